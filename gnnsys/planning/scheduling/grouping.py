"""Algorithm 1 of DAHA (section 3.2.3): batches in groups, whose rules and schedules are chosen together.

The lower level finds the rules by which a group's batches end first: exactly up to four batches, by lists beyond. A
group fails where that is more than 1 - mu of what its batches take one by one. The upper level deals the batches of
failed groups anew, so that in each group compute and transfer take the same time. mu rises, and a group of one batch
always fails: the last grouping may be worse than one before. So the best that was seen is kept, and every plan of one
rule for all batches counts as seen; so does a few batches' plan by lists alone.
"""

from __future__ import annotations

import math
import random
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from gnnsys.planning.scheduling.operations import CORES, GPU, PlanGraph
from gnnsys.planning.scheduling.simulate import (
    EXACT_BATCHES,
    BatchSchedule,
    best_schedule,
    least_seconds,
    list_schedule,
)

LARGEST_GROUP = 9  # the paper's beta is below 10
_LOG_LIMIT = 50.0  # of a ratio whose one side is nothing
_PASSES = 3  # over the batches of a large group, changing one rule at a time


@dataclass(frozen=True)
class GroupedPlan:
    """`groups` in the order in which they begin, `rules` by batch, and when every operation of every batch begins."""

    groups: tuple[tuple[int, ...], ...]
    rules: tuple[str, ...]
    schedule: BatchSchedule

    @property
    def seconds(self) -> float:
        return self.schedule.seconds


def plan_groups(
    batches: Sequence[Mapping[str, PlanGraph]],
    *,
    beta: int = EXACT_BATCHES,
    mu_star: float = 0.6,
    alpha: float = 0.1,
    tau: int = 10,
    seed: int = 0,
) -> GroupedPlan:
    """Groups of at most `beta` batches, by the plan graphs of each batch's rules.

    mu rises by `alpha` each time until `mu_star`, at most `tau` times. The first grouping is random, by `seed`.
    """
    if not batches or not all(batches):
        raise ValueError("there must be batches, and each must have a rule")
    if not 1 <= beta <= LARGEST_GROUP:
        raise ValueError(f"groups have 1 to {LARGEST_GROUP} batches, got beta={beta}")
    if not (0 < mu_star < 1 and alpha > 0 and tau >= 0):
        raise ValueError(f"mu_star is between 0 and 1, alpha more than 0, got {mu_star}, {alpha}")
    merged = _merged(batches)
    plan = _planned(merged, beta, mu_star, alpha, tau, seed)
    graphs = [batch[rule] for batch, rule in zip(batches, plan.rules, strict=True)]
    starts = [g.split_starts(s, in_order=False) for g, s in zip(graphs, plan.schedule.starts, strict=True)]
    return replace(plan, schedule=replace(plan.schedule, starts=tuple(starts)))


def _merged(batches: Sequence[Mapping[str, PlanGraph]]) -> list[Mapping[str, PlanGraph]]:
    """With fewer operations; batches of one mapping still are."""
    found: dict[int, Mapping[str, PlanGraph]] = {}
    for batch in batches:
        if id(batch) not in found:
            found[id(batch)] = {rule: graph.merged(in_order=False) for rule, graph in batch.items()}
    return [found[id(batch)] for batch in batches]


def _planned(
    batches: Sequence[Mapping[str, PlanGraph]], beta: int, mu_star: float, alpha: float, tau: int, seed: int
) -> GroupedPlan:
    lower, numbers = _LowerLevel(batches), list(range(len(batches)))
    random.Random(seed).shuffle(numbers)
    groups = [numbers[first : first + beta] for first in range(0, len(numbers), beta)]
    best = _join(batches, groups, lower)
    mu, count = 0.0, 0
    while count < tau and mu < mu_star:
        mu, count = mu + alpha, count + 1
        failed = [group for group in groups if lower.seconds(group) > (1 - mu) * lower.one_by_one(group)]
        if not failed:
            continue
        loose = sorted(number for group in failed for number in group)
        dealt = regroup([_compute_per_transfer(batches[number]) for number in loose], beta)
        groups = [group for group in groups if group not in failed]
        groups += [[loose[place] for place in places] for places in dealt]
        best = min(best, _join(batches, groups, lower), key=lambda plan: plan.seconds)
    return min([best, *_without_groups(batches, beta)], key=lambda plan: plan.seconds)


