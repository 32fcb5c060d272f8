"""A channel that gives out batches group by group: a group is taken when all of it is there, and the next one is put
when all of it was taken. So what comes before it and what comes behind it take turns, each with all cores there are.
"""

from __future__ import annotations

from typing import Any

from gnnsys.pipeline.channel import Channel
from gnnsys.pipeline.stage import BatchGroup


class GroupChannel(Channel):
    """A group has `group.size` batches; fewer where they take `group.most_bytes` before that, and at the source's end.

    One batch is let in however many bytes there are: the next one that is to be taken.
    """

    def __init__(self, group: BatchGroup) -> None:
        super().__init__(None)
        self._group = group
        self._opened = 0  # batches before this number may be taken
        self._ready = 0  # batches before this number are here, or were taken
        self._end: int | None = None
        self._bytes: dict[int, int] = {}  # of those that are here, and of those that wait for room
        self._held = 0  # bytes of those that are here

    def put(self, index: int, item: Any) -> None:
        weigh = self._group.num_bytes
        num_bytes = 0 if weigh is None or item.is_passed_on else weigh(item.item)
        with self._arrived:
            self._bytes[index] = num_bytes
            super().put(index, item)

    def take(self, timeout: float | None = None) -> tuple[int, Any]:
        with self._arrived:  # whoever is told that there is room must find it
            index, item = super().take(timeout)
            self._held -= self._bytes.pop(index)
            return index, item

    def finish(self, count: int | None) -> None:
        """Says that `count` batches are all that will be put; None where there will be more after all."""
        with self._arrived:
            self._end = count
            if self._open():
                self._arrived.notify()

    def _has_room(self, index: int) -> bool:
        if self._next < self._opened or index >= self._opened + self._group.size:
            return False
        return index == self._next or not self._is_heavy()

    def _is_awaited(self, index: int) -> bool:
        self._held += self._bytes[index]
        while self._ready in self._items:
            self._ready += 1
        return self._open()

    def _is_ready(self) -> bool:
        return self._next < self._opened

    def _open(self) -> bool:
        """Opens the next group, where it is complete. Whether there is one to take from."""
        is_complete = self._ready in (self._opened + self._group.size, self._end) or self._is_heavy()
        if self._next == self._opened and is_complete:
            self._opened = self._ready
        return self._is_ready()

    def _is_heavy(self) -> bool:
        return self._group.most_bytes is not None and self._held >= self._group.most_bytes
