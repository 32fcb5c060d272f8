"""Hands numbered batches from one set of threads to the next, in order and bounded.

Threads of a stage finish in any order; a channel lets them go on in the order of their numbers. Every wait ends when
the channel is closed, and wakes up by itself now and then, so that nothing depends on a signal that was missed.
"""

from __future__ import annotations

import threading
import time
from typing import Any

_WAKE_UP = 2.0  # seconds; the longest any thread sleeps without looking around


class ChannelClosed(Exception):
    """The channel was closed: the thread that waited has nothing left to do."""


class Channel:
    """`put(index, item)` waits while `index` is `depth` or more ahead of what has been taken (None: never)."""

    def __init__(self, depth: int | None) -> None:
        self._depth = depth
        self._items: dict[int, Any] = {}
        self._next = 0  # the number of the item that is taken next
        self._num_taken = self._sum_waiting = self.most_waiting = 0
        self._closed = False
        # Re-entrant: a garbage collection inside the lock may run a finalizer that closes this very channel.
        lock = threading.RLock()
        self._arrived = threading.Condition(lock)
        self._left = threading.Condition(lock)

    def put(self, index: int, item: Any) -> None:
        with self._arrived:
            while not self._closed and self._depth is not None and index >= self._next + self._depth:
                self._left.wait(_WAKE_UP)
            if self._closed:
                raise ChannelClosed
            self._items[index] = item
            if index == self._next:
                self._arrived.notify()

    def take(self, timeout: float | None = None) -> tuple[int, Any]:
        """The next item and its number; TimeoutError when there is none within `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._arrived:
            while not self._closed and self._next not in self._items:
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
            if self._next in self._items:
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
        """How many there were, on average, each time one was taken."""
        return self._sum_waiting / max(1, self._num_taken)
