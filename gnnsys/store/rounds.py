"""Optimizer steps of all ranks, matched: a step is applied when every rank's gradients have come, in rank order.

So what a step does never depends on who was first. A rank that does not come is named to those that wait for it, when
it counts as dead or else a little before their own deadline, and what they brought is withdrawn.
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

from gnnsys.comm import Reply, TrainerLost

_MAX_RANKS = 1 << 16
_MAX_PAST = 1024
_RESTART = 1 << 20  # more steps than can be under way
_MARGIN_SECONDS = 1.0  # an answer sent so long before the deadline is sure to arrive in time


@dataclass(eq=False)
class Contribution:
    """What one rank of a job brings to a step: (part, row numbers in it, gradients), perhaps none.

    `is_gradient` is False where the rank had no backward pass: that is not a gradient without rows. With `skip` no
    rank's gradients are applied; with `problem` neither, and every rank is told what it is.
    """

    rank: int
    world_size: int
    optimizer: dict[str, Any]
    items: list[tuple[int, Tensor, Tensor]]
    incarnation: int = 0
    step: int = 0
    is_gradient: bool = True
    skip: bool = False
    problem: str | None = None
    answer: Future[Reply] = field(default_factory=Future)

    def end(self, answer: Reply | Exception) -> None:
        """Answers it. What the rank brought is not kept for as long as the answer is."""
        self.items = []
        if isinstance(answer, Reply):
            self.answer.set_result(answer)
        else:
            self.answer.set_exception(answer)


class StepRounds:
    """The steps of one table that wait for ranks. `apply` is called with one contribution per rank, in rank order, and
    returns the options of the answer to each.

    Ranks number their steps from `next` on, and only equal numbers of one job (incarnation) meet. A step that was given
    up leaves ranks apart that others believe together: no further one is taken until the table is loaded again, or
    another job begins. Not locked: the table's lock is held around every call.
    """

    def __init__(self, name: str, apply: Callable[[Sequence[Contribution]], dict[str, Any] | None]) -> None:
        self.next = 0  # the number of the step that is applied next
        self._name, self._apply = name, apply
        self._waiting: dict[int, dict[int, Contribution]] = {}  # by step and rank
        self._incarnation: int | None = None
        self._past: deque[int] = deque(maxlen=_MAX_PAST)  # incarnations of jobs before this one
        self._given_up: int | None = None
        self._lost: TrainerLost | None = None  # why, where it was a dead rank

    def add(self, new: Contribution) -> None:
        """Queues a contribution and applies every step that is complete with it."""
        if not 0 <= new.rank < new.world_size <= _MAX_RANKS:
            raise ValueError(f"rank must be in [0, world_size), got {new.rank} of {new.world_size}")
        self._begin_job(new.incarnation)
        if self._lost is not None:
            raise self._lost
        what = f"step {new.step} of table {self._name!r} by rank {new.rank}"
        if self._given_up is not None:
            raise TimeoutError(
                f"{what} comes too late: step {self._given_up} was given up because ranks did not come, and the table "
                "must be loaded from a save, on every rank"
            )
        if new.step < self.next or new.rank in self._waiting.get(new.step, {}):
            raise RuntimeError(
                f"{what} cannot be: it came already, or the table was loaded since and this rank did not take part; "
                f"the next one is {self.next}. Every rank must load the table from a save"
            )
        self._waiting.setdefault(new.step, {})[new.rank] = new
        while len(self._waiting.get(self.next, {})) == new.world_size:
            came = self._waiting.pop(self.next)
            self.next += 1
            self._finish([came[rank] for rank in sorted(came)])

    def withdraw(self, late: Contribution, waited: float) -> None:
        """Gives up a step that is still incomplete, and those behind it; nothing where it was applied."""
        if self._waiting.get(late.step, {}).get(late.rank) is not late:
            return
        self._given_up = late.step
        waiting, self._waiting = self._waiting, {}
        for came in waiting.values():
            for contribution in came.values():
                missing = [str(rank) for rank in range(contribution.world_size) if rank not in came]
                contribution.end(
                    TimeoutError(
                        f"step of table {self._name!r}: no gradients came from rank {', '.join(missing)} within "
                        f"{waited:.1f} s: every rank must call step() as often as the others, with or without gradients"
                    )
                )

    def lose_silent(self, silent_for: Callable[[int, int], float], lost_after: float) -> None:
        """Gives up what waits for a rank that was not heard of for so long; all who wait are told the same at once.

        `silent_for(rank, incarnation)` is in seconds.
        """
        for step, came in sorted(self._waiting.items()):
            first = next(iter(came.values()))
            for rank in range(first.world_size):
                if rank not in came and (silence := silent_for(rank, first.incarnation)) >= lost_after:
                    self._given_up = step
                    self._lost = TrainerLost(
                        f"rank {rank} was not heard of for {silence:.1f} s while step {step} of table {self._name!r} "
                        "waited for its gradients: it has ended, is stopped, or cannot be reached. Look at its output, "
                        "and start again from the last checkpoint; raise lost_after if it may pause that long",
                        rank=rank,
                        silent_for=silence,
                    )
                    self.fail(self._lost)
                    return

    def restart(self, why: str) -> None:
        """Fails what waits and takes steps again, under numbers that nothing still under way can have."""
        self.fail(RuntimeError(f"step of table {self._name!r}: {why}"))
        self._given_up = self._lost = None
        self.next += _RESTART

    def fail(self, error: Exception) -> None:
        """Fails everything that waits."""
        waiting, self._waiting = self._waiting, {}
        for came in waiting.values():
            for contribution in came.values():
                contribution.end(error)

    def close(self, error: Exception) -> None:
        """Fails everything that waits and all that comes later; lets go of the table, whose memory waits for that."""
        self.fail(error)

        def refuse(_: Sequence[Contribution]) -> None:
            raise error

        self._apply = refuse

    def _begin_job(self, incarnation: int) -> None:
        if incarnation == self._incarnation:
            return
        if incarnation in self._past:
            raise RuntimeError(f"step of table {self._name!r}: another job has begun to train it, this one is over")
        if self._incarnation is not None:
            self._past.append(self._incarnation)
            self.fail(RuntimeError(f"step of table {self._name!r}: another job has begun to train it"))
        self._incarnation, self._given_up, self._lost = incarnation, None, None

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
            told = self._apply(contributions)
        except Exception as error:
            for contribution in contributions:
                contribution.end(error)
            return
        for contribution in contributions:
            contribution.end(Reply(options=told))


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
        self.after(max(remaining / 2, remaining - _MARGIN_SECONDS), callback)

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        """Calls `callback` when so much time has passed."""
        when = time.monotonic() + seconds
        with self._changed:
            if self._closed:
                return
            heapq.heappush(self._heap, (when, next(self._order), callback))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gnnsys-deadlines", daemon=True)
                self._thread.start()
            if self._heap[0][2] is callback:
                self._changed.notify()

    def stop(self) -> None:
        """Forgets what has not been called, and has the thread end."""
        with self._changed:
            self._closed = True
            self._heap.clear()
            self._changed.notify()

    def close(self) -> None:
        """The same, and waits for the thread."""
        self.stop()
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
