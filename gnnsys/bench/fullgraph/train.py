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

from gnnsys.bench.fullgraph.desk import Desk
from gnnsys.bench.fullgraph.trainers import WAIT_SECONDS, Trainer, make_trainer
from gnnsys.bench.fullgraph.variant import CALIBRATED, UNLIMITED, Group, Job
from gnnsys.graph import load

AGREE = 1e-3  # how far losses of one epoch may be apart, of the loss: sums are made in other orders


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=WAIT_SECONDS))
    bench = Bench(folder, Job.load(folder))
    found = [figures for group in bench.job.groups for figures in bench.run(group)]
    if bench.is_first:
        (folder / "figures.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


class Bench:
    def __init__(self, folder: Path, job: Job) -> None:
        self.job = job
        self.is_first = dist.get_rank() == 0
        self._desk = Desk(folder)
        self._graph = load(Path(job.graph))
        self._ranks = {name: torch.from_numpy(np.load(path)) for name, path in job.parts.items()}

    def run(self, group: Group) -> Iterator[dict[str, Any]]:
        """Figures of every variant at every rate."""
        self._lab(rate=None, cpu=None)  # making plans and bins is not what is measured
        trainers = {v.name: make_trainer(v, self._graph, self._ranks[v.parts], self.job.hidden) for v in group.variants}
        firsts = {name: self._turn(trainer) for name, trainer in trainers.items()}  # features travel in these
        rate_bits: float | None = None
        base: dict[str, Any] = {}
        for rate in group.rates:
            if rate == CALIBRATED:
                rate_bits = calibrated(base)
                asked: str | None = f"{rate_bits:.0f}bit"
            else:
                asked, rate_bits = (None, None) if rate == UNLIMITED else (rate, None)
            self._lab(rate=asked, cpu=self.job.cpu)
            found = self._turns(group, trainers)
            for name, turns in found.items():
                figures = {
                    "group": group.name, "rate": rate, "rate_bits": asked, "variant": name, "turns": turns,
                    "first": firsts[name], "facts": self._gathered_facts(trainers[name]),
                }  # fmt: skip
                base = base or figures
                yield figures

    def _turns(self, group: Group, trainers: dict[str, Trainer]) -> dict[str, list[dict[str, Any]]]:
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in trainers}
        for epoch in range(group.epochs):
            for name, trainer in trainers.items():
                found[name].append(self._turn(trainer))
            check_losses({name: turns[epoch]["loss"] for name, turns in found.items()})
        return found

    def _turn(self, trainer: Trainer) -> dict[str, Any]:
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
        used = {name: [b - a for a, b in zip(before[name], after[name])] for name in before}
        return {
            "seconds": max(rank["seconds"] for rank in ranks),
            "loss": sum(rank["loss"] for rank in ranks),
            "ranks": ranks,
            **used,
        }

    def _lab(self, **what: Any) -> dict[str, list[float]]:
        """Rank 0 asks, and all go on when it has been done."""
        answer = self._desk.ask(**what) if self.is_first else {}
        dist.barrier()
        return answer

    def _gathered(self, numbers: dict[str, float]) -> list[dict[str, float]]:
        own = torch.tensor(list(numbers.values()), dtype=torch.float64)
        everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, own)
        return [dict(zip(numbers, row.tolist())) for row in everyone]

    def _gathered_facts(self, trainer: Trainer) -> list[dict[str, float]]:
        return self._gathered(trainer.facts())


def calibrated(figures: dict[str, Any]) -> float:
    """Bits per second at which the busiest link is busy for as long as the epoch took without limits.

    Every rank decides for itself and must decide alike: only rank 0 has read counters, and tells.
    """
    bits = torch.zeros(1, dtype=torch.float64)
    if dist.get_rank() == 0:
        seconds = statistics.median(turn["seconds"] for turn in figures["turns"])
        busiest = statistics.median(max(turn["bytes_in"] + turn["bytes_out"]) for turn in figures["turns"])
        bits[0] = busiest * 8 / seconds
    dist.broadcast(bits, 0)
    return float(bits)


def check_losses(losses: dict[str, float]) -> None:
    """All trainers of a group compute the same thing, or their times mean nothing."""
    least, most = min(losses.values()), max(losses.values())
    if not most - least <= AGREE * abs(most):
        raise RuntimeError(f"trainers disagree about the loss of an epoch: {losses}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
