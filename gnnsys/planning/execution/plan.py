"""A plan: the ways that are possible, what was predicted and measured of each, and which one was chosen and why."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gnnsys.planning.execution.drift import Drift, DriftWatch, as_seconds
from gnnsys.planning.execution.trial import WayTrial
from gnnsys.planning.execution.way import PLACES, Way

_VERSION = 1


class ExecutionPlan:
    """`ways[0]` is what is done without a plan. `chosen` is None until the trial is over.

    `passed_over` are ways that were not tried, with the reason; `drifts` say when and why ways were tried again.
    `made_for` says what the plan is for: a plan of other hardware or another loader is refused.
    """

    def __init__(
        self,
        ways: Sequence[Way],
        *,
        made_for: Mapping[str, Any] | None = None,
        passed_over: Mapping[str, str] | None = None,
        chosen: int | None = None,
        reason: str = "",
    ) -> None:
        if not ways:
            raise ValueError("a plan needs a way, at least")
        self.ways = tuple(ways)
        if chosen is not None and (isinstance(chosen, bool) or not 0 <= chosen < len(ways)):
            raise ValueError(f"the plan has ways 0 to {len(ways) - 1}, chosen is {chosen!r}")
        self.made_for = dict(made_for or {})
        self.passed_over = dict(passed_over or {})
        self.trial = WayTrial(len(self.ways))
        self.chosen = chosen
        self.reason = reason
        self.drifts: list[Drift] = []
        if chosen is None and len(self.ways) == 1:
            self.chosen, self.reason = 0, "there is no other way"

    @property
    def way(self) -> Way | None:
        """The way that was chosen."""
        return None if self.chosen is None else self.ways[self.chosen]

    def choose(self) -> Way:
        """Ends the trial."""
        self.chosen, self.reason = self._best(self.trial)
        return self.ways[self.chosen]

    def _best(self, trial: WayTrial) -> tuple[int, str]:
        """A way and the reason."""
        best, times, first = trial.best(), trial.medians(), trial.tried[0]
        if not times:
            return best, "nothing was measured"
        if first not in times:
            return best, "it was not measured, and there is nothing to compare others with"
        if best != first:
            before = "without a plan" if first == 0 else f"before, {self.ways[first].name}"
            return best, f"{times[first] / times[best]:.2f} times as fast as {before}"
        if len(times) == 1:
            return best, "no other way can be gone"
        others = min(seconds for way, seconds in times.items() if way != first)
        return best, f"no other way is faster: the best of them takes {others / times[first]:.2f} of its time"

    def choose_together(self, told: Sequence[Mapping[str, Any]]) -> bool:
        """Chooses by what all ranks have measured, each as its plan's `to_json` says it; the same on all of them.

        Whether it is another way than before. Ranks that have other ways, or on which others cannot be gone, keep what
        they have chosen for themselves.
        """
        try:
            plans = [ExecutionPlan.from_json(one) for one in told]
        except ValueError:  # of another version, say
            return False
        own = (self.ways, self.trial.refused.keys(), self.trial.tried)
        if any((plan.ways, plan.trial.refused.keys(), plan.trial.tried) != own for plan in plans):
            return False
        before = self.chosen
        self.chosen, reason = self._best(WayTrial.slowest([plan.trial for plan in plans]))
        self.reason = f"{reason}, by the slowest of {len(plans)} ranks"
        return self.chosen != before

    def refuse(self, way: int, reason: str) -> None:
        """Says that a way cannot be gone. What is done without a plan takes its place, where it was chosen."""
        self.trial.refuse(way, reason)
        if way == self.chosen:
            self.chosen, self.reason = 0, f"{self.ways[way].name} was chosen, and cannot be gone any more"

    def make_first_plain(self, reason: str) -> None:
        """The first way turned out to be none: it goes on without sums, products and samples of the host."""
        before, plain = self.ways[0], self.ways[0].without_patterns()
        self.ways = (plain, *self.ways[1:])
        self.passed_over[before.name] = reason
        self.trial.seconds.pop(0, None)
        if self.chosen == 0:
            self.reason = f"{before.name} was chosen, and cannot be gone"

    def try_again(self, epoch: int, expected: float, found: float) -> bool:
        """Has ways take turns anew: from `epoch` on a batch takes `found` seconds in place of `expected`.

        Those take part that were not much slower. Whether there are any: if not, the way that was chosen stays.
        """
        assert self.chosen is not None
        near = [way for way in self.trial.near(max(expected, found)) if way != self.chosen]
        if not near:
            return False
        self.drifts.append(Drift(epoch=epoch, way=self.chosen, expected=expected, found=found))
        self.trial.begin(sorted([*near, self.chosen]) if 0 in near else [self.chosen, *near])
        self.chosen, self.reason = None, ""
        return True

    def begin_watch(self, watch: DriftWatch) -> None:
        """Has `watch` expect what was measured of the way that was chosen."""
        seconds = None if self.chosen is None else self.trial.median(self.chosen)
        watch.begin(seconds, len(self.drifts), self.drifts[-1].found if self.drifts else None)

    def take_ways(self, other: ExecutionPlan) -> bool:
        """Adopts the ways of another plan if all their places are possible here. Returns whether it did.

        Memory figures stay those of this machine. All else is copied: a new choice would depend on how busy it is.
        """
        here = {way.place: way for way in reversed(self.ways)}
        if not {way.place for way in other.ways} <= here.keys():
            return False
        self.ways = tuple(
            replace(way, device_bytes=here[way.place].device_bytes, host_bytes=here[way.place].host_bytes)
            for way in other.ways
        )
        self.trial = WayTrial(len(self.ways))
        return True

    def take_results(self, other: ExecutionPlan) -> None:
        """What was measured and chosen by a plan of the same ways."""
        self.trial.seconds = {way: list(seconds) for way, seconds in other.trial.seconds.items()}
        self.trial.refused = dict(other.trial.refused)
        self.trial.take(other.trial.to_json())
        self.chosen, self.reason, self.drifts = other.chosen, other.reason, list(other.drifts)

    def report(self) -> str:
        """Every way, predicted and measured, and why one was chosen."""
        lines = []
        for number, way in enumerate(self.ways):
            mark = "*" if number == self.chosen else " "
            lines.append(f"{mark} {way.name}: {PLACES[way.place]}; {self._told(number)}")
        lines += [f"  {name}: not tried, {why}" for name, why in self.passed_over.items()]
        lines += [self._told_drift(drift) for drift in self.drifts]
        lines.append(self._verdict())
        return "\n".join(lines)

    def _told(self, number: int) -> str:
        way, told = self.ways[number], []
        if way.predicted is not None:
            told.append(f"loading predicted {1000 * way.predicted:.1f} ms a batch")
        if number in self.trial.refused:
            told.append(f"not possible: {self.trial.refused[number]}")
        median = self.trial.median(number)
        if median is not None:
            again = "" if number in self.trial.tried else ", not tried again"
            told.append(f"measured {1000 * median:.1f} ms a batch, loading and training{again}")
        return ", ".join(told) or "not measured"

    def _told_drift(self, drift: Drift) -> str:
        found, expected = 1000 * drift.found, 1000 * drift.expected
        name = self.ways[drift.way].name
        return f"tried again from epoch {drift.epoch} on: {name} took {found:.1f} ms a batch in place of {expected:.1f}"

    def _verdict(self) -> str:
        if self.chosen is None:
            done = sum(len(self.trial.seconds.get(way, [])) for way in self.trial.tried)
            return f"trying: {done} of {len(self.trial.tried) * self.trial.rounds} turns were measured"
        return f"chosen: {self.ways[self.chosen].name}, {self.reason or 'as the plan was given'}"

    def to_json(self) -> dict[str, Any]:
        """What `from_json` takes, and what was measured."""
        return {
            "version": _VERSION,
            "ways": [way.to_json() for way in self.ways],
            "made_for": self.made_for,
            "passed_over": self.passed_over,
            "chosen": self.chosen,
            "reason": self.reason,
            "seconds": {str(way): list(seconds) for way, seconds in self.trial.seconds.items()},
            "refused": {str(way): reason for way, reason in self.trial.refused.items()},
            "trial": self.trial.to_json(),
            "drifts": [drift.to_json() for drift in self.drifts],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ExecutionPlan:
        """ValueError, in one line, for what is no plan, or one of another version."""
        if not isinstance(value, Mapping):
            raise ValueError(f"this is no plan: {value!r:.200}")
        if value.get("version") != _VERSION:
            raise ValueError(f"this is a plan of version {value.get('version')}, version {_VERSION} is read here")
        try:
            ways = [Way.from_json(way) for way in value["ways"]]
            plan = cls(
                ways, made_for=value["made_for"], passed_over=value["passed_over"], chosen=value["chosen"],
                reason=value["reason"],
            )  # fmt: skip
            seconds = {plan._number(way): [*map(as_seconds, of)] for way, of in value["seconds"].items()}
            plan.trial.seconds = seconds
            plan.trial.refused = {plan._number(way): str(reason) for way, reason in value["refused"].items()}
            if "trial" in value:  # older plans have none
                plan.trial.take(value["trial"])
            plan.drifts = [Drift.from_json(drift) for drift in value.get("drifts", ())]  # older plans have none
            for drift in plan.drifts:
                plan._number(drift.way)
            if 0 in plan.trial.refused:
                raise ValueError("this is no plan: it refuses what is done without one")
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this is no plan: {error!r}") from error
        return plan

    def _number(self, way: Any) -> int:
        """The number of one of the ways; ValueError where there is none."""
        number = int(way)
        if not 0 <= number < len(self.ways):
            raise ValueError(f"the plan has ways 0 to {len(self.ways) - 1}, got {number}")
        return number

    def save(self, path: str) -> None:
        """As JSON, for `ExecutionPlan.load`."""
        with open(path, "w") as file:
            json.dump(self.to_json(), file, indent=2)

    @classmethod
    def load(cls, path: str) -> ExecutionPlan:
        """ValueError, in one line, for a file that holds no plan."""
        with open(path, "rb") as file:
            told = file.read()
        try:
            return cls.from_json(json.loads(told))
        except ValueError as error:  # what is no JSON, or no text, too
            raise ValueError(f"{path}: {error}") from error

    def copy(self) -> ExecutionPlan:
        """The same, for another loader to go on with."""
        return ExecutionPlan.from_json(self.to_json())

    def __repr__(self) -> str:
        return f"ExecutionPlan({len(self.ways)} ways, {self._verdict()})"
