"""A loader whose batches are made by a plan: by one way or another, and the same ones whichever it is.

While a plan is tried, ways take turns over the first batches, and what a batch takes from one `next` to the next is
measured: loading and the user's training together, as they share cores, bus and device. Then the fastest stays, and
what the others have taken is given back.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from gnnsys.graph import Graph, NodeType
from gnnsys.loader.batch import Batch
from gnnsys.loader.default_threads import LoadingWork, default_num_threads
from gnnsys.observe import BatchTrace, num_local_ranks, num_usable_cores
from gnnsys.ops import HAS_CUDA_KERNELS
from gnnsys.pipeline import Pipeline, StageCounters
from gnnsys.planning import (
    DEVICE,
    GIVEN,
    PINNED,
    BatchLoad,
    ComputeThreads,
    ExecutionPlan,
    Memory,
    TurnClock,
    Way,
    measure_rates,
    propose_places,
    propose_splits,
)
from gnnsys.sampling import AnyGraph, ranks_on_device
from gnnsys.seeds import Leftover
from gnnsys.store import DeviceCache, MemoryBudget

AUTO = "auto"
Visits = Callable[[], Mapping[NodeType, torch.Tensor]]
"""How likely a batch is to hold each node."""
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

    def begin_anew(self) -> None:
        """Batches are others from here on, larger ones say: a trial that is not over begins again."""
        self._leave()
        self._clock.forget()
        if self.plan.chosen is None:
            self._num_tried = 0
            self.plan.trial.seconds.clear()

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


def check_made_for(plan: ExecutionPlan, made_for: Mapping[str, Any]) -> None:
    """ValueError where a plan was made for something else."""
    for what, here in made_for.items():
        there = plan.made_for.get(what)
        if there != here:
            raise ValueError(
                f'this plan was made for another {what}: {there!r}, here it is {here!r}. execution="auto" makes one'
            )


def make_plan(
    graph: AnyGraph, target: torch.device | None, visits: Visits | None, made_for: Mapping[str, Any], *,
    num_threads: int, is_told_threads: bool, is_in_order: bool,
) -> ExecutionPlan:  # fmt: skip
    """The ways of a loader of `graph` whose batches go to `target`, to be tried.

    `visits` is None where a sampler of the user's own reads the graph. The loader has `num_threads`, by the user's own
    word (`is_told_threads`) or not; `is_in_order`: functions of the user's are called for every batch, in order.
    """
    passed_over: dict[str, str] = {}
    fixed = _why_as_given(graph, target, visits, is_told_threads=is_told_threads, is_in_order=is_in_order)
    if fixed is not None:
        ways, passed_over = [Way()], {"other ways": fixed}
    elif target is None:
        cores = max(1, num_usable_cores() // num_local_ranks(os.environ))
        ways = propose_splits(cores, num_threads, torch.get_num_threads())
    else:
        assert isinstance(graph, Graph) and visits is not None
        sharing = ranks_on_device(target)
        here = num_local_ranks(os.environ)
        memory = Memory(MemoryBudget.of(target).left() // sharing, MemoryBudget.of("cpu").left() // here)
        load = _load_of(graph, visits)
        rates = measure_rates(target, default_num_threads(LoadingWork.HOST, target))
        ways, passed_over = propose_places(
            _num_bytes(graph), is_pinned=graph.is_pinned, memory=memory, load=load, rates=rates
        )
    return ExecutionPlan(ways, made_for=made_for, passed_over=passed_over)


def _why_as_given(
    graph: AnyGraph, target: torch.device | None, visits: Visits | None, *, is_told_threads: bool, is_in_order: bool
) -> str | None:
    """Why nothing but what the loader does by itself is tried; None where something is."""
    if is_in_order:
        return "functions of your own are called for every batch, in order"
    if not isinstance(graph, Graph):
        return "a graph of parts is placed by gnnsys.open(place=...)"
    if target is None:
        return "num_threads was given" if is_told_threads else None
    if graph.device.type != "cpu":
        return "the graph is on the device already"
    if target.type != "cuda" or not HAS_CUDA_KERNELS:
        return "there are no kernels for this device"
    if visits is None:
        return "your own sampler reads the graph where it is"
    return None if _tables(graph) else "the graph has no rows but those of sources of your own"


class GraphPlaces:
    """A graph as ways want it. What is there already is shared, and lives as long as a loader that reads it."""

    def __init__(self, graph: AnyGraph, target: torch.device | None, visits: Visits | None) -> None:
        self._graph, self._target, self._visits = graph, target, visits
        self._pinned: weakref.ref[Graph] | None = None

    def place(self, way: Way) -> AnyGraph:
        graph = self._graph
        if way.place == GIVEN:
            return graph
        assert isinstance(graph, Graph) and self._target is not None and self._visits is not None
        if way.place == DEVICE:
            return graph.to(self._target)
        pinned = None if self._pinned is None else self._pinned()
        if pinned is None:
            pinned = graph.pin_memory()
            self._pinned = weakref.ref(pinned)
        if way.place == PINNED:
            return pinned
        cached = pinned.pin_memory()  # the same tensors, and a dict of its own
        node_type, name = _largest_table(cached)
        rows, scores = cached.node_data[node_type][name], self._visits()[node_type]
        cache = DeviceCache.from_scores(rows, scores, bytes=way.device_bytes, device=self._target)
        cached.set_node_data(name, cache, node_type)
        return cached


def _load_of(graph: Graph, visits: Visits) -> BatchLoad:
    """By the largest table alone: it is what a cache is made of, and nearly all bytes of a batch."""
    node_type, name = _largest_table(graph)
    rows = graph.node_data[node_type][name]
    row_bytes = rows[:1].nbytes if rows.shape[0] else 0
    probability = visits()[node_type].sort(descending=True).values.cumsum(0)
    in_batch = float(probability[-1]) if probability.numel() else 0.0

    def hit_rate(num_bytes: int) -> float:
        count = min(num_bytes // max(1, row_bytes), probability.numel())
        return float(probability[count - 1]) / in_batch if count > 0 and in_batch else 0.0

    return BatchLoad(int(in_batch * row_bytes), hit_rate)


def _tables(graph: Graph) -> list[tuple[int, NodeType, str]]:
    """Rows of nodes that are tensors: bytes, type and name."""
    return [
        (rows.nbytes, node_type, name)
        for node_type, arrays in graph.node_data.items()
        for name, rows in arrays.items()
        if isinstance(rows, torch.Tensor)
    ]


def _largest_table(graph: Graph) -> tuple[NodeType, str]:
    _, node_type, name = max(_tables(graph), key=lambda table: (table[0], str(table[1:])))
    return node_type, name


def _num_bytes(graph: Graph) -> int:
    """Of structure and tensors of rows."""
    arrays = [a for data in (graph.node_data, graph.edge_data) for of in data.values() for a in of.values()]
    rows = sum(a.nbytes for a in arrays if isinstance(a, torch.Tensor))
    structure = [t for edge_type in graph.edge_types for t in vars(graph.csc(edge_type)).values()]
    return rows + sum(t.nbytes for t in structure if isinstance(t, torch.Tensor))


def hardware(target: torch.device | None) -> dict[str, Any]:
    """What a plan depends on beside the loader."""
    name = torch.cuda.get_device_name(target) if target is not None and target.type == "cuda" else str(target or "cpu")
    return {"device": name, "cores": num_usable_cores(), "torch": str(torch.__version__)}
