"""A bounded queue of numbered batches between the threads of one stage and the next, which keeps their order.

The threads of a stage finish batches in any order; `take` returns them in the order of their numbers. Closing the
channel ends every wait. A waiting thread also wakes up every few seconds, in case a notification was missed.
"""

from __future__ import annotations

import threading
import time
from typing import Any

_WAKE_UP = 2.0  # seconds; the longest that a thread sleeps without checking again


class ChannelClosed(Exception):
    """The channel was closed while a thread waited on it: the thread should end."""


class Channel:
    """`put(index, item)` waits while `index` is `depth` or more ahead of the next item to be taken (None: never)."""

    def __init__(self, depth: int | None) -> None:
        self._depth = depth
        self._items: dict[int, Any] = {}
        self._next = 0  # number of the next item to be taken
        self._num_taken = self._sum_waiting = self.most_waiting = 0
        self._closed = False
        # Re-entrant: a garbage collection inside the lock may run a finalizer that closes this very channel.
        lock = threading.RLock()
        self._arrived = threading.Condition(lock)
        self._left = threading.Condition(lock)

    def put(self, index: int, item: Any) -> None:
        with self._arrived:
            while not self._closed and not self._has_room(index):
                self._left.wait(_WAKE_UP)
            if self._closed:
                raise ChannelClosed
            self._items[index] = item
            if self._is_awaited(index):
                self._arrived.notify()

    def _has_room(self, index: int) -> bool:
        return self._depth is None or index < self._next + self._depth

    def _is_awaited(self, index: int) -> bool:
        """Whether what has just been put lets one be taken."""
        return index == self._next

    def _is_ready(self) -> bool:
        """Whether the next item may be taken."""
        return self._next in self._items

    def would_wait(self) -> bool:
        """Whether `take` would wait now."""
        return not self._is_ready()

    def take(self, timeout: float | None = None) -> tuple[int, Any]:
        """The number of the next item, and the item. TimeoutError if it does not arrive within `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._arrived:
            while not self._closed and not self._is_ready():
                left = _WAKE_UP if deadline is None else min(_WAKE_UP, deadline - time.monotonic())
                if left <= 0:
                    raise TimeoutError
                self._arrived.wait(left)
            if self._closed:
                raise ChannelClosed
            index = self._next
            self._num_taken += 1
            self._sum_waiting += len(self._items)
            self.most_waiting = max(self.most_waiting, len(self._items))
            item = self._items.pop(index)
            self._next += 1
            if self._is_ready():
                self._arrived.notify()
            self._left.notify_all()
            return index, item

    def close(self) -> None:
        with self._arrived:
            self._closed = True
            self._items.clear()
            self._arrived.notify_all()
            self._left.notify_all()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def mean_waiting(self) -> float:
        """The mean number of items in the channel when one was taken."""
        return self._sum_waiting / max(1, self._num_taken)
