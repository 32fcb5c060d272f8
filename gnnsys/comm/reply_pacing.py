"""Replies at a rate: a token bucket for each peer, in front of the window of what is handed to libzmq.

OES's rate of a flow (Eq. 19-20) is the least over its two machines of link rate / active flows in that direction. The
receiver says its half in every request (`Header.share`); the server knows the other half. A flow here is all that a
server answers to one client. It is active while a reply of it waits, or while what was sent takes time at its rate:
while the bucket is in debt. Who waits holds no thread. A share of 0 is not paced, and one that is absurdly small is
served at LEAST_RATE: whoever says it slows down nobody but itself.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

LEAST_RATE = 1 << 16  # bytes per second; also where link rate / flows is less
MOST_FLOWS = 4096  # the one that was heard of longest ago is forgotten
LINK_PAYLOAD = 0.94  # of a link's bytes: headers of Ethernet, IP and TCP take 90 of every 1538
_BURST_SECONDS = 0.025  # of its rate that a flow may have saved up: timers are late, and small replies need not wait
_CHUNK_SECONDS = 0.02  # that a chunk of a reply should take at the flow's rate
_LEAST_CHUNK = 1 << 16
_TURN_SECONDS = 0.02  # after which a job that was let go and sent nothing is taken for gone


def chunk_bytes(rate: float, most: int) -> int:
    """How large a chunk of a reply should be at so many bytes per second; `most` where it is not paced (0).

    >>> chunk_bytes(0, 4 << 20) == 4 << 20
    True
    >>> chunk_bytes(10e6, 4 << 20)
    200000
    """
    return most if rate <= 0 else min(most, max(_LEAST_CHUNK, int(rate * _CHUNK_SECONDS)))


class PacedFlow:
    """The bucket of one peer. `tokens` are bytes that may be sent now; below zero, the flow is in debt."""

    __slots__ = ("_at", "_entries", "is_counted", "jobs", "rate", "share", "tokens", "turn_until")

    def __init__(self, share: float, now: float) -> None:
        self.share = share
        self.rate = max(share, LEAST_RATE)
        self.tokens = 0.0
        self.is_counted = False  # among the server's active flows
        self.jobs: set[Any] = set()  # that wait
        self.turn_until = 0.0  # a job was let go and may send until then
        self._entries: list[tuple[int, float, int, Any]] = []  # of the jobs, and of some that wait no more
        self._at = now

    def settle(self, now: float) -> None:
        """Adds the tokens of the time since the last call."""
        self.tokens = min(self.rate * _BURST_SECONDS, self.tokens + self.rate * (now - self._at))
        self._at = now

    @property
    def is_in_debt(self) -> bool:
        return self.tokens <= -1.0  # a whole byte

    @property
    def is_active(self) -> bool:
        return self.is_in_debt or bool(self.jobs)

    def add(self, job: Any) -> None:
        self.jobs.add(job)
        heappush(self._entries, _entry(job))

    def is_before(self, job: Any) -> bool:
        """Whether a job that waits goes before this one."""
        entries = self._entries
        while entries and entries[0][3] not in self.jobs:
            heappop(entries)
        return bool(entries) and entries[0][:3] < _entry(job)[:3]

    def take(self) -> Any:
        """The job whose turn it is: the smallest priority, then the one that came first."""
        while True:
            job = heappop(self._entries)[3]
            if job in self.jobs:
                self.jobs.remove(job)
                return job


def _entry(job: Any) -> tuple[int, float, int, Any]:
    return (job.header.priority, job.arrived, id(job), job)


class ReplyPacer:
    """All flows out of a server. `on_turn(job)` is called, by `release`, for a job that was parked and may go on.

    The server's reading thread calls `release` when `wait` seconds have passed, and is woken by `wake` where that
    becomes less; all else is called by any thread.
    """

    def __init__(
        self, on_turn: Callable[[Any], None], wake: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._on_turn, self._wake, self._clock = on_turn, wake, clock
        self._rate_out = math.inf
        self._flows: OrderedDict[bytes, PacedFlow] = OrderedDict()  # of all peers that are heard of
        self._active: dict[bytes, PacedFlow] = {}
        self._num_waiting = 0
        self._lock = threading.Lock()

    def set_rate_out(self, rate: float | None) -> None:
        """Bytes per second that all flows together may have; None: as many as their receivers take."""
        if rate is not None and not rate > 0:
            raise ValueError(f"rate_out is {rate}; it must be a positive number of bytes per second, or None")
        with self._lock:
            self._advance()
            self._rate_out = math.inf if rate is None else rate
            self._share_out()
        self._wake()

    def tell(self, peer: bytes, share: int, *, is_request: bool = True) -> None:
        """A peer says what it can take. Where it asks for nothing yet (`is_request`), only who is known is noted."""
        forgotten: list[Any] = []
        with self._lock:
            flow = self._flows.get(peer)
            if flow is None:
                if not is_request:
                    return
                if len(self._flows) >= MOST_FLOWS:
                    forgotten = self._forget_oldest()
                self._flows[peer] = PacedFlow(share, self._clock())
                return self._resume(forgotten)
            self._flows.move_to_end(peer)
            if share != flow.share:
                self._settle(flow)
                flow.share = share
                self._share_out()
        if self._num_waiting:
            self._wake()

    def rate_of(self, peer: bytes) -> float:
        """Bytes per second that a peer's next reply has; 0 for one that is not known."""
        with self._lock:
            flow = self._flows.get(peer)
            return 0.0 if flow is None else self._rate_of(flow)

    def park(self, peer: bytes, job: Any) -> bool:
        """True where a job must wait: `on_turn(job)` is called when it need not, unless `unpark` was before."""
        with self._lock:
            flow = self._flows.get(peer)
            if flow is None:
                return False
            self._settle(flow)
            if not flow.is_in_debt and not flow.is_before(job):
                return False
            flow.add(job)
            self._num_waiting += 1
            self._activate(peer, flow)
        self._wake()
        return True

    def unpark(self, peer: bytes, job: Any) -> bool:
        """Whether the job was parked; it is not any more."""
        with self._lock:
            flow = self._flows.get(peer)
            if flow is None or job not in flow.jobs:
                return False
            flow.jobs.remove(job)
            self._num_waiting -= 1
            return True

    def may_send(self, peer: bytes) -> bool:
        """Whether a reply can be sent without waiting for its turn."""
        with self._lock:
            flow = self._flows.get(peer)
            if flow is None:
                return True
            self._settle(flow)
            return not flow.is_active

    def charge(self, peer: bytes, num_bytes: int) -> None:
        """So many bytes were sent to a peer."""
        with self._lock:
            flow = self._flows.get(peer)
            if flow is None:
                return
            self._settle(flow)
            flow.tokens -= num_bytes
            flow.turn_until = 0.0
            if flow.is_active:
                self._activate(peer, flow)
            is_awaited = bool(flow.jobs)
        if is_awaited:
            self._wake()

    def wait(self) -> float:
        """Seconds until `release` has something to do; infinite where nothing waits."""
        if not self._num_waiting:
            return math.inf
        with self._lock:
            self._advance()
            now = self._clock()
            times = [max(-flow.tokens / flow.rate, flow.turn_until - now, 0.0) for flow in self._active.values()]
        return min(times, default=math.inf)

    def release(self) -> None:
        """Lets one job of every flow go on that is not in debt."""
        if not self._num_waiting:
            return
        turned = []
        with self._lock:
            self._advance()
            now = self._clock()
            for flow in self._active.values():
                if flow.jobs and not flow.is_in_debt and now >= flow.turn_until:
                    turned.append(flow.take())
                    flow.turn_until = now + _TURN_SECONDS
            self._num_waiting -= len(turned)
        self._resume(turned)

    def to_json(self) -> dict[str, int]:
        with self._lock:
            self._advance()
            return {"flows": len(self._active), "waiting": self._num_waiting}

    # With the lock

    def _advance(self) -> None:
        """Adds tokens to all active flows; those that are done have none of the server's rate from now on."""
        now = self._clock()
        for flow in self._active.values():
            flow.settle(now)
        done = [peer for peer, flow in self._active.items() if not flow.is_active and now >= flow.turn_until]
        for peer in done:
            self._active.pop(peer).is_counted = False
        if done:
            self._share_out()

    def _settle(self, flow: PacedFlow) -> None:
        """Brings a flow, active or not, and all that are active up to date."""
        self._advance()
        if not flow.is_counted:
            flow.rate = self._rate_of(flow)
            flow.settle(self._clock())

    def _activate(self, peer: bytes, flow: PacedFlow) -> None:
        if not flow.is_counted:
            self._active[peer] = flow
            flow.is_counted = True
            self._share_out()

    def _share_out(self) -> None:
        for flow in self._active.values():
            flow.rate = self._rate_of(flow)

    def _rate_of(self, flow: PacedFlow) -> float:
        num_active = len(self._active) + (not flow.is_counted)
        return max(LEAST_RATE, min(flow.share, self._rate_out / num_active))

    def _forget_oldest(self) -> list[Any]:
        peer, flow = self._flows.popitem(last=False)
        if self._active.pop(peer, None) is not None:
            self._share_out()
        self._num_waiting -= len(flow.jobs)
        jobs, flow.jobs = list(flow.jobs), set()
        return jobs

    def _resume(self, jobs: list[Any]) -> None:
        for job in jobs:
            self._on_turn(job)
