"""Of `gnnsys bench plan`, bottlenecks that were planted: what `binding` names first must be the one that was.

A trainer and a part on each of four machines, as gnnsys runs them, in balance until one thing of one machine is slow.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from gnnsys.bench.case import OURS, Benchmark, Case, Side, Versus, score
from gnnsys.bench.workload import Workload
from gnnsys.planning import ClusterMachines, Demands, SimulatedRun, TrainingTasks, simulate

NAMES = ("h0", "h1", "h2", "h3")
SLOW = 2  # the machine that has it
ALL_NAMED = "all of them"
RATE, CORES, WORKER_SECONDS = 1e9, 4.0, 0.05


def _with_slow(usual: float, slow: float) -> np.ndarray:
    return np.where(np.arange(len(NAMES)) == SLOW, slow, usual)


PLANTED: dict[str, tuple[dict[str, Any], Any, str]] = {  # machines' options, seconds of workers, what must be named
    "link in": ({"rate_in": _with_slow(RATE, 5e7)}, WORKER_SECONDS, "the link into h2"),
    "link out": ({"rate_out": _with_slow(RATE, 5e7)}, WORKER_SECONDS, "the link out of h2"),
    "cores": ({"cores": _with_slow(CORES, 0.3)}, WORKER_SECONDS, "the cores of h2"),
    "trainer": ({}, _with_slow(WORKER_SECONDS, 0.5), "work of workers on h2"),
    "server thread": (
        {"server_threads": np.array([4, 4, 1, 4]), "speeds": {"serving": _with_slow(1.0, 0.02)}},
        WORKER_SECONDS,
        "the threads of the graph server on h2",
    ),
}


def planted_run(machines: dict[str, Any] | None = None, worker_seconds: Any = WORKER_SECONDS) -> SimulatedRun:
    """30 iterations of the job; with no arguments, that in balance."""
    tasks = TrainingTasks.of_job(4, 4, 1, sync="ring-whole", own_samplers=True, serve_each=True, ahead=2)
    seconds = {"serving": 0.004, "sampler": 0.02, "worker": worker_seconds}
    demands = Demands.of(tasks, 30, seconds=seconds, volume={"graph": 5e6, "chunk": 1e6})
    usual = {"cores": np.full(4, CORES), "server_threads": np.full(4, 4)}
    rates = {"rate_in": np.full(4, RATE), "rate_out": np.full(4, RATE)}
    cluster = ClusterMachines(**{**usual, **rates, **(machines or {})}, names=NAMES)
    return simulate(cluster, tasks, [0, 1, 2, 3, 0, 1, 2, 3], demands)


def named(what: str) -> bool:
    """Whether `binding` names first what was planted."""
    machines, worker_seconds, words = PLANTED[what]
    binding = planted_run(machines, worker_seconds).binding()
    return binding.names[binding.first] == words


def what_binds(work: Workload) -> Iterator[Case]:
    """Five bottlenecks, each planted by itself: how many are named."""

    def sides() -> dict[str, Side]:
        return {
            OURS: Side(lambda: float(sum(named(what) for what in PLANTED))),
            ALL_NAMED: Side(lambda: float(len(PLANTED))),
        }

    yield Case("plan/planted bottlenecks named", score("of 5"), sides, (Versus((ALL_NAMED,), 1.0),), repeats=1)


BENCHMARKS: list[Benchmark] = [what_binds]
