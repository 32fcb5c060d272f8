"""A loader whose batches are made by a plan: by one way or another, and the same ones whichever it is.

While a plan is tried, ways take turns over the first batches, and what a batch takes until the next one is given out is
measured: loading and the user's training together, as they share cores, bus and device. Then the fastest stays, and
what the others have taken is given back. What a batch takes goes on being watched: where it drifts, ways take turns
again from the next epoch on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from gnnsys.loader.batch import Batch
from gnnsys.loader.first_products import WayIsNone
from gnnsys.loader.planned import GraphPlaces
from gnnsys.loader.rank_choice import RankChoice, numbered
from gnnsys.observe import BatchTrace
from gnnsys.pipeline import Pipeline, StageCounters
from gnnsys.planning import GIVEN, ComputeThreads, DriftWatch, ExecutionPlan, MeasuredTurn, TurnClock, Way
from gnnsys.seeds import Leftover

LoaderT = TypeVar("LoaderT", covariant=True)
OpenPipeline = Callable[[int], Pipeline]
"""The pipeline of a way, whose next batch is the one at a position."""


_OF_ONE_LOADER = ("self", "graph", "execution", "_way", "__class__")


def options_given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Of the arguments of a loader's `__init__`, its `locals()`, those that a loader which goes another way has too."""
    return {name: value for name, value in arguments.items() if name not in _OF_ONE_LOADER}


@dataclass(frozen=True)
class OtherWays(Generic[LoaderT]):
    """Makes loaders of the same batches that go other ways: of class `face`, with the arguments that were `given`."""

    face: Callable[..., LoaderT]
    places: GraphPlaces
    given: Mapping[str, Any]

    def make(self, way: Way) -> LoaderT:
        given = self.given
        options = dict(given) if way.loading_threads is None else {**given, "num_threads": way.loading_threads}
        if way.has_patterns:
            options["_way"] = way
        elif "model" in options:
            options["model"] = None  # read for sums and products alone
        if "staleness" in options and not any(way.products):
            options["staleness"] = 0  # of products alone
        return self.face(self.places.place(way), **options)


class WayLoader(NamedTuple):
    """One way that a loader can go.

    `open` begins at a position, `close` ends its threads, `take_over` tells it of an epoch that was dealt anew, `trace`
    has the records of its batches.
    """

    open: OpenPipeline
    close: Callable[[], None]
    take_over: Callable[[Leftover | None], None]
    trace: Callable[[], list[BatchTrace]]


class PlannedState(NamedTuple):
    """Of a `PlannedExecution`, as it is read from a checkpoint."""

    plan: ExecutionPlan
    num_tried: int
    watch: DriftWatch | None


