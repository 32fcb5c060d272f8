"""Of `gnnsys bench plan`, policies beside each other on the same jobs and placements: mean makespan of several draws.

`oes` is ours. Each worker sits with its samplers, machines by turns; the same with samplers that are four batches ahead
at most; or every task is anywhere. Rows inform: who wins by how much depends on the placement.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial

import numpy as np

from gnnsys.bench.case import Benchmark, Case, Side, Versus, value
from gnnsys.bench.plan.random_jobs import RandomJob
from gnnsys.bench.plan.simulator import PAPERS100M, SMALL, JobSize, drawn_job
from gnnsys.bench.workload import FULL, SEED, Workload
from gnnsys.planning import POLICIES, simulate

PRODUCTS = JobSize(8, 16, 2)
NUM_DRAWS, NUM_QUICK = 20, 2
TOGETHER, ANYWHERE = "samplers with their worker", "tasks anywhere"
BOUNDED, AHEAD = "samplers with their worker, 4 batches ahead", 4


def together(job: RandomJob) -> np.ndarray:
    """Workers by turns over the machines, each with its samplers; the servers on the first machines."""
    tasks, num_machines = job.tasks, job.machines.num_machines
    placement = job.placement.copy()
    workers = tasks.ids("worker")
    placement[workers] = np.arange(len(workers)) % num_machines
    placement[tasks.ids("sampler")] = placement[workers[tasks.worker_of_sampler]]
    placement[tasks.ids("server")] = np.arange(tasks.count("server")) % num_machines
    return placement


def makespans(work: Workload) -> Iterator[Case]:
    """Mean seconds of 20 iterations by each policy; `oes` beside each of the others."""
    full = work.sizes == FULL

    @cache
    def jobs(size: JobSize, how: str) -> list[RandomJob]:
        ahead = AHEAD if how == BOUNDED else None
        drawn = [drawn_job(size, SEED + draw, ahead=ahead) for draw in range(NUM_DRAWS if full else NUM_QUICK)]
        return drawn if how == ANYWHERE else [job._replace(placement=together(job)) for job in drawn]

    def mean(size: JobSize, how: str, policy: str) -> float:
        return float(np.mean([simulate(*job, policy, explain=False).seconds for job in jobs(size, how)]))

    def sides(size: JobSize, how: str) -> dict[str, Side]:
        return {policy: Side(partial(mean, size, how, policy)) for policy in POLICIES}

    for name, size in (("8 machines, 16 x 2", PRODUCTS), ("16 machines, 20 x 4", PAPERS100M)):
        for how in (TOGETHER, BOUNDED, ANYWHERE):
            yield Case(
                f"plan/policies/{name}, {how}",
                value("s"),
                partial(sides, size if full else SMALL, how),
                tuple(Versus((policy,)) for policy in POLICIES[1:]),
                ours=POLICIES[0],
                repeats=1,
            )


BENCHMARKS: list[Benchmark] = [makespans]
