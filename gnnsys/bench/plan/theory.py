"""Of `gnnsys bench plan`, what the paper says of every schedule, checked on 2,000 random jobs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from gnnsys.bench.case import OURS, Benchmark, Case, Side, Versus, score
from gnnsys.bench.plan.random_jobs import random_job
from gnnsys.bench.workload import FULL, Workload
from gnnsys.planning import broken_rules, simulate

NUM_JOBS, NUM_QUICK = 2_000, 20
ALL_OF_THEM = "all of them"


def kept_rules(work: Workload) -> Iterator[Case]:
    """Of so many schedules, how many keep every rule."""
    count = NUM_JOBS if work.sizes == FULL else NUM_QUICK

    def kept(policy: str) -> float:
        return float(sum(not broken_rules(simulate(*random_job(seed), policy)) for seed in range(count)))

    def sides(policy: str) -> dict[str, Side]:
        return {OURS: Side(lambda: kept(policy)), ALL_OF_THEM: Side(lambda: float(count))}

    for policy in ("oes", "maxmin"):
        versus = (Versus((ALL_OF_THEM,), 1.0),)
        yield Case(f"plan/theory/{policy}", score("schedules"), partial(sides, policy), versus, repeats=1)


BENCHMARKS: list[Benchmark] = [kept_rules]
