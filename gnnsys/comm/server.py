"""The answering end: a ROUTER socket that one thread reads, and worker threads that run the handlers.

A request is served once. One that is sent again while it waits, is being served, or was answered recently is recognised
by its connection and request id. Large replies are not kept, so a lost one is made again. What a client may hold at
once is bounded (`ClientQuotas`): no client can fill the server or keep others from being served.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import zmq

from gnnsys.comm import urgency, wire
from gnnsys.comm.arrays import ReceivedFrame
from gnnsys.comm.client_quotas import ClientQuotas, client_of, peer_of
from gnnsys.comm.counters import ServiceTimes, Tally
from gnnsys.comm.egress import COUNTED_BYTES, Egress, countable
from gnnsys.comm.errors import WireError
from gnnsys.comm.job import Job
from gnnsys.comm.keys import Gate, Keys, check_can_seal, protect_bulk_server
from gnnsys.comm.kinds import Kind, kind_name
from gnnsys.comm.liveness import Liveness
from gnnsys.comm.request import Handlers, ShortHandler
from gnnsys.comm.sealed_sessions import SealedMessage, SealedSessions
from gnnsys.comm.sockets import SharedSocket, WakeUp, bind, bulk_place, is_loopback, make_socket, port_of
from gnnsys.comm.wire import Buffer, Header, Limits
from gnnsys.comm.worker_threads import WorkerThreads

_log = logging.getLogger(__name__)

_DRAIN = 256  # messages that are read before replies are sent again
_SWEEP_SECONDS = 1.0
_KEPT_REPLIES = 4096
_KEPT_RAISES = 4096
_KEPT_BYTES = 4096  # a larger reply is made again rather than kept
_SHORT_US = 1000  # what has less time left is not answered at once
_SMALL_BYTES = 1 << 14  # of a request that the thread which reads may answer itself
_CLOSE_SECONDS = 5.0
_LINGER_MS = 1000

# What of `Limits` bounds a client, and all of them together.
_QUOTAS = ("max_queue", "max_client_requests", "max_client_bytes", "max_bytes")

KNOWN = 1  # in a ping's answer: the request waits, is in work, or its reply is under way
UNKNOWN = 0  # it never came, or its reply was lost: send it again


class Server:
    """Serves `handlers` at the endpoints it is bound to.

    With `keys` only clients of the job are admitted; without, it binds to the loopback interface only. `is_reserved`:
    another process of this account holds its ports for it, by SO_REUSEPORT. Handlers of the kinds in `at_once` run in
    the thread that reads, and so are answered when all workers are busy: they must take no time and no lock.
    A small request of a kind in `short` is answered by that thread too where none waits before it, as handing it over
    takes longer: by what `short` has for it, which says None where the handler must do it. libzmq shares connections
    among `io_threads`, which encrypt and decrypt CURVE. With keys that seal, rows go over another port of each address:
    `bulk_port`, or one that is chosen. `rate_out`: bytes per second of replies to clients that are paced, all together.
    `order`: whose reply goes first, see `Egress.set_order`. `on_raise` is called with the header of each RAISE.

    >>> with Server({Kind.PULL: lambda request: Reply(request.arrays)}) as server:
    ...     print(server.endpoints)
    """

    def __init__(
        self,
        handlers: Handlers,
        *,
        bind: Sequence[str] = ("tcp://127.0.0.1:*",),
        keys: Keys | None = None,
        threads: int = 2,
        native_threads: int = 1,
        limits: Limits | None = None,
        name: str = "server",
        is_reserved: bool = False,
        at_once: Sequence[int] = (),
        short: Mapping[int, ShortHandler] | None = None,
        io_threads: int = 1,
        bulk_port: int = 0,
        rate_out: float | None = None,
        order: str = "auto",
        on_raise: Callable[[Header], None] | None = None,
    ) -> None:
        for kind in (Kind.PING, Kind.RAISE):
            if kind in handlers:
                raise ValueError(f"{kind.name} is for the server itself: leave it out of the handlers")
        open_to_all = [endpoint for endpoint in bind if not is_loopback(endpoint)]
        if open_to_all and keys is None:
            raise ValueError(f"{open_to_all[0]!r} is open to other machines: pass keys=Keys.generate()")
        if keys is not None and keys.seals:
            check_can_seal()
        for what, count in (("threads", threads), ("native_threads", native_threads), ("io_threads", io_threads)):
            if count < 1:
                raise ValueError(f"{what} is {count}; it must be at least 1")
        self.liveness = Liveness()
        self._handlers = dict(handlers)
        self._at_once = frozenset(at_once)
        self._short = dict(short or {})
        self._bind = tuple(bind)
        self._is_reserved = is_reserved
        self._keys = keys
        self._limits = limits or Limits()
        self._name = name
        self._endpoints: list[str] = []
        self._context = zmq.Context(io_threads=io_threads)
        self._gate: Gate | None = None
        self._router: SharedSocket | None = None
        self._sessions = SealedSessions(keys) if keys is not None and keys.seals else None
        self._bulk_router: SharedSocket | None = None  # for what is sealed
        self._bulk_port = bulk_port
        self._bulk_ports: dict[int, int] = {}  # by the port of the endpoint that they belong to
        self._wake_up = WakeUp()
        self._lock = threading.RLock()  # of the next three
        self._jobs: dict[tuple[bytes, int], Job] = {}  # not answered in full yet
        self._kept: OrderedDict[tuple[bytes, int], tuple[Header, list[Buffer]]] = OrderedDict()  # sent again if lost
        self._quotas = ClientQuotas(self._limits)
        self._egress = Egress(self.resume, self._wake_up.wake, order=order)
        self._egress.set_rate_out(rate_out)
        self._on_raise = on_raise
        self._ahead: dict[tuple[bytes, int, int], dict[Job, None]] = {}  # jobs that may be raised, by peer and batch
        self._raised: OrderedDict[tuple[bytes, int], int] = OrderedDict()  # the batch last raised, by peer and loader
        self._tally = Tally()
        self._times = {kind: ServiceTimes() for kind in handlers}
        self._workers = WorkerThreads(threads, native_threads, self._run, f"{name}-work")
        self._thread = threading.Thread(target=self._main, name=f"gnnsys-{name}-io", daemon=True)
        self._stop = False
        self._closed = threading.Lock()

    def start(self) -> Server:
        """Binds, here, so that a bad endpoint raises here; then serves in the background."""
        if self._router is not None:
            raise ValueError("the server was started before")
        if self._keys is not None:
            self._gate = Gate(self._context, self._keys, None if self._sessions is None else self._sessions.admits)
        router = self._make_router()
        self._router = SharedSocket(router, self._wake_up)
        router.router_handover = True  # a client that reconnects takes its name along
        if self._keys is not None:
            self._keys.protect_server(router)
        try:
            self._endpoints = [bind(router, place, is_reserved=self._is_reserved) for place in self._bind]
            if self._sessions is not None:
                self._bind_bulk()
        except ValueError:
            self.close()
            raise
        self._workers.start()
        self._thread.start()
        return self

    def _make_router(self) -> Any:
        router = make_socket(self._context, zmq.ROUTER)
        router.sndhwm = self._limits.max_unread
        router.router_mandatory = True
        router.copy_threshold = COUNTED_BYTES  # from here on libzmq says when it has sent a frame
        return router

    def _bind_bulk(self) -> None:
        """A port beside each endpoint for what is sealed. Clients are told which, so any will do."""
        router = self._make_router()
        self._bulk_router = SharedSocket(router, self._wake_up)
        protect_bulk_server(router)
        for endpoint in self._endpoints:
            if endpoint.startswith("tcp://"):
                self._bulk_ports[port_of(endpoint)] = port_of(
                    bind(router, bulk_place(endpoint, self._bulk_port or "*"))
                )

    @property
    def endpoints(self) -> list[str]:
        """Where it serves, with real ports, in the order of `bind`."""
        return list(self._endpoints)

    def counters(self) -> dict[str, Any]:
        """Messages and bytes by sender and by kind, events by reason, times by kind, and what waits now."""
        with self._lock:  # a reply is counted before anybody who has it can ask
            return self._tally.to_json() | self._state()

    def summary(self) -> dict[str, Any]:
        """What `counters` says without the single peers, and the limits: small, whoever has sent what."""
        with self._lock:
            kinds = self._tally.kinds_to_json({*self._handlers, Kind.PING, Kind.SEAL, Kind.RAISE})
            limits = {name: getattr(self._limits, name) for name in _QUOTAS}
            return {"kinds": kinds, "events": self._tally.events(), "limits": limits, **self._state()}

    def _state(self) -> dict[str, Any]:
        times = {kind_name(kind): times.to_json() for kind, times in sorted(self._times.items()) if times.replies}
        for of_kind in times.values():
            del of_kind["waited_us"]  # clients know it
        return {
            "times": times,
            "queue": len(self._workers),
            "unanswered": len(self._jobs),
            "clients": len(self._quotas),
            "held_bytes": self._quotas.bytes,
            "worker_errors": self._workers.num_raised,
            "egress": self._egress.to_json(),
            "refused_keys": 0 if self._gate is None else self._gate.refused,
        }

    def load(self, *, without: Sequence[int] = ()) -> dict[str, int]:
        """How many requests came, except of the kinds in `without`, and how many wait. Cheap enough to poll."""
        kinds = [kind for kind in self._handlers if kind not in without]
        return {"served": self._tally.num_received(kinds), "queue": len(self._workers)}

    def set_order(self, order: str) -> None:
        """See `Egress.set_order`."""
        self._egress.set_order(order)

    def set_rate_out(self, rate: float | None) -> None:
        """Bytes per second of replies to clients that say what they can take; None: as fast as those take them."""
        self._egress.set_rate_out(rate)

    def close(self) -> None:
        """Answers what waits with an error and ends every thread, within seconds. Idempotent."""
        if not self._closed.acquire(blocking=False):
            return
        if not self._workers.close(_CLOSE_SECONDS):
            _log.warning("%s: a handler is still running %.0f s after close()", self._name, _CLOSE_SECONDS)
        self._stop = True
        self._wake_up.wake()
        if self._thread.ident is None:
            self._close_sockets()
        elif self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # What jobs and workers call, from any thread

    def seal(self, job: Job, frames: list[Buffer]) -> SealedMessage | None:
        session = None if self._sessions is None else self._sessions.of(job.identity)
        return None if session is None else session.seal(frames)

    def send(self, job: Job, frames: list[Buffer], sealed: SealedMessage | None, is_last: bool) -> bool:
        with self._lock:
            if self._jobs.get(job.key) is not job:
                self.note("late")  # its time passed meanwhile, and it was answered with that
                return False
            is_sent = self._send(job.identity, job.header, frames, sealed)
            if is_last:
                self._finish(job, frames)
        return is_sent

    def resume(self, job: Job) -> None:
        """Puts a job back in front of its client's other jobs. Called in finalizers, so it must take no lock."""
        self._workers.put(job.priority, job.client, job, first=True)

    def is_awaited(self) -> bool:
        """Whether other jobs wait for a worker."""
        return len(self._workers) > 0

    def note(self, event: str) -> None:
        self._tally.note(event)

    def _run(self, job: Job) -> None:
        job.run(self._handlers, self._limits)

    def _finish(self, job: Job, frames: list[Buffer]) -> None:
        if job.is_kept and job.num_chunks == 1:
            self._keep(job.key, job.header, frames, wire.num_bytes(frames))
        if (filed := self._ahead.get(key := _batch_of(job))) is not None:
            filed.pop(job, None)
            if not filed:
                del self._ahead[key]
        del self._jobs[job.key]  # after that: `_answer_short` looks at both without the lock
        self._quotas.leave(job.client, job.num_bytes, is_joint=job.header.kind == Kind.STEP)
        kind = job.header.kind
        if kind in self._handlers:  # other numbers are made up by senders
            self._times[kind].add(job.queued_us, job.served_us)

    def _keep(self, key: tuple[bytes, int], header: Header, frames: list[Buffer], num_bytes: int) -> None:
        """Keeps a reply for the case that it is lost, where it is small."""
        if num_bytes <= _KEPT_BYTES:
            self._kept[key] = (header, frames)
            if len(self._kept) > _KEPT_REPLIES:
                self._kept.popitem(last=False)

    def _send(self, identity: bytes, header: Header, frames: list[Buffer], sealed: SealedMessage | None = None) -> bool:
        """Sends a message. Returns False if its receiver cannot be reached, or does not read."""
        if sealed is None and self._sessions is not None and (session := self._sessions.of(identity)) is not None:
            sealed = session.seal(frames)
        try:
            if sealed is not None:
                assert self._bulk_router is not None
                if sealed.session.route is None:  # a new agreement, and the client has sent nothing under it yet
                    raise zmq.ZMQError(zmq.EHOSTUNREACH)
                self._bulk_router.send((sealed.session.route, *sealed.frames))
            else:
                assert self._router is not None
                self._router.send((identity, *frames))
        except zmq.Again:
            self.note("unread")  # it asks and does not read: it may ask again
        except zmq.ZMQError:
            self.note("unreachable")  # it has gone, or is about to reconnect and will ask again
        else:
            self._tally.sent(header.sender, header.kind, wire.num_bytes(frames))
            return True
        return False

    # The thread that reads

    def _main(self) -> None:
        try:
            self._loop()
        except BaseException:
            _log.exception("%s: the thread that reads has ended", self._name)
            raise
        finally:
            for job in list(self._jobs.values()):
                job.refuse(wire.FAILED, "Closed", "the server was closed before it answered", event="closed")
            self._close_sockets()

    def _loop(self) -> None:
        router, bulk_router, gate, wake_up = self._router, self._bulk_router, self._gate, self._wake_up
        assert router is not None
        routers = [router] if bulk_router is None else [router, bulk_router]
        poller, wake_fd = select.poll(), wake_up.fileno()
        for fd in (*(each.fd for each in routers), wake_fd, *([] if gate is None else [gate.socket.fd])):
            poller.register(fd, select.POLLIN)
        next_sweep = 0.0
        while not self._stop:
            wake_up.sleeping = True
            is_hot = self._stop or router.hot or (bulk_router is not None and bulk_router.hot)
            ready = [fd for fd, _ in poller.poll(0 if is_hot else 1000 * min(_SWEEP_SECONDS, self._egress.wait()))]
            wake_up.sleeping = False
            self.liveness.look(time.monotonic())
            if wake_fd in ready:
                wake_up.clear()
            if gate is not None:
                gate.answer_all()
            for each in routers:
                self._read(each, each.fd in ready)
            self._egress.release()
            now = time.monotonic()
            if now > next_sweep:
                next_sweep = now + _SWEEP_SECONDS
                self._expire(now)

    def _close_sockets(self) -> None:
        if self._gate is not None:
            self._gate.close()
        for router in (self._router, self._bulk_router):
            if router is not None:
                router.close(_LINGER_MS)
        if self._sessions is not None:
            self._sessions.threads.close()
        self._wake_up.close()
        self._context.term()

    def _read(self, router: SharedSocket, is_told: bool) -> None:
        """Takes what has come at a port. See `SharedSocket.receive`."""
        take = self._accept if router is self._router else self._open
        max_frames, is_first = 1 + self._limits.max_frames, True
        for _ in range(_DRAIN):
            frames = router.receive(max_frames, is_told, True)
            if frames is None:
                break
            try:
                take(frames[0], frames[1:], is_first)
            except Exception:  # whatever somebody sent, the others are served
                self.note("not accepted")
                _log.exception("%s goes on after a message it could not take", self._name)
            is_told = is_first = False

    def _open(self, route: bytes, frames: list[zmq.Frame], is_first: bool) -> None:
        """A message at the bulk port. What does not open is nobody's: it is counted, and not answered."""
        assert self._sessions is not None
        try:
            name, opened = self._sessions.open(route, frames)
        except WireError as error:
            self.note(f"malformed: {error.reason}")
            return
        self._accept(name, opened, is_first)

    def _accept(self, identity: bytes, frames: Sequence[ReceivedFrame], is_first: bool) -> None:
        now = time.monotonic()
        front: Any = frames[0].buffer if frames else b""
        try:
            header = wire.read_request(front, self._limits)
        except WireError as error:
            self._refuse(identity, front, error)
            return
        if header.share:
            self._egress.tell(peer_of(identity), header.share, is_request=header.kind != Kind.PING)
        short = self._short.get(header.kind) if is_first and len(frames) == 1 else None
        is_answered = short is not None and self._answer_short(short, identity, header, front, now)
        self.liveness.note(header.sender, header.incarnation, now)
        if is_answered:
            return
        num_bytes = wire.num_bytes(frames)
        self._tally.received(header.sender, header.kind, num_bytes)
        if header.kind == Kind.PING:
            self._answer_ping(identity, header, frames)
            return
        if header.kind == Kind.SEAL and self._sessions is not None:
            self._answer_seal(identity, header, frames)
            return
        if header.kind == Kind.RAISE:
            self._raise(identity, header)
            return
        deadline = now + min(header.timeout_us / 1e6, self._limits.max_seconds)
        with self._lock:
            key, busy = (identity, header.request_id), None
            is_new = key not in self._jobs and key not in self._kept
            if is_new:
                quota = self._quotas.of(client_of(identity))
                busy = self._quotas.enter(quota, num_bytes, is_joint=header.kind == Kind.STEP)
                job = self._jobs[key] = Job(self, identity, header, frames, num_bytes, deadline, self._egress)
                self._file(job)
            else:
                self.note("repeated")
                if key in self._kept:
                    self._send(identity, *self._kept[key])
        if is_new and self._may_enter(job, busy):
            if header.kind in self._at_once:
                self._run(job)
            else:
                self._workers.put(job.priority, job.client, job)

    def _answer_short(
        self, short: ShortHandler, identity: bytes, header: Header, front: memoryview, now: float
    ) -> bool:
        """Answers a request at once, from its bytes, and does all that is counted for it; False where that is no way.

        It is answered before another is read. So it takes nobody's turn, and nothing of its client's quota: one whose
        client holds too much, whose time has passed, or that came before goes the ordinary way. What is looked at
        without the lock stays true without it, as this thread alone adds to it.
        """
        key = (identity, header.request_id)
        if len(front) >= _SMALL_BYTES or header.timeout_us < _SHORT_US:
            return False
        if (self._jobs or self._quotas) and (  # otherwise nobody holds anything
            len(self._workers) or key in self._jobs or not self._quotas.has_room(client_of(identity))
        ):
            return False
        if not self._egress.has_room(peer_of(identity), header.priority, bool(header.share)):
            return False
        if key in self._kept:  # looked at behind `_jobs`: a worker keeps a reply before it forgets the job
            return False
        try:
            reply = short(header, front)
        except Exception:  # the handler says what is wrong
            return False
        if reply is None:
            return False
        frames, num_arrays = reply
        served_us = int((time.monotonic() - now) * 1e6)
        wire.put_reply(frames[0], header, served_us, num_arrays)
        frames = countable(frames)
        session = None if self._sessions is None else self._sessions.of(identity)
        sealed = None if session is None else session.seal(frames)
        num_bytes = wire.num_bytes(frames)
        with self._lock:  # whoever has the reply and asks for counters waits until it is counted
            is_sent = self._send(identity, header, frames, sealed)
            self._tally.received(header.sender, header.kind, len(front))
            self._times[header.kind].add(0, served_us)
            self._keep(key, header, frames, num_bytes)
        if is_sent and (header.share or sealed is not None or len(frames) > 1):
            sent = frames if sealed is None else sealed.frames
            self._egress.enter(
                peer_of(identity), sent, num_bytes, priority=header.priority, is_paced=bool(header.share)
            )
        return True

    def _file(self, job: Job) -> None:
        """Notes a job that a later RAISE may concern. If the RAISE overtook the request, raises the job now."""
        if job.header.batch < 0 or not urgency.need_of(job.priority):
            return
        if self._raised.get((job.peer, job.header.loader)) == job.header.batch:
            job.priority = urgency.raised(job.priority)
        else:
            self._ahead.setdefault(_batch_of(job), {})[job] = None

    def _raise(self, identity: bytes, header: Header) -> None:
        """Makes a client's requests of one batch WAITED. A RAISE has no reply."""
        peer = peer_of(identity)
        with self._lock:
            self._raised[peer, header.loader] = header.batch  # of requests that it overtakes
            self._raised.move_to_end((peer, header.loader))
            if len(self._raised) > _KEPT_RAISES:
                self._raised.popitem(last=False)
            jobs = list(self._ahead.pop((peer, header.loader, header.batch), ()))
        groups: dict[tuple[bytes, int], set[Job]] = {}
        for job in jobs:
            groups.setdefault((job.client, job.priority), set()).add(job)
            job.priority = urgency.raised(job.priority)
        for (client, before), moved in groups.items():
            self._workers.move(moved, client, before, urgency.raised(before))
        self._egress.note_raised(jobs)
        self.note("raised" if jobs else "nothing to raise")
        if self._on_raise is not None:
            self._on_raise(header)

    def _may_enter(self, job: Job, busy: str | None) -> bool:
        kind = job.header.kind
        if len(self._jobs) > self._limits.max_queue:  # it is one of them
            busy = f"{self._limits.max_queue} requests are unanswered already"
        if kind not in self._handlers:
            served = ", ".join(kind_name(each) for each in sorted(self._handlers))
            job.refuse(
                wire.UNKNOWN_KIND, "ValueError", f"kind {kind} is not served here; {served} are", event="unknown kind"
            )
        elif busy is not None:
            job.is_kept = False
            job.refuse(wire.BUSY, "Busy", busy, event="busy")
        else:
            return True
        return False

    def _refuse(self, identity: bytes, front: bytes | memoryview, error: WireError) -> None:
        """Counts a message that cannot be read; tells its sender where enough of it can."""
        self.note(f"malformed: {error.reason}")
        prefix = wire.read_prefix(front)
        if prefix is None or prefix.flags & wire.REPLY:
            return
        status = wire.OTHER_VERSION if error.reason == "version" else wire.MALFORMED
        header = wire.reply_header(prefix, status=status)
        frames = wire.encode(header, (), {"type": "WireError", "text": str(error)}, Limits())
        self._send(identity, header, frames)

    def _answer_seal(self, identity: bytes, header: Header, frames: Sequence[ReceivedFrame]) -> None:
        """Agrees with a client on how one of its lanes is sealed, or says that the agreement it has is known."""
        assert self._sessions is not None
        try:
            options = wire.read_message(header, frames, self._limits).options
            agreed = self._sessions.agree(identity, options)
        except WireError as error:
            self._refuse(identity, frames[0].buffer, error)
            return
        ports = self._bulk_ports
        port = options.get("port")  # where the client found the control connection, which may be behind another
        agreed["port"] = (ports.get(port, 0) if type(port) is int else 0) or next(iter(ports.values()), 0)
        self._send(identity, header, wire.encode(wire.reply_header(header), (), agreed, self._limits))

    def _answer_ping(self, identity: bytes, header: Header, frames: Sequence[ReceivedFrame]) -> None:
        """Says of each request id in the ping whether it is known; sends small replies again that were lost.

        The ping came behind the requests it asks about, on their connection: what is unknown now was lost.
        """
        try:
            arrays = wire.read_message(header, frames, self._limits, self._check_ping).arrays
        except WireError as error:
            self._refuse(identity, frames[0].buffer, error)
            return
        with self._lock:  # a reply is sent and its job forgotten in one step: what is unknown has been answered or lost
            states, asked = [], arrays[0].tolist() if arrays else []
            for request_id in dict.fromkeys(asked):
                if (identity, request_id) in self._kept:
                    self._send(identity, *self._kept[identity, request_id])
            for request_id in asked:
                key = (identity, request_id)
                states.append(KNOWN if key in self._jobs or key in self._kept else UNKNOWN)
            answered = [torch.tensor(states, dtype=torch.uint8, device="cpu")] if arrays else []
            self._send(identity, header, wire.encode(wire.reply_header(header), answered, None, self._limits))

    def _check_ping(self, plan: wire.Plan) -> None:
        """WireError for what is no list of request ids. Pings are read by the thread that all others wait for."""
        if len(plan) > 1 or any(dtype != torch.int64 or len(shape) != 1 for _, _, dtype, shape, _ in plan):
            raise WireError("ping", "a ping carries at most one array of request ids")
        if plan and plan[0][-1] > self._limits.max_queue:
            raise WireError("ping", f"a ping about {plan[0][-1]} requests, {self._limits.max_queue} may wait")

    def _expire(self, now: float) -> None:
        """Answers what nobody answered in its time: a future that never came, a queue that never moved."""
        for job in [job for job in list(self._jobs.values()) if now > job.deadline + _SWEEP_SECONDS]:
            job.expire("it was not answered in its time")


def _batch_of(job: Job) -> tuple[bytes, int, int]:
    return job.peer, job.header.loader, job.header.batch
