"""Whether a target that is written beside a case counts: what `--check` says of figures just below and above it."""

from __future__ import annotations

from collections.abc import Iterable

from gnnsys.bench import Case, Report
from gnnsys.bench.measure import Measured


def judged(cases: Iterable[Case]) -> set[tuple[str, float]]:
    """(name, target) of every row that fails where ours is a little worse than its target, and only there."""
    return {
        (case.name, versus.target)
        for case in cases
        for number, versus in enumerate(case.versus)
        if versus.target is not None
        and verdict(case, number, versus.target * 0.999) is False
        and verdict(case, number, versus.target * 1.001) is True
    }


def verdict(case: Case, number: int, ratio: float) -> bool | None:
    """Whether a row is met when ours is `ratio` times as good as every peer; `--check` must agree."""
    unit = case.unit
    more_is_worse = unit.ratio(unit.figure(1.0), unit.figure(2.0)) > 1  # of what is measured
    peers = {peer for versus in case.versus for peer in versus.peers} | {case.limit or case.ours}
    samples = {peer: [ratio if more_is_worse else 1 / ratio] for peer in peers} | {case.ours: [1.0]}
    report = Report("test", quick=False)
    row = report.add(case, Measured(samples))[number]
    objections = [line for line in report.failures() if f"target {row.target:.2f}" in line]
    assert bool(objections) or row.met is not False, f"--check does not object to {row}"
    return row.met
