"""Ways in turn, over the first batches of training: which one makes a batch, and what each takes.

Turns are short and every way has several, one in each round, so that whatever else the machine does meets all of them.
Ways that take much longer than another have no more turns: trying them costs what they take.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

WARM = 8  # batches at the beginning of a turn that are not measured: several threads make the first ones at once
MEASURED = 12
ROUNDS = 3
MOST_ROUNDS = 6  # where the fastest way and the first one are hard to tell apart
_BETTER = 0.98  # of the time of the first way, to be worth leaving it
_ALIKE = 1.03  # times the fastest: of ways that close to each other the simplest one, which is named first
_HOPELESS = {1: 3.0, 2: 1.5}  # how many times as long as the best, after so many rounds
_NEAR = 2.0  # times what a batch takes by now: ways that took no longer may have become the fastest


@dataclass
class WayTrial:
    """`seconds[w]`: what a batch took in each turn of way w. The first way is what is done without a plan.

    `tried` are the ways of this trial. The first of them is left only for one that is faster. `playing` are those that
    have a turn in this round, the `round`-th.

    >>> trial = WayTrial(2, warm=1, measured=2)
    >>> [trial.way_of(number) for number in range(trial.num_batches)]
    [0, 0, 0, 1, 1, 1]
    """

    num_ways: int
    warm: int = WARM
    measured: int = MEASURED
    rounds: int = ROUNDS
    seconds: dict[int, list[float]] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    tried: list[int] = field(default_factory=list)
    playing: list[int] = field(default_factory=list)
    round: int = 0

    def __post_init__(self) -> None:
        self.tried = self.tried or list(range(self.num_ways))
        self.playing = self.playing or list(self.tried)

    def begin(self, ways: Sequence[int] | None = None) -> None:
        """A trial of these ways, or of all of them. What was measured of others stays known."""
        self.tried = list(range(self.num_ways)) if ways is None else list(ways)
        self.playing, self.round = list(self.tried), 0
        for way in self.tried:
            self.seconds.pop(way, None)

    def end_round(self) -> None:
        """All that play have had their turn: the next round is without those that are hopeless, or cannot be gone."""
        self.round += 1
        medians = [median for way in self.tried if (median := self.median(way)) is not None]
        longest = _HOPELESS.get(self.round, min(_HOPELESS.values())) * min(medians, default=0.0)
        self.playing = [way for way in self.playing if way not in self.refused and not self._is_hopeless(way, longest)]
        if self.round >= self.rounds and self._is_open():
            self.playing = [self.tried[0], self._fastest()]

    def _fastest(self) -> int:
        medians = self.medians()
        return min(medians, key=lambda way: medians[way])

    def _is_open(self) -> bool:
        """Whether another way seems faster than the first one, and turns of the two overlap."""
        medians, first = self.medians(), self.tried[0]
        if first not in medians:
            return False
        fastest = self._fastest()
        return medians[fastest] <= _BETTER * medians[first] and not self._is_clear(fastest)

    def _is_clear(self, way: int) -> bool:
        """Whether a way's median is below the turns of the first one; of four of these, one may be below it."""
        median, turns = self.medians()[way], self.seconds[self.tried[0]]
        return sum(turn <= median for turn in turns) <= len(turns) // 4

    def _is_hopeless(self, way: int, longest: float) -> bool:
        """By its best turn. The first turn of the first way may be of the very first batches: one turn is too few."""
        turns = self.seconds.get(way, [])
        return len(turns) > (way == self.tried[0]) and min(turns) > longest

    @property
    def is_over(self) -> bool:
        if self.round > 0 and len(self.playing) < 2:
            return True
        return self.round >= self.rounds and (self.round >= MOST_ROUNDS or not self._is_open())

    @property
    def turn(self) -> int:
        """Batches of a turn."""
        return self.warm + self.measured

    @property
    def num_batches(self) -> int:
        """Of a round."""
        return self.turn * len(self.playing)

    def way_of(self, number: int) -> int:
        """The way that makes batch `number`, counted from the beginning of the round."""
        return self.playing[number // self.turn]

    def is_first(self, number: int) -> bool:
        """Whether a turn begins with this batch."""
        return number % self.turn == 0

    def is_last(self, number: int) -> bool:
        return number % self.turn == self.turn - 1

    def add(self, way: int, seconds: float) -> None:
        """What a batch took in a turn of a way."""
        self.seconds.setdefault(way, []).append(seconds)

    def refuse(self, way: int, reason: str) -> None:
        """Says that a way cannot be gone."""
        self.refused[way] = reason

    def median(self, way: int) -> float | None:
        """Seconds a batch takes; None where it was not measured, or cannot be gone."""
        if way in self.refused or not self.seconds.get(way):
            return None
        return statistics.median(self.seconds[way])

    @classmethod
    def slowest(cls, trials: Sequence[WayTrial]) -> WayTrial:
        """Of ranks that take each step together: turn by turn what the slowest of them took.

        Of turns that not all have measured, the last are left out.
        """
        joined = cls(trials[0].num_ways, tried=list(trials[0].tried), refused=dict(trials[0].refused))
        for way in joined.tried:
            turns = zip(*(trial.seconds.get(way, []) for trial in trials), strict=False)
            joined.seconds[way] = [max(turn) for turn in turns]
        return joined

    def best(self) -> int:
        """The fastest of those that were tried; the first one, where none is faster by more than noise, or it was not
        measured itself.

        More than noise: a median below the turns of the first one (of four of these, one may be below it), and below
        0.98 of their median. Of several that are as fast within 3%, the one that is named first.
        """
        first, medians = self.tried[0], self.medians()
        if first not in medians:
            return first
        most = min(_BETTER * medians[first], _ALIKE * medians[self._fastest()])
        faster = [way for way in sorted(medians) if medians[way] <= most and self._is_clear(way)]
        return faster[0] if faster else first

    def medians(self) -> dict[int, float]:
        """Seconds a batch takes, of the ways that were tried and measured."""
        return {way: median for way in self.tried if (median := self.median(way)) is not None}

    def near(self, seconds: float) -> list[int]:
        """Ways that might take `seconds` by now: measured at no more than twice that, or not measured yet."""
        medians = {way: self.median(way) for way in range(self.num_ways) if way not in self.refused}
        return [way for way, median in medians.items() if median is None or median <= _NEAR * seconds]

    def to_json(self) -> dict[str, Any]:
        """How far it is."""
        return {"tried": list(self.tried), "playing": list(self.playing), "round": self.round}

    def take(self, value: Mapping[str, Any]) -> None:
        """Goes on where `to_json` was; ValueError for what is no trial of these ways."""
        tried, playing, number = value["tried"], value["playing"], value["round"]
        all_ways = range(self.num_ways)
        if (
            not tried
            or not set(playing) <= set(tried) <= set(all_ways)
            or number not in range(max(self.rounds, MOST_ROUNDS) + 1)
        ):
            raise ValueError(f"this is no trial of {self.num_ways} ways: {dict(value)!r:.200}")
        self.tried, self.playing, self.round = list(map(int, tried)), list(map(int, playing)), int(number)
