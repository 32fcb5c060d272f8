"""Two results of a benchmark: which cases are faster, which slower, and which only look so.

    changes = compare_results(read_results(Path("before.json")), read_results(Path("after.json")))

A case's ratio says how many times better the second result is: the ratio of the medians over its repeats, more being
better whatever the unit. A verdict other than "no difference" needs two things: the ratio's interval does not hold 1,
and the ratio is further from 1 than the tolerance.

- The interval is that of a percentile bootstrap. Repeats that come after one another are alike on a machine that
  drifts, so it is widened by sqrt((1 + r) / (1 - r)), r being the correlation of neighbouring ranks.
- A table of many cases has many chances of a false alarm: all of them together have 5%, one case 1% at most.
- The tolerance is for what repeats within a process cannot show: another process of the same code has other addresses.
- Sides of a case that are others' code are the same in both results. Where they have changed, it was the machine: the
  ratio is divided by theirs.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gnnsys.bench.results import CaseSamples, Results

Verdict = Literal["faster", "slower", "no difference", "too few repeats", "did not run"]
TOLERANCE = 0.02
LEAST_REPEATS = 5
RESAMPLES = 4000
FAMILY_LEVEL, CASE_LEVEL = 0.05, 0.01  # chances of a false alarm
NOISE = 0.05  # an interval that reaches further hides differences of this size, which is told
_MOST_CORRELATION = 0.8


@dataclass(frozen=True)
class Interval:
    """A ratio and where it may lie."""

    ratio: float
    low: float
    high: float

    @property
    def reach(self) -> float:
        """How far from the ratio it goes, as a share of it: a smaller difference may not be seen."""
        return max(self.ratio / self.low, self.high / self.ratio) - 1

    def tells(self, tolerance: float) -> bool:
        """Whether it is a difference."""
        return not self.low <= 1 <= self.high and not 1 - tolerance <= self.ratio <= 1 + tolerance


@dataclass(frozen=True)
class CaseChange:
    """One case. `machine`: the ratio of others' code in it, where that has changed and `interval` is divided by it."""

    name: str
    unit: str
    before: float | None
    after: float | None
    interval: Interval | None
    verdict: Verdict
    machine: float | None = None
    reason: str | None = None

    @property
    def is_worse(self) -> bool:
        return self.verdict in ("slower", "did not run")

    @staticmethod
    def header() -> str:
        return f"{'name':<44}  {'unit':<10}  {'before':>10}  {'after':>10}  {'ratio':>6}  {'interval':<16}  verdict"

    def line(self) -> str:
        i = self.interval
        ratio = "-" if i is None else f"{i.ratio:.3f}"
        interval = "-" if i is None or self.verdict == "too few repeats" else f"{i.low:.3f} to {i.high:.3f}"
        notes = [] if self.machine is None else [f"the machine: {self.machine:.3f}"]
        notes += [] if self.reason is None else [self.reason]
        note = f"  ({'; '.join(notes)})" if notes else ""
        figures = f"{_figure(self.before):>10}  {_figure(self.after):>10}  {ratio:>6}  {interval:<16}"
        return f"{self.name:<44}  {self.unit:<10}  {figures}  {self.verdict}{note}"

    def to_json(self) -> dict[str, Any]:
        i = self.interval
        shown = None if i is None else [i.low, i.high]
        return {
            "name": self.name, "unit": self.unit, "before": self.before, "after": self.after,
            "ratio": None if i is None else i.ratio, "interval": shown, "machine": self.machine,
            "verdict": self.verdict, "reason": self.reason,
        }  # fmt: skip


def compare_results(
    before: Results, after: Results, *, tolerance: float = TOLERANCE, resamples: int = RESAMPLES
) -> list[CaseChange]:
    """A change per case that ran in `before`, in its order; one that `after` lacks did not run."""
    if not 0 <= tolerance < 1:
        raise ValueError(f"--tolerance must be from 0 to less than 1, got {tolerance:g}")
    if not set(before.cases) & set(after.cases):
        raise ValueError(f"{before.path} and {after.path} have no case in common")
    judged = [n for n in before.cases if n in after.cases and _has_enough(before.cases[n], after.cases[n])]
    level = min(CASE_LEVEL, FAMILY_LEVEL / max(1, len(judged)))
    same_peers = before.versions == after.versions
    changes = []
    for name, old in before.cases.items():
        new = after.cases.get(name)
        if not old.ours:
            continue  # it did not run before either
        if new is None or not new.ours:
            changes.append(_not_run(old, after.reasons.get(name, "not in the second result")))
        else:
            changes.append(_change(old, new, tolerance, level, resamples, same_peers))
    return changes


def ratio_interval(
    before: Sequence[float], after: Sequence[float], *, more_is_better: bool, level: float, resamples: int, seed: int
) -> Interval:
    """How many times better `after` is, with the interval that misses the truth with a chance of `level`."""
    return _Resampled.of(before, after, more_is_better, resamples, seed).interval(level)


