"""One rank: `torchrun -m gnnsys.bench.fullgraph.train FOLDER`, where FOLDER holds the job and gets its figures.

Trainers of a group take turns, epoch by epoch. A turn is measured between two barriers, on the slowest rank's clock;
what links carried is read from the kernel's counters before and after it.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gnnsys.bench.fullgraph.lab_control import LabClient
from gnnsys.bench.fullgraph.trainers import WAIT_SECONDS, VariantTrainer, make_trainer
from gnnsys.bench.fullgraph.variant import CALIBRATED, UNLIMITED, VariantGroup, VariantJob
from gnnsys.graph import load

AGREE = 1e-3  # how far losses of one step may be apart, of the loss: sums are made in other orders


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=WAIT_SECONDS))
    bench = Bench(folder, VariantJob.load(folder))
    found = [figures for group in bench.job.groups for figures in bench.run(group)]
    if bench.is_first:
        (folder / "figures.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


class Bench:
    def __init__(self, folder: Path, job: VariantJob) -> None:
        self.job = job
        self.is_first = dist.get_rank() == 0
        self._lab_client = LabClient(folder)
        self._graph = load(Path(job.graph))
        self._losses: list[float] = []  # of the group, by step
        self._steps: dict[str, int] = {}  # that each trainer has done
        self._ranks = {name: torch.from_numpy(np.load(path)) for name, path in job.parts.items()}

    def run(self, group: VariantGroup) -> Iterator[dict[str, Any]]:
        """Figures of every variant at every rate."""
        self._lab(rate=None, cpu=None)  # making plans and bins is not what is measured
        trainers = {v.name: make_trainer(v, self._graph, self._ranks[v.parts], self.job.hidden) for v in group.variants}
        self._losses, self._steps = [], dict.fromkeys(trainers, 0)
        firsts = {name: self._turn(name, trainer) for name, trainer in trainers.items()}  # features travel in these
        base: list[dict[str, Any]] = []
        for rate in group.rates:
            asked = None if rate == UNLIMITED else rate
            if rate == CALIBRATED:
                asked = self._calibrate(next(iter(trainers.items())), base)
            self._lab(rate=asked, cpu=self.job.cpu)
            found: dict[str, list[dict[str, Any]]] = {name: [] for name in trainers}
            for _ in range(group.epochs):
                for name, trainer in trainers.items():
                    found[name].append(self._turn(name, trainer))
            for name, turns in found.items():
                base = base or turns
                yield {
                    "group": group.name, "rate": rate, "rate_bits": asked, "variant": name, "turns": turns,
                    "first": firsts[name], "facts": self._gathered(trainers[name].facts()),
                }  # fmt: skip

    def _calibrate(self, first: tuple[str, VariantTrainer], base: list[dict[str, Any]]) -> str:
        """The rate at which links double the time of the first trainer's epoch, `base` being those without limits.

        A first guess is what the busiest link carried over that time; the second corrects it by what it did to an
        epoch, since links are not always full. Only rank 0 has read counters: it decides, and tells.
        """
        unlimited = _median(base, "seconds")
        busiest = (
            statistics.median(max(turn["bytes_in"] + turn["bytes_out"]) for turn in base) if self.is_first else 0.0
        )
        bits = self._told(busiest * 8 / unlimited)
        self._lab(rate=f"{bits:.0f}bit", cpu=self.job.cpu)
        added = _median([self._turn(*first) for _ in range(3)], "seconds") - unlimited
        return f"{self._told(bits * max(0.25, added / unlimited)):.0f}bit"

    def _turn(self, name: str, trainer: VariantTrainer) -> dict[str, Any]:
        before = self._lab()
        dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        loss = trainer.epoch()
        own, cpu = time.perf_counter() - start, time.process_time() - cpu
        dist.barrier()
        seconds = time.perf_counter() - start
        after = self._lab()
        numbers = {"seconds": seconds, "own": own, "cpu": cpu, "loss": float(loss), **asdict(trainer.spent())}
        ranks = self._gathered(numbers)
        used = {name: [b - a for a, b in zip(before[name], after[name], strict=True)] for name in before}
        self._check_loss(name, sum(rank["loss"] for rank in ranks))
        return {"seconds": max(rank["seconds"] for rank in ranks), "ranks": ranks, **used}

    def _check_loss(self, name: str, loss: float) -> None:
        """All trainers of a group compute the same thing, step by step, or their times mean nothing."""
        step = self._steps[name]
        self._steps[name] += 1
        if step == len(self._losses):
            self._losses.append(loss)
        if not abs(loss - self._losses[step]) <= AGREE * abs(self._losses[step]):
            raise RuntimeError(f"{name} has a loss of {loss} after {step} steps, others had {self._losses[step]}")

    def _lab(self, **what: Any) -> dict[str, list[float]]:
        """Rank 0 asks, and all go on when it has been done."""
        answer = self._lab_client.ask(**what) if self.is_first else {}
        dist.barrier()
        return answer

    def _gathered(self, numbers: dict[str, float]) -> list[dict[str, float]]:
        own = torch.tensor(list(numbers.values()), dtype=torch.float64)
        everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, own)
        return [dict(zip(numbers, row.tolist(), strict=True)) for row in everyone]

    def _told(self, number: float) -> float:
        """Rank 0's number, on every rank."""
        told = torch.tensor([number], dtype=torch.float64)
        dist.broadcast(told, 0)
        return float(told)


def _median(turns: list[dict[str, Any]], name: str) -> float:
    return statistics.median(turn[name] for turn in turns)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
