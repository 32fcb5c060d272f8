"""One trainer of ours: `torchrun -m gnnsys.bench.typed.embedding_train FOLDER PARTS`. PARTS are of any graph: what
they say is which host serves which half of the rows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gnnsys
from gnnsys.bench.await_file import WAIT_SECONDS
from gnnsys.bench.typed.embedding_task import LEARNING_RATE, EmbeddingTask, loss_of, run_phases


class Trainer:
    def __init__(self, session: gnnsys.Session, graph: Any, task: EmbeddingTask) -> None:
        self.session, self.rank = session, session.rank
        self.embedding = gnnsys.DistEmbedding(graph.store, task.num_rows, task.dim, "rows")
        self.optimizer = gnnsys.SparseAdam([self.embedding], lr=LEARNING_RATE)

    def barrier(self) -> None:
        self.session.barrier()

    def gather(self, name: str, figures: dict[str, Any]) -> list[dict[str, Any]]:
        return self.session.group.gather(name, figures) or []

    def update(self, ids: Tensor) -> float:
        loss = loss_of(self.embedding(ids))
        loss.backward()
        self.optimizer.step()
        return loss.item()


def main(folder: Path, parts: str) -> None:
    torch.set_num_threads(1)
    task = EmbeddingTask.load(folder)
    with gnnsys.init(timeout=WAIT_SECONDS, encrypt=task.encrypt) as session:
        run_phases(Trainer(session, gnnsys.open(parts, verify=False), task), task, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
