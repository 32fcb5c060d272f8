"""Of `gnnsys bench execution`, the algorithms that plan: how near they come to the best, and how long they take.

No GPU is needed: batches are plan graphs with seconds of an H200 and 16 cores, larger and smaller at random.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import product

import numpy as np

from gnnsys.bench.case import OURS, Benchmark, Case, Side, Versus, value
from gnnsys.bench.workload import FULL, SEED, Workload
from gnnsys.planning import (
    Operation,
    PlanGraph,
    assign_longest_first,
    assign_nearly_best,
    best_schedule,
    bound,
    least_seconds,
    plan_groups,
    round_shares,
    steady_seconds,
)

ONE_SECOND, LONGEST_FIRST = "one second", "longest first"
EXHAUSTIVE, ONE_RULE, PROGRAM = "every choice of rules", "one rule for all", "linear program"
NEAR, OF_THE_PROGRAM = 1 / 1.05, 1 / 1.2
NUM_BATCHES, NUM_INSTANCES = 10_000, 16
_NODES = 30_000  # of each exact search


def dealt_sampling(work: Workload) -> Iterator[Case]:
    """10,000 batches dealt to host and device within one percent of the best way."""

    def sides() -> dict[str, Side]:
        seconds = np.random.default_rng(SEED).pareto(1.5, NUM_BATCHES) + 0.1

        def timed(call: object) -> float:
            assert callable(call)
            began = time.perf_counter()
            call(seconds, 8.0)
            return time.perf_counter() - began

        return {
            OURS: Side(lambda: timed(lambda *of: assign_nearly_best(*of, eps=0.01))),
            ONE_SECOND: Side(lambda: 1.0),
            LONGEST_FIRST: Side(lambda: timed(assign_longest_first)),
        }

    versus = (Versus((ONE_SECOND,), 1.0), Versus((LONGEST_FIRST,)))
    yield Case("execution/10,000 batches dealt", value("s"), sides, versus, repeats=3)


def grouped_batches(work: Workload) -> Iterator[Case]:
    """Algorithm 1 on up to six batches of three rules, beside all that could be chosen: mean seconds of all batches."""

    @cache
    def instances() -> list[list[dict[str, PlanGraph]]]:
        generator = np.random.default_rng(SEED)
        count, sizes = (NUM_INSTANCES, 4) if work.sizes == FULL else (4, 2)
        return [[_batch(generator) for _ in range(3 + number % sizes)] for number in range(count)]

    @cache
    def shortest() -> float:
        return _mean(map(_shortest, instances()))

    def sides() -> dict[str, Side]:
        return {
            OURS: Side(lambda: _mean(plan_groups(batches).seconds for batches in instances())),
            EXHAUSTIVE: Side(shortest),
            ONE_RULE: Side(lambda: _mean(map(_of_one_rule, instances()))),
        }

    versus = (Versus((EXHAUSTIVE,), NEAR), Versus((ONE_RULE,), 1.0))
    yield Case("execution/groups of batches", value("s"), sides, versus, repeats=1)


def mixed_rules(work: Workload) -> Iterator[Case]:
    """The linear program's mix, rounded to a pattern and simulated, beside its value: seconds a batch."""

    @cache
    def instances() -> list[dict[str, PlanGraph]]:
        generator = np.random.default_rng(SEED + 1)
        return [_batch(generator) for _ in range(NUM_INSTANCES if work.sizes == FULL else 4)]

    def program(batch: Mapping[str, PlanGraph]) -> tuple[float, tuple[str, ...]]:
        found = bound({rule: graph.busy() for rule, graph in batch.items()})
        assert not isinstance(found, str)
        return found.seconds, round_shares(found.shares)

    def sides() -> dict[str, Side]:
        return {
            OURS: Side(lambda: _mean(steady_seconds([b[rule] for rule in program(b)[1]]) for b in instances())),
            PROGRAM: Side(lambda: _mean(program(batch)[0] for batch in instances())),
            ONE_RULE: Side(lambda: _mean(min(steady_seconds([g]) for g in b.values()) for b in instances())),
        }

    versus = (Versus((PROGRAM,), OF_THE_PROGRAM), Versus((ONE_RULE,), 1.0))
    yield Case("execution/a mix of rules", value("s"), sides, versus, repeats=1)


def _batch(generator: np.random.Generator) -> dict[str, PlanGraph]:
    """Rows over the bus, sums of the host, and a split between them: milliseconds of an H200, twice or half of them."""
    rows, sampling, sums, own, both, train = (np.array([5.4, 1.5, 10.9, 1.0, 2.4, 4.2]) * 1e-3).tolist()
    size, cores = generator.uniform(0.5, 2, 2).tolist()
    return {
        "bus": _chain(("bus up", size * (sampling + rows)), ("gpu", size * train)),
        "sums": _chain(
            ("cores", cores * size * (sums + own)), ("bus up", size * (sampling + both)), ("gpu", size * train),
        ),
        "split": _chain(
            ("cores", cores * size * 0.5 * (sums + own)), ("bus up", size * (sampling + 0.4 * rows + 0.5 * both)),
            ("gpu", 1.1 * size * train),
        ),
    }  # fmt: skip


def _chain(*steps: tuple[str, float]) -> PlanGraph:
    return PlanGraph(
        Operation(resource, resource, seconds, (number - 1,) if number else ())
        for number, (resource, seconds) in enumerate(steps)
    )


def _shortest(batches: Sequence[Mapping[str, PlanGraph]]) -> float:
    """Every choice of rules with its shortest schedule; a choice that cannot be shorter is left out."""
    best = float("inf")
    choices = [[batch[r] for batch, r in zip(batches, rules, strict=True)] for rules in product(*batches)]
    for least, number in sorted((least_seconds(graphs), number) for number, graphs in enumerate(choices)):
        if least >= best:
            break
        best = min(best, best_schedule(choices[number], exact_up_to=6, most_nodes=_NODES).seconds)
    return best


def _of_one_rule(batches: Sequence[Mapping[str, PlanGraph]]) -> float:
    return min(best_schedule([batch[rule] for batch in batches]).seconds for rule in batches[0])


def _mean(seconds: Iterator[float] | map[float]) -> float:
    return float(np.mean(list(seconds)))


BENCHMARKS: list[Benchmark] = [dealt_sampling, grouped_batches, mixed_rules]
