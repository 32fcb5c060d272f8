"""The way out of a server: whose reply goes next, and how much of it lies ahead of the wire.

Bytes in libzmq cannot be reordered. So a server hands over no more than leaves in AHEAD_SECONDS. All else waits here,
in one order over all clients: the most urgent first, equals in turns. How fast links are is measured: libzmq lets go of
a buffer when it has been sent. Two limits apply: one for all clients together, and one for each client that is slow.
Bytes of slow clients count only against their own limit, so that others use the rest of the link.

With `gnnsys.open(pace=...)` replies also leave at OES's rate: a token bucket for each client (`reply_pacing`).
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Any

import numpy as np

from gnnsys.comm.reply_pacing import TURN_SECONDS, TokenBucket, TokenBuckets
from gnnsys.comm.urgency import CLASSES, LEVELS, class_of, level_of
from gnnsys.comm.wire import Buffer

AHEAD_SECONDS = 0.01
LEAST_WINDOW = 1 << 17  # two chunks, so that one is under way while the next is made
MOST_WINDOW = 64 << 20
LEAST_CHUNK = 1 << 16
MOST_FLOWS = 4096  # the one that was heard of longest ago is forgotten
COUNTED_BYTES = 1 << 14  # smaller frames are copied by libzmq, which does not say when it has sent them
_FIRST_WINDOW = 8 << 20  # a fast link begins with large chunks; a slow one is known after one window
_PERIOD = 4  # a measurement ends after _PERIOD * AHEAD_SECONDS, or _PERIOD * the window's bytes
_MORE = 1.25  # the new window is larger than measured by this factor, to find out that a link is faster
_SLOW_SECONDS = 0.025  # a client's buffers lie for so long before it is compared with the others
_SLOW_PART = 4  # a client is slow if it takes less than 1 / _SLOW_PART of an equal share
_STALL_SECONDS = 0.1  # a client of which nothing leaves for so long is slow in any case
_LOOK_SECONDS = 0.01  # between two looks for clients that take nothing
_FAIR_TURN = 16  # every so many turns the client that waited longest has one, however urgent others are
ORDERS = ("auto", "fair", "fifo")


def check_order(order: str) -> None:
    """ValueError unless it is one of ORDERS."""
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(map(repr, ORDERS))}, got {order!r}")


@dataclass
class ClassCounts:
    """What was sent of a class (`urgency.CLASSES`), and how long its jobs were held back."""

    replies: int = 0
    bytes: int = 0
    held_us: int = 0


class Window:
    """How many bytes libzmq may hold unsent: what leaves in AHEAD_SECONDS, measured while jobs wait for room.

    Only bytes of levels that are at least as urgent as a job's use up its room.
    """

    __slots__ = ("_began", "_in_period", "_levels", "ahead", "drained", "is_short", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.ahead = 0
        self.drained = 0  # bytes that have left so far
        self.is_short = False  # a job waits for room
        self._began, self._in_period = 0.0, 0  # of a measurement: when, and the bytes that have left since
        self._levels = [0] * LEVELS  # bytes of each level of urgency

    def has_room(self, level: int) -> bool:
        return self.ahead < self.size or sum(self._levels[: level + 1]) < self.size

    def add(self, level: int, num_bytes: int) -> None:
        self.ahead += num_bytes
        self._levels[level] += num_bytes

    def move(self, other: Window, is_in: bool) -> None:
        """Adds or removes all that lies ahead of `other`."""
        for level, num_bytes in enumerate(other._levels):
            self.add(level, num_bytes if is_in else -num_bytes)

    def note_short(self, now: float) -> None:
        """A job waits for room in it."""
        if not self.is_short:
            self.is_short, self._began, self._in_period = True, now, 0

    def learn(self, now: float, num_bytes: int) -> None:
        """So many bytes have left. The kernel takes bytes in bursts, so the rate is measured over longer periods."""
        self.drained += num_bytes
        if not self.is_short:
            return
        self._in_period += num_bytes
        seconds = now - self._began
        if seconds >= _PERIOD * AHEAD_SECONDS or self._in_period >= _PERIOD * self.size:
            fits = int(_MORE * AHEAD_SECONDS * self._in_period / max(seconds, 1e-6))
            self.size = max(LEAST_WINDOW, min(fits, 2 * self.size, MOST_WINDOW))
            self._began, self._in_period = now, 0


class Flow:
    """All replies to one client."""

    __slots__ = ("_entries", "bucket", "is_slow", "jobs", "moved_at", "served", "window")

    def __init__(self) -> None:
        self.window = Window(MOST_WINDOW)
        self.is_slow = False  # what lies ahead of it does not count among all
        self.bucket: TokenBucket | None = None  # None: not paced
        self.jobs: dict[Any, float] = {}  # that wait, and since when
        self.served = 0  # the number of its last turn
        self.moved_at = 0.0  # when something of it left, or it began to have something ahead
        self._entries: list[tuple[tuple[int, float], int, Any]] = []  # a heap of its jobs, and of some that went

    def add(self, job: Any, key: tuple[int, float]) -> None:
        """Files a job that waits, or files it again under another key."""
        heappush(self._entries, (key, id(job), job))

    def first(self, key_of: Callable[[Any], tuple[int, float]]) -> Any:
        """The job with the least key. There is one."""
        entries = self._entries
        while entries[0][2] not in self.jobs or entries[0][0] != key_of(entries[0][2]):
            heappop(entries)
        return entries[0][2]

    def file_again(self, key_of: Callable[[Any], tuple[int, float]]) -> None:
        self._entries = [(key_of(job), id(job), job) for job in self.jobs]
        heapify(self._entries)


def countable(frames: Sequence[Buffer]) -> list[Buffer]:
    """Frames to hand to libzmq, those of COUNTED_BYTES and more as arrays: it drops an array once it is sent."""
    return [
        np.frombuffer(frame, np.uint8) if type(frame) in (bytes, bytearray) and len(frame) >= COUNTED_BYTES else frame
        for frame in frames
    ]


class _Sent(weakref.ref):  # type: ignore[type-arg]
    """A buffer that was handed to libzmq, which drops it once it is sent."""

    __slots__ = ("at", "drained", "drained_by_all", "flow", "level", "num_bytes")
    at: float
    drained: int
    drained_by_all: int
    flow: Flow
    level: int
    num_bytes: int


class Egress:
    """All flows out of a server. `on_turn(job)` is called for a job that was parked and may go on, in any thread.

    A job has a `peer`, a `priority`, whether it `is_paced`, and the time it `arrived`. The server's reading thread
    calls `release` after `wait()` seconds; `wake` interrupts its sleep if a job may go on earlier. All else is called
    by any thread. Buffers leave in finalizers, which may run inside any of these calls.
    """

    def __init__(
        self, on_turn: Callable[[Any], None], wake: Callable[[], None], clock: Callable[[], float] = time.monotonic,
        order: str = "auto",
    ) -> None:  # fmt: skip
        self._on_turn, self._wake, self._clock = on_turn, wake, clock
        self._lock = threading.Lock()
        self._left: deque[_Sent] = deque()  # buffers that have left and are not accounted for
        self._sent: dict[int, _Sent] = {}  # weak references must live
        self._all = Window(_FIRST_WINDOW)
        self._flows: OrderedDict[bytes, Flow] = OrderedDict()
        self._waiting: dict[bytes, Flow] = {}  # flows with jobs
        self._ahead: dict[Flow, None] = {}  # flows that have something ahead
        self._granted: dict[Any, tuple[Flow, int, int, float]] = {}  # jobs let go: priority, bytes and until when
        self._buckets = TokenBuckets()
        self._turn = 0
        self._sleeps_until = math.inf  # the reading thread
        self._counts = [ClassCounts() for _ in CLASSES]
        self.set_order(order)

    def set_order(self, order: str) -> None:
        """One of ORDERS. "auto": the most urgent first; "fair": clients in turns; "fifo": as requests came, and nothing
        is held back."""
        check_order(order)
        with self._lock:
            self.order = order
            self._by_urgency, self._bounds = order == "auto", order != "fifo"
            for flow in self._waiting.values():
                flow.file_again(self._key)
        self._settle(look=True)

    # Paced flows

    def set_rate_out(self, rate: float | None) -> None:
        """Bytes per second that all paced flows together may have; None: as many as their receivers take."""
        if rate is not None and not rate > 0:
            raise ValueError(f"rate_out is {rate}; it must be a positive number of bytes per second, or None")
        with self._lock:
            self._buckets.set_rate_out(math.inf if rate is None else rate, self._clock())
        self._wake()

    def tell(self, peer: bytes, share: int, *, is_request: bool = True) -> None:
        """A peer reports its share. Unless the message is a request, peers that are not known are ignored."""
        with self._lock:
            flow = self._flows.get(peer)
            if flow is None or flow.bucket is None:
                if not is_request:
                    return
                flow = self._flow(peer)
                flow.bucket = TokenBucket(share, self._clock())
                self._buckets.settle(flow.bucket, self._clock())
            elif share != flow.bucket.share:
                self._buckets.set_share(flow.bucket, share, self._clock())
        self._settle()
        if self._waiting:
            self._wake()

    def rate_of(self, peer: bytes) -> float:
        """Bytes per second that a paced peer's next reply has; 0 for one that is not paced."""
        with self._lock:
            flow = self._flows.get(peer)
            return 0.0 if flow is None or flow.bucket is None else self._buckets.rate_of(flow.bucket)

    # Jobs

    def chunk_bytes(self, job: Any, most: int) -> int:
        """How large the next chunk of a reply should be: half of what may lie ahead, `most` at most."""
        with self._lock:
            flow = self._flow(job.peer)
            if job.is_paced and flow.bucket is not None:
                size = int(self._buckets.rate_of(flow.bucket) * TURN_SECONDS)
            else:
                size = min(self._all.size, flow.window.size) // 2 if self._bounds else most
        return min(most, max(LEAST_CHUNK, size))

    def has_room(self, peer: bytes, priority: int, is_paced: bool = False) -> bool:
        """Whether a small reply can be sent without waiting for its turn."""
        flow = self._flows.get(peer)
        if flow is None or (flow.bucket is None and not flow.window.ahead and self._all.ahead < self._all.size):
            return True  # without the lock, as nearly always
        with self._lock:
            if is_paced and flow.bucket is not None:
                self._buckets.settle(flow.bucket, self._clock())
                if flow.bucket.is_active:
                    return False
            return self._fits(flow, self._level(priority))

    def park(self, job: Any) -> bool:
        """Returns True if the job must wait. `on_turn(job)` is called later, unless `unpark` removes it first."""
        with self._lock:
            is_its_turn, now = self._take_back(job), self._clock()
            flow = self._flow(job.peer)
            if is_its_turn or self._may_go(flow, job, now):
                return False
            flow.jobs[job] = now
            flow.add(job, self._key(job))
            self._waiting[job.peer] = flow
            if job.is_paced and flow.bucket is not None:
                flow.bucket.is_awaited = True
                self._buckets.activate(flow.bucket)
            is_news = now + self._next_look(flow, now) < self._sleeps_until
        self._settle(look=True)
        if is_news:
            self._wake()
        return True

    def unpark(self, job: Any) -> bool:
        """Removes a parked job. Returns whether it was parked."""
        with self._lock:
            self._take_back(job)
            flow = self._flows.get(job.peer)
            was_parked = flow is not None and job in flow.jobs
            if flow is not None and was_parked:
                self._drop(flow, job)
        self._settle()
        return was_parked

    def note_raised(self, jobs: Iterable[Any]) -> None:
        """The priorities of these jobs have changed."""
        with self._lock:
            for job in jobs:
                flow = self._flows.get(job.peer)
                if flow is not None and job in flow.jobs:
                    flow.add(job, self._key(job))
        self._settle(look=True)

    def enter(
        self, peer: bytes, frames: Sequence[Buffer], num_bytes: int, *, priority: int = 0, is_paced: bool = False,
        job: Any = None,
    ) -> None:  # fmt: skip
        """A message of `num_bytes` goes to a peer. Its arrays count as ahead until libzmq has dropped them.

        `job`: what it answers, if that was parked before.
        """
        with self._lock:
            self._take_back(job)
            flow, level, now = self._flow(peer), self._level(priority), self._clock()
            counts = self._counts[class_of(priority)]
            counts.replies += 1
            counts.bytes += num_bytes
            for frame in frames:
                if isinstance(frame, np.ndarray) and frame.nbytes:
                    sent = _Sent(frame, self._leave)
                    sent.num_bytes, sent.at, sent.flow, sent.level = frame.nbytes, now, flow, level
                    sent.drained, sent.drained_by_all = flow.window.drained, self._all.drained
                    self._sent[id(sent)] = sent
                    self._add(flow, level, frame.nbytes, now)
            if is_paced and flow.bucket is not None:
                self._buckets.charge(flow.bucket, num_bytes, now)
            is_news = is_paced and bool(flow.jobs)
        self._settle(look=bool(self._waiting))
        if is_news:
            self._wake()

    # The thread that reads

    def wait(self) -> float:
        """Seconds until `release` has something to do; infinite if nothing waits."""
        with self._lock:
            now = self._clock()
            self._buckets.advance(now)
            wait = min((self._next_look(flow, now) for flow in self._waiting.values()), default=math.inf)
            self._sleeps_until = now + wait
        return wait

    def release(self) -> None:
        """Lets those go on that may."""
        if self._waiting:
            self._settle(look=True)

    def to_json(self) -> dict[str, Any]:
        with self._lock:
            self._buckets.advance(self._clock())
            waiting = sum(len(flow.jobs) for flow in self._waiting.values())
            classes = {name: asdict(counts) for name, counts in zip(CLASSES, self._counts, strict=True)}
            return {"order": self.order, "paced": len(self._buckets), "waiting": waiting, "ahead": self._all.ahead,
                    "window": self._all.size, "classes": classes}  # fmt: skip

    # Accounting

    def _leave(self, sent: _Sent) -> None:
        self._left.append(sent)
        self._settle()

    def _settle(self, look: bool = False) -> None:
        """Accounts for what has left and lets jobs go on. If another thread holds the lock, that one does so before it
        returns.

        No lock is waited for: finalizers call this in threads that may hold it.
        """
        while (look or self._left) and self._lock.acquire(blocking=False):
            try:
                look = False
                while self._left:
                    self._account(self._left.popleft())
                turned = self._let_go()
            finally:
                self._lock.release()
            for job in turned:
                self._on_turn(job)

    def _account(self, sent: _Sent) -> None:
        del self._sent[id(sent)]
        flow, now = sent.flow, self._clock()
        flow.moved_at = now
        self._remove(flow, sent.level, sent.num_bytes)
        flow.window.learn(now, sent.num_bytes)
        self._all.learn(now, sent.num_bytes)
        if now - sent.at > _SLOW_SECONDS or flow.is_slow:
            own, by_all = flow.window.drained - sent.drained, self._all.drained - sent.drained_by_all
            num_flows = len(self._waiting) + sum(not each.jobs for each in self._ahead)
            self._judge(flow, _SLOW_PART * own * num_flows < by_all)
        if not flow.jobs:
            flow.window.is_short = False
            if not self._waiting:
                self._all.is_short = False

    def _add(self, flow: Flow, level: int, num_bytes: int, now: float) -> None:
        if not flow.window.ahead:
            flow.moved_at = now
            self._ahead[flow] = None
        flow.window.add(level, num_bytes)
        if not flow.is_slow:
            self._all.add(level, num_bytes)

    def _remove(self, flow: Flow, level: int, num_bytes: int) -> None:
        flow.window.add(level, -num_bytes)
        if not flow.is_slow:
            self._all.add(level, -num_bytes)
        if not flow.window.ahead:
            del self._ahead[flow]

    def _judge(self, flow: Flow, is_slow: bool) -> None:
        """Notes whether a client takes far less than an equal part of what the server sends."""
        if is_slow == flow.is_slow:
            return
        flow.is_slow = is_slow
        self._all.move(flow.window, not is_slow)
        flow.window.size, flow.window.is_short = LEAST_WINDOW if is_slow else MOST_WINDOW, False

    def _take_back(self, job: Any) -> bool:
        """Ends a job's turn, and what was kept free for it. Returns whether it had one."""
        granted = self._granted.pop(job, None)
        if granted is None:
            return False
        flow, level, num_bytes, _ = granted
        self._remove(flow, level, num_bytes)
        return True

    def _level(self, priority: int) -> int:
        return level_of(priority) if self._by_urgency else 0

    # Turns

    def _fits(self, flow: Flow, level: int) -> bool:
        if not self._bounds:
            return flow.window.ahead < MOST_WINDOW
        if not flow.window.has_room(level):
            flow.window.note_short(self._clock())
            return False
        if not self._all.has_room(level):
            self._all.note_short(self._clock())
            return False
        return True

    def _may_go(self, flow: Flow, job: Any, now: float) -> bool:
        """Whether a job that comes may go before all that wait."""
        if job.is_paced and flow.bucket is not None:
            self._buckets.settle(flow.bucket, now)
            if flow.bucket.is_in_debt:
                return False
        if not self._fits(flow, self._level(job.priority)):
            return False
        own = self._key(job)
        for other in self._waiting.values():
            first = other.first(self._key)
            if self._key(first) < own and self._is_turn(other, first, now):
                return False
        return True

    def _key(self, job: Any) -> tuple[int, float]:
        """By which jobs of a client are ordered."""
        return (job.priority if self._by_urgency else 0), job.arrived

    def _turn_key(self, flow: Flow, job: Any) -> tuple[int, int, float]:
        """By which clients are ordered, with their first jobs."""
        level, arrived = self._key(job)
        return level, 0 if self.order == "fifo" else flow.served, arrived

    def _let_go(self) -> list[Any]:
        """The jobs that may go on now, in their order."""
        now, turned = self._clock(), list[Any]()
        self._buckets.advance(now)
        for job in [job for job, granted in self._granted.items() if now >= granted[3]]:
            self._take_back(job)
        for flow in [flow for flow in self._ahead if now - flow.moved_at > _STALL_SECONDS]:
            self._judge(flow, True)
        while self._waiting:
            self._turn += 1
            is_fair = self._turn % _FAIR_TURN == 0 and self._by_urgency
            best: tuple[Any, Flow, Any] | None = None
            for flow in self._waiting.values():
                job = flow.first(self._key)
                key: Any = (flow.served, job.arrived) if is_fair else self._turn_key(flow, job)
                if (best is None or key < best[0]) and self._is_turn(flow, job, now):
                    best = key, flow, job
            if best is None:
                self._turn -= 1
                break
            _, flow, job = best
            self._drop(flow, job)
            self._grant(flow, job, now)
            turned.append(job)
        return turned

    def _is_turn(self, flow: Flow, job: Any, now: float) -> bool:
        bucket = flow.bucket if job.is_paced else None
        if bucket is not None and (bucket.is_in_debt or now < bucket.turn_until):
            return False
        return self._fits(flow, self._level(job.priority))

    def _grant(self, flow: Flow, job: Any, now: float) -> None:
        flow.served = self._turn
        if job.is_paced and flow.bucket is not None:
            flow.bucket.turn_until = now + TURN_SECONDS
        level, num_bytes = self._level(job.priority), max(LEAST_CHUNK, min(flow.window.size, self._all.size) // 2)
        self._add(flow, level, num_bytes, now)
        self._granted[job] = flow, level, num_bytes, now + TURN_SECONDS

    def _next_look(self, flow: Flow, now: float) -> float:
        job = flow.first(self._key)
        wait = flow.bucket.wait(now) if job.is_paced and flow.bucket is not None else 0.0
        return wait if wait or self._fits(flow, self._level(job.priority)) else _LOOK_SECONDS

    def _drop(self, flow: Flow, job: Any) -> None:
        since = flow.jobs.pop(job)
        self._counts[class_of(job.priority)].held_us += int((self._clock() - since) * 1e6)
        if not flow.jobs:
            self._waiting.pop(job.peer, None)
            if flow.bucket is not None:
                flow.bucket.is_awaited = False

    def _flow(self, peer: bytes) -> Flow:
        flow = self._flows.get(peer)
        if flow is not None:
            self._flows.move_to_end(peer)
            return flow
        if len(self._flows) >= MOST_FLOWS:
            self._forget_idle(len(self._flows) - MOST_FLOWS + 1)
        flow = self._flows[peer] = Flow()
        flow.served = self._turn
        return flow

    def _forget_idle(self, count: int) -> None:
        """Forgets the flows that were heard of longest ago, of those with nothing to send. There may be none."""
        idle = ((peer, flow) for peer, flow in self._flows.items() if not flow.jobs and not flow.window.ahead)
        for peer, flow in list(islice(idle, count)):
            if flow.bucket is not None:
                self._buckets.forget(flow.bucket)
            del self._flows[peer]
