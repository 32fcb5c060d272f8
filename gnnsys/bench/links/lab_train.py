"""One trainer of the lab's job: `torchrun -m gnnsys.bench.links.lab_train FOLDER PARTS`.

A phase's name is the kind of its negatives. Links are a share of the edges, so that their ends, and the edges that a
batch must not see, are looked up as well.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import gnnsys
from gnnsys.bench.await_file import WAIT_SECONDS
from gnnsys.bench.dist.phase import FIGURES, MODES, Phase, load
from gnnsys.bench.dist.task import Task
from gnnsys.bench.dist.train import PhaseTrainer, RankFigures, endless
from gnnsys.comm import Client, Kind
from gnnsys.graph import EDGE
from gnnsys.nn import Dot, softmax_link_loss

NEGATIVES = 8
NAMES, EDGES = "names asked", "edges asked"
_OF_EDGES = (Kind.FIND_EDGES, Kind.EDGE_ENDS)


class LookUps:
    """Counts the messages that a client sends for look-ups: of nodes' names, and of edges and their ends."""

    def __init__(self, client: Client) -> None:
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        client.request = self._counted(client.request)  # type: ignore[method-assign]
        client.request_encoded = self._counted(client.request_encoded)  # type: ignore[method-assign]

    def _counted(self, request: Callable[..., Any]) -> Callable[..., Any]:
        def send(peer: int, kind: int, *args: Any, **rest: Any) -> Any:
            is_name = kind == Kind.PULL and rest.get("batch", -1) < 0  # rows that a batch is to have name it
            what = EDGES if kind in _OF_EDGES else NAMES if is_name else ""
            if what:
                with self._lock:
                    self.counts[what] += 1
            return request(peer, kind, *args, **rest)

        return send


class LinkTrainer(PhaseTrainer):
    """Makes the loader that a phase's name asks for."""

    def __init__(self, session: gnnsys.Session, graph: gnnsys.DistGraph, task: Task) -> None:
        super().__init__(
            session, graph, replace(task, max_steps=None), None
        )  # steps are counted in links, not in nodes
        self.task = task
        self._decoder = Dot(graph.info["num_classes"])
        assert graph.client is not None
        self._look_ups = LookUps(graph.client)
        share = gnnsys.split(graph, "train", type=EDGE)
        assert task.max_steps is not None
        count = task.max_steps * task.batch_size
        if len(share) < count:
            raise ValueError(f"a share has {len(share)} links, {task.max_steps} steps need {count}")
        places = torch.arange(count) * len(share) // count
        self._links = gnnsys.Seeds(graph.from_global(share.ids[places], EDGE), EDGE, count, count)

    def run(self, phase: Phase, folder: Path) -> dict[str, Any]:
        self.close()
        self._loader = gnnsys.LinkNeighborLoader(
            self.graph,
            list(self.task.fanouts),
            edge_label_index=self._links,
            neg_sampling=gnnsys.NegativeSampling("triplet", NEGATIVES, kind=phase.name),
            batch_size=self.task.batch_size,
            shuffle=True,
            fetch=["x"],
            **MODES[phase.mode],
        )
        self._batches = endless(self._loader)
        return super().run(phase, folder)

    def _use(self, mode: str) -> None:
        """The phase's name has decided already."""

    def _counts(self) -> dict[str, int]:
        return {**super()._counts(), **self._look_ups.counts}

    def _step(self, batch: Any, figures: RankFigures) -> None:
        began = time.perf_counter()
        out = self.model(batch.x, batch.edge_index)
        src, dst = out[batch.src_index], out[batch.dst_pos_index]
        loss = softmax_link_loss(self._decoder(src, dst), self._decoder(src, out[batch.dst_neg_index]))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        figures.computed += time.perf_counter() - began
        figures.steps += 1
        figures.seeds += batch.src_index.numel()
        figures.input_nodes += batch.x.shape[0]
        figures.loss = loss.item()


def main(folder: Path, parts: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    task = Task.load(folder)
    with gnnsys.init(timeout=WAIT_SECONDS, encrypt=task.encrypt) as session:
        trainer = LinkTrainer(session, gnnsys.open(parts, verify=False), task)
        for phase in load(folder):
            figures = trainer.run(phase, folder)
            everyone = session.group.gather(f"figures-{phase.name}", figures)
            trainer.say(f"{FIGURES} {phase.name} {json.dumps(everyone)}")
        trainer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
