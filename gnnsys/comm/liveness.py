"""When each sender was last heard of: how a server tells living clients from dead ones.

Silence counts from a sender's last message of any kind. Time in which this process itself was stopped does not count:
messages may have been sent then and not been read.
"""

from __future__ import annotations

import time

_MAX_SENDERS = 1 << 13  # some 250 bytes each
_GAP_SECONDS = 3.0  # between two looks: this process was stopped


class Liveness:
    """Written by the thread that reads the sockets, read by any."""

    def __init__(self) -> None:
        self._at: dict[tuple[int, int], float] = {}  # by sender and incarnation
        self._since = time.monotonic()
        self._looked = self._since

    def note(self, sender: int, incarnation: int, now: float) -> None:
        """A message of that sender came."""
        self._at[sender, incarnation] = now
        if len(self._at) > _MAX_SENDERS:  # senders name themselves: those of the past go first
            last = sorted(self._at.items(), key=lambda entry: entry[1])[_MAX_SENDERS // 2 :]
            self._at = dict(last)

    def look(self, now: float) -> None:
        """Called by a running thread at short intervals. After a gap, this process was stopped: silence starts anew."""
        if now - self._looked > _GAP_SECONDS:
            self._since = now
        self._looked = now

    def silent_for(self, sender: int, incarnation: int) -> float:
        """Seconds since that sender was heard of; for one that never was, since the first such question."""
        now = time.monotonic()
        return now - max(self._at.setdefault((sender, incarnation), now), self._since)
