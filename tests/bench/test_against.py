"""A suite beside that of another checkout: what is slower is told, whichever way its figure is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from gnnsys.bench import Change, compare, load_suite, milliseconds, rate, units_of
from gnnsys.bench.suite import SuiteOptions

ROOT = Path(__file__).resolve().parents[2]
CASE = "gather_rows/512B/1t"


def test_a_case_is_worse_when_it_takes_longer_or_its_rate_is_lower_by_more_than_the_tolerance() -> None:
    longer = Change("a", milliseconds(), (10.0, 30.0, 11.0), (10.0, 10.0, 10.0))
    assert longer.ratio == pytest.approx(10 / 11) and longer.is_worse and longer.line().endswith("WORSE")
    faster = Change("a", milliseconds(), (8.0,), (10.0,))
    assert faster.ratio == pytest.approx(1.25) and not faster.is_worse
    lower = Change("b", rate("GB/s", 1.0), (9.0, 9.0), (10.0, 10.0))
    assert lower.ratio == pytest.approx(0.9) and lower.is_worse
    assert not Change("b", rate("GB/s", 1.0), (9.8,), (10.0,)).is_worse


@pytest.mark.long
def test_both_checkouts_run_and_their_figures_are_compared() -> None:
    """This checkout beside itself: the frame is what is looked at."""
    options = SuiteOptions(only=CASE, quick=True)
    units = units_of(load_suite("ops"), options)
    assert list(units) == [CASE]
    said: list[str] = []
    (change,) = compare(["ops", "--only", CASE, "--quick"], units, ROOT, 1, show=said.append)
    assert change.name == CASE and len(change.here) == len(change.there) == 1 and change.ratio > 0
    assert said == [f"round 1 of 1: {ROOT}"] * 2


def test_cases_are_named_by_the_sizes_that_run() -> None:
    assert "pull/local/100000 rows" in units_of(load_suite("store"), SuiteOptions(only="pull/local"))
    assert "pull/local/5000 rows" in units_of(load_suite("store"), SuiteOptions(only="pull/local", quick=True))


def test_a_folder_without_a_built_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no built checkout is there"):
        compare(["ops"], {}, tmp_path, 1)
    with pytest.raises(ValueError, match="--rounds must be at least 1"):
        compare(["ops"], {}, ROOT, 0)
