"""Optimizer steps of all ranks, matched: a step is applied when every rank's gradients have come, in rank order.

So what a step does never depends on who was first. A rank that does not come is named to those that wait for it, a
little before their own deadline, and what they brought is withdrawn.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gnnsys.comm import Reply

_MAX_RANKS = 1 << 16
_MARGIN_SECONDS = 1.0  # an answer sent so long before the deadline is sure to arrive in time


@dataclass(eq=False)
class Contribution:
    """What one rank brings to a step: (part, row numbers in it, gradients), perhaps none."""

    rank: int
    world_size: int
    optimizer: dict[str, Any]
    items: list[tuple[int, Tensor, Tensor]]
    answer: Future[Reply] = field(default_factory=Future)


class Rounds:
    """The steps of one table that wait for ranks. `apply` is called with one contribution per rank, in rank order.

    Not locked: the table's lock is held around every call.
    """

    def __init__(self, name: str, apply: Callable[[Sequence[Contribution]], None]) -> None:
        self._name, self._apply = name, apply
        self._queues: dict[int, deque[Contribution]] = {}

    def add(self, new: Contribution) -> None:
        """Queues a contribution and applies every step that is complete with it."""
        if not 0 <= new.rank < new.world_size <= _MAX_RANKS:
            raise ValueError(f"rank must be in [0, world_size), got {new.rank} of {new.world_size}")
        self._queues.setdefault(new.rank, deque()).append(new)
        while all(self._queues.get(rank) for rank in range(new.world_size)):
            self._finish([self._queues[rank].popleft() for rank in range(new.world_size)])

    def withdraw(self, late: Contribution, waited: float) -> None:
        """Gives up a step that is still incomplete; nothing where it was applied."""
        queue = self._queues.get(late.rank, deque())
        if late not in queue:
            return
        place = queue.index(late)
        missing = [r for r in range(late.world_size) if len(self._queues.get(r, ())) <= place]
        queue.remove(late)
        late.answer.set_exception(
            TimeoutError(
                f"step of table {self._name!r}: no gradients came from rank {', '.join(map(str, missing))} within "
                f"{waited:.1f} s: every rank must call step() as often as the others, with or without gradients"
            )
        )

    def fail(self, error: Exception) -> None:
        """Fails everything that waits."""
        for queue in self._queues.values():
            while queue:
                queue.popleft().answer.set_exception(error)

    def _finish(self, contributions: list[Contribution]) -> None:
        try:
            first = contributions[0]
            for other in contributions:
                if other.optimizer != first.optimizer or other.world_size != first.world_size:
                    raise ValueError(
                        f"step of table {self._name!r}: rank {other.rank} asks for {other.optimizer} on "
                        f"{other.world_size} ranks, rank 0 for {first.optimizer} on {first.world_size}: give every "
                        "rank the same optimizer"
                    )
            self._apply(contributions)
        except Exception as error:
            for contribution in contributions:
                contribution.answer.set_exception(error)
            return
        for contribution in contributions:
            contribution.items = []  # received messages: not kept for as long as the answer is
            contribution.answer.set_result(Reply())


class Deadlines:
    """Calls what was asked for when its time comes, in one thread that starts with the first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, remaining: float, callback: Callable[[], None]) -> None:
        """Calls `callback` shortly before `remaining` seconds are over."""
        when = time.monotonic() + max(remaining / 2, remaining - _MARGIN_SECONDS)
        with self._changed:
            heapq.heappush(self._heap, (when, next(self._order), callback))
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="gnnsys-deadlines", daemon=True)
                self._thread.start()
            if self._heap[0][2] is callback:
                self._changed.notify()

    def close(self) -> None:
        """Forgets what has not been called, and ends the thread."""
        with self._changed:
            self._closed = True
            self._heap.clear()
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=10)

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                wait = self._heap[0][0] - time.monotonic() if self._heap else 3600.0
                if wait > 0:
                    self._changed.wait(wait)
                    continue
                _, _, callback = heapq.heappop(self._heap)
            callback()
