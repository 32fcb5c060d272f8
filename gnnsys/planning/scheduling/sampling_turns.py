"""Who samples which batch: host and device are two machines, of which one is faster by a factor (DAHA, section 3.2.1).

`assign_nearly_best` is within 1 + eps of the shortest time (a scheme of Horowitz and Sahni, 1976);
`assign_longest_first` is the simple way beside it. What a batch will take comes from `SamplingForecast`.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

WINDOW = 9  # of the moving median


@dataclass(frozen=True)
class SamplingTurns:
    """`on_device[b]` says who samples batch b. Both are done after `seconds`."""

    on_device: np.ndarray
    seconds: float


def assign_longest_first(host_seconds: Sequence[float] | np.ndarray, speed: float) -> SamplingTurns:
    """The longest first, each to whoever would end it first. The device is `speed` times as fast as the host.

    >>> assign_longest_first([2.0, 2.0, 2.0], speed=2.0).on_device
    array([ True,  True, False])
    """
    seconds = _checked(host_seconds, speed)
    host = device = 0.0
    on_device = np.zeros(len(seconds), dtype=bool)
    for batch in np.argsort(-seconds, kind="stable").tolist():
        here, there = host + seconds[batch], device + seconds[batch] / speed
        if there <= here:
            on_device[batch], device = True, there
        else:
            host = here
    return SamplingTurns(on_device, float(max(host, device)))


def assign_nearly_best(host_seconds: Sequence[float] | np.ndarray, speed: float, *, eps: float = 0.05) -> SamplingTurns:
    """Within 1 + eps of the shortest time, in O(n / eps^2).

    All that counts is the work x on the slower machine: the time is max(x, (all - x) / faster). Batches of more than
    eps * (a bound of the time) are few on it, at most c; sums of them are kept on a grid, on which c roundings make no
    more than eps of the bound. The others are filled in, longest first, and end at most half a small batch from x.
    """
    seconds = _checked(host_seconds, speed)
    if not 0 < eps <= 1:
        raise ValueError(f"eps is more than 0 and at most 1, got {eps}")
    slow_is_host, faster = speed >= 1, max(speed, 1 / speed)
    work = seconds if slow_is_host else seconds / speed  # seconds on the slower machine
    total = float(work.sum())
    if total == 0:
        return SamplingTurns(np.full(len(work), slow_is_host), 0.0)
    least = max(total / (1 + faster), float(work.max()) / faster)
    simple = assign_longest_first(seconds, speed)
    most = simple.seconds  # less than twice as much
    is_large = work > eps * least
    large = np.flatnonzero(is_large)
    small = np.flatnonzero(~is_large)
    small = small[np.argsort(-work[small], kind="stable")]
    cell = eps * least / max(1, int(most / (eps * least)))
    came_from, sums = _reachable(work[large], cell, most)
    filled = np.concatenate([[0.0], np.cumsum(work[small])])
    best, end, count = np.inf, 0, 0
    ideal = total / (1 + faster)
    places = np.clip(np.searchsorted(filled, ideal - sums), 1, max(1, len(filled) - 1))
    for step in (-1, 0):
        chosen = np.minimum(places + step, len(filled) - 1)
        on_slow = sums + filled[chosen]
        times = np.maximum(on_slow, (total - on_slow) / faster)
        at = int(times.argmin())
        if times[at] < best:
            best, end, count = float(times[at]), at, int(chosen[at])
    on_slow_machine = np.zeros(len(work), dtype=bool)
    on_slow_machine[small[:count]] = True
    cells = np.flatnonzero(came_from >= -1)
    on_slow_machine[large[_traced(came_from, np.floor(work[large] / cell).astype(np.int64), int(cells[end]))]] = True
    on_device = ~on_slow_machine if slow_is_host else on_slow_machine
    found = SamplingTurns(on_device, _time_of(seconds, on_device, speed))
    return min(simple, found, key=lambda turns: turns.seconds)


def _reachable(work: np.ndarray, cell: float, most: float) -> tuple[np.ndarray, np.ndarray]:
    """Of each cell the batch by which it was first reached (-1 for none at the origin, -2 where it cannot be), and the
    exact sums of all cells that can."""
    came_from = np.full(int(most / cell) + 1, -2, dtype=np.int64)
    sums = np.zeros(len(came_from))
    came_from[0] = -1
    steps = np.floor(work / cell).astype(np.int64)
    for number, step in enumerate(steps.tolist()):
        if step >= len(came_from):
            continue
        reached = np.flatnonzero((came_from[: len(came_from) - step] >= -1) & (came_from[step:] == -2))
        came_from[reached + step] = number
        sums[reached + step] = sums[reached] + work[number]
    return came_from, sums[came_from >= -1]


def _traced(came_from: np.ndarray, steps: np.ndarray, cell: int) -> list[int]:
    members = []
    while came_from[cell] >= 0:
        members.append(int(came_from[cell]))
        cell -= int(steps[members[-1]])
    return members


def _time_of(seconds: np.ndarray, on_device: np.ndarray, speed: float) -> float:
    return float(max(seconds[~on_device].sum(), seconds[on_device].sum() / speed))


def _checked(host_seconds: Sequence[float] | np.ndarray, speed: float) -> np.ndarray:
    seconds = np.asarray(host_seconds, dtype=np.float64)
    if seconds.ndim != 1 or not np.isfinite(seconds).all() or (seconds < 0).any():
        raise ValueError("seconds of batches are a list of numbers of 0 or more")
    if not 0 < speed < float("inf"):
        raise ValueError(f"the device is some times as fast as the host, got speed={speed}")
    return seconds


class SamplingForecast:
    """What batches will take, by what they took: the moving median of the last few times.

    With shuffling off batch b of an epoch has the same seeds each time, and a median of its own. With shuffling on what
    is known of it is its size, and the median is of seconds per unit of size. A batch that was not seen is like the
    others.

    >>> forecast = SamplingForecast()
    >>> for epoch in range(3):
    ...     forecast.observe(0, seconds=2.0 + epoch, size=100)
    >>> forecast.of_batch(0), forecast.of_size(200)
    (3.0, 6.0)
    """

    def __init__(self, window: int = WINDOW) -> None:
        if window < 1:
            raise ValueError(f"a median is of one value, at least, got window={window}")
        self._window = window
        self._by_batch: dict[int, deque[float]] = {}
        self._all: deque[float] = deque(maxlen=window)
        self._per_size: deque[float] = deque(maxlen=window)

    def observe(self, batch: int, seconds: float, size: float | None = None) -> None:
        """What sampling a batch took, in seconds of the host: on the device, times its speed."""
        self._by_batch.setdefault(batch, deque(maxlen=self._window)).append(seconds)
        self._all.append(seconds)
        if size:
            self._per_size.append(seconds / size)

    def of_batch(self, batch: int) -> float | None:
        """With shuffling off. None where nothing was seen yet: deal evenly."""
        seen = self._by_batch.get(batch, self._all)
        return statistics.median(seen) if seen else None

    def of_size(self, size: float) -> float | None:
        """With shuffling on, by the number of seeds or, where it is known, of edges."""
        return size * statistics.median(self._per_size) if self._per_size else None
