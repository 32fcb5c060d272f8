"""The largest value of an argument, such as a batch size, with which a job fits a given amount of memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from gnnsys.planning.memory.estimate import JobMemory, format_bytes, trace_job
from gnnsys.planning.memory.training_device import TrainingDevice, training_device
from gnnsys.planning.memory.training_job import NoBatches

_START, _MOST = 64, 1 << 40
_MOST_AT_ONCE = 16  # times as large, for the next value
_NO_HOST_MEMORY = "can't allocate memory"
DRAWN = 24  # batches of a sampling loader whose structure is drawn for each value
FIT_STEPS = 300  # that are replayed for each


@dataclass(frozen=True)
class ArgumentFit:
    """`value` fits and `too_large` does not, or has no batches. None where the search ended at the most that was asked
    for, or where a larger value takes no more: a batch has all input nodes then."""

    argument: str
    value: int
    too_large: int | None
    memory: JobMemory
    capacity: int
    num_estimates: int


def fit_argument(
    function: Callable[..., Any],
    argument: str,
    arguments: Mapping[str, Any] | None = None,
    device: str | TrainingDevice = "cpu",
    capacity: int | None = None,
    num_steps: int | None = None,
    most: int = _MOST,
) -> ArgumentFit:
    """Doubles the argument from what it is given as (else 64) while the job fits, then halves the interval.

    It stops where the interval is under 1% of the value: batches of one size differ by more. `capacity` in bytes is
    that of the device by default. Memory is taken to grow with the argument.

    What a sampling loader's job finds free between blocks that are taken goes up and down with the argument. So from
    where it has room whatever it finds the search goes up in small steps, and ends at the first that does not fit.
    """
    target = training_device(device)
    limit = capacity
    if limit is None and target.capacity is not None:  # the process's context is not torch's to give
        limit = target.capacity - (0 if target.profile is None else target.profile.context)
    if limit is None:
        raise ValueError(f"the capacity of {target.name} is not known: give --memory, such as --memory 16g")
    given = dict(arguments or {})
    start = given.get(argument, _START)
    if not isinstance(start, int) or isinstance(start, bool) or start < 1:
        raise ValueError(f"{argument} must be a number from 1 on to be fitted, got {start!r}")
    if most < 1:
        raise ValueError(f"most must be at least 1, got {most}")

    def estimate(value: int) -> _Tried:
        traced = trace_job(function, {**given, argument: value}, target, num_steps, DRAWN, FIT_STEPS)
        memory = traced.memory
        return _Tried(memory, traced.fits(limit), traced.many is None or memory.needed_bytes <= limit)

    search = _Search(argument, estimate, limit, most)
    low, high = search.run_above_empty(min(start, most), lambda asked: asked.fits and asked.has_room)
    if high is not None and search.ask(high).fits:
        low, high = search.climb(high) if low else search.run_above_empty(high, lambda asked: asked.fits)
    if low == 0:
        least = min(value for value, asked in search.asked.items() if asked.memory is not None)
        raise ValueError(
            f"the job takes {format_bytes(search.memory(least).needed_bytes)} with {argument}={least}, and only "
            f"{format_bytes(limit)} are there: make the model smaller"
        )
    return ArgumentFit(argument, low, high, search.memory(low), limit, len(search.asked))


class _Tried(NamedTuple):
    """`has_room`: without giving anything back, or it is no matter of what is found free. Without batches a job has
    neither."""

    memory: JobMemory | None
    fits: bool
    has_room: bool


class _Search:
    """Values are estimated once. What is found is the largest that holds, and one above it that does not, or None."""

    def __init__(self, argument: str, estimate: Callable[[int], _Tried], limit: int, most: int) -> None:
        self.asked: dict[int, _Tried] = {}
        self._argument, self._estimate, self._limit, self._most = argument, estimate, limit, most

    def ask(self, value: int) -> _Tried:
        if value not in self.asked:
            try:
                self.asked[value] = self._estimate(value)
            except (NoBatches, RuntimeError) as error:
                if not self._is_beyond(value, error):
                    raise
                self.asked[value] = _Tried(None, False, False)
        return self.asked[value]

    def _is_beyond(self, value: int, error: Exception) -> bool:
        """Whether this is above a value that could be estimated, and too much for this host or without batches."""
        is_less_known = any(asked.memory is not None and known < value for known, asked in self.asked.items())
        return is_less_known and (isinstance(error, NoBatches) or _NO_HOST_MEMORY in str(error))

    def memory(self, value: int) -> JobMemory:
        memory = self.ask(value).memory
        assert memory is not None
        return memory

    def run(self, start: int, holds: Callable[[_Tried], bool]) -> tuple[int, int | None]:
        """From `start` upwards, each time twice as much or more; then by halves."""
        low, high = 0, start
        while holds(self.ask(high)):
            if high == self._most:
                return high, None
            if low and self._peak(high) == self._peak(low):
                self._check_growth(low, high)
                return low, None
            low, high = high, min(self._next_above(low, high), self._most)
        return self._close_in(low, high, holds)

    def run_above_empty(self, start: int, holds: Callable[[_Tried], bool]) -> tuple[int, int | None]:
        """As `run`; nothing holds where a loader has no batches before one does."""
        try:
            return self.run(start, holds)
        except NoBatches:
            if not self.asked:
                raise
            return 0, min(self.asked)

    def climb(self, low: int) -> tuple[int, int | None]:
        """From `low`, which fits, in steps of a tenth to the first that does not."""
        while True:
            above = min(low + max(low // 10, 1), self._most)
            if not self.ask(above).fits:
                break
            if above == self._most or self._peak(above) == self._peak(low):
                return above, None
            low = above
        while above - low > max(1, low // 100):
            middle = (low + above) // 2
            low, above = (middle, above) if self.ask(middle).fits else (low, middle)
        return low, above

    def _close_in(self, low: int, high: int, holds: Callable[[_Tried], bool]) -> tuple[int, int]:
        while high - low > max(1, low // 100):
            middle = (low + high) // 2 if len(self.asked) % 2 else self._between(low, high)
            low, high = (middle, high) if holds(self.ask(middle)) else (low, middle)
        return low, high

    def _peak(self, value: int) -> int:
        return self.memory(value).peak_bytes

    def _needed(self, value: int) -> int:
        return self.memory(value).needed_bytes

    def _check_growth(self, low: int, high: int) -> None:
        if len({asked.memory.peak_bytes for asked in self.asked.values() if asked.memory}) == 1:
            raise ValueError(
                f"memory does not grow with {self._argument}: {format_bytes(self._peak(high))} at {low} and at {high}. "
                "Fit another argument, or give the loader more input nodes"
            )

    def _next_above(self, low: int, high: int) -> int:
        """Twice as much, or where a line through the last two sizes reaches the limit."""
        if low == 0:
            return 2 * high
        slope = (self._peak(high) - self._peak(low)) / (high - low)
        reached = high + (self._limit - self._needed(high)) / slope if slope > 0 else 0
        return min(max(2 * high, int(1.02 * reached)), _MOST_AT_ONCE * high)

    def _between(self, low: int, high: int) -> int:
        """Where a line between the two reaches the limit, inside of the interval."""
        if low == 0 or self.ask(high).memory is None:
            return max(1, (low + high) // 2)
        least, most = self._needed(low), self._needed(high)
        at = low + (high - low) * (self._limit - least) // max(most - least, 1)
        return min(max(at, low + 1), high - 1)
