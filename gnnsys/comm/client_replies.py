"""What a client does with a message that has come: it belongs to a request, to a ping or to an agreement, or is late.

Called by whoever reads, the client's thread or a caller that waits; one at a time for each connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakValueDictionary

from gnnsys.comm import wire
from gnnsys.comm.arrays import ReceivedFrame
from gnnsys.comm.counters import Tally
from gnnsys.comm.errors import WireError
from gnnsys.comm.kinds import Kind, kind_name
from gnnsys.comm.lane_agreements import LaneAgreements
from gnnsys.comm.peer_link import Connection, Link
from gnnsys.comm.peer_watch import PeerWatch
from gnnsys.comm.pending import Pending
from gnnsys.comm.receiver_share import ReceiverShare
from gnnsys.comm.sockets import WakeUp
from gnnsys.comm.turned_away import TurnedAway
from gnnsys.comm.wire import Limits
from gnnsys.observe import Trace


class ClientReplies:
    """`traces` are told of every answer to a request of their loader, by its number."""

    def __init__(
        self, limits: Limits, tally: Tally, watch: PeerWatch, agreements: LaneAgreements, turned_away: TurnedAway,
        share: ReceiverShare, wake_up: WakeUp,
    ) -> None:  # fmt: skip
        self.traces: WeakValueDictionary[int, Trace] = WeakValueDictionary()
        self._limits, self._tally, self._watch, self._agreements = limits, tally, watch, agreements
        self._turned_away, self._share, self._wake_up = turned_away, share, wake_up

    def take(self, link: Link, connection: Connection, frames: Sequence[ReceivedFrame], now: float) -> None:
        try:
            header = wire.read_header(frames[0].buffer, self._limits)
            if not header.flags & wire.REPLY:
                raise WireError("flags", "a request where a reply was expected")
        except WireError as error:
            self._tally.note(f"malformed: {error.reason}")
            self._take_other_version(link, connection, frames[0].buffer, now)
            return
        num_bytes = len(frames[0]) if len(frames) == 1 else wire.num_bytes(frames)
        pending = connection.outstanding.get(header.request_id)
        if pending is not None and header.status != wire.BUSY:
            self._take_reply(link, connection, pending, header, frames, num_bytes, now)
            return
        self._tally.received(link.peer, header.kind, num_bytes)
        if pending is not None:
            self._take_busy(link, connection, pending, header, frames, now)
        elif header.kind == Kind.PING:
            self._watch.take_ping(link, connection, header, frames, now)
        elif header.kind == Kind.SEAL and connection is link.control:
            self._agreements.take(link, header, frames, now)
        else:
            self._tally.note("late")  # its time had passed, or it was answered twice

    def _take_other_version(self, link: Link, connection: Connection, front: bytes | memoryview, now: float) -> None:
        """A peer of another version answers in its own: who asked need not wait for more."""
        prefix = wire.read_prefix(front)
        if prefix is None or prefix.version == wire.VERSION or not prefix.flags & wire.REPLY:
            return
        pending = connection.take(prefix.request_id)
        if pending is not None:
            self._share.note_change(now)
            pending.fail(
                WireError(
                    "version",
                    f"machine {link.peer} speaks version {prefix.version} of the messages and this process version "
                    f"{wire.VERSION}: install the same gnnsys on all machines",
                )
            )

    def _take_reply(
        self, link: Link, connection: Connection, pending: Pending, header: wire.Header,
        frames: Sequence[ReceivedFrame], num_bytes: int, now: float,
    ) -> None:  # fmt: skip
        """One message of a reply. It is counted before whoever waits for it has it, and can ask for counters."""
        peer, kind, seconds = link.peer, pending.kind, now - pending.sent_at
        if not pending.is_ended_by(header):
            self._tally.received(peer, kind, num_bytes)
            pending.num_received += num_bytes
            asked = pending.frames  # it lets go of them with the last message
            if pending.deliver(header, frames, now):
                connection.take(header.request_id)
                self._share.note_change(now)
                self._tally.answered((peer, kind, 0, 0, header.queued_us, header.served_us, seconds))
                self._tell(header, pending, asked, pending.num_received, seconds)
        elif connection.take(header.request_id) is not None:
            self._share.note_change(now)
            self._tally.answered((peer, kind, 1, num_bytes, header.queued_us, header.served_us, seconds))
            self._tell(header, pending, pending.frames, num_bytes, seconds)
            pending.finish((header, frames))

    def _tell(
        self, header: wire.Header, pending: Pending, asked: Sequence[wire.Buffer], num_bytes: int, seconds: float
    ) -> None:
        """Has the trace of the loader that asked note it, before whoever waits for the reply goes on."""
        trace = self.traces.get(header.loader)
        if trace is not None and header.batch >= 0:
            trace.add_answer(
                header.batch, kind_name(pending.kind), pending.peer, wire.num_bytes(asked), num_bytes,
                header.queued_us, header.served_us, seconds,
            )  # fmt: skip

    def _take_busy(
        self, link: Link, connection: Connection, pending: Pending, header: wire.Header,
        frames: Sequence[ReceivedFrame], now: float,
    ) -> None:  # fmt: skip
        """The peer had no room for a request and dropped it: it is sent again later."""
        refusal = pending.refusal
        try:
            refusal = str(wire.read_message(header, frames, self._limits).options.get("text", ""))
        except WireError as error:
            self._tally.note(f"malformed: {error.reason}")
        self._tally.note("busy")
        self._turned_away.add(link, connection, pending, refusal, now)
        self._wake_up.wake()  # where a caller has read this
