"""Whether jobs that run together get more done than one after the other, and how long a job will run.

A job's relative speed is its steps per second beside others over those alone. Two jobs that do not disturb each other
have 1 each, and 2 as a set; two that take turns have 0.5 each, and 1: they gain nothing and both end late. A set below
1.05 is parted. What was measured is remembered by the jobs' kinds, and no such set starts again.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from gnnsys.jobs.policies.waiting_jobs import WaitingJob

LEAST_SPEED = 1.05  # of a set that stays together
_NOISE = 0.95  # a larger set may seem slower than a smaller one by so much

Kinds = tuple[str, ...]
_NONE: Mapping[Kinds, float] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class EndedRun:
    """A run of a job of some kind: `seconds` of training, in so many steps, at this speed relative to a run alone."""

    kind: str
    seconds: float
    num_steps: int
    speed: float = 1.0


def steps_per_second(kind: str, runs: Iterable[EndedRun]) -> float | None:
    """Of jobs of this kind when alone: the median of the runs that are known, None where there are none."""
    rates = [run.num_steps / (run.seconds * run.speed) for run in runs if run.kind == kind and _is_measured(run)]
    return statistics.median(rates) if rates else None


def predict_seconds(kind: str, num_steps: int, runs: Iterable[EndedRun]) -> float | None:
    """How long a job of this kind would run alone, from runs like it; None where there are none."""
    rate = steps_per_second(kind, runs)
    return None if rate is None else num_steps / rate


def _is_measured(run: EndedRun) -> bool:
    return run.num_steps > 0 and run.seconds > 0 and run.speed > 0


def relative_speeds(together: Mapping[int, float], alone: Mapping[int, float]) -> dict[int, float]:
    """By job number, from steps per second. A job whose speed alone is not known is left out."""
    return {number: speed / alone[number] for number, speed in together.items() if alone.get(number, 0.0) > 0}


def to_be_parted(speeds: Mapping[int, float]) -> bool:
    """Whether the jobs of a set, given all their relative speeds, had better run one after the other."""
    return len(speeds) > 1 and sum(speeds.values()) < LEAST_SPEED


@dataclass(frozen=True)
class SharingRecord:
    """The sums of relative speeds of sets that ran together, by their kinds in order. A value: `measured` makes a new
    one.

    >>> record = SharingRecord().measured(["gat", "gcn"], 1.6).measured(["gat", "gat"], 1.01)
    >>> record.pays_for(["gcn", "gat"]), record.pays_for(["gat", "gat"]), record.pays_for(["gat", "gat", "gcn"])
    (True, False, False)
    """

    speeds: Mapping[Kinds, float] = field(default_factory=lambda: _NONE)

    def measured(self, kinds: Iterable[str], speed: float) -> SharingRecord:
        """With the latest sum of a set."""
        return SharingRecord({**self.speeds, tuple(sorted(kinds)): speed})

    def pays(self, jobs: Sequence[WaitingJob]) -> bool:
        """Whether jobs should run together. What was never measured is tried. Jobs of no kind are never remembered."""
        return self.pays_for([job.kind for job in jobs if job.kind])

    def pays_for(self, kinds: Sequence[str]) -> bool:
        """False where the set, or a part of it, was measured below 1.05, or below what a smaller part of it does.

        So a part of a set that pays pays.
        """
        known = {part: speed for part, speed in self.speeds.items() if _is_part(part, kinds)}
        for part, speed in known.items():
            if len(part) > 1 and speed < LEAST_SPEED:
                return False
            if any(
                speed < _NOISE * other
                for less, other in known.items()
                if len(less) < len(part) and _is_part(less, part)
            ):
                return False
        return True

    def as_json(self) -> list[list[object]]:
        return [[list(kinds), speed] for kinds, speed in sorted(self.speeds.items())]

    @classmethod
    def from_json(cls, told: Sequence[Sequence[object]]) -> SharingRecord:
        """ValueError where this is not what `as_json` gives."""
        record = cls()
        for entry in told:
            if len(entry) != 2 or not isinstance(entry[0], list) or not isinstance(entry[1], (int, float)):
                raise ValueError(f"a record of sharing has entries [kinds, speed], got {entry!r}: remove it")
            record = record.measured(map(str, entry[0]), float(entry[1]))
        return record


def _is_part(part: Sequence[str], whole: Sequence[str]) -> bool:
    return all(kind in whole for kind in part) and not Counter(part) - Counter(whole)