def regroup(ratios: Sequence[float], most: int) -> list[list[int]]:
    """Groups of at most `most` batches, so that the product of each group's ratios is near 1: the paper's greedy way.

    The batch whose ratio is farthest from 1 joins the one nearest to its reciprocal; they are one batch from then on.
    It ends when all ratios that are left are on one side of 1.

    >>> regroup([8.0, 0.5, 0.25, 1.0], most=4)
    [[0, 1, 2], [3]]
    """
    logs = [_log(ratio) for ratio in ratios]
    line: list[tuple[float, list[int]]] = sorted((log, [number]) for number, log in enumerate(logs))
    done: list[list[int]] = []
    while line and line[0][0] < 0 < line[-1][0]:
        farthest = line.pop(0) if -line[0][0] >= line[-1][0] else line.pop()
        fitting = [other for other in line if len(other[1]) + len(farthest[1]) <= most]
        if not fitting:
            done.append(farthest[1])
            continue
        nearest = min(fitting, key=lambda other: abs(other[0] + farthest[0]))
        line.remove(nearest)
        joined = (farthest[0] + nearest[0], farthest[1] + nearest[1])
        if len(joined[1]) >= most:
            done.append(joined[1])
        else:
            insort(line, joined)
    return sorted(map(sorted, done + [members for _, members in line]))


def _log(ratio: float) -> float:
    if ratio < 0 or math.isnan(ratio):
        raise ValueError(f"a ratio of seconds is 0 or more, got {ratio}")
    return max(-_LOG_LIMIT, min(_LOG_LIMIT, math.log(ratio))) if 0 < ratio < math.inf else (
        _LOG_LIMIT if ratio else -_LOG_LIMIT
    )  # fmt: skip


def _compute_per_transfer(batch: Mapping[str, PlanGraph]) -> float:
    """By the rule that is fastest for the batch alone."""
    busy = min(batch.values(), key=lambda graph: graph.chain()).busy()
    compute = busy[CORES] + busy[GPU]
    transfer = sum(busy.values()) - compute
    return compute / transfer if transfer > 0 else math.inf if compute > 0 else 1.0


class _LowerLevel:
    """The best rules of a group, once for all groups of the same batches; batches of one mapping are the same."""

    def __init__(self, batches: Sequence[Mapping[str, PlanGraph]]) -> None:
        firsts: dict[int, int] = {}
        self._batches, self._twin = batches, [firsts.setdefault(id(one), n) for n, one in enumerate(batches)]
        self._found: dict[tuple[int, ...], tuple[tuple[str, ...], BatchSchedule]] = {}

    def rules(self, group: Sequence[int]) -> dict[int, str]:
        return dict(zip(self._sorted(group), self._best(group)[0], strict=True))

    def starts(self, group: Sequence[int]) -> dict[int, tuple[float, ...]]:
        return dict(zip(self._sorted(group), self._best(group)[1].starts, strict=True))

    def seconds(self, group: Sequence[int]) -> float:
        return self._best(group)[1].seconds

    def one_by_one(self, group: Sequence[int]) -> float:
        return sum(self._batches[number][rule].chain() for number, rule in self.rules(group).items())

    def _sorted(self, group: Sequence[int]) -> list[int]:
        return sorted(group, key=lambda number: (self._twin[number], number))

    def _best(self, group: Sequence[int]) -> tuple[tuple[str, ...], BatchSchedule]:
        key = tuple(self._twin[number] for number in self._sorted(group))
        if key not in self._found:
            members = [self._batches[number] for number in key]
            self._found[key] = _exact_rules(members) if len(members) <= EXACT_BATCHES else _listed_rules(members)
        return self._found[key]


def _exact_rules(members: Sequence[Mapping[str, PlanGraph]]) -> tuple[tuple[str, ...], BatchSchedule]:
    """All choices of rules, the promising ones first; the rest cannot be shorter than what was found."""
    choices = set()
    for choice in product(*members):
        by_twins: dict[int, list[str]] = {}
        for member, rule in zip(members, choice, strict=True):
            by_twins.setdefault(id(member), []).append(rule)
        if all(rules == sorted(rules) for rules in by_twins.values()):
            choices.add(choice)
    bounds = sorted((least_seconds(_graphs(members, choice)), choice) for choice in choices)
    best: tuple[tuple[str, ...], BatchSchedule] | None = None
    for least, choice in bounds:
        if best is not None and least >= best[1].seconds:
            break
        found = best_schedule(_graphs(members, choice))
        if best is None or found.seconds < best[1].seconds:
            best = (choice, found)
    assert best is not None
    return best


