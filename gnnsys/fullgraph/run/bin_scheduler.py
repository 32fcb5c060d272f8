"""The one driver of bins, for both ways of a pass: brings what a bin needs, runs it, and lets those follow that waited.

What a bin is on the way there or back, the pass says by `BinWork`. Where bins move, the next one is brought while one
computes, and a bin is done when its results are back where rows live.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, Protocol

from gnnsys.fullgraph.plan.bins import Bin
from gnnsys.fullgraph.run.halo_exchange import Exchange
from gnnsys.fullgraph.run.pass_state import Pass


class BinWork(Protocol):
    """What one way of a pass does with its bins."""

    is_back: bool

    def order(self, here: Bin) -> tuple[int, ...]:
        """Of the bins that may run, the one with the least order runs next. No two bins have the same."""
        ...

    def bring(self, here: Bin) -> None:
        """Begins to bring what a bin is computed from, where bins move."""
        ...

    def compute(self, here: Bin, done: Callable[[], None]) -> None:
        """Runs a bin. Its results are where rows live when this returns or, where bins move, when it calls `done`."""
        ...

    def done(self, here: Bin) -> Iterable[Bin]:
        """Passes on a bin's results, which are where rows live; returns the bins that waited for them."""
        ...

    def receive(self, token: Any) -> Iterable[Bin]:
        """Takes a message that has come; returns the bins that waited for it."""
        ...


class BinScheduler:
    """Runs the bins of all steps from `first_step` on; `wait`, `in_turn` and `expect` say beforehand what for.

    It does not hold the work, which holds it: a pass that is over lets go of its rows at once, and not when Python next
    looks for cycles.
    """

    def __init__(self, state: Pass, exchange: Exchange, first_step: int = 0) -> None:
        self._exchange, self._mover, self._times = exchange, state.mover, state.times
        steps = state.plan.steps
        self.num_left = [len(step.bins) if s >= first_step else 0 for s, step in enumerate(steps)]  # not done, by step
        self._missing = {here: 0 for step in steps[first_step:] for here in step.bins}  # what a bin still waits for
        self._num_undone, self._num_messages = len(self._missing), 0
        self._next_in_turn: dict[Bin, Bin] = {}
        self._ready: list[tuple[tuple[int, ...], Bin]] = []
        self._brought: Bin | None = None  # the bin that runs next, whose inputs are on their way

    def wait(self, bins: Iterable[Bin], times: int = 1) -> None:
        """Each of the bins waits for so much more: bins that are done, or messages."""
        for here in bins:
            self._missing[here] += times

    def in_turn(self, bins: Sequence[Bin]) -> None:
        """The bins run in this order, whatever they wait for."""
        for before, here in pairwise(bins):
            self._next_in_turn[before] = here
            self._missing[here] += 1

    def expect(self, num_messages: int) -> None:
        """So many more messages will come."""
        self._num_messages += num_messages

    def run(self, work: BinWork) -> None:
        """Returns when all bins are done and all messages have come."""
        self._ready = [(work.order(here), here) for here, missing in self._missing.items() if missing == 0]
        heapq.heapify(self._ready)
        while self._num_undone or self._num_messages:
            can_run = bool(self._ready) or self._brought is not None
            is_flying = self._mover is not None and self._mover.num_flying > 0
            token = self._exchange.arrival(wait=not (can_run or is_flying)) if self._num_messages else None
            if token is not None:
                self._num_messages -= 1
                self._release(work, work.receive(token))
            elif can_run:
                self._run(work, self._bring(work))
            else:
                assert self._mover is not None
                self._mover.finish()

    def _bring(self, work: BinWork) -> Bin:
        """The bin that runs next, whose inputs are on their way."""
        here, self._brought = self._brought, None
        if here is None:
            _, here = heapq.heappop(self._ready)
            work.bring(here)
        return here

    def _run(self, work: BinWork, here: Bin) -> None:
        began = time.perf_counter()
        work.compute(here, lambda: self._done(work, here))
        self._times.computed(began, work.is_back, here.step, here.number)
        follower = self._next_in_turn.get(here)
        if follower is not None:
            self._release(work, [follower])
        if self._mover is None:
            self._done(work, here)
            return
        self._mover.finish(keep=1)
        if self._ready:
            self._brought = self._bring(work)

    def _done(self, work: BinWork, here: Bin) -> None:
        self.num_left[here.step] -= 1
        self._num_undone -= 1
        self._release(work, work.done(here))

    def _release(self, work: BinWork, bins: Iterable[Bin]) -> None:
        for here in bins:
            self._missing[here] -= 1
            if self._missing[here] == 0:
                heapq.heappush(self._ready, (work.order(here), here))
