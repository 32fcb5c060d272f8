"""What each client holds at a server: unanswered requests, their bytes, and replies that are not sent yet.

A client here is a connection, or several whose names begin alike: its lanes. One that holds too much is refused (BUSY)
or has to wait; the others are not held up.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from gnnsys.comm.wire import Limits

CLIENT_NAME_BYTES = 14  # of a connection's name say whose it is; those behind them tell the client's lanes apart
WINDOW_BYTES = 64 << 20  # of replies to one client, handed to libzmq and not sent yet


def client_of(identity: bytes) -> bytes:
    """The client that a connection belongs to. Names of strangers may be shorter, and are their own clients."""
    return identity[:CLIENT_NAME_BYTES]


def peer_of(identity: bytes) -> bytes:
    """The same without the traffic class: what says how much it can take speaks for all of a client's connections."""
    return identity[: CLIENT_NAME_BYTES - 1]


class _Sent(weakref.ref):  # type: ignore[type-arg]
    """A buffer that was handed to libzmq, which drops it once it is sent."""

    __slots__ = ("num_bytes",)
    num_bytes: int


class SendWindow:
    """Counts the bytes of buffers that libzmq has not sent yet. A buffer counts until its array object is collected.

    A job that finds it full registers itself with `park`. `on_room` is called with each parked job, in whatever thread
    made room, unless `unpark` was called first.
    """

    def __init__(self, max_bytes: int, on_room: Callable[[Any], None]) -> None:
        self.bytes = 0
        self._max_bytes = max_bytes
        self._on_room = on_room
        self._parked: dict[Any, None] = {}
        self._sent: dict[int, _Sent] = {}  # weakref.finalize costs twice as much, per chunk of a reply
        self._lock = threading.RLock()  # re-entrant: finalizers run anywhere

    def enter(self, buffer: np.ndarray) -> None:
        sent = _Sent(buffer, self._leave)
        sent.num_bytes = num_bytes = buffer.nbytes
        with self._lock:
            self.bytes += num_bytes
            self._sent[id(sent)] = sent

    @property
    def is_full(self) -> bool:
        return self.bytes >= self._max_bytes

    def park(self, job: Any) -> bool:
        """True where there is no room: `on_room(job)` is then called when there is."""
        if not self.is_full:
            return False
        with self._lock:
            if self.bytes < self._max_bytes:
                return False
            self._parked[job] = None
            return True

    def unpark(self, job: Any) -> bool:
        """Whether the job was parked; it is not any more."""
        with self._lock:
            return self._parked.pop(job, self) is None

    def _leave(self, sent: _Sent) -> None:
        with self._lock:
            del self._sent[id(sent)]
            self.bytes -= sent.num_bytes
            if self.bytes >= self._max_bytes or not self._parked:
                return
            waiting, self._parked = self._parked, {}
        for job in waiting:
            self._on_room(job)


class ClientQuota:
    """What one client holds."""

    __slots__ = ("bytes", "requests", "window")

    def __init__(self, window: SendWindow) -> None:
        self.requests = 0
        self.bytes = 0
        self.window = window


class ClientQuotas:
    """What every client holds, by its name (`client_of`). Not locked: the server holds its lock around every call."""

    def __init__(self, limits: Limits, on_room: Callable[[Any], None]) -> None:
        self.bytes = 0
        self._joint_bytes = 0  # of them
        self._limits = limits
        self._on_room = on_room
        self._quotas: dict[bytes, ClientQuota] = {}

    def of(self, client: bytes) -> ClientQuota:
        quota = self._quotas.get(client)
        if quota is None:
            quota = self._quotas[client] = ClientQuota(SendWindow(WINDOW_BYTES, self._on_room))
        return quota

    def enter(self, quota: ClientQuota, num_bytes: int, *, is_joint: bool = False) -> str | None:
        """Counts a request; the reason to refuse it, or None. Either way `leave` must be called for it.

        A request is admitted while what is held is below the limit, so one that is larger than the limit is admitted
        alone. Requests that are answered once all ranks have sent theirs (`is_joint`) do not count towards the limit
        over all clients: refusing one would hold up all ranks.
        """
        limits, held, of_all = self._limits, quota.bytes, self.bytes - self._joint_bytes
        quota.requests += 1
        quota.bytes += num_bytes
        self.bytes += num_bytes
        self._joint_bytes += num_bytes if is_joint else 0
        if quota.requests > limits.max_client_requests:
            return f"{limits.max_client_requests} requests of this client are unanswered already"
        if held >= limits.max_client_bytes:
            return f"requests of this client with {held} bytes are unanswered already"
        if not is_joint and of_all >= limits.max_bytes:
            return f"requests with {of_all} bytes are unanswered already"
        return None

    def has_room(self, client: bytes) -> bool:
        """Whether a small request of a client could be answered now: `enter` admits it, and its replies are taken."""
        limits, quota = self._limits, self._quotas.get(client)
        if self.bytes - self._joint_bytes >= limits.max_bytes:
            return False
        return quota is None or (
            quota.requests < limits.max_client_requests
            and quota.bytes < limits.max_client_bytes
            and not quota.window.is_full
        )

    def leave(self, client: bytes, num_bytes: int, *, is_joint: bool = False) -> None:
        """A request has been answered."""
        quota = self._quotas[client]
        quota.requests -= 1
        quota.bytes -= num_bytes
        self.bytes -= num_bytes
        self._joint_bytes -= num_bytes if is_joint else 0
        if not quota.requests and not quota.window.bytes:
            del self._quotas[client]

    def sweep(self) -> None:
        """Forgets clients that hold nothing: their last reply was still being sent when `leave` was called."""
        for client in [c for c, each in self._quotas.items() if not each.requests and not each.window.bytes]:
            del self._quotas[client]

    def __len__(self) -> int:
        return len(self._quotas)