class PlannedExecution:
    """Carries out a plan. `make` makes a way's loader; `device` is where batches arrive, None for the host.
    `label` is what a loader has in common with those of other ranks.

    A trial counts the batches that were given out. A turn that is broken off begins anew. A way that was chosen
    beforehand is the user's word, and stays whatever its batches take. `were_written` says whether rows of the graph
    were, since it was last asked: ways that have copies of them are then made anew.
    """

    def __init__(
        self, plan: ExecutionPlan, make: Callable[[Way], WayLoader], device: torch.device | None, label: str = "",
        were_written: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self.plan, self._make, self._were_written = plan, make, were_written
        self._name = numbered(label)
        self._ranks: RankChoice | None = None
        self._num_tried = 0
        self._loaders: dict[int, WayLoader] = {}
        self._current: int | None = None
        self._pipeline: Pipeline | None = None
        self._clock = TurnClock(device)
        self._measured: list[tuple[int, MeasuredTurn]] = []
        self._threads = ComputeThreads()
        self._position, self._begins = 0, False
        self._watch = None if plan.chosen is not None else DriftWatch()
        self._is_closed = False
        if plan.chosen is None:
            plan.trial.begin()  # one that was not over begins anew

    def at(self, position: int, epoch: int) -> PlannedExecution:
        """Goes on with the batch at a position, in an epoch that begins or is gone on with: an iterator over batches.

        Where batches have drifted from what they took, ways take turns again from here on.
        """
        if self._were_written():
            self._drop_copies()
        if position != self._position:
            self._break_off()
        self._clock.skip()
        self._agree()
        drifted = None if self._watch is None or self.plan.chosen is None else self._watch.look()
        if drifted is not None:
            self._try_again(epoch, *drifted)
        self._position, self._begins, self._is_closed = position, True, False
        return self

    def _try_again(self, epoch: int, expected: float, found: float) -> None:
        assert self._watch is not None
        if self.plan.try_again(epoch, expected, found):
            self._stop_asking()
            self._forget_turns()
            self._num_tried = 0
        else:
            self._watch.expect(found)  # no other way is near

    def __iter__(self) -> PlannedExecution:
        return self

    def __next__(self) -> Batch:
        if self._is_closed:
            raise RuntimeError("this loader was closed while it was iterated over: begin another iteration")
        trial = self.plan.trial
        if self.plan.chosen is None and self._num_tried >= trial.num_batches:
            self._end_round()
        chosen, number = self.plan.chosen, self._num_tried
        way = trial.way_of(number) if chosen is None else chosen
        try:
            batch = self._next_by(way)
        except BaseException:
            self._break_off()
            raise
        self._clock.tick()
        if chosen is not None:
            self._look_on()
            return batch
        if self._current == way and way not in trial.refused:
            if number % trial.turn == trial.warm - 1:
                self._clock.begin()
            elif trial.is_last(number) and (turn := self._clock.end(trial.measured)) is not None:
                self._measured.append((way, turn))
        self._num_tried += 1
        return batch

    def _look_on(self) -> None:
        """Adds up what the batches of the chosen way take, window by window."""
        if self._watch is None or (self._clock.is_measuring and self._clock.num_batches < self._watch.window):
            return
        window = self._clock.end(self._watch.window)
        if window is not None and (seconds := window.seconds()) is not None:
            self._watch.add(seconds)
        self._clock.begin(by_host=True)

    def _add_turns(self) -> None:
        """Tells the trial what turns took. A device is waited for, so not in the middle of a turn."""
        for way, turn in self._measured:
            if (seconds := turn.seconds()) is not None:
                self.plan.trial.add(way, seconds)
        self._measured.clear()

    def _forget_turns(self) -> None:
        self._clock.forget()
        self._measured.clear()

    def _next_by(self, way: int) -> Batch:
        """The next batch by a way; by the first one, where this one turns out to be none. A first one that does so is
        gone plainly."""
        try:
            batch: Batch = next(self._go(way))
        except (MemoryError, torch.OutOfMemoryError, WayIsNone) as error:
            if way == 0 and not (isinstance(error, WayIsNone) and self.plan.ways[0].has_patterns):
                raise
            told = _first_line(error)
        else:
            self._position += 1
            return batch
        # Not while the error is handled, which holds what the way has taken.
        if way == 0:
            self.plan.make_first_plain(told)
            self._end_way(0)
        else:
            self._refuse(way, told)
        return self._next_by(0)

    def _go(self, way: int) -> Pipeline:
        if way in self.plan.trial.refused:
            way = 0
        if way != self._current:
            self._leave()
            why_not = None if way in self._loaders else self._add_loader(way)
            if why_not is not None:
                self._refuse(way, why_not)
                return self._go(0)
            self._current = way
        self._threads.use(self.plan.ways[way].compute_threads)
        pipeline = self._pipeline
        if pipeline is None or self._begins or pipeline.is_closed or pipeline.position != self._position:
            pipeline = self._pipeline = self._loaders[way].open(self._position)
        self._begins = False
        return pipeline

    def _add_loader(self, way: int) -> str | None:
        """Makes the loader of a way. Why there is none, where it cannot be made: out of memory, above all."""
        try:
            self._loaders[way] = self._make(self.plan.ways[way])
        except (MemoryError, RuntimeError, ValueError) as error:
            if way == 0:
                raise
            return _first_line(error)
        return None

    def _refuse(self, way: int, reason: str) -> None:
        was_chosen = way == self.plan.chosen
        self.plan.refuse(way, reason)
        if was_chosen:
            self._begin_watch()
        self._end_way(way)

    def _end_way(self, way: int) -> None:
        self._leave()
        if way in self._loaders:
            self._loaders.pop(way).close()

    def _end_round(self) -> None:
        """Ways that have no more turns give back what they have."""
        trial = self.plan.trial
        self._add_turns()
        trial.end_round()
        self._num_tried = 0
        if trial.is_over:
            self._settle()
        else:
            self._drop_others(trial.playing)

    def _settle(self) -> None:
        """Chooses a way, and gives back what the others have."""
        self.plan.choose()
        self._begin_watch()
        drifts = self.plan.drifts
        trial = f"{self._name}/{len(drifts)}/{drifts[-1].epoch if drifts else 0}"
        self._ranks = RankChoice.of_process_group(trial, self.plan.to_json())
        self._drop_others()

    def _agree(self) -> None:
        """Goes the way that is best for all ranks, once all have measured."""
        told = None if self._ranks is None or self.plan.chosen is None else self._ranks.look()
        if told is None or not self.plan.choose_together(told):
            return
        self._begin_watch()
        self._drop_others()

    def _begin_watch(self) -> None:
        """Another way is gone from here on."""
        self._clock.forget()
        if self._watch is not None:
            self.plan.begin_watch(self._watch)

    def _stop_asking(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None

    def _drop_others(self, kept: Sequence[int] | None = None) -> None:
        """Ends the ways that are not `kept`; by default, all but the one that was chosen."""
        keeps = {self.plan.chosen} if kept is None else set(kept)
        if self._current not in keeps:
            self._leave()
        for way in [way for way in self._loaders if way not in keeps]:
            self._loaders.pop(way).close()

    def _drop_copies(self) -> None:
        """Ends the ways that read copies of the graph's rows, which are not what they were."""
        self._leave()
        for way in [way for way in self._loaders if self.plan.ways[way].place != GIVEN]:
            self._loaders.pop(way).close()

    def _break_off(self) -> None:
        """Has the turn begin anew: its batches do not follow each other."""
        if self.plan.chosen is not None:
            return
        self._clock.forget()
        self._num_tried -= self._num_tried % self.plan.trial.turn

    def _leave(self) -> None:
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None
        self._current = None
        self._threads.release()

    def begin_anew(self) -> None:
        """Batches are others from here on, larger ones say: a trial that is not over begins again."""
        self._leave()
        self._forget_turns()
        if self.plan.chosen is None:
            self._num_tried = 0
            self.plan.trial.begin()

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
        self._is_closed = True
        self._leave()
        for loader in self._loaders.values():
            loader.close()

    def state_dict(self) -> dict[str, Any]:
        self._add_turns()
        watch = {} if self._watch is None else {"watch": self._watch.state_dict()}
        return {"plan": self.plan.to_json(), "num_tried": self._num_tried, **watch}

    def read_state(self, state: Mapping[str, Any]) -> PlannedState:
        """What `load_state` takes; ValueError, in one line, for what is no state. Nothing changes."""
        if not isinstance(state, Mapping) or "plan" not in state:
            raise ValueError(f"this is no state of a plan: {state!r:.200}")
        num_tried = state.get("num_tried")
        if isinstance(num_tried, bool) or not isinstance(num_tried, int) or num_tried < 0:
            raise ValueError(f"this is no state of a plan: num_tried is {num_tried!r}")
        plan, watch = ExecutionPlan.from_json(state["plan"]), state.get("watch")  # states of older versions have none
        if "trial" not in state["plan"]:  # those of older versions count batches over all rounds
            plan.trial.round = min(num_tried // plan.trial.num_batches, plan.trial.rounds - 1)
            num_tried -= plan.trial.round * plan.trial.num_batches
        return PlannedState(plan, num_tried, None if watch is None else DriftWatch.from_state(watch))

    def load_state(self, state: PlannedState) -> None:
        """Goes on with a plan as it was; one of other hardware is left aside, and this one is tried from there."""
        if self._watch is None:  # the user's word, or there is but one way
            return
        plan = state.plan
        self._stop_asking()
        self._leave()
        self._forget_turns()
        self._num_tried = 0
        is_same = plan.made_for == self.plan.made_for
        if is_same and plan.ways != self.plan.ways and self.plan.take_ways(plan):
            for way in list(self._loaders):
                self._loaders.pop(way).close()
        if is_same and plan.ways == self.plan.ways:
            self.plan.take_results(plan)  # memory that ways take is that of here and now
            self._num_tried = state.num_tried - state.num_tried % self.plan.trial.turn
            if state.watch is None:
                self.plan.begin_watch(self._watch)
            else:
                self._watch = state.watch
        elif self.plan.chosen is None:
            self.plan.trial.begin()
        if self.plan.chosen is not None:
            self._drop_others()


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]
