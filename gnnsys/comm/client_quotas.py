"""What each client of a server has there: requests that are not answered, their bytes, and replies it has not taken.

A client here is a connection. One that has too much is refused (BUSY) or waits for itself, and nobody else for it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from gnnsys.comm.wire import Limits

WINDOW_BYTES = 64 << 20  # of replies to one client, handed to libzmq and not sent yet


class _Sent(weakref.ref):  # type: ignore[type-arg]
    """A buffer that was handed to libzmq; it dies when it was sent."""

    __slots__ = ("num_bytes",)
    num_bytes: int


class SendWindow:
    """Counts the bytes of buffers that libzmq has not sent yet: each leaves when its array object dies.

    Whoever finds it full leaves his name with `park`; `on_room` is called with each name, from whatever thread made
    room, unless `unpark` came first.
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

    def park(self, who: Any) -> bool:
        """Whether there is no room, and `who` will be called when there is."""
        if self.bytes < self._max_bytes:
            return False
        with self._lock:
            if self.bytes < self._max_bytes:
                return False
            self._parked[who] = None
            return True

    def unpark(self, who: Any) -> bool:
        """Whether `who` was parked; he is not called now."""
        with self._lock:
            return self._parked.pop(who, self) is None

    def _leave(self, sent: _Sent) -> None:
        with self._lock:
            del self._sent[id(sent)]
            self.bytes -= sent.num_bytes
            if self.bytes >= self._max_bytes or not self._parked:
                return
            waiting, self._parked = self._parked, {}
        for who in waiting:
            self._on_room(who)


class ClientQuota:
    """One client's."""

    __slots__ = ("bytes", "requests", "window")

    def __init__(self, window: SendWindow) -> None:
        self.requests = 0
        self.bytes = 0
        self.window = window


class ClientQuotas:
    """Every client's, by the name of its connection. Not locked: the server's lock is held around every call."""

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
        """Books a request; what speaks against serving it, if anything does. Either way it must `leave`.

        A request is admitted while there is room for one of no size: one that is larger than the limit is, alone.
        What is answered once all ranks have sent theirs (`is_joint`) is not held against the limit over all clients:
        refusing one would hold up all the others.
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
        """Forgets who has nothing here: its last reply was sent after it was booked."""
        for client in [c for c, each in self._quotas.items() if not each.requests and not each.window.bytes]:
            del self._quotas[client]

    def __len__(self) -> int:
        return len(self._quotas)
