"""Of `gnnsys bench jobs`, a sweep: settings of GraphSAGE tried on one graph of 2.45M nodes and 123.7M edges, which is
on the device once. Beside it the same jobs one after the other in a warm worker that has the graph there, too.

Jobs run at the same time as eight of them; each trains on so many batches (`--set jobs=24 batches=200 workers=8`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from gnnsys.bench.case import OURS, Benchmark, Case, NotHere, Side, Versus, value
from gnnsys.bench.jobs.queue_jobs import SWEEP_JOB
from gnnsys.bench.jobs.queue_runs import QueuedCall, QueueRun, QueueSide, run_queue
from gnnsys.bench.jobs.settings import JobsSettings, settings_of
from gnnsys.bench.workload import FULL, Workload
from gnnsys.observe import num_usable_cores

IN_TURN, COLD, COPIES = "one after the other", "a process of its own", "a copy per worker (computed)"
FASTER, SOONER = 2.0, 10.0
SIZES = {"nodes": 2_450_000, "edges": 123_700_000, "features": 100, "classes": 47, "batch_size": 1024}
SMALL = {"nodes": 2_000, "edges": 20_000, "features": 16, "classes": 5, "batch_size": 64}
_GRID = list(itertools.product((1e-2, 3e-3, 1e-3, 3e-4), (64, 128, 256), (0.0, 0.5)))
_JOB_BYTES = 4 << 30  # stated for each job: many times what it takes


def sweep_calls(settings: JobsSettings, sizes: dict[str, int], device: str) -> list[QueuedCall]:
    calls = []
    for lr, hidden, dropout in itertools.islice(itertools.cycle(_GRID), settings.jobs):
        arguments: dict[str, Any] = {**sizes, "num_batches": settings.batches, "lr": lr, "hidden": hidden}
        arguments |= {"dropout": dropout, "epochs": 1}
        memory = _JOB_BYTES if device != "cpu" else 1 << 28
        calls.append(QueuedCall(target=SWEEP_JOB, arguments=arguments, memory=memory))
    return calls


class SweepBench:
    """Each side runs once, when first asked for."""

    def __init__(self, work: Workload) -> None:
        self._work, self.settings = work, settings_of(work)
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._sizes = SIZES if work.sizes is FULL else SMALL
        self.calls = sweep_calls(self.settings, self._sizes, self._device)

    def run(self, side: str) -> QueueRun:
        return self._work.once(f"jobs/sweep/{side}", lambda: self._run(side))

    def _run(self, side: str) -> QueueRun:
        threads = max(1, num_usable_cores() // self.settings.workers)  # on the CPU the last bits depend on it
        ways = {
            OURS: QueueSide(policy="continuous", workers=self.settings.workers, threads=threads),
            IN_TURN: QueueSide(sharing="slices", threads=threads),
            COLD: QueueSide(is_warm=False, sharing="slices", threads=threads),
        }
        calls = self.calls[:1] if side == COLD else self.calls
        one = replace(calls[0], arguments={**calls[0].arguments, "num_batches": 2})
        return run_queue(ways[side], [calls], one, device=self._device, capacity=None)[0].check()

    @property
    def graph_bytes(self) -> int:
        sizes = self._sizes
        return sizes["nodes"] * (4 * sizes["features"] + 8 + 8) + 4 * sizes["edges"]

    def different(self) -> float:
        """How many jobs end with other weights than the same job alone."""
        ours, alone = (self.run(side).times for side in (OURS, IN_TURN))
        return float(sum(a.result["weights"] != b.result["weights"] for a, b in zip(ours, alone, strict=True)))

    def used(self) -> int:
        used = self.run(OURS).used
        if used is None:
            raise NotHere("nvidia-smi tells nothing here")
        return used


def sweep(work: Workload) -> Iterator[Case]:
    """Makespan, how busy the device is, results that differ from those alone, its memory, and how soon a job is at its
    first step."""
    bench = SweepBench(work)
    name = f"jobs/sweep/{len(bench.calls)} settings"
    yield Case(
        f"{name}, makespan",
        value("s"),
        lambda: {side: Side(lambda side=side: bench.run(side).makespan) for side in (OURS, IN_TURN)},  # type: ignore[misc]
        (Versus((IN_TURN,), FASTER),),
        repeats=1,
    )
    yield Case(
        f"{name}, to the first step",
        value("s"),
        lambda: {side: Side(lambda side=side: bench.run(side).to_first_step) for side in (OURS, IN_TURN, COLD)},  # type: ignore[misc]
        (Versus((COLD,), SOONER), Versus((IN_TURN,))),
        repeats=1,
    )
    yield Case(
        f"{name}, device idle",
        value("%"),
        lambda: {side: Side(lambda side=side: 100.0 - bench.run(side).known_busy()) for side in (OURS, IN_TURN)},  # type: ignore[misc]
        (Versus((IN_TURN,)),),
        repeats=1,
    )
    yield Case(
        f"{name}, results that are not those alone",
        value("jobs"),
        lambda: {OURS: Side(bench.different), "none": Side(lambda: 0.0)},
        (Versus(("none",)),),
        repeats=1,
    )
    yield Case(
        f"{name}, memory of the device",
        value("GB"),
        lambda: {
            OURS: Side(lambda: bench.used() / 1e9),
            COPIES: Side(lambda: (bench.used() + (bench.settings.workers - 1) * bench.graph_bytes) / 1e9),
        },
        (Versus((COPIES,)),),
        repeats=1,
    )


BENCHMARKS: list[Benchmark] = [sweep]
