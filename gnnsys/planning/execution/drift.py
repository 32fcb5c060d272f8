"""Whether batches still take what they took when a way was chosen: if not for long enough, ways are tried again.

Nothing is waited for: windows of batches are timed from one `next` to another, and windows are many enough for what a
device has queued not to matter. What was measured while ways took turns is compared with the first windows; from then
on windows are compared with those.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

_WINDOW = 64  # batches
_DRIFT = 1.25  # how many times what is expected, or how many times less
_FASTER_THAN_TURNS = 1.25**2  # the same, where turns were measured: the device is waited for between them
_FEWEST = 5  # windows that are looked at together
_SECONDS = 10.0  # that they take, at least: what passes by sooner is noise
_MOST_WINDOWS = 1024
_MOST_DOUBLED = 30  # times that `rest` doubles


@dataclass(frozen=True, kw_only=True)
class Drift:
    """Since `epoch` ways are tried again: a batch of way `way` took `found` seconds, where it took `expected`."""

    epoch: int
    way: int
    expected: float
    found: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Drift:
        """ValueError for what is none."""
        if not isinstance(value, Mapping) or set(value) != {one.name for one in fields(cls)}:
            raise ValueError(f"this is no drift: {value!r}")
        times = {name: as_seconds(value[name]) for name in ("expected", "found")}
        return cls(epoch=as_count(value["epoch"]), way=as_count(value["way"]), **times)


def as_seconds(value: Any) -> float:
    """ValueError for what no batch can take."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"seconds must be positive and finite, got {value!r}")
    return float(value)


def as_count(value: Any) -> int:
    """ValueError for what is no whole number >= 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"a count must be a whole number >= 0, got {value!r}")
    return value


@dataclass
class DriftWatch:
    """`low` and `high`: what a batch is expected to take, as turns measured it or, once `is_usual`, as windows did.

    None: nothing is known yet. `rest`: epochs that are not looked at. Each drift has twice as many behind it as the one
    before, so that a machine that is simply noisy tries less and less.

    >>> watch = DriftWatch()
    >>> watch.begin(1.0, num_drifts=0)
    >>> for _ in range(5):
    ...     watch.add(2.0)
    >>> watch.look()
    (1.0, 2.0)
    """

    window: ClassVar[int] = _WINDOW

    low: float | None = None
    high: float | None = None
    is_usual: bool = False
    rest: int = 0

    def __post_init__(self) -> None:
        self._windows: deque[float] = deque(maxlen=_MOST_WINDOWS)

    def begin(self, seconds: float | None, num_drifts: int, before: float | None = None) -> None:
        """A way was chosen, whose batches took `seconds` while ways took turns; None where nothing was measured.

        `before`: what they took when that trial was called for. Where that goes on, no way has changed it.
        """
        known = [value for value in (seconds, before) if value is not None]
        self.low, self.high = (None, None) if seconds is None else (min(known), max(known))
        self.is_usual = False
        self.rest = 2 ** min(num_drifts - 1, _MOST_DOUBLED) if num_drifts else 0
        self.forget()

    def forget(self) -> None:
        """What was added so far says nothing of what comes."""
        self._windows.clear()

    def add(self, seconds: float) -> None:
        """What a batch took in a window."""
        self._windows.append(seconds)

    def look(self) -> tuple[float, float] | None:
        """At the beginning of an epoch: (expected, found) seconds of a batch, where these have drifted apart."""
        if self.rest > 0:
            self.rest -= 1
            self.forget()
            return None
        if len(self._windows) < _FEWEST or self.window * sum(self._windows) < _SECONDS:
            return None
        found = statistics.median(self._windows)
        self.forget()
        if self.low is not None and self.high is not None:
            if found > _DRIFT * self.high:
                return self.high, found
            if (_DRIFT if self.is_usual else _FASTER_THAN_TURNS) * found < self.low:
                return self.low, found
        if not self.is_usual:
            self.expect(found)
        return None

    def expect(self, seconds: float) -> None:
        """This is what batches take from here on."""
        self.low, self.high, self.is_usual = seconds, seconds, True

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> DriftWatch:
        """ValueError for what is no state of one."""
        if not isinstance(state, Mapping) or set(state) != {one.name for one in fields(cls)}:
            raise ValueError(f"this is no state of a watch for drift: {state!r}")
        low, high = (None if state[name] is None else as_seconds(state[name]) for name in ("low", "high"))
        return cls(low, high, bool(state["is_usual"]), as_count(state["rest"]))
