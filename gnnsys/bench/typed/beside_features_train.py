"""One trainer of the lab's job: `torchrun -m gnnsys.bench.typed.beside_features_train FOLDER PARTS`.

Features are prefetched while rows of a `DistEmbedding` are looked up and stepped, so both share the links.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import gnnsys
from gnnsys.bench.await_file import WAIT_SECONDS
from gnnsys.bench.dist.phase import FIGURES, load
from gnnsys.bench.dist.task import Task
from gnnsys.bench.dist.train import NODE, PhaseTrainer, RankFigures
from gnnsys.bench.typed.embedding_task import LEARNING_RATE, loss_of

DIM = 64
LOOK_UPS, STEPS = "microseconds of look-ups", "microseconds of steps"


class BesideFeaturesTrainer(PhaseTrainer):
    """Trains the model on features, and rows of their nodes on a loss of their own."""

    def __init__(self, session: gnnsys.Session, graph: gnnsys.DistGraph, task: Task) -> None:
        super().__init__(session, graph, task, None)
        self.embedding = gnnsys.DistEmbedding(graph, dim=DIM, node_type=NODE)
        self.sparse = gnnsys.SparseAdam([self.embedding], lr=LEARNING_RATE)
        self._spent = {LOOK_UPS: 0, STEPS: 0}

    def _counts(self) -> dict[str, int]:
        return {**super()._counts(), **self._spent}

    def _step(self, batch: Any, figures: RankFigures) -> None:
        began = time.perf_counter()
        rows = self.embedding(batch.n_id[: batch.batch_size])
        self._spent[LOOK_UPS] += int(1e6 * (time.perf_counter() - began))
        out = self.model(batch.x, batch.edge_index, num_sampled_nodes=batch.num_sampled_nodes)
        loss = F.cross_entropy(out, batch.y[: batch.batch_size]) + loss_of(rows)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        step_began = time.perf_counter()
        self.sparse.step()
        ended = time.perf_counter()
        self._spent[STEPS] += int(1e6 * (ended - step_began))
        figures.computed += ended - began
        figures.steps += 1
        figures.seeds += batch.batch_size
        figures.input_nodes += batch.x.shape[0]
        figures.loss = loss.item()


def main(folder: Path, parts: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    task = Task.load(folder)
    with gnnsys.init(timeout=WAIT_SECONDS, encrypt=task.encrypt) as session:
        trainer = BesideFeaturesTrainer(session, gnnsys.open(parts, verify=False), task)
        for phase in load(folder):
            figures = trainer.run(phase, folder)
            everyone = session.group.gather(f"figures-{phase.name}", figures)
            trainer.say(f"{FIGURES} {phase.name} {json.dumps(everyone)}")
        trainer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
