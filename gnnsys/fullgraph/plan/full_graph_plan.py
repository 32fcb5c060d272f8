"""A plan of full-graph training: ways that compete over the first epochs, what each took, and which one stays.

Ways differ in several respects at once, so they compete in contests, one respect each: the way at work against the same
way with one change. Both take turns over epochs of training, and the faster one goes on. A change that costs something
once, such as sums that are made to be kept, has its contest at once where that cost is small. Else it waits until doing
without has cost as much: so a training of any length loses no more than that cost to one that knew its length.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from gnnsys.fullgraph.plan.full_graph_way import AS_GIVEN, FIRST, KEPT, NARROW, FullGraphWay
from gnnsys.planning import WayTrial

WARM, MEASURED, ROUNDS = 1, 2, 3  # epochs of a turn; turns of each way
_HOPELESS = 1.5  # times the other way's epoch, in its first turn
_BETTER = 0.98  # of the median, and of the least turn, of the way at work, to be worth leaving it
_CHEAP = 1.0  # epochs that a way may take once to be tried at once
_MOST = 3  # times the epochs of a contest, after which it is left: passes without a backward are not measured
_VERSION = 1
ALL, APART, NONE = "all", "apart", "none"


@dataclass
class WayContest:
    """`change` names what another way has, by field of `FullGraphWay`. It begins behind `after` epochs. `cost` are the
    seconds that the other way takes once, None where that is not known, and `pays` the epochs after which it has saved
    as much; `why` says so. `passes` counts those of training since it began."""

    change: dict[str, Any]
    after: int = 0
    cost: float | None = 0.0
    pays: int = 0
    why: str = ""
    passes: int = 0
    held: int = 0  # passes by the way at work until it is known what it takes
    seconds: dict[int, list[float]] = field(default_factory=dict)  # 0: the way at work, 1: the other; by turn
    epochs: list[float] = field(default_factory=list)  # of the turn that is being measured

    @property
    def trial(self) -> WayTrial:
        return WayTrial(2, warm=WARM, measured=MEASURED, rounds=ROUNDS, seconds=self.seconds)

    @property
    def is_decided(self) -> bool:
        own, other = self.seconds.get(0, []), self.seconds.get(1, [])
        if own and other and len(other) == 1 and other[0] > _HOPELESS * own[0]:
            return True
        return len(own) >= ROUNDS and len(other) >= ROUNDS

    @property
    def is_early(self) -> bool:
        """Whether what the other way takes once is much, as the first turn of the way at work shows."""
        own = self.seconds.get(0, [])
        is_dear = self.cost is None or (bool(own) and self.cost > _CHEAP * own[0])
        return is_dear and 1 not in self.seconds

    def anew(self) -> WayContest:
        """The same, as if it had not begun."""
        return WayContest(dict(self.change), self.after, self.cost, self.pays, self.why)

    def wait(self) -> None:
        """Begins later, anew."""
        self.after, self.passes, self.held, self.seconds, self.epochs = self.pays, 0, 0, {}, []

    @property
    def is_vain(self) -> bool:
        return self.passes + self.held >= _MOST * self.trial.num_batches * ROUNDS

    def side_of(self, number: int) -> int:
        """Whose pass the `number`-th is: the two take turns."""
        return number // self.trial.turn % 2

    def add(self, side: int, seconds: float, is_last: bool) -> None:
        self.epochs.append(seconds)
        if is_last:
            self.seconds.setdefault(side, []).append(sum(self.epochs) / len(self.epochs))
            self.epochs = []


@dataclass(frozen=True)
class Turn:
    """Which pass of which contest is measured, by whom: 0 is the way at work, 1 the other. One that `is_held` waits for
    what is known of the passes before."""

    contest: int
    side: int
    is_warm: bool
    is_last: bool
    is_held: bool = False


class FullGraphPlan:
    """`way` is the way at work. `passed_over` are ways that are not tried, with the reason; `facts` are said in the
    report besides. `sums` says which ways make sums of the first layer that could be kept: `ALL` of them, those that
    take PyG's layers `APART`, or `NONE`. `made_for` says what the plan is for: a plan of other layers, ranks or
    hardware is refused."""

    def __init__(
        self,
        way: FullGraphWay = AS_GIVEN,
        contests: Sequence[WayContest] = (),
        *,
        made_for: Mapping[str, Any] | None = None,
        passed_over: Mapping[str, str] | None = None,
        facts: Sequence[str] = (),
        sums: str = NONE,
    ) -> None:
        self.way = way
        self.sums = sums
        self.contests = list(contests)  # that are to come; the first may be under way
        self.made_for = dict(made_for or {})
        self.passed_over = dict(passed_over or {})
        self.facts = list(facts)
        self.results: list[str] = []  # a line for each contest that is over
        self.medians: dict[str, float] = {}  # seconds of an epoch, by the name of a way, as last measured
        self.num_over = 0
        self._epoch = 0

    @property
    def chosen(self) -> FullGraphWay | None:
        """The way at work, unless others are tried now or next."""
        is_tried = bool(self.contests) and (self.contests[0].after == 0 or self.contests[0].passes > 0)
        return None if is_tried else self.way

    def other(self) -> FullGraphWay | None:
        """The way that competes, or will next."""
        return replace(self.way, **self.contests[0].change) if self.contests else None

    def turn(self, epoch: int) -> Turn | None:
        """Whose turn the training pass number `epoch` is; None where nothing competes then."""
        while self.contests and self.other() == self.way:  # another contest has brought what this one is about
            self.contests.pop(0)
        self._epoch = epoch
        if self.contests and self.contests[0].cost is None and epoch < self.contests[0].pays:
            self.contests[0].wait()
        if not self.contests or epoch < self.contests[0].after:
            return None
        contest = self.contests[0]
        trial, number = contest.trial, contest.passes
        at = number % trial.turn
        if contest.side_of(number) == 1 and contest.cost and 0 not in contest.seconds:
            return Turn(self.num_over, 0, True, False, is_held=True)
        return Turn(self.num_over, contest.side_of(number), at < trial.warm, at == trial.turn - 1)

    def way_of(self, turn: Turn | None) -> FullGraphWay:
        other = self.other() if turn is not None and turn.side else None
        return self.way if other is None else other

    def began(self, turn: Turn) -> None:
        """A pass of this turn has begun."""
        if turn.contest == self.num_over:
            self.contests[0].held += turn.is_held
            self.contests[0].passes += not turn.is_held

    def add(self, turn: Turn, seconds: float | None) -> None:
        """What a pass took there and back, the slowest rank's; None where it was not measured on all of them."""
        if turn.contest != self.num_over:
            return  # of a contest that is over
        contest = self.contests[0]
        if seconds is None:
            contest.epochs = []
        elif not turn.is_warm:
            contest.add(turn.side, seconds, turn.is_last)
        if contest.is_early and self._epoch < contest.pays:
            contest.wait()
            self.num_over += 1  # what is measured already is of no use then
        elif contest.is_decided:
            self._decide(contest)
        elif contest.is_vain:
            self._end("was not measured: passes have no backward")

    def refuse(self, reason: str) -> None:
        """The way that competes cannot be gone."""
        other = self.other()
        assert other is not None
        self.passed_over[other.name] = reason
        self._end(f"is not possible: {reason}")

    def leave_sums(self, reason: str) -> bool:
        """Goes on without sums that are kept, and tries none; whether that is another way than before."""
        if self.sums == NONE or KEPT in self.passed_over:
            return False
        self.passed_over[KEPT] = reason
        self.passed_over.pop(NARROW, None)
        left = [contest.anew() for contest in self.contests if contest.change != {"first": KEPT}]
        for contest in left:
            if "first" in contest.change:
                contest.change["first"] = NARROW
        self.contests = left
        self.num_over += 1  # what is measured already is of other ways
        if self._sums_up(self.way):
            self.way = replace(self.way, first=NARROW)
        return True

    def _decide(self, contest: WayContest) -> None:
        trial, other = contest.trial, self.other()
        own, others = trial.median(0), trial.median(1)
        assert other is not None and own is not None and others is not None
        self.medians |= {self.way.name: own, other.name: others}
        least, least_other = min(contest.seconds[0]), min(contest.seconds[1])
        wins = others <= _BETTER * own and least_other <= _BETTER * least  # what else runs here only adds
        said = f"{1000 * others:.2f} ms an epoch, against {1000 * own:.2f} of {self._told(self.way)}"
        if wins:
            self._end(f"{said}: {own / others:.2f} times as fast, stays")
            self.way = other
        else:
            self._end(f"{said}: not faster")

    def _end(self, said: str) -> None:
        other = self.other()
        assert other is not None
        self.results.append(f"{self._told(other)}: {said}")
        self.contests.pop(0)
        self.num_over += 1

    def _sums_up(self, way: FullGraphWay) -> bool:
        """Whether a way makes sums of the first layer that could be kept."""
        return self.sums == ALL or (self.sums == APART and way.takes_apart)

    def _told(self, way: FullGraphWay) -> str:
        """The name of a way, which says what it does with the first layer's sums, where it makes some."""
        return f"{way.name}, {KEPT}" if self._sums_up(way) and way.first == KEPT and KEPT not in way.name else way.name

    def report(self) -> str:
        """Every way that was or will be tried, what was measured, and why one is at work."""
        lines = [*self.facts, *(f"  {line}" for line in self.results)]
        for number, contest in enumerate(self.contests):
            other = replace(self.way, **contest.change)
            if contest.passes:
                done = sum(map(len, contest.seconds.values()))
                lines.append(f"  {self._told(other)}: being tried, {done} of {2 * ROUNDS} turns were measured")
            elif contest.after:
                lines.append(f"  {self._told(other)}: tried from epoch {contest.after} on, {contest.why}")
            else:
                lines.append(f"  {self._told(other)}: tried {'next' if number == 0 else 'later'}")
        lines += [f"  {name}: not tried, {why}" for name, why in self.passed_over.items()]
        verdict = "at work" if self.chosen is None else "chosen"
        told = f", {1000 * self.medians[self.way.name]:.2f} ms an epoch" if self.way.name in self.medians else ""
        does = f" ({FIRST[self.way.first]})" if self._sums_up(self.way) else ""
        return "\n".join([*lines, f"{verdict}: {self._told(self.way)}{does}{told}"])

    def to_json(self) -> dict[str, Any]:
        """What `from_json` takes. A contest that is under way begins anew from it."""
        return {
            "version": _VERSION,
            "way": self.way.to_json(),
            "contests": [asdict(one.anew()) for one in self.contests],
            "made_for": self.made_for,
            "passed_over": self.passed_over,
            "facts": self.facts,
            "sums": self.sums,
            "results": self.results,
            "medians": self.medians,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> FullGraphPlan:
        """ValueError for what is no plan of full-graph training, or one of another version."""
        if value.get("version") != _VERSION or "contests" not in value:
            raise ValueError(f"this is no plan of full-graph training of version {_VERSION}")
        try:
            plan = cls(
                FullGraphWay.from_json(value["way"]),
                [WayContest(**one).anew() for one in value["contests"]],
                made_for=value["made_for"],
                passed_over=value["passed_over"],
                facts=value["facts"],
                sums=value["sums"],
            )
            plan.results, plan.medians = list(value["results"]), dict(value["medians"])
            for contest in plan.contests:
                replace(plan.way, **contest.change)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this is no plan of full-graph training: {error!r}") from error
        return plan

    def save(self, path: str) -> None:
        """As JSON, for `FullGraphPlan.load`."""
        with open(path, "w") as file:
            json.dump(self.to_json(), file, indent=2)

    @classmethod
    def load(cls, path: str) -> FullGraphPlan:
        with open(path) as file:
            return cls.from_json(json.load(file))

    def __repr__(self) -> str:
        return f"FullGraphPlan({self.way.name}, {len(self.contests)} contests to come)"
