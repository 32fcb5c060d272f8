"""Ways in turn, over the first batches of training: which one makes a batch, and what each takes.

Which way makes a batch depends on its number alone, so two runs of one plan do the same. Turns are short and every way
has several, so that whatever else the machine does meets all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

WARM = 5  # batches at the beginning of a turn that are not measured: they fill the pipeline
MEASURED = 8
ROUNDS = 3
_BETTER = 0.98  # of the time of the first way, to be worth leaving it


@dataclass
class WayTrial:
    """`seconds[w]`: what a batch took in each turn of way w. The first way is what is done without a plan.

    >>> trial = WayTrial(2, warm=1, measured=2, rounds=1)
    >>> [trial.way_of(number) for number in range(trial.num_batches)]
    [0, 0, 0, 1, 1, 1]
    """

    num_ways: int
    warm: int = WARM
    measured: int = MEASURED
    rounds: int = ROUNDS
    seconds: dict[int, list[float]] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)

    @property
    def turn(self) -> int:
        """Batches of a turn."""
        return self.warm + self.measured

    @property
    def num_batches(self) -> int:
        """Of the whole trial."""
        return self.turn * self.num_ways * self.rounds

    def way_of(self, number: int) -> int:
        """The way that makes batch `number`, counted from the beginning of the trial."""
        return number // self.turn % self.num_ways

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
        joined = cls(trials[0].num_ways)
        for way in range(joined.num_ways):
            turns = zip(*(trial.seconds.get(way, []) for trial in trials), strict=False)
            joined.seconds[way] = [max(turn) for turn in turns]
        joined.refused = dict(trials[0].refused)
        return joined

    def best(self) -> int:
        """The fastest way; the first one, where none is faster by more than noise, or it was not measured itself.

        More than noise: a median below every turn of the first one, and below 0.98 of its median.
        """
        medians = {way: median for way in range(self.num_ways) if (median := self.median(way)) is not None}
        if 0 not in medians:
            return 0
        fastest = min(medians, key=lambda way: medians[way])
        is_faster = medians[fastest] <= _BETTER * medians[0] and medians[fastest] < min(self.seconds[0])
        return fastest if is_faster else 0
