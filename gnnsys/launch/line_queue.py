"""A queue between threads in which lines wait for room, and nothing else does.

A job may print faster than anybody reads. Its lines then wait, and the ranks that print them; answers and ends do not.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from typing import Generic, TypeVar

MOST_BYTES = 2 << 20
AROUND_BYTES = 600  # of memory that a short line takes beside its letters
T = TypeVar("T")


class LineQueue(Generic[T]):
    """First in, first out."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most, self._bytes = most_bytes, 0
        self._items: deque[tuple[T, int]] = deque()
        self._is_closed, self._changed = False, threading.Condition()

    def put(self, item: T) -> None:
        with self._changed:
            self._items.append((item, 0))
            self._changed.notify_all()

    def put_line(self, item: T, length: int) -> None:
        """Waits while there are too many bytes of lines. What comes after `close_to_lines` is dropped."""
        num_bytes = length + AROUND_BYTES
        with self._changed:
            while self._bytes > self._most and not self._is_closed:
                self._changed.wait()
            if not self._is_closed:
                self._items.append((item, num_bytes))
                self._bytes += num_bytes
                self._changed.notify_all()

    def get(self, timeout: float | None = None) -> T:
        """queue.Empty where nothing has come within `timeout` seconds."""
        with self._changed:
            if not self._items and not self._changed.wait_for(lambda: bool(self._items), timeout):
                raise queue.Empty
            item, num_bytes = self._items.popleft()
            was_full = self._bytes > self._most
            self._bytes -= num_bytes
            if was_full:
                self._changed.notify_all()
            return item

    @property
    def is_full(self) -> bool:
        """Whether lines wait."""
        with self._changed:
            return not self._is_closed and self._bytes > self._most

    def clear(self) -> None:
        with self._changed:
            self._items.clear()
            self._bytes = 0
            self._changed.notify_all()

    def close_to_lines(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
