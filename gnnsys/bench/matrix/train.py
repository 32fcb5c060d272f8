"""One rank of a cell: `torchrun -m gnnsys.bench.matrix.train CELL RESULT`, an ordinary script on plain DDP.

CELL says what to train. Rank 0 writes RESULT: what was measured, repeat by repeat. It prints a line when all ranks are
ready, and one when a repeat begins or ends: whoever started the job may set limits and read counters then. Where
GNNSYS_BENCH_GO is set, ranks that are ready wait until that file is there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import gnnsys
from gnnsys import nn
from gnnsys.bench.dist.phase import MODES
from gnnsys.bench.matrix.cell import READY, REPEAT, Cell
from gnnsys.sampling import LaborSampler

NODE = "node"
TIMED = ("batches", "busy", "starved", "blocked")  # of a stage since the pipeline was started
WAIT_SECONDS = 1800.0  # the launcher's deadline is what ends a cell


def main(cell: Cell, result: Path) -> None:
    options = cell.options
    torch.manual_seed(options.seed)
    with gnnsys.init(timeout=WAIT_SECONDS, encrypt=options.encrypt, device=options.device) as session:
        trainer = CellTrainer(session, gnnsys.open(cell.parts, verify=False), cell)
        session.barrier()
        trainer.say(READY)
        if session.rank == 0 and "GNNSYS_BENCH_GO" in os.environ:
            wait_for(Path(os.environ["GNNSYS_BENCH_GO"]))
        session.barrier()
        trainings = trainer.measure_epochs() if options.accuracy is None else trainer.measure_trainings()
        ranks = session.group.gather("suite-figures", [asdict(figures) for figures in trainings])
        if session.rank == 0:
            told = {"device": str(session.device), "world_size": session.world_size, "ranks": ranks}
            result.write_text(json.dumps(told))
        trainer.close()


@dataclass
class RepeatFigures:
    """What a rank did in a repeat, an epoch or a whole training. Seconds of the wall clock, without validation.

    `curve`: seconds of training and validation accuracy after each epoch.
    """

    seconds: float = 0.0
    epochs: int = 0
    seeds: int = 0
    steps: int = 0
    waited: float = 0.0
    computed: float = 0.0
    cpu_seconds: float = 0.0
    loss: float = 0.0
    stages: dict[str, dict[str, float]] = field(default_factory=dict)
    curve: list[tuple[float, float]] = field(default_factory=list)

    def add(self, other: RepeatFigures) -> None:
        for name in ("seconds", "epochs", "seeds", "steps", "waited", "computed", "cpu_seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.loss = other.loss
        for stage, counts in other.stages.items():
            own = self.stages.setdefault(stage, {})
            for name, count in counts.items():
                own[name] = own.get(name, 0) + count


class CellTrainer:
    """The model, its optimizer and its loader."""

    def __init__(self, session: gnnsys.Session, graph: gnnsys.DistGraph, cell: Cell) -> None:
        self.session, self.graph, self.cell = session, graph, cell
        options = cell.options
        self.device = session.device
        self.width, self.num_classes = graph.node_data[NODE]["x"].shape[1], graph.info["num_classes"]
        draws: dict[str, Any] = {"num_neighbors": list(cell.fanouts)}
        if cell.sampler == "labor":
            draws = {"sampler": LaborSampler(graph, list(cell.fanouts))}
        self.loader = gnnsys.NeighborLoader(
            graph,
            input_nodes=choose_seeds(gnnsys.split(graph, "train"), cell, session.world_size),
            batch_size=options.batch_size,
            shuffle=True,
            fetch=["x", "y"],
            seed=options.seed,
            device=self.device,
            **draws,
            **MODES[options.loading],
        )
        self.restarts = not MODES[options.loading]["across_epochs"]
        self.batches = self._endless()
        self._begin(options.seed)

    def measure_epochs(self) -> list[RepeatFigures]:
        """Every repeat is an epoch."""
        for _ in range(self.cell.warmup):
            self._epoch()
        measured = []
        for number in range(self.cell.repeats):
            self.say(f"{REPEAT} {number}")
            measured.append(self._epoch())
        self.say(f"{REPEAT} {self.cell.repeats}")
        return measured

    def measure_trainings(self) -> list[RepeatFigures]:
        """Every repeat is a training from new weights until the accuracy is reached."""
        options = self.cell.options
        for _ in range(self.cell.warmup):
            self._epoch()
        measured = []
        for number in range(self.cell.repeats):
            self._begin(options.seed + number)
            self.say(f"{REPEAT} {number}")
            total = RepeatFigures()
            for _ in range(options.max_epochs):
                total.add(self._epoch())
                total.curve.append((total.seconds, self._validate()))
                if total.curve[-1][1] >= (options.accuracy or 1.0):
                    break
            measured.append(total)
        self.say(f"{REPEAT} {self.cell.repeats}")
        return measured

    def say(self, line: str) -> None:
        if self.session.rank == 0:
            print(line, flush=True)

    def close(self) -> None:
        self.loader.close()

    def _begin(self, seed: int) -> None:
        torch.manual_seed(seed)
        kind = getattr(nn, self.cell.model)
        model = kind(self.width, self.cell.options.hidden, len(self.cell.fanouts), self.num_classes).to(self.device)
        self.model = model
        self.parallel = DistributedDataParallel(model) if self.session.world_size > 1 else model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=self.cell.options.learning_rate)

    def _endless(self) -> Iterator[Any]:
        while True:
            yield from self.loader

    def _epoch(self) -> RepeatFigures:
        self.session.barrier()
        figures, before, cpu = RepeatFigures(epochs=1), self._counts(), time.process_time()
        start = began = time.perf_counter()
        for batch in islice(self.batches, len(self.loader)):
            got = time.perf_counter()
            figures.waited += got - began
            self._step(batch, figures)
            began = time.perf_counter()
            figures.computed += began - got
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.session.barrier()
        figures.seconds = time.perf_counter() - start
        figures.cpu_seconds = time.process_time() - cpu
        figures.stages = _difference(self._counts(), before, restarted=self.restarts)
        return figures

    def _step(self, batch: Any, figures: RepeatFigures) -> None:
        out = self.parallel(batch.x, batch.edge_index, num_sampled_nodes=batch.num_sampled_nodes)
        loss = F.cross_entropy(out, batch.y[: batch.batch_size])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        figures.steps += 1
        figures.seeds += batch.batch_size
        figures.loss = float(loss.detach())

    @torch.no_grad()
    def _validate(self) -> float:
        """Accuracy on the validation nodes of all ranks, with the same fanouts."""
        self.model.eval()
        share = gnnsys.split(self.graph, "val")
        loader = gnnsys.NeighborLoader(
            self.graph, list(self.cell.fanouts), input_nodes=share, batch_size=self.cell.options.batch_size,
            fetch=["x", "y"], device=self.device,
        )  # fmt: skip
        right = torch.zeros(2, dtype=torch.float64)
        for batch in loader:
            out = self.model(batch.x, batch.edge_index, num_sampled_nodes=batch.num_sampled_nodes)
            right[0] += int((out.argmax(1) == batch.y[: batch.batch_size]).sum())
            right[1] += batch.batch_size
        loader.close()
        self.model.train()
        if self.session.world_size > 1:
            torch.distributed.all_reduce(right)
        return float(right[0] / right[1])

    def _counts(self) -> dict[str, dict[str, float]]:
        return {
            stage: {name: getattr(of, name) for name in TIMED} | of.counts
            for stage, of in self.loader.counters().items()
        }


def choose_seeds(share: gnnsys.Seeds, cell: Cell, world_size: int) -> gnnsys.Seeds:
    """A rank's share, cut to `steps` batches by taking evenly spaced ids: what is near stays near."""
    if cell.options.steps is None:
        return share
    count = cell.options.steps * cell.options.batch_size
    if share.largest - 1 < count:  # the smallest share of any rank has one less
        return share
    ids = share.ids[torch.arange(len(share))]
    return gnnsys.Seeds(ids[torch.arange(count) * len(ids) // count], NODE, count, count * world_size)


def _difference(
    after: dict[str, dict[str, float]], before: dict[str, dict[str, float]], *, restarted: bool
) -> dict[str, dict[str, float]]:
    """What was counted in between. A pipeline that was started anew has counted from 0, all but its own counts."""
    return {
        stage: {
            name: value - (0 if restarted and name in TIMED else before.get(stage, {}).get(name, 0))
            for name, value in counts.items()
        }
        for stage, counts in after.items()
    }


def wait_for(path: Path) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{path} did not appear within {WAIT_SECONDS:g} s")
        time.sleep(0.01)


if __name__ == "__main__":
    main(Cell.load(Path(sys.argv[1])), Path(sys.argv[2]))