def _listed_rules(members: Sequence[Mapping[str, PlanGraph]]) -> tuple[tuple[str, ...], BatchSchedule]:
    """From rules that keep the busiest resource low, one rule changed at a time while that helps."""
    choice, busy = [], dict[str, float]()
    for member in members:
        rule = min(member, key=lambda one: max(busy.get(r, 0.0) + s for r, s in member[one].busy().items()))
        choice.append(rule)
        busy = {resource: busy.get(resource, 0.0) + s for resource, s in member[rule].busy().items()}
    starts = [choice, [min(member, key=lambda one: member[one].chain()) for member in members]]
    schedules = [best_schedule(_graphs(members, start)) for start in starts]
    at = min(range(2), key=lambda n: schedules[n].seconds)
    choice, best = starts[at], schedules[at]
    for _ in range(_PASSES):
        before = best.seconds
        for place, member in enumerate(members):
            for rule in member:
                other = [*choice[:place], rule, *choice[place + 1 :]]
                if rule == choice[place] or least_seconds(_graphs(members, other)) >= best.seconds:
                    continue
                found = best_schedule(_graphs(members, other))
                if found.seconds < best.seconds:
                    choice, best = other, found
        if best.seconds >= before:
            break
    return tuple(choice), best


def _graphs(members: Sequence[Mapping[str, PlanGraph]], rules: Sequence[str]) -> list[PlanGraph]:
    return [member[rule] for member, rule in zip(members, rules, strict=True)]


def _join(
    batches: Sequence[Mapping[str, PlanGraph]], groups: Sequence[Sequence[int]], lower: _LowerLevel
) -> GroupedPlan:
    """One group after the other, the next one as early as resources allow: each keeps its own order on each of them."""
    rules = {number: rule for group in groups for number, rule in lower.rules(group).items()}
    graphs = [batches[number][rules[number]] for number in range(len(batches))]
    order = []
    for place, group in enumerate(groups):
        starts = lower.starts(group)
        order += [(place, starts[b][k], b, k) for b in group for k in range(len(graphs[b]))]
    free: dict[str, float] = {}
    ends: dict[tuple[int, int], float] = {}
    begins: dict[tuple[int, int], float] = {}
    for _, _, b, k in sorted(order, key=lambda at: (at[0], at[1], at[3], at[2])):
        one = graphs[b].operations[k]
        begins[b, k] = max([free.get(one.resource, 0.0), *(ends[b, before] for before in one.after)])
        free[one.resource] = ends[b, k] = begins[b, k] + one.seconds
    eager = BatchSchedule(
        max(ends.values()),
        tuple(tuple(begins[b, k] for k in range(len(graph))) for b, graph in enumerate(graphs)),
    )
    chosen = tuple(rules[number] for number in range(len(batches)))
    listed = [_listed(graphs, [number for group in groups for number in group], longest) for longest in (False, True)]
    best = min([eager, *listed], key=lambda schedule: schedule.seconds)
    return GroupedPlan(tuple(map(tuple, groups)), chosen, best)


def _listed(graphs: Sequence[PlanGraph], order: Sequence[int], longest_first: bool) -> BatchSchedule:
    found = list_schedule([graphs[number] for number in order], longest_first=longest_first)
    starts = dict(zip(order, found.starts, strict=True))
    return BatchSchedule(found.seconds, tuple(starts[number] for number in range(len(graphs))))


def _without_groups(batches: Sequence[Mapping[str, PlanGraph]], beta: int) -> list[GroupedPlan]:
    """Every rule that all batches have, for all of them; and, where they are few, all of them by lists."""
    numbers = range(len(batches))
    groups = tuple(tuple(numbers[first : first + beta]) for first in range(0, len(numbers), beta))
    plans = []
    for rule in [rule for rule in batches[0] if all(rule in batch for batch in batches)]:
        schedule = best_schedule([batch[rule] for batch in batches])
        plans.append(GroupedPlan(groups, (rule,) * len(batches), schedule))
    if len(batches) <= LARGEST_GROUP:
        plans.append(GroupedPlan(groups, *_listed_rules(batches)))
    return plans
