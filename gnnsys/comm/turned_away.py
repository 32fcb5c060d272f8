"""Requests that a peer had no room for and dropped: they are sent again, after longer and longer waits."""

from __future__ import annotations

import math
import threading
from typing import NamedTuple

from gnnsys.comm.peer_link import Connection, Link
from gnnsys.comm.pending import Pending

_BUSY_SECONDS = (0.02, 1.0)  # before a request is sent again: at first, and at most
_MOST_DOUBLED = 16


class TurnedAwayRequest(NamedTuple):
    """A request, where it goes, and when."""

    again_at: float
    link: Link
    connection: Connection
    pending: Pending


class TurnedAway:
    """All of a client. Added by whoever reads, taken by the client's thread."""

    def __init__(self) -> None:
        self._waiting: list[TurnedAwayRequest] = []  # the first to be sent again is the first
        self._lock = threading.Lock()

    @property
    def next_at(self) -> float:
        """When the first of them is sent again."""
        waiting = self._waiting
        return waiting[0].again_at if waiting else math.inf

    def add(self, link: Link, connection: Connection, pending: Pending, refusal: str, now: float) -> None:
        """The peer had no room for a request, for the reason `refusal`."""
        pending.refusal = refusal
        pending.last_sign = now
        first, longest = _BUSY_SECONDS
        again_at = now + min(first * 2**pending.num_refused, longest)
        pending.num_refused = min(pending.num_refused + 1, _MOST_DOUBLED)
        with self._lock:
            added = [*self._waiting, TurnedAwayRequest(again_at, link, connection, pending)]
            self._waiting = sorted(added, key=lambda each: each.again_at)

    def take_due(self, now: float) -> list[TurnedAwayRequest]:
        """Those whose time has come; they are no longer among these."""
        with self._lock:
            due = [each for each in self._waiting if each.again_at <= now]
            self._waiting = self._waiting[len(due) :]
        return due
