"""When each sender was last heard of: what a server knows of the lives of those who ask it.

Silence counts from a sender's last message, whatever it was, but never through a time in which this process itself was
stopped: whoever was silent then may have been speaking.
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
        """Called again and again by a thread that is awake: after a gap silence begins anew."""
        if now - self._looked > _GAP_SECONDS:
            self._since = now
        self._looked = now

    def silent_for(self, sender: int, incarnation: int) -> float:
        """Seconds since that sender was heard of; where it never was, since this was asked first."""
        now = time.monotonic()
        return now - max(self._at.setdefault((sender, incarnation), now), self._since)
