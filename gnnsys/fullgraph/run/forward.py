"""The way there: a bin runs when its inputs are there, the earliest layer first, and its rows leave at once.

A bin's result does not depend on when it runs, so whatever is ready may run. Where bins move, the next one is brought
while one computes, and a bin is done when its rows are back.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence

from torch import Tensor

from gnnsys.fullgraph.plan.step_plan import Step
from gnnsys.fullgraph.run.halo_exchange import Exchange
from gnnsys.fullgraph.run.pass_state import Pass


class Forward:
    """Runs the bins of all steps. `x` has rows for core and halo; `halo_is_here` says that those are filled."""

    def __init__(self, state: Pass, exchange: Exchange) -> None:
        self._state, self._exchange = state, exchange
        self._steps, self._schedule = state.ground.steps, state.ground.schedule
        self._missing: list[list[int]] = []  # per step and bin: how much it still waits for
        self._by_bin: list[dict[int, list[int]]] = []  # per step: who waits for a bin of the step before
        self._by_chunk: list[dict[int, list[int]]] = []
        self._ready: list[tuple[int, int]] = []
        self._next: tuple[int, int] | None = None  # what is being brought
        self._left = [len(step.bins) for step in self._steps]

    def run(self, x: Tensor, halo_is_here: bool) -> Tensor:
        peers, state = self._exchange.peers, self._state
        sent_before = sum(peers.bytes_sent)
        state.begin(x)
        self._exchange.begin()
        for s, step in enumerate(self._steps):
            self._await(s, step, halo_is_here)
        if not halo_is_here and self._steps[0].has_halo:
            for number in range(len(self._steps[0].sends)):
                self._exchange.send_rows(0, number)
        heapq.heapify(self._ready)
        with state.moving():
            self._run_bins()
        if not state.wants_grad:
            self._exchange.flush()
        state.times.num_bytes += sum(peers.bytes_sent) - sent_before
        return state.rows[-1]

    def _run_bins(self) -> None:
        mover = self._state.mover
        while sum(self._left):
            is_flying = mover is not None and mover.num_flying > 0
            can_run = bool(self._ready) or self._next is not None
            token = self._exchange.arrival(wait=not (can_run or is_flying))
            if token is not None:
                s, number = self._exchange.take_rows(token)
                self._release(s, self._by_chunk[s].get(number, ()))
            elif can_run:
                self._do(*self._bring())
            else:
                assert mover is not None
                mover.finish()

    def _bring(self) -> tuple[int, int]:
        """The bin that is due, whose inputs are on their way."""
        due, self._next = self._next, None
        if due is None:
            due = heapq.heappop(self._ready)
            self._state.load(*due)
        return due

    def _do(self, s: int, b: int) -> None:
        state, mover = self._state, self._state.mover
        began = time.perf_counter()
        state.compute(s, b, lambda: self._done(s, b))
        state.times.computed(began, False, s, b)
        if mover is None:
            self._done(s, b)
            return
        mover.finish(keep=1)
        if self._ready:
            self._next = self._bring()

    def _done(self, s: int, b: int) -> None:
        """A bin's rows are where they live."""
        self._left[s] -= 1
        if s + 1 < len(self._steps):
            self._send(s, b)
            self._release(s + 1, self._by_bin[s + 1].get(b, ()))
        if self._left[s] == 0:
            self._state.forget(s)

    def _await(self, s: int, step: Step, halo_is_here: bool) -> None:
        """Notes what the bins of a step wait for, and asks for its halo."""
        comes = set(self._exchange.expect_rows(s)) if step.chunks and not (s == 0 and halo_is_here) else set()
        by_bin: dict[int, list[int]] = {}
        by_chunk: dict[int, list[int]] = {}
        missing = []
        for b, (local, chunks) in enumerate(self._openings(step)):
            local = local if s else ()  # the input is there
            chunks = [chunk for chunk in chunks if chunk in comes]
            for number in local:
                by_bin.setdefault(number, []).append(b)
            for number in chunks:
                by_chunk.setdefault(number, []).append(b)
            missing.append(len(local) + len(chunks))
            if missing[-1] == 0:
                self._ready.append((s, b))
        self._missing.append(missing)
        self._by_bin.append(by_bin)
        self._by_chunk.append(by_chunk)

    def _openings(self, step: Step) -> Sequence[tuple[Sequence[int], Sequence[int]]]:
        """What each bin waits for before it may begin: its own inputs, or all of the layer's."""
        if self._schedule.inter_layer and step.stage.norm is None:
            return step.needs
        return [(range(len(step.sends)), range(len(step.chunks)))] * len(step.bins)

    def _release(self, s: int, bins: Sequence[int]) -> None:
        for b in bins:
            self._missing[s][b] -= 1
            if self._missing[s][b] == 0:
                heapq.heappush(self._ready, (s, b))

    def _send(self, s: int, b: int) -> None:
        """Sends a bin's rows, or, where layers are not pipelined, the layer's when it is done."""
        if self._schedule.intra_layer:
            self._exchange.send_rows(s + 1, b)
        elif self._left[s] == 0:
            for number in range(len(self._steps[s].bins)):
                self._exchange.send_rows(s + 1, number)
            if not self._schedule.inter_layer:
                self._exchange.flush()