def median_interval(samples: Sequence[float], level: float = FAMILY_LEVEL) -> tuple[float, float]:
    """Where the median may lie: the ends of a bootstrap interval; of a single sample, itself."""
    values = np.asarray(samples, np.float64)
    draws = np.random.default_rng(0).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.quantile(np.median(values[draws], axis=1), [level / 2, 1 - level / 2])
    return float(low), float(high)


def _has_enough(old: CaseSamples, new: CaseSamples) -> bool:
    return min(len(old.ours), len(new.ours)) >= LEAST_REPEATS


def _not_run(old: CaseSamples, reason: str) -> CaseChange:
    return CaseChange(old.name, old.unit, float(np.median(old.ours)), None, None, "did not run", reason=reason)


def _change(
    old: CaseSamples, new: CaseSamples, tolerance: float, level: float, resamples: int, same_peers: bool
) -> CaseChange:
    seed = zlib.crc32(old.name.encode())
    ours = _Resampled.of(old.ours, new.ours, old.more_is_better, resamples, seed)
    machine = None
    if _has_enough(old, new):
        control = _control(old, new, resamples, seed + 1) if same_peers else None
        if control is not None and control.interval(level).tells(tolerance):
            machine, ours = control.ratio, ours.divided_by(control)
        interval = ours.interval(level)
        told = interval.tells(tolerance)
        verdict: Verdict = "no difference" if not told else "faster" if interval.ratio > 1 else "slower"
    else:
        interval, verdict = ours.interval(level), "too few repeats"
    medians = float(np.median(old.ours)), float(np.median(new.ours))
    is_noisy = verdict == "no difference" and interval.reach > NOISE
    reason = f"noise: less than {interval.reach:.0%} may not be seen" if is_noisy else None
    return CaseChange(old.name, old.unit, *medians, interval, verdict, machine, reason)


def _control(old: CaseSamples, new: CaseSamples, resamples: int, seed: int) -> _Resampled | None:
    """The sides of others' code that both have: the geometric mean of their ratios."""
    common: Mapping[str, list[float]] = {
        name: values
        for name, values in old.others.items()
        if min(len(values), len(new.others.get(name, ()))) >= LEAST_REPEATS
    }
    made = [
        _Resampled.of(values, new.others[name], old.more_is_better, resamples, seed + number)
        for number, (name, values) in enumerate(common.items())
    ]
    if not made:
        return None
    logs = np.mean([each.logs for each in made], axis=0)
    point = float(np.mean([each.log for each in made]))
    return _Resampled(point, logs, max(each.correlation for each in made))


@dataclass(frozen=True)
class _Resampled:
    """The logarithm of a ratio of medians, of the samples and of many draws from them."""

    log: float
    logs: NDArray[np.float64]
    correlation: float

    @classmethod
    def of(
        cls, before: Sequence[float], after: Sequence[float], more_is_better: bool, resamples: int, seed: int
    ) -> _Resampled:
        rng = np.random.default_rng(seed)
        worse, better = (np.asarray(x, np.float64) for x in ((before, after) if more_is_better else (after, before)))
        point = _log_ratio(np.median(better), np.median(worse))
        draws = [np.median(x[rng.integers(0, len(x), (resamples, len(x)))], axis=1) for x in (better, worse)]
        correlation = (_neighbour_correlation(better) + _neighbour_correlation(worse)) / 2
        return cls(float(point), _log_ratio(draws[0], draws[1]), correlation)

    @property
    def ratio(self) -> float:
        return math.exp(self.log)

    def divided_by(self, other: _Resampled) -> _Resampled:
        return _Resampled(self.log - other.log, self.logs - other.logs, max(self.correlation, other.correlation))

    def interval(self, level: float) -> Interval:
        r = min(max(self.correlation, 0.0), _MOST_CORRELATION)
        wider = math.sqrt((1 + r) / (1 - r))
        ends = np.quantile(self.logs, [level / 2, 1 - level / 2])
        low, high = self.log + wider * (ends - self.log)
        return Interval(self.ratio, math.exp(min(low, self.log)), math.exp(max(high, self.log)))


def _log_ratio(better: Any, worse: Any) -> Any:
    """Figures may be 0, such as bytes of rows that never travel: as good as the least that can be told."""
    tiny = 1e-12
    return np.log(np.maximum(better, tiny)) - np.log(np.maximum(worse, tiny))


def _neighbour_correlation(values: NDArray[np.float64]) -> float:
    """Of ranks with those that follow them; ranks, so that one outlier does not hide it."""
    if len(np.unique(values)) < 3:
        return 0.0
    ranks = np.argsort(np.argsort(values, kind="stable"), kind="stable") - (len(values) - 1) / 2
    return float((ranks[:-1] * ranks[1:]).sum() / (ranks * ranks).sum())


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
