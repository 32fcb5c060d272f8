"""Of `gnnsys bench plan`, how long the simulator takes: the paper's larger setting, and a thousand trainers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from gnnsys.bench.case import OURS, Benchmark, Case, Side, Versus, value
from gnnsys.bench.plan.random_jobs import RandomJob
from gnnsys.bench.workload import FULL, SEED, Workload
from gnnsys.planning import POLICIES, ClusterMachines, Demands, DrawnAmount, TrainingTasks, simulate

GIGABIT = 1.25e8  # bytes per second
LIMIT = "limit"


@dataclass(frozen=True)
class JobSize:
    machines: int
    workers: int
    samplers: int
    iterations: int = 20


PAPERS100M = JobSize(16, 20, 4)  # 28,000 flows where no task is on the machine that it sends to (§VI-B)
MANY_TRAINERS = JobSize(128, 1_000, 1)  # 2.6 million flows
SMALL = JobSize(4, 6, 2, 5)


def drawn_job(size: JobSize, seed: int = SEED, peak_to_mean: float = 1.16, ahead: int | None = None) -> RandomJob:
    """Machines of 10, 20 or 50 Gbit/s, tasks anywhere: more flows than any placement that somebody chose."""
    rng = np.random.default_rng(seed)
    tasks = TrainingTasks.of_job(size.machines, size.workers, size.samplers, ahead=ahead)
    rates = rng.choice([10, 20, 50], size.machines) * GIGABIT
    demands = Demands.of(
        tasks,
        size.iterations,
        seconds={"store": 0.02, "sampler": 0.03, "worker": 0.05, "server": 0.01},
        volume={
            "graph": DrawnAmount(80e6 / size.machines, peak_to_mean),
            "batch": DrawnAmount(80e6, peak_to_mean),
            "gradient": 1e6,
            "parameter": 1e6,
        },
        seed=seed,
    )
    moved = rng.integers(0, size.machines, tasks.num_placed - size.machines)
    placement = np.concatenate([np.arange(size.machines), moved])
    return RandomJob(ClusterMachines(rates, rates), tasks, placement, demands)


def _seconds(job: RandomJob, policy: str) -> float:
    """Of the processor, on one thread: what others do on the machine is not counted."""
    began = time.process_time()
    simulate(*job, policy)
    return time.process_time() - began


def speed(work: Workload) -> Iterator[Case]:
    """Processor seconds to simulate 20 iterations, beside what is promised."""
    full = work.sizes == FULL

    def within(size: JobSize, limit: float) -> dict[str, Side]:
        job = drawn_job(size)
        return {OURS: Side(lambda: _seconds(job, "oes")), LIMIT: Side(lambda: limit)}

    def beside_oes(policy: str) -> dict[str, Side]:
        job = drawn_job(PAPERS100M if full else SMALL)
        return {policy: Side(lambda: _seconds(job, policy)), "oes": Side(lambda: _seconds(job, "oes"))}

    sizes = [("16 machines, 80 samplers", PAPERS100M, 0.2, 3), ("128 machines, 1,000 trainers", MANY_TRAINERS, 60.0, 1)]
    for name, size, limit, repeats in sizes:
        make = partial(within, size if full else SMALL, limit)
        yield Case(f"plan/simulator/{name}", value("cpu s"), make, (Versus((LIMIT,), 1.0),), repeats=repeats)
    for policy in POLICIES[1:]:
        name, make = f"plan/simulator/16 machines, {policy}", partial(beside_oes, policy)
        yield Case(name, value("cpu s"), make, (Versus(("oes",)),), ours=policy, repeats=1)


BENCHMARKS: list[Benchmark] = [speed]
