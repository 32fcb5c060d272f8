"""How a client keeps watch: deadlines, peers that are silent, and showing peers that this end lives.

A peer that is asked something and is silent is pinged. A ping on the connection of a request also asks whether that
ever arrived, and what did not is sent again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from gnnsys.comm import wire
from gnnsys.comm.arrays import ReceivedFrame
from gnnsys.comm.errors import DeadlineExceeded, WireError
from gnnsys.comm.kinds import CONTROL, Kind
from gnnsys.comm.lane_agreements import LaneAgreements
from gnnsys.comm.peer_link import Connection, Link, ids_array, states_of
from gnnsys.comm.pending import Pending
from gnnsys.comm.server import UNKNOWN
from gnnsys.comm.wire import Limits

_BEATS = 4  # signs of life within the time after which they are missed


class Watched(Protocol):
    """Whose peers they are: the client."""

    def send_order(
        self, link: Link, connection: Connection, kind: int, request_id: int, arrays: Sequence[Tensor] = (),
        options: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Sends a message that nobody waits for; a no-op where that cannot be."""
        ...

    def send_again(self, link: Link, connection: Connection, pending: Pending, now: float) -> None: ...

    def lose_silent(self, link: Link, silent_for: float) -> None:
        """Fails what a peer has not answered that was silent for too long."""
        ...

    def describe_timeout(self, pending: Pending) -> str: ...

    def note(self, event: str) -> None: ...


class PeerWatch:
    """All times are in seconds. Called by the client's thread, `take_ping` by whoever reads."""

    def __init__(
        self, client: Watched, links: Mapping[int, Link], agreements: LaneAgreements, limits: Limits,
        ids: Iterator[int], *, lost_after: float, resend_after: float, ping_interval: float,
    ) -> None:  # fmt: skip
        self._client, self._links, self._agreements = client, links, agreements
        self._limits, self._ids = limits, ids
        self.lost_after, self._resend_after, self._ping_interval = lost_after, resend_after, ping_interval
        self._beat = max(ping_interval, lost_after / _BEATS)
        self.next_beat = 0.0  # when to show life next

    def check(self, now: float) -> float:
        """Fails what is overdue and asks silent peers how they are; returns when the next deadline is due."""
        next_deadline = math.inf
        for link in self._links.values():
            deadlines = [math.inf]
            for connection in link.connections:
                for pending in list(connection.outstanding.values()):
                    if pending.deadline > now:
                        deadlines.append(pending.deadline)
                    elif connection.take(pending.request_id) is not None:
                        pending.fail(DeadlineExceeded(self._client.describe_timeout(pending)))
            if len(deadlines) == 1:
                continue
            silent_for = link.silent_for(now)
            if silent_for >= self.lost_after:
                self._client.lose_silent(link, silent_for)
            else:
                next_deadline = min(next_deadline, *deadlines)
                self._ask(link, now)
        return next_deadline

    def _ask(self, link: Link, now: float) -> None:
        for connection in link.connections:
            silent = connection.silent(max(now - self._resend_after, link.returned_at))
            self._agreements.check(link, connection, bool(silent), now)
            if connection.socket is None and self._agreements.wants(connection):
                continue
            due = silent or (connection.traffic_class == CONTROL and link.silent_for(now) >= self._ping_interval)
            wait = self._resend_after if silent else self._ping_interval
            if not due or (
                connection.ping_id and connection.ping_at > link.returned_at and now - connection.ping_at < wait
            ):
                continue
            ping_id = next(self._ids)
            with connection.lock:
                connection.ping_id, connection.ping_at, connection.asked = ping_id, now, silent
            self._client.send_order(link, connection, Kind.PING, ping_id, ids_array(silent))

    def take_ping(
        self, link: Link, connection: Connection, header: wire.Header, frames: Sequence[ReceivedFrame], now: float
    ) -> None:
        """A peer's answer to a ping. What never arrived there is sent again."""
        with connection.lock:
            if header.request_id != connection.ping_id:
                return
            asked, connection.asked, connection.ping_id = connection.asked, [], 0
        try:
            answer = wire.read_message(header, frames, self._limits)
        except WireError as error:
            self._client.note(f"malformed: {error.reason}")
            return
        for request_id, state in zip(asked, states_of(answer, len(asked)), strict=False):  # none of a strange answer
            pending = connection.outstanding.get(request_id)
            if pending is None:
                continue
            pending.last_sign = now
            if state == UNKNOWN:
                self._client.note("resent")
                self._client.send_again(link, connection, pending, now)

    def show_life(self, now: float) -> None:
        """Sends a heartbeat to every peer that was sent nothing for a while. Its answer shows that the peer lives."""
        for link in self._links.values():
            if now - link.last_said >= self._beat and not link.end:  # else who asks is told
                self._client.send_order(link, link.control, Kind.PING, next(self._ids))
        self.next_beat = min((max(link.last_said, now - self._beat / 2) for link in self._links.values()), default=now)
        self.next_beat += self._beat
