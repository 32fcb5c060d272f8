"""One trainer: `torchrun -m gnnsys.bench.dist.train FOLDER PARTS [NUM_SEED_PARTS]`, an ordinary script on plain DDP.

FOLDER holds the task and the phases. Rank 0 prints a line when a phase is ready, begins and ends, and then
the figures of all ranks. With NUM_SEED_PARTS seeds are taken from so many parts only, so that one host of a job does the
same work whether the others are there or not.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import gnnsys
from gnnsys.bench.await_file import WAIT_SECONDS, await_file
from gnnsys.bench.dist.phase import BEGIN, COMPUTE, END, FIGURES, MODES, READY, Phase, go_file, load
from gnnsys.bench.dist.task import Task
from gnnsys.nn import GraphSAGE

NODE = "node"


def main(folder: Path, parts: str, num_seed_parts: int | None) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    task = Task.load(folder)
    with gnnsys.init(timeout=WAIT_SECONDS, encrypt=task.encrypt) as session:
        graph = gnnsys.open(parts, verify=False)
        trainer = PhaseTrainer(session, graph, task, num_seed_parts)
        for phase in load(folder):
            figures = trainer.run(phase, folder)
            everyone = session.group.gather(f"figures-{phase.name}", figures)
            trainer.say(f"{FIGURES} {phase.name} {json.dumps(everyone)}")
        trainer.close()


@dataclass
class RankFigures:
    """What one rank did while a phase was measured; seconds of the wall clock."""

    seconds: float = 0.0
    steps: int = 0
    seeds: int = 0
    input_nodes: int = 0
    waited: float = 0.0
    computed: float = 0.0
    cpu_seconds: float = 0.0
    loss: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)  # of the fetch stage


class PhaseTrainer:
    """The model, its optimizer, and the loader of the last phase."""

    def __init__(
        self, session: gnnsys.Session, graph: gnnsys.DistGraph, task: Task, num_seed_parts: int | None
    ) -> None:
        self.session, self.graph, self.task = session, graph, task
        self.seeds = choose_seeds(graph, task, num_seed_parts)
        width, num_classes = graph.node_data[NODE]["x"].shape[1], graph.info["num_classes"]
        model = GraphSAGE(width, task.hidden, len(task.fanouts), num_classes)
        self.model: torch.nn.Module = DistributedDataParallel(model) if session.world_size > 1 else model
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=task.learning_rate)
        self._mode: str | None = None
        self._loader: Any = None
        self._batches: Iterator[Any] = iter(())

    def run(self, phase: Phase, folder: Path) -> dict[str, Any]:
        self._use(phase.mode)
        self._meet(READY, phase, folder)
        for _ in range(phase.warm):
            self._step(next(self._batches), RankFigures())
        self._meet(BEGIN, phase, folder)
        figures = self._measure(phase.epochs * len(self._loader))
        self.say(f"{END} {phase.name}")
        return figures.__dict__

    def _meet(self, word: str, phase: Phase, folder: Path) -> None:
        """All ranks and the harness, who does what the word asks for before anyone goes on."""
        self.session.barrier()
        self.say(f"{word} {phase.name}")
        if self.session.rank == 0:
            await_file(go_file(folder, word, phase.name))
        self.session.barrier()

    def say(self, line: str) -> None:
        if self.session.rank == 0:
            print(line, flush=True)

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()

    def _use(self, mode: str) -> None:
        """A loader for this mode; phases of one mode that follow each other share it."""
        if mode == self._mode:
            return
        self.close()
        task = self.task
        self._mode = mode
        self._loader = gnnsys.NeighborLoader(
            self.graph,
            list(task.fanouts),
            input_nodes=self.seeds,
            batch_size=task.batch_size,
            shuffle=True,
            fetch=["x", "y"],
            **MODES[mode],
        )
        self._batches = one_batch(self._loader) if mode == COMPUTE else endless(self._loader)

    def _measure(self, num_steps: int) -> RankFigures:
        figures, counts, cpu = RankFigures(), self._counts(), time.process_time()
        start = time.perf_counter()
        for _ in range(num_steps):
            began = time.perf_counter()
            batch = next(self._batches)
            figures.waited += time.perf_counter() - began
            self._step(batch, figures)
            del batch
        self.session.barrier()
        figures.seconds = time.perf_counter() - start
        figures.cpu_seconds = time.process_time() - cpu
        figures.counts = {name: value - counts.get(name, 0) for name, value in self._counts().items()}
        return figures

    def _step(self, batch: Any, figures: RankFigures) -> None:
        began = time.perf_counter()
        out = self.model(batch.x, batch.edge_index, num_sampled_nodes=batch.num_sampled_nodes)
        loss = F.cross_entropy(out, batch.y[: batch.batch_size])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        figures.computed += time.perf_counter() - began
        figures.steps += 1
        figures.seeds += batch.batch_size
        figures.input_nodes += batch.x.shape[0]
        figures.loss = loss.item()

    def _counts(self) -> dict[str, int]:
        counters = self._loader.counters()
        return dict(counters["fetch"].counts) if "fetch" in counters else {}


def choose_seeds(graph: gnnsys.DistGraph, task: Task, num_seed_parts: int | None) -> gnnsys.Seeds:
    """This rank's share, cut to `max_steps` batches by taking evenly spaced ids: what is near stays near."""
    what: Any = "train"
    if num_seed_parts is not None:
        bounds = graph.store.spec(f"node/{NODE}/train_mask").bounds
        ids = torch.arange(bounds[num_seed_parts])
        what = graph.from_global(ids[graph.node_data[NODE]["train_mask"][ids]])
    share = gnnsys.split(graph, what, type=NODE)
    ids = share.ids[torch.arange(len(share))]
    if task.max_steps is None:
        return share
    count = task.max_steps * task.batch_size
    if len(ids) < count:
        raise ValueError(f"a share has {len(ids)} seeds, {task.max_steps} steps need {count}: train on more nodes")
    chosen = graph.from_global(ids[torch.arange(count) * len(ids) // count])
    return gnnsys.Seeds(chosen, NODE, count, count)


def endless(loader: Any) -> Iterator[Any]:
    """Epoch after epoch."""
    while True:
        yield from loader


def one_batch(loader: Any) -> Iterator[Any]:
    for batch in loader:
        held = batch
        break
    loader.close()
    while True:
        yield held


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else None)
