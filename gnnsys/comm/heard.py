"""When each sender was last heard of: what a server knows of the lives of those who ask it.

Silence counts from a sender's last message, whatever it was, but never through a time in which this process itself was
stopped: whoever was silent then may have been speaking.
"""

from __future__ import annotations

import time

_MAX_SENDERS = 1 << 16


class Heard:
    """Written by the thread that reads the sockets, read by any. `look` is called now and then by whoever judges."""

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

    def look(self, interval: float) -> None:
        """Says that this process is awake, as it does every `interval` seconds; after a gap silence begins anew."""
        now = time.monotonic()
        if now - self._looked > 2 * interval:
            self._since = now
        self._looked = now

    def begin(self) -> None:
        """Says that `look` will be called from now on."""
        self._looked = time.monotonic()

    def silent_for(self, sender: int, incarnation: int) -> float:
        """Seconds since that sender was heard of; since this server began where it never was."""
        return time.monotonic() - max(self._at.get((sender, incarnation), 0.0), self._since)

    def silences(self, incarnation: int) -> dict[int, float]:
        """Seconds of silence of every sender of a job that was ever heard of."""
        return {sender: self.silent_for(sender, job) for sender, job in self._at.copy() if job == incarnation}
