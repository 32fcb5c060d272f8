"""Contests of a plan by given seconds, without a model: who stays, who waits, who has one turn."""

from __future__ import annotations

from gnnsys.fullgraph import FullGraphPlan, FullGraphWay
from gnnsys.fullgraph.plan.full_graph_plan import MEASURED, ROUNDS, WARM, WayContest
from gnnsys.fullgraph.plan.full_graph_way import AS_GIVEN, KEPT
from tests.fullgraph.planned_models import PASSES


def one_contest(**change) -> FullGraphPlan:
    return FullGraphPlan(contests=[WayContest(change or {"num_bins": 2})])


def run_plan(plan: FullGraphPlan, seconds: dict[FullGraphWay, float], epochs: int) -> list[FullGraphWay]:
    """As ranks do: what a pass took is known when the next one has begun."""
    gone, last = [], None
    for epoch in range(1, epochs + 1):
        turn = plan.turn(epoch)
        gone.append(plan.way_of(turn))
        if turn is not None:
            plan.began(turn)
        if last is not None:
            plan.add(*last)
        last = None if turn is None else (turn, seconds[gone[-1]])
    return gone


def test_the_faster_way_stays_and_ties_are_what_was_done_before():
    other = FullGraphWay(num_bins=2)
    for seconds, want in ((0.5, other), (0.99, AS_GIVEN), (1.1, AS_GIVEN)):
        plan = one_contest()
        gone = run_plan(plan, {AS_GIVEN: 1.0, other: seconds}, PASSES + 3)
        turn = WARM + MEASURED
        assert gone[: 2 * ROUNDS * turn] == ([AS_GIVEN] * turn + [other] * turn) * ROUNDS
        assert plan.way == plan.chosen == want and set(gone[-2:]) == {want}


def test_a_way_that_is_much_slower_has_one_turn():
    other, plan = FullGraphWay(num_bins=2), one_contest()
    gone = run_plan(plan, {AS_GIVEN: 1.0, other: 2.0}, PASSES)
    assert gone.count(other) == WARM + MEASURED and plan.way == AS_GIVEN and "not faster" in plan.report()


def test_a_contest_whose_cost_is_much_waits_until_it_has_paid():
    other = FullGraphWay(num_bins=2)
    turn = WARM + MEASURED
    for cost, pays, first in ((1.0, 50, turn + 1), (100.0, 50, 49 + turn + 1), (100.0, 2, turn + 1)):
        plan = FullGraphPlan(contests=[WayContest({"num_bins": 2}, cost=cost, pays=pays)])
        gone = run_plan(plan, {AS_GIVEN: 1.0, other: 0.5}, 60 + PASSES)
        assert gone.index(other) == first and plan.way == other
        again = FullGraphPlan.from_json(plan.to_json())
        assert again.to_json() == plan.to_json()


def test_contests_add_up_and_one_that_is_settled_already_is_left_out():
    contests = [
        WayContest({"takes_apart": True}),
        WayContest({"num_bins": 2}),
        WayContest({"first": KEPT}, cost=None, pays=500),
    ]
    plan = FullGraphPlan(contests=contests)
    apart = FullGraphWay(takes_apart=True)
    both = FullGraphWay(takes_apart=True, num_bins=2)
    run_plan(plan, {AS_GIVEN: 1.0, apart: 0.5, both: 0.4}, 3 * PASSES)
    assert plan.way == both and plan.chosen == both and len(plan.results) == 2
    assert plan.turn(600) is None and plan.contests == []  # sums are kept: nothing to try
