"""The queue's own clock, by which jobs age: the seconds that services have run it, all of them together.

Nobody sets it, as the wall clock can be set. It stands while no service runs, when no job could start whatever its age.
"""

from __future__ import annotations

from time import monotonic

_KEEP_SECONDS = 5.0  # a service that is killed takes so much of its jobs' waiting along, at most


class QueueClock:
    """Goes on from `seconds`, which a service before has written down."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._kept = seconds
        self._zero = monotonic() - seconds

    def now(self) -> float:
        return monotonic() - self._zero

    def is_to_be_kept(self) -> bool:
        """Whether it is time to write it down."""
        return self.now() - self._kept >= _KEEP_SECONDS

    def was_kept(self, seconds: float) -> None:
        self._kept = seconds
