"""The way there: a bin runs when its inputs are there, the earliest layer first, and its rows leave at once.

A bin's result does not depend on when it runs, so whatever is ready may run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from gnnsys.fullgraph.plan.bins import Bin, Chunk
from gnnsys.fullgraph.plan.step_plan import Step
from gnnsys.fullgraph.run.bin_scheduler import BinScheduler
from gnnsys.fullgraph.run.halo_exchange import Exchange
from gnnsys.fullgraph.run.pass_state import Pass


class Forward:
    """Runs the bins of all steps. `x` has rows for core and halo; `halo_is_here` says that those are filled."""

    is_back = False

    def __init__(self, state: Pass, exchange: Exchange) -> None:
        self._state, self._exchange = state, exchange
        self._steps, self._schedule = state.plan.steps, state.plan.schedule
        self._bins = BinScheduler(state, exchange)
        self._waiting: dict[Bin | Chunk, list[Bin]] = {}  # who waits for a bin of the step before, or for a message

    def run(self, x: Tensor, halo_is_here: bool) -> Tensor:
        peers, state = self._exchange.peers, self._state
        sent_before = sum(peers.bytes_sent)
        state.begin(x)
        self._exchange.begin()
        for s, step in enumerate(self._steps):
            self._await(s, step, halo_is_here)
        if not halo_is_here and self._steps[0].has_halo:
            for here in self._steps[0].before:
                self._exchange.send_rows(here)
        with state.moving():
            self._bins.run(self)
        if not state.wants_grad:
            self._exchange.flush()
        state.times.num_bytes += sum(peers.bytes_sent) - sent_before
        return state.rows[-1]

    def order(self, here: Bin) -> tuple[int, ...]:
        return here.step, here.number

    def bring(self, here: Bin) -> None:
        self._state.load(here)

    def compute(self, here: Bin, done: Callable[[], None]) -> None:
        self._state.compute(here, done)

    def done(self, here: Bin) -> Iterable[Bin]:
        """A bin's rows are where they live: sends what others need of them."""
        if here.step + 1 < len(self._steps):
            self._send(here)
        if self._bins.num_left[here.step] == 0:
            self._state.forget(here.step)
        return self._waiting.get(here, ())

    def receive(self, token: Any) -> Iterable[Bin]:
        return self._waiting.get(self._exchange.take_rows(token), ())

    def _await(self, s: int, step: Step, halo_is_here: bool) -> None:
        """Notes what the bins of a step wait for, and asks for its halo."""
        comes = set(self._exchange.expect_rows(s)) if step.chunks and not (s == 0 and halo_is_here) else set()
        self._bins.expect(len(comes))
        for here in step.bins:
            before, chunks = self._awaited(step, here)
            awaited: list[Bin | Chunk] = [*(before if s else ())]  # the input is there
            awaited += [chunk for chunk in chunks if chunk in comes]
            for each in awaited:
                self._waiting.setdefault(each, []).append(here)
            self._bins.wait([here], len(awaited))

    def _awaited(self, step: Step, here: Bin) -> tuple[Sequence[Bin], Sequence[Chunk]]:
        """What a bin waits for before it may begin: its own inputs, or all of the layer's."""
        if self._schedule.inter_layer and step.stage.norm is None:
            return step.needs[here.number]
        return step.before, step.chunks

    def _send(self, here: Bin) -> None:
        """Sends a bin's rows, or, where layers are not pipelined, the layer's when it is done."""
        if self._schedule.intra_layer:
            self._exchange.send_rows(here)
        elif self._bins.num_left[here.step] == 0:
            for each in self._steps[here.step].bins:
                self._exchange.send_rows(each)
            if not self._schedule.inter_layer:
                self._exchange.flush()
