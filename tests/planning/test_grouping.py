"""Algorithm 1: groups that partition, near the best of all plans, and never behind a plan of one rule."""

import itertools
import math

import numpy as np
import pytest

from gnnsys.planning.scheduling.grouping import plan_groups, regroup
from gnnsys.planning.scheduling.operations import CORES, GPU, UP, Operation, PlanGraph
from gnnsys.planning.scheduling.shares import bound
from gnnsys.planning.scheduling.simulate import best_schedule, least_seconds, list_schedule
from tests.planning.plan_graphs import check


def _chain(*steps):
    return PlanGraph(
        Operation(resource, resource, float(seconds), (number - 1,) if number else ())
        for number, (resource, seconds) in enumerate(steps)
    )


def _steps(seconds):
    """The same work of the GPU, in some steps."""
    return [(GPU, seconds / 3)] * 3


def _random_batch(generator):
    """Rows up the bus; sums by the cores, less up the bus; products by the cores, next to nothing up the bus."""
    size = generator.uniform(0.5, 2)
    bus, sums, products, gpu = generator.uniform([3, 3, 3, 2], [8, 12, 20, 6]) * size
    return {
        "bus": _chain((UP, bus), *_steps(gpu)),
        "sums": _chain((CORES, sums), (UP, 0.4 * bus), (GPU, 0.9 * gpu)),
        "products": _chain((CORES, products), (UP, 0.2 * bus), (GPU, 0.8 * gpu)),
    }


def _exhaustive(batches):
    """Every choice of rules, each with its shortest schedule; choices that cannot be shorter are left out."""
    best = math.inf
    batches = [{rule: graph.merged(in_order=False) for rule, graph in batch.items()} for batch in batches]
    choices = [
        [batch[rule] for batch, rule in zip(batches, rules, strict=True)] for rules in itertools.product(*batches)
    ]
    for least, number in sorted((least_seconds(graphs), number) for number, graphs in enumerate(choices)):
        if least >= best:
            return best
        found = best_schedule(choices[number], exact_up_to=6, most_nodes=30_000)
        assert found.is_exact
        best = min(best, found.seconds)
    return best


def _check(batches, plan, beta):
    assert sorted(number for group in plan.groups for number in group) == list(range(len(batches)))
    assert all(1 <= len(group) <= beta for group in plan.groups)
    check([batch[rule] for batch, rule in zip(batches, plan.rules, strict=True)], plan.schedule)


def test_it_is_near_the_best_plan_and_never_behind_one_rule_for_all():
    generator = np.random.default_rng(0)
    ratios, gains = [], []
    for number in [1, 2, 3, 4, 4, 5, 5, 6]:
        batches = [_random_batch(generator) for _ in range(number)]
        plan = plan_groups(batches)
        _check(batches, plan, beta=4)
        of_one_rule = min(best_schedule([batch[rule] for batch in batches]).seconds for rule in batches[0])
        assert plan.seconds <= of_one_rule + 1e-9
        best = _exhaustive(batches)
        ratios.append(plan.seconds / best)
        gains.append(of_one_rule / plan.seconds)
    assert np.mean(ratios) <= 1.05, ratios
    assert np.mean(gains) > 1.1, "mixing rules pays"


def test_groups_partition_the_batches_and_none_is_larger_than_beta():
    generator = np.random.default_rng(1)
    for number, beta in [(1, 1), (5, 1), (7, 2), (11, 3), (13, 9), (9, 4)]:
        batches = [_random_batch(generator) for _ in range(number)]
        plan = plan_groups(batches, beta=beta, tau=3, seed=number)
        _check(batches, plan, beta)
        of_one_rule = [list_schedule([batch[rule] for batch in batches]).seconds for rule in batches[0]]
        assert plan.seconds <= min(of_one_rule) + 1e-9


def test_many_like_batches_come_near_the_linear_program():
    batch = _random_batch(np.random.default_rng(2))
    plan = plan_groups([batch] * 24, tau=3)
    least = bound({rule: graph.busy() for rule, graph in batch.items()}).seconds
    assert least * 24 <= plan.seconds <= 1.25 * least * 24
    assert plan == plan_groups([batch] * 24, tau=3), "the same every time"


def test_regrouping_balances_what_can_be_balanced():
    generator = np.random.default_rng(3)
    for number, most in itertools.product([1, 2, 5, 20], [1, 2, 4, 9]):
        ratios = np.exp(generator.normal(size=number)).tolist()
        groups = regroup(ratios, most)
        assert sorted(itertools.chain(*groups)) == list(range(number)) and all(len(g) <= most for g in groups)
        farthest = max(abs(math.log(math.prod(ratios[n] for n in group))) for group in groups)
        assert farthest <= max(abs(math.log(ratio)) for ratio in ratios) + 1e-9, "none is worse than one by one"
    assert regroup([4.0, 2.0, 0.25, 0.5], 2) == [[0, 2], [1, 3]]
    assert regroup([math.inf, 0.0, 1.0], 3) == [[0, 1], [2]]
    assert regroup([2.0, 3.0], 2) == [[0], [1]], "all on one side"
    with pytest.raises(ValueError, match="0 or more"):
        regroup([-1.0], 2)


def test_settings_that_are_none_are_refused():
    batch = _random_batch(np.random.default_rng(4))
    for bad in [{"beta": 0}, {"beta": 10}, {"mu_star": 1.0}, {"alpha": 0.0}]:
        with pytest.raises(ValueError, match=next(iter(bad))):
            plan_groups([batch], **bad)
    with pytest.raises(ValueError, match="must be batches"):
        plan_groups([])
