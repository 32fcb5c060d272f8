"""One line after fifty batches; and which part of a profile was wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gnnsys.planning import PlanWatch, profile_drift
from tests.planning.profile.profiles import made_profile


def lines_of(watch: PlanWatch, seconds: float, batches: int = 80) -> list[str]:
    said = [watch.take(number * seconds, 20) for number in range(batches)]
    return [line for line in said if line is not None]


@pytest.mark.parametrize(
    ("seconds", "told", "is_off"),
    [(0.1, "(+0%)", False), (0.11, "(+10%)", False), (0.2, "(+100%)", True), (0.05, "(-50%)", True)],
)
def test_a_run_says_once_what_was_predicted_and_what_it_takes(seconds: float, told: str, is_off: bool) -> None:
    lines = lines_of(PlanWatch(2.0, "what binds: the link into h3"), seconds)
    assert len(lines) == 1
    assert told in lines[0] and "the plan said 2 s" in lines[0] and "the link into h3" in lines[0]
    assert ("save_trace" in lines[0]) == is_off


def test_the_first_batches_are_not_counted() -> None:
    watch = PlanWatch(1.0, "x", warm=2, batches=3)
    times = [0.0, 100.0, 200.0, 201.0, 202.0, 203.0]
    said = [watch.take(now, 1) for now in times]
    assert said[:5] == [None] * 5 and said[5] is not None and "takes 1 s" in said[5]


def test_too_few_batches_say_nothing() -> None:
    assert lines_of(PlanWatch(1.0, "x"), 0.1, batches=50) == []


def test_what_is_off_most_is_named_first() -> None:
    said = made_profile(2)
    measured = replace(said, shares=tuple(replace(share, sampling=3 * share.sampling) for share in said.shares))
    lines = profile_drift(said, measured)
    assert lines[0].startswith("core-seconds of sampling") and "(+200%)" in lines[0]
    assert all("(+0%)" in line for line in lines[1:])
    with pytest.raises(ValueError, match="are of other parts"):
        profile_drift(said, replace(measured, parts_digest=1))
