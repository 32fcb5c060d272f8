"""DGTP's figures beside ours: a row that names one has it as its target, and no other row has a target."""

from __future__ import annotations

import re

import pytest

from gnnsys.bench.plan.paper_rows import BENCHMARKS
from gnnsys.bench.workload import FULL, Workload
from tests.bench.verdicts import judged

CASES = [case for benchmark in BENCHMARKS for case in benchmark(Workload(FULL))]


def test_a_target_that_is_met_is_the_papers_figure() -> None:
    named = set()
    for case in CASES:
        for versus in case.versus:
            percent = re.search(r"\(paper: (?:up to )?([\d.]+)% less\)", versus.label or "")
            assert (percent is not None) == (versus.target is not None), (case.name, versus)
            if percent is not None:
                assert versus.target == pytest.approx(1 / (1 - float(percent[1]) / 100)), (case.name, versus)
                named.add((case.name, versus.target))
    assert judged(CASES) == named and len(named) >= 20


def test_every_figure_that_the_paper_prints_is_one() -> None:
    percents = {round(100 * (1 - 1 / v.target), 2) for case in CASES for v in case.versus if v.target is not None}
    assert percents == {28.45, 26.54, 26.11, 24.0, 48.0, 9.0, 29.0, 18.0, 23.0, 67.0}
