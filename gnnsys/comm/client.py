"""The asking end: requests from any thread, many in flight. Replies are read by who waits for them, or by a thread.

Every request ends by its deadline: with its reply, with what its handler raised, or with an error that names the peer.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import select
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import zmq
from torch import Tensor

from gnnsys.comm import this_process, urgency, wire
from gnnsys.comm.arrays import ReceivedFrame
from gnnsys.comm.client_replies import ClientReplies
from gnnsys.comm.context import RequestContext, current_context, first_given
from gnnsys.comm.counters import Tally
from gnnsys.comm.errors import Closed, CommError, ShardLost, WireError
from gnnsys.comm.keys import Keys, check_can_seal
from gnnsys.comm.kinds import Kind, kind_name
from gnnsys.comm.lane_agreements import LaneAgreements
from gnnsys.comm.led_socket import LedSocket
from gnnsys.comm.peer_link import Connection, Link, make_name
from gnnsys.comm.peer_watch import PeerWatch
from gnnsys.comm.pending import Pending
from gnnsys.comm.receiver_share import ReceiverShare
from gnnsys.comm.sockets import WakeUp
from gnnsys.comm.turned_away import TurnedAway
from gnnsys.comm.wire import Limits

_log = logging.getLogger(__name__)

_DRAIN = 256  # messages read from one socket before the others get their turn
_CLOSE_SECONDS = 5.0
_LINGER_MS = 500
_RESEND_SECONDS, _PING_SECONDS = 5.0, 2.0  # at most
_REQUEST_LOAD = 1 << 16  # bytes that a request counts as where lanes are compared, besides its reply
MAX_LANES = 16


class Client:
    """Asks the servers at `peers` (machine -> endpoint) for things.

    `sender` and `incarnation` say who asks. `lost_after` is how long a peer may be silent before it counts as dead,
    `resend_after` how long a request may be before the peer is asked whether it ever arrived. A peer that is asked
    nothing is told several times in `lost_after` that this end lives. Requests that change nothing share `lanes`
    connections to each peer, with an I/O thread for each: one connection carries what one core can encrypt. With `keys`
    that seal, a lane is connected once the peer has said over the control connection how its messages are sealed.

    >>> with Client({0: server.endpoints[0]}, sender=0, incarnation=1) as client:
    ...     client.request(0, Kind.PULL, [ids]).result().arrays
    """

    def __init__(
        self,
        peers: Mapping[int, str],
        *,
        sender: int,
        incarnation: int,
        keys: Keys | None = None,
        timeout: float = 60.0,
        limits: Limits | None = None,
        lost_after: float = 30.0,
        resend_after: float | None = None,
        ping_interval: float | None = None,
        name: str = "client",
        lanes: int = 1,
    ) -> None:
        resend_after = min(_RESEND_SECONDS, lost_after / 4) if resend_after is None else resend_after
        ping_interval = min(_PING_SECONDS, lost_after / 8) if ping_interval is None else ping_interval
        for what, value in (("timeout", timeout), ("resend_after", resend_after), ("ping_interval", ping_interval)):
            if not value > 0:
                raise ValueError(f"{what} is {value}; it must be a positive number of seconds")
        if lost_after <= ping_interval:
            raise ValueError(f"lost_after ({lost_after}) must be longer than ping_interval ({ping_interval})")
        if not 1 <= lanes <= MAX_LANES:
            raise ValueError(f"lanes is {lanes}; it must be a whole number from 1 to {MAX_LANES}")
        if keys is not None and keys.seals:
            check_can_seal()
        uid = make_name()
        self.lanes = lanes
        self._links = {peer: Link(peer, endpoint, uid, lanes) for peer, endpoint in peers.items()}
        self.context = RequestContext()  # priority and path where nobody says another
        self._sender = sender
        self._incarnation = incarnation
        self._keys = keys
        self._timeout = timeout
        self._limits = limits or Limits()
        self._resend_after = resend_after
        self._ping_interval = ping_interval
        self._name = name
        self._ids = itertools.count(1)
        self._connections: list[tuple[Link, Connection, LedSocket]] = []  # that have a socket
        self._lock = threading.RLock()  # of making them
        self._agreements = LaneAgreements(self, keys, self._limits, self._ids, self._lock, ping_interval)
        self._watch = PeerWatch(
            self, self._links, self._agreements, self._limits, self._ids, lost_after=lost_after,
            resend_after=resend_after, ping_interval=ping_interval,
        )  # fmt: skip
        self._turned_away = TurnedAway()
        self._wake_up = WakeUp()
        self._share = ReceiverShare(self._links, self._tell_share, self._wake_up.wake)
        self._epoll = select.epoll()
        self._epoll.register(self._wake_up.fileno(), select.EPOLLIN)
        self._tally = Tally()
        self._replies = ClientReplies(
            self._limits, self._tally, self._watch, self._agreements, self._turned_away, self._share, self._wake_up
        )
        self.traces = self._replies.traces
        self._pid = this_process.pid
        self._stop = False
        self._wakes_at = math.inf  # when the thread looks at deadlines next, whatever arrives
        self._next_deadline = math.inf  # not after the first of them
        self._context = zmq.Context(io_threads=lanes)
        self._thread = threading.Thread(target=self._main, name=f"gnnsys-{name}-io", daemon=True)
        self._thread.start()

    @property
    def peers(self) -> dict[int, str]:
        return {peer: link.endpoint for peer, link in self._links.items()}

    def request(
        self,
        peer: int,
        kind: int,
        arrays: Sequence[Tensor] = (),
        options: dict[str, Any] | None = None,
        *,
        timeout: float | None = None,
        priority: int | None = None,
        sequence: int = 0,
        batch: int = -1,
        layer: int = -1,
        path: int | None = None,
        loader: int = 0,
        reply_bytes: int = 0,
    ) -> Pending:
        """Sends a request and returns at once. Large arrays are not copied: leave them alone until the reply came.

        `batch`, `loader`, `priority` and `path` that are left out are as the current `RequestContext` says; priority
        and path that this leaves out are the client's own, `context`. `reply_bytes` is the expected size
        of the reply, 0 if unknown. It decides which connection carries the request.
        """
        timeout = self._checked(timeout)
        request_id, context = next(self._ids), current_context()
        header = wire.make_header(
            kind, request_id, timeout_us=int(timeout * 1e6),
            priority=self._urgency(kind, priority, context, layer), sender=self._sender,
            incarnation=self._incarnation, sequence=sequence,
            batch=context.batch if batch < 0 else batch, layer=layer, loader=loader or context.loader,
            path=first_given(path, context.path, self.context.path), share=self._share.of_request(peer, kind),
        )  # fmt: skip
        frames = wire.encode(header, arrays, options, self._limits)
        said = header.loader, header.batch, header.priority
        return self._begin(peer, kind, request_id, frames, timeout, reply_bytes, said)

    def request_encoded(
        self, peer: int, kind: int, front: bytearray, num_arrays: int, reply_bytes: int, timeout: float | None,
        priority: int | None, path: int | None, batch: int, layer: int,
    ) -> Pending:  # fmt: skip
        """As `request`, of a message that is encoded but for its header, for which there is room at its beginning."""
        timeout = self._checked(timeout)
        request_id, context = next(self._ids), current_context()
        number = self._urgency(kind, priority, context, layer)
        batch = context.batch if batch < 0 else batch
        if path is None and (path := context.path) is None:
            path = self.context.path or 0
        wire.put_request(
            front, kind, num_arrays, request_id, int(timeout * 1e6), number, self._sender, self._incarnation,
            batch, layer, path, context.loader, self._share.of_request(peer, kind),
        )  # fmt: skip
        said = context.loader, batch, number
        return self._begin(peer, kind, request_id, [front], timeout, reply_bytes, said)

    def _urgency(self, kind: int, priority: int | None, context: RequestContext, layer: int) -> int:
        asked: Any = priority
        if asked is None and (asked := context.priority) is None:
            asked = self.context.priority
        return urgency.of_request(kind, context.need, layer, asked)

    def raise_batch(self, loader: int, batch: int) -> None:
        """Asks peers to send the remaining replies of a batch earlier, because its consumer waits.

        Peers that have all answered are told nothing. A message that is lost loses nothing but time.
        """
        for link in self._links.values():
            if any([connection.raise_batch(loader, batch) for connection in link.bulk]):
                self.send_order(link, link.control, Kind.RAISE, next(self._ids), loader=loader, batch=batch)
                self._tally.note("raised")

    def _checked(self, timeout: float | None) -> float:
        timeout = self._timeout if timeout is None else timeout
        if not timeout > 0:
            raise ValueError(f"timeout is {timeout}; it must be a positive number of seconds")
        return timeout

    def _begin(
        self, peer: int, kind: int, request_id: int, frames: list[wire.Buffer], timeout: float, reply_bytes: int,
        said: tuple[int, int, int],
    ) -> Pending:  # fmt: skip
        if this_process.pid != self._pid:
            raise CommError(f"this client belongs to process {self._pid}: after a fork, make a new one in the child")
        link = self._links.get(peer)
        if link is None:
            raise ValueError(f"no peer {peer}; this client knows {sorted(self._links)}")
        connection = link.connection_for(kind, reply_bytes)
        pending = Pending(
            peer, kind, request_id, connection, frames, timeout, self._limits, self, _REQUEST_LOAD + reply_bytes, said
        )
        if not link.is_awaited():
            link.waiting_since = pending.sent_at
        connection.outstanding[request_id] = pending
        self._share.note_change(pending.sent_at)
        try:
            self._transmit(link, connection, kind, frames, request_id)
        except (zmq.ZMQError, ValueError) as error:
            if self._stop or (isinstance(error, zmq.ZMQError) and error.errno in (zmq.ENOTSOCK, zmq.ETERM)):
                self.fail_all(link, lambda pending: Closed("the client is closed"))
            elif isinstance(error, zmq.Again):
                pass  # the connection was cut: the request is sent again on the next one, or expires
            elif connection.take(request_id) is not None:
                pending.fail(CommError(f"{kind_name(kind)} was not sent to machine {peer} at {link.endpoint}: {error}"))
        if link.end:
            self.lose(peer, link.end)
        socket = connection.socket
        if socket is not None and socket.hot and not socket.is_led:
            self._read(link, connection, socket)
        if pending.deadline < self._next_deadline:
            self._next_deadline = pending.deadline
        if pending.deadline < self._wakes_at:
            self._wake_up.wake()
        return pending

    def lose(self, peer: int, why: str) -> None:
        """Fails what a peer has not answered and all that is asked of it later: the caller knows that it has ended."""
        link = self._links[peer]
        link.end = why
        silent_for = time.monotonic() - link.last_heard if link.last_heard else 0.0
        self.fail_all(link, lambda _: ShardLost(why, machine=peer, rank=self._sender, silent_for=silent_for))

    def set_rate_in(self, rate: float | None, *, without: Collection[int] = ()) -> None:
        """Has peers send at a rate: so many bytes per second of all replies, shared among those that send. None: not.

        `without`: peers that are reached over no link. What was asked before comes as it was asked for.
        """
        self._share.set_rate(rate, without)

    def counters(self) -> dict[str, Any]:
        """Messages and bytes by peer and by kind, times by peer and kind, events by reason, what is outstanding now."""
        return self._tally.to_json() | {"outstanding": sum(link.num_outstanding() for link in self._links.values())}

    def close(self) -> None:
        """Fails what is outstanding and ends the thread, within seconds. Idempotent; a no-op in a forked child."""
        if this_process.pid != self._pid or self._stop:
            return
        self._stop = True
        self._wake_up.wake()
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _transmit(
        self, link: Link, connection: Connection, kind: int, frames: list[wire.Buffer], request_id: int = 0
    ) -> None:
        """Sends a message. Where it is not agreed yet how to seal it, the request is sent once that is."""
        socket = connection.socket or self._open(link, connection, request_id)
        if socket is None:
            return
        sealed = frames if socket.channel is None else socket.channel.seal(frames)
        with socket.lock:
            try:
                socket.send_locked(sealed)
            except zmq.Again:
                # A client's queues have no limit: libzmq has given the connection up, as it does when the other end
                # speaks another protocol (it wants a key, say). The thread that reads lets go of the socket.
                socket.is_cut = True
                socket.leader_wake_up.wake()
                self._wake_up.wake()
                raise
            link.last_said = time.monotonic()
            self._tally.sent(link.peer, kind, wire.num_bytes(frames))

    def _open(self, link: Link, connection: Connection, request_id: int = 0) -> LedSocket | None:
        """The connection's socket, made on first use; None where it is not agreed yet how to seal what it carries."""
        with self._lock:
            if connection.socket is not None or not self._agreements.wants(connection):
                return self.make_socket(link, connection)
            ask_id = self._agreements.wait(connection, request_id)
        if ask_id:
            self._agreements.ask(link, connection, ask_id)
        return None

    # What agreements and the watch call

    def make_socket(self, link: Link, connection: Connection) -> LedSocket:
        with self._lock:
            if self._stop:
                raise zmq.ZMQError(zmq.ENOTSOCK)
            socket = connection.socket
            if socket is None:
                socket = link.open(connection, self._context, self._keys, self._wake_up, self._epoll)
                self._connections.append((link, connection, socket))
                self._wake_up.wake()  # to read what it may have been told already
            return socket

    def send_order(
        self, link: Link, connection: Connection, kind: int, request_id: int, arrays: Sequence[Tensor] = (),
        options: dict[str, Any] | None = None, *, share: int = 0, loader: int = 0, batch: int = -1,
    ) -> None:  # fmt: skip
        header = wire.make_header(
            kind, request_id, timeout_us=int(self._watch.lost_after * 1e6), sender=self._sender, loader=loader,
            batch=batch,
            incarnation=self._incarnation, share=share or (self._share.of_ping(link) if kind == Kind.PING else 0),
        )  # fmt: skip
        with contextlib.suppress(zmq.ZMQError, ValueError):  # sent again when it is due again
            self._transmit(link, connection, kind, wire.encode(header, arrays, options, self._limits))
            self._have_read(connection)

    def note(self, event: str) -> None:
        self._tally.note(event)

    def _tell_share(self, link: Link, share: int) -> None:
        self.send_order(link, link.control, Kind.PING, next(self._ids), share=share)

    # The thread that reads

    def _main(self) -> None:
        text = "the client was closed while the request was outstanding"
        try:
            self._loop()
        except BaseException as cause:
            text = f"the client's thread ended: {type(cause).__name__}: {cause}"
            _log.exception("%s: the thread that reads has ended", self._name)
        finally:
            with self._lock:
                self._stop = True  # no socket is made any more
                made = [socket for _, _, socket in self._connections]  # also those whose place another took
            for socket in made:
                socket.close(_LINGER_MS)
            for link in self._links.values():
                self.fail_all(link, lambda pending: Closed(text))
            self._agreements.close()
            self._wake_up.close()
            self._epoll.close()
            self._context.term()

    def _loop(self) -> None:
        wake_up, tick = self._wake_up, min(self._ping_interval, self._resend_after) / 2
        next_tick = 0.0
        looked, was_paused = time.monotonic(), False
        while not self._stop:
            wake_up.sleeping = True
            self._drop_cut()
            wait = self._time_to_sleep(next_tick)
            if self._stop or any(socket.hot and not socket.is_led for _, _, socket in self._connections):
                wait = 0
            ready = {fd for fd, _ in self._epoll.poll(wait)}
            wake_up.sleeping = False
            if wake_up.fileno() in ready:
                wake_up.clear()
            now = time.monotonic()
            paused = now - looked > self._ping_interval
            looked = now
            if paused:  # this process was stopped: nobody's silence counts through that
                for link in self._links.values():
                    link.waiting_since = now
            is_due = now >= self._wakes_at
            for link, connection, socket in self._connections[:]:
                if is_due:
                    socket.check_leader()
                if is_due or socket.hot or socket.fd in ready:
                    self._read(link, connection, socket)
            if now >= self._turned_away.next_at:
                for _, link, connection, pending in self._turned_away.take_due(now):
                    self.send_again(link, connection, pending, now)
            if is_due and (was_paused or not paused):  # after a pause, what has come is read first
                self._next_deadline = math.inf
                due = self._watch.check(now)
                self._next_deadline = min(self._next_deadline, due)  # a request may have come meanwhile
                next_tick = now + tick
            was_paused = paused
            if now >= self._share.next_at:
                self._share.tell_all(now)
            if now >= self._watch.next_beat:
                self._watch.show_life(now)

    def _read(
        self, link: Link, connection: Connection, socket: LedSocket, is_enough: Callable[[], int] | None = None,
        is_told: bool = False,
    ) -> None:  # fmt: skip
        """Takes what has come on a connection, or as much as `is_enough`: in any thread. See `SharedSocket.receive`."""
        now = time.monotonic()
        with connection.reading:
            for _ in range(_DRAIN):
                received = socket.receive(self._limits.max_frames, is_told)
                if received is None or socket is not connection.socket:  # another took its place
                    return
                is_told = False
                frames: Sequence[ReceivedFrame] = received
                if socket.channel is not None:
                    try:
                        frames = socket.channel.open(received)
                    except WireError as error:  # nobody knows who sent it
                        self._tally.note(f"malformed: {error.reason}")
                        continue
                if now - link.last_heard > self._ping_interval:
                    link.return_at(now)
                link.last_heard = now
                connection.is_heard = True
                self._accept(link, connection, frames, now)
                if is_enough is not None and is_enough():
                    return
        self._wake_up.wake()  # there may be more

    def _have_read(self, connection: Connection) -> None:
        """Wakes who reads, after a sender that does not read itself: it may have taken the news that something came."""
        socket = connection.socket
        if socket is not None and socket.hot and not socket.is_led:
            self._wake_up.wake()

    def read_for(self, pending: Pending, until: float) -> None:
        """Has the caller read itself while it waits for `pending`, where no other caller does on that connection."""
        link, connection = self._links[pending.peer], pending.connection
        socket = connection.socket
        if socket is not None and not self._stop and threading.current_thread() is not self._thread:
            pending.wake_up = socket.leader_wake_up
            arrivals = pending.count_arrivals
            socket.lead(arrivals, until, partial(self._read, link, connection, socket, arrivals))
            if socket.hot and (connection.awaits_others(pending) or self._agreements.is_asking(link)):
                self._wake_up.wake()  # what else has come, nobody may have been told of

    def _drop_cut(self) -> None:
        """Lets go of connections that libzmq has given up; the next message makes another."""
        for entry in [entry for entry in self._connections if entry[2].is_cut]:
            link, connection, socket = entry
            with self._lock:
                self._connections.remove(entry)
                if connection.socket is socket:
                    connection.socket = None
                    self._agreements.lose(link, connection)
            socket.close(0)
            self._tally.note("connection cut")

    def _time_to_sleep(self, next_tick: float) -> float:
        """Seconds until a deadline, a heartbeat or a request to be sent again is due.

        A tick is due though nothing is outstanding: a request that comes meanwhile is then seen in time without waking
        this thread, which would take longer than sending it. Clears `_wakes_at` before deadlines are looked at. A
        request added in between either sees it cleared, and wakes this thread, or is seen here.
        """
        self._wakes_at = math.inf
        self._wakes_at = min(next_tick, self._next_deadline)
        until = min(self._wakes_at, self._watch.next_beat, self._turned_away.next_at, self._share.next_at)
        return max(0.0, until - time.monotonic()) + 1e-3

    def _accept(self, link: Link, connection: Connection, frames: Sequence[ReceivedFrame], now: float) -> None:
        self._replies.take(link, connection, frames, now)

    def send_again(self, link: Link, connection: Connection, pending: Pending, now: float) -> None:
        frames = pending.frames  # none where another thread has ended it
        if not frames or connection.outstanding.get(pending.request_id) is not pending:
            return
        front = wire.with_timeout(frames[0], max(1, int((pending.deadline - now) * 1e6)))
        with contextlib.suppress(zmq.ZMQError, ValueError):  # it stays outstanding, until its deadline
            self._transmit(link, connection, pending.kind, [front, *frames[1:]], pending.request_id)
            pending.resent += 1
            self._have_read(connection)

    # Ends of requests

    def fail_all(self, link: Link, error_of: Callable[[Pending], CommError]) -> None:
        for connection in link.connections:
            for request_id in list(connection.outstanding):
                pending = connection.take(request_id)
                if pending is not None:
                    pending.fail(error_of(pending))
            connection.ping_id = 0

    def lose_silent(self, link: Link, silent_for: float) -> None:
        self._tally.note("lost")
        self.fail_all(link, lambda pending: link.lost(pending, self._sender, silent_for))

    def describe_timeout(self, pending: Pending) -> str:
        return self._links[pending.peer].overdue(pending, self._sender)
