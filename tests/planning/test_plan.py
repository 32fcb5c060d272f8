"""A plan says what was tried, what was measured and why; as JSON it comes back as it was."""

import json

import pytest

from gnnsys.planning import ExecutionPlan, Way
from gnnsys.planning.execution.way import DEVICE, PINNED


def _plan() -> ExecutionPlan:
    ways = [Way(predicted=0.04), Way(place=DEVICE, device_bytes=100, predicted=0.001), Way(place=PINNED)]
    return ExecutionPlan(ways, made_for={"device": "a GPU"}, passed_over={"cached": "it does not fit"})


def test_the_report_names_every_way_and_why_one_was_chosen():
    plan = _plan()
    assert "trying" in plan.report() and plan.way is None
    plan.trial.add(0, 0.060)
    plan.trial.add(1, 0.012)
    plan.trial.refuse(2, "out of memory")
    assert plan.choose().place == DEVICE
    lines = plan.report().splitlines()
    assert len(lines) == 5
    assert lines[0].startswith("  as given") and "predicted 40.0 ms" in lines[0] and "measured 60.0 ms" in lines[0]
    assert lines[1].startswith("* device") and "measured 12.0 ms" in lines[1]
    assert "not possible: out of memory" in lines[2]
    assert lines[3] == "  cached: not tried, it does not fit"
    assert lines[4] == "chosen: device, 5.00 times as fast as without a plan"


def test_it_says_so_where_nothing_is_faster():
    plan = _plan()
    for way, seconds in enumerate((1.0, 1.2, 2.0)):
        plan.trial.add(way, seconds)
    plan.choose()
    assert plan.report().splitlines()[-1] == (
        "chosen: as given, no other way is faster: the best of them takes 1.20 of its time"
    )


def test_one_way_needs_no_trial():
    plan = ExecutionPlan([Way()])
    assert plan.chosen == 0 and "there is no other way" in plan.report()


def test_json_has_all_of_it(tmp_path):
    plan = _plan()
    plan.trial.add(0, 0.06)
    plan.trial.refuse(2, "out of memory")
    plan.choose()
    plan.save(str(tmp_path / "plan.json"))
    again = ExecutionPlan.load(str(tmp_path / "plan.json"))
    assert again.to_json() == plan.to_json() and again.report() == plan.report()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"version": 2}, "version 2"),
        ({"ways": []}, "needs a way"),
        ({"chosen": 3}, "chosen is 3"),
        ({"ways": [{"speed": 1}]}, "no speed"),
        ({"ways": [{"place": "moon"}]}, "'moon'"),
        ({"ways": 5}, "no plan"),
        ({"seconds": None}, "no plan"),
    ],
)
def test_what_is_no_plan_is_refused(change, told):
    with pytest.raises(ValueError, match=told):
        ExecutionPlan.from_json(json.loads(json.dumps(_plan().to_json())) | change)


def test_a_way_that_is_chosen_beforehand_needs_no_reason():
    plan = ExecutionPlan(_plan().ways, chosen=1)
    assert plan.report().splitlines()[-1] == "chosen: device, as the plan was given"


def test_it_says_so_where_there_is_nothing_to_compare_with():
    plan = _plan()
    plan.trial.add(1, 1.0)
    plan.choose()
    assert plan.chosen == 0 and "not measured, and there is nothing to compare" in plan.report()
