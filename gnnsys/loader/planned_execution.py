"""A loader whose batches are made by a plan: by one way or another, and the same ones whichever it is.

While a plan is tried, ways take turns over the first batches, and what a batch takes from one `next` to the next is
measured: loading and the user's training together, as they share cores, bus and device. Then the fastest stays, and
what the others have taken is given back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from gnnsys.loader.batch import Batch
from gnnsys.observe import BatchTrace
from gnnsys.pipeline import Pipeline, StageCounters
from gnnsys.planning import ComputeThreads, ExecutionPlan, TurnClock, Way
from gnnsys.seeds import Leftover

OpenPipeline = Callable[[int], Pipeline]
"""The pipeline of a way, whose next batch is the one at a position."""


class WayLoader(NamedTuple):
    """One way that a loader can go.

    `open` begins at a position, `close` ends its threads, `take_over` tells it of an epoch that was dealt anew, `trace`
    has the records of its batches.
    """

    open: OpenPipeline
    close: Callable[[], None]
    take_over: Callable[[Leftover | None], None]
    trace: Callable[[], list[BatchTrace]]


class PlannedExecution:
    """Carries out a plan. `make` makes a way's loader; `device` is where batches arrive, None for the host.

    A trial counts the batches that were given out. A turn that is broken off begins anew.
    """

    def __init__(self, plan: ExecutionPlan, make: Callable[[Way], WayLoader], device: torch.device | None) -> None:
        self.plan, self._make = plan, make
        self._num_tried = 0
        self._loaders: dict[int, WayLoader] = {}
        self._current: int | None = None
        self._pipeline: Pipeline | None = None
        self._clock = TurnClock(device)
        self._threads = ComputeThreads()
        self._position, self._begins = 0, False

    def at(self, position: int) -> PlannedExecution:
        """Goes on with the batch at a position: an iterator over batches."""
        if position != self._position:
            self._break_off()
        self._clock.skip()
        self._position, self._begins = position, True
        return self

    def __iter__(self) -> PlannedExecution:
        return self

    def __next__(self) -> Batch:
        trial, number = self.plan.trial, self._num_tried
        if self.plan.chosen is None and number >= trial.num_batches:
            self._settle()
        if self.plan.chosen is not None:
            return self._next_by(self.plan.chosen)
        way = trial.way_of(number)
        self._clock.enter()
        batch = self._next_by(way)
        self._clock.leave()
        if self._current == way and way not in trial.refused:
            if number % trial.turn == trial.warm - 1:
                self._clock.begin()
            elif trial.is_last(number) and (seconds := self._clock.end(trial.measured)) is not None:
                trial.add(way, seconds)
        self._num_tried += 1
        return batch

    def _next_by(self, way: int) -> Batch:
        """The next batch by a way; by the first one, where this one turns out to be none."""
        try:
            batch: Batch = next(self._go(way))
        except (MemoryError, torch.OutOfMemoryError) as error:
            if way == 0 or self.plan.chosen is not None:
                raise
            self._refuse(way, error)
            batch = next(self._go(0))
        self._position += 1
        return batch

    def _go(self, way: int) -> Pipeline:
        if way in self.plan.trial.refused:
            way = 0
        if way != self._current:
            self._leave()
            if way not in self._loaders:
                try:
                    self._loaders[way] = self._make(self.plan.ways[way])
                except (MemoryError, RuntimeError, ValueError) as error:  # out of memory, above all
                    if way == 0:
                        raise
                    self._refuse(way, error)
                    return self._go(0)
            self._current = way
        self._threads.use(self.plan.ways[way].compute_threads)
        pipeline = self._pipeline
        if pipeline is None or self._begins or pipeline.is_closed or pipeline.position != self._position:
            pipeline = self._pipeline = self._loaders[way].open(self._position)
        self._begins = False
        return pipeline

    def _refuse(self, way: int, error: BaseException) -> None:
        self.plan.trial.refuse(way, (str(error) or repr(error)).splitlines()[0])
        self._leave()
        if way in self._loaders:
            self._loaders.pop(way).close()

    def _settle(self) -> None:
        """Chooses a way, and gives back what the others have."""
        self.plan.choose()
        if self._current != self.plan.chosen:
            self._leave()
        self._drop_others()

    def _drop_others(self) -> None:
        for way in [way for way in self._loaders if way != self.plan.chosen]:
            self._loaders.pop(way).close()

    def _break_off(self) -> None:
        """Has the turn begin anew: its batches do not follow each other."""
        self._clock.forget()
        self._num_tried -= self._num_tried % self.plan.trial.turn

    def _leave(self) -> None:
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None
        self._current = None
        self._threads.release()

    def take_over(self, leftover: Leftover | None) -> None:
        """Tells all ways of an epoch that was dealt anew; those that are made later are told when they are."""
        self._leave()
        for loader in self._loaders.values():
            loader.take_over(leftover)

    def counters(self) -> dict[str, StageCounters]:
        return {} if self._pipeline is None else self._pipeline.counters()

    def trace(self) -> list[BatchTrace]:
        """Records of the batches of all ways, by their number."""
        return sorted((r for loader in self._loaders.values() for r in loader.trace()), key=lambda record: record.batch)

    def close(self) -> None:
        """Ends the threads of all ways, and gives torch back those that it had. Idempotent; `at` begins again."""
        self._leave()
        for loader in self._loaders.values():
            loader.close()

    def state_dict(self) -> dict[str, Any]:
        return {"plan": self.plan.to_json(), "num_tried": self._num_tried}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with a plan as it was; one of other hardware is left aside, and this one is tried from there."""
        plan = ExecutionPlan.from_json(state["plan"])
        self._leave()
        self._clock.forget()
        self._num_tried = 0
        if plan.made_for == self.plan.made_for and plan.ways == self.plan.ways:
            self.plan.take_results(plan)  # memory that ways take is that of here and now
            self._num_tried = int(state["num_tried"])
            self._num_tried -= self._num_tried % plan.trial.turn
        if self.plan.chosen is not None:
            self._drop_others()
