"""Which request is served next: the smallest priority first, then client by client, each client's in their order.

So a client with ten thousand requests delays another by one of them. Senders choose priorities themselves, so every
`_EVERY`-th turn goes to the client that has waited longest, whatever its priority: a client that calls everything
urgent starves nobody. Not locked: `WorkerThreads` holds its lock around every call.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Hashable, Set
from typing import Any

_EVERY = 16


class FairQueue:
    """What waits to be served. `put` and `take` cost a few look-ups, however much waits."""

    def __init__(self) -> None:
        self._levels: dict[int, OrderedDict[Hashable, deque[Any]]] = {}  # by priority, then by client, next one first
        self._priorities: list[int] = []  # of the levels, ascending
        self._served: dict[Hashable, int] = {}  # the number of a client's last turn, of those that wait
        self._waiting: dict[Hashable, int] = {}  # levels that a client waits in
        self._turn = 0
        self._size = 0

    def put(self, priority: int, client: Hashable, item: Any, *, first: bool = False) -> None:
        """Queues an item behind its client's others of this priority; with `first`, before them."""
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = OrderedDict()
            insort(self._priorities, priority)
        queue = level.get(client)
        if queue is None:
            queue = level[client] = deque()
            self._waiting[client] = self._waiting.get(client, 0) + 1
        if first:
            queue.appendleft(item)
        else:
            queue.append(item)
        self._size += 1

    def move(self, items: Set[Any], client: Hashable, old: int, new: int) -> None:
        """Gives those of a client's items that wait at priority `old` another one."""
        level = self._levels.get(old)
        queue = None if level is None else level.get(client)
        if queue is None:
            return
        moved = [item for item in queue if item in items]
        left = deque(item for item in queue if item not in items)
        self._size -= len(moved)
        if left:
            self._levels[old][client] = left
        else:
            self._drop(old, client)
        for item in moved:
            self.put(new, client, item)

    def take(self) -> Any:
        """The item whose turn it is; None where nothing waits."""
        if not self._size:
            return None
        self._turn += 1
        if self._turn % _EVERY:
            priority = self._priorities[0]
            client = next(iter(self._levels[priority]))
        else:
            priority, client = self._longest_waiting()
        return self._take_from(priority, client)

    def _longest_waiting(self) -> tuple[int, Hashable]:
        """The client whose last turn is longest ago (or that had none), and its most urgent priority."""
        found = [(p, client) for p in self._priorities for client in self._levels[p]]
        return min(found, key=lambda each: self._served.get(each[1], -1))

    def _take_from(self, priority: int, client: Hashable) -> Any:
        level = self._levels[priority]
        queue = level[client]
        item = queue.popleft()
        self._size -= 1
        self._served[client] = self._turn
        if queue:
            level.move_to_end(client)
            return item
        self._drop(priority, client)
        return item

    def _drop(self, priority: int, client: Hashable) -> None:
        """The last item of a client at this priority has gone."""
        level = self._levels[priority]
        del level[client]
        self._waiting[client] -= 1
        if not self._waiting[client]:  # who comes back has waited for no turn
            del self._waiting[client]
            self._served.pop(client, None)
        if not level:
            del self._levels[priority], self._priorities[bisect_left(self._priorities, priority)]

    def __len__(self) -> int:
        return self._size
