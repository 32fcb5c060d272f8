"""A loader whose batches are made by a plan: by one way or another, and the same ones whichever it is.

While a plan is tried, ways take turns over the first batches, and what a batch takes from one `next` to the next is
measured: loading and the user's training together, as they share cores, bus and device. Then the fastest stays, and
what the others have taken is given back.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gnnsys.graph import Graph, NodeType
from gnnsys.loader.batch import Batch
from gnnsys.loader.default_threads import LoadingWork, default_num_threads
from gnnsys.observe import num_local_ranks, num_usable_cores
from gnnsys.ops import HAS_CUDA_KERNELS
from gnnsys.pipeline import Pipeline, StageCounters
from gnnsys.planning import (
    CACHED,
    DEVICE,
    GIVEN,
    PINNED,
    BatchLoad,
    ExecutionPlan,
    Memory,
    Way,
    measure_rates,
    propose_places,
    propose_splits,
)
from gnnsys.sampling import AnyGraph, ranks_on_device
from gnnsys.store import DeviceCache, MemoryBudget

AUTO = "auto"
Visits = Callable[[], Mapping[NodeType, torch.Tensor]]
"""How likely a batch is to hold each node."""
OpenPipeline = Callable[[int], Pipeline]
"""The pipeline of a way, whose next batch is the one at a position."""


class WayLoader:
    """One way that a loader can go: `open` begins at a position, `close` gives back what it has taken."""

    def __init__(self, open: OpenPipeline, close: Callable[[], None]) -> None:
        self.open, self.close = open, close


class PlannedExecution:
    """Carries out a plan. `make` makes a way's loader; `device` is where batches arrive, None for the host.

    `start` is the position of the trial's first batch: which way makes a batch depends on its position alone.
    """

    def __init__(self, plan: ExecutionPlan, make: Callable[[Way], WayLoader], device: torch.device | None) -> None:
        self.plan, self._make, self._device = plan, make, device
        self.start: int | None = None
        self._loaders: dict[int, WayLoader] = {}
        self._current: int | None = None
        self._pipeline: Pipeline | None = None
        self._clock = _TurnClock(device)
        self._threads = torch.get_num_threads()
        self._position, self._begins = 0, False

    def at(self, position: int) -> PlannedExecution:
        """Goes on with the batch at a position: an iterator over batches."""
        if self.start is None:
            self.start = position
        if self._pipeline is not None and (self._pipeline.is_closed or self._pipeline.position != position):
            self._clock.forget()
        self._clock.pause()
        self._position, self._begins = position, True
        return self

    def __iter__(self) -> PlannedExecution:
        return self

    def __next__(self) -> Batch:
        assert self.start is not None
        number, trial = self._position - self.start, self.plan.trial
        if self.plan.chosen is None and number >= trial.num_batches:
            self._settle()
        tries = self.plan.chosen is None
        way = trial.way_of(number) if tries else self.plan.chosen
        assert way is not None
        if tries and trial.is_first(number):
            self._clock.forget()
        pipeline = self._go(way)
        self._clock.go_on()
        batch: Batch = next(pipeline)
        self._position += 1
        if tries and self._current == way:
            if number % trial.turn == trial.warm - 1:
                self._clock.begin()
            elif trial.counts(number):
                self._clock.count()
                if trial.is_last(number) and (seconds := self._clock.end()) is not None:
                    trial.add(way, seconds)
        self._clock.leave()
        return batch

    def _go(self, way: int) -> Pipeline:
        """The pipeline of a way at the position; of the first way, where this one turns out to be none."""
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
                    self.plan.trial.refuse(way, str(error).splitlines()[0])
                    return self._go(0)
            threads = self.plan.ways[way].compute_threads
            torch.set_num_threads(self._threads if threads is None else threads)
            self._current = way
        pipeline = self._pipeline
        if pipeline is None or self._begins or pipeline.is_closed or pipeline.position != self._position:
            pipeline = self._pipeline = self._loaders[way].open(self._position)
        self._begins = False
        return pipeline

    def _settle(self) -> None:
        """Chooses a way, and gives back what the others have."""
        self.plan.choose()
        chosen = self.plan.chosen
        if self._current != chosen:
            self._leave()
        for way in [way for way in self._loaders if way != chosen]:
            self._loaders.pop(way).close()

    def _leave(self) -> None:
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None
        self._current = None

    def counters(self) -> dict[str, StageCounters]:
        return {} if self._pipeline is None else self._pipeline.counters()

    def close(self) -> None:
        """Ends the threads of all ways, and gives torch back those that it had. Idempotent; `at` begins again."""
        self._leave()
        for loader in self._loaders.values():
            loader.close()
        torch.set_num_threads(self._threads)

    def state_dict(self) -> dict[str, Any]:
        return {"plan": self.plan.to_json(), "start": self.start}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with a plan as it was; one of other hardware is left aside, and this one is tried from there."""
        plan = ExecutionPlan.from_json(state["plan"])
        self._leave()
        if plan.made_for == self.plan.made_for and plan.ways == self.plan.ways:
            self.plan, self.start = plan, state["start"]
        else:
            self.start = None


class _TurnClock:
    """Seconds per batch from one moment to another, without what passes between two epochs."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self.forget()
        self._left_at: float | None = None
        self._is_paused = False

    def forget(self) -> None:
        self._began: float | None = None
        self._away, self._num = 0.0, 0

    def begin(self) -> None:
        self.forget()
        self._began = self._now()

    def count(self) -> None:
        self._num += 1

    def end(self) -> float | None:
        if self._began is None or self._num == 0:
            return None
        seconds = self._now() - self._began - self._away
        return seconds / self._num if seconds > 0 else None

    def pause(self) -> None:
        """An epoch ends or begins: what happens until the next batch is asked for does not count."""
        self._is_paused = True

    def go_on(self) -> None:
        if self._is_paused and self._left_at is not None:
            self._away += time.perf_counter() - self._left_at
            self._num -= self._num > 0  # the batch that was trained on meanwhile
        self._is_paused = False

    def leave(self) -> None:
        """The user has a batch."""
        self._left_at = time.perf_counter()

    def _now(self) -> float:
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def check_made_for(plan: ExecutionPlan, made_for: Mapping[str, Any]) -> None:
    """ValueError where a plan was made for something else."""
    for what, here in made_for.items():
        there = plan.made_for.get(what)
        if there != here:
            raise ValueError(
                f'this plan was made for another {what}: {there!r}, here it is {here!r}. execution="auto" makes one'
            )


def make_plan(
    graph: AnyGraph, target: torch.device | None, visits: Visits | None, made_for: Mapping[str, Any]
) -> ExecutionPlan:
    """The ways of a loader of `graph` whose batches go to `target`, to be tried.

    `visits` is None where a sampler of the user's own reads the graph: then it stays where it is.
    """
    passed_over: dict[str, str] = {}
    if target is None:
        cores = max(1, num_usable_cores() // num_local_ranks(os.environ))
        ways = propose_splits(cores, default_num_threads(LoadingWork.HOST), torch.get_num_threads())
    elif not isinstance(graph, Graph):
        ways, passed_over = [Way()], {"other places": "a graph of parts is placed by gnnsys.open(place=...)"}
    elif graph.device.type != "cpu":
        ways, passed_over = [Way()], {"other places": "the graph is on the device already"}
    elif target.type != "cuda" or not HAS_CUDA_KERNELS:
        ways, passed_over = [Way()], {"other places": "there are no kernels for this device"}
    elif visits is None:
        ways, passed_over = [Way()], {"other places": "your own sampler reads the graph where it is"}
    elif not _tables(graph):
        ways, passed_over = [Way()], {"other places": "the graph has no rows but those of sources of your own"}
    else:
        sharing = ranks_on_device(target)
        here = num_local_ranks(os.environ)
        memory = Memory(MemoryBudget.of(target).left() // sharing, MemoryBudget.of("cpu").left() // here)
        load = _load_of(graph, visits)
        rates = measure_rates(target, default_num_threads(LoadingWork.HOST, target))
        ways, passed_over = propose_places(
            _num_bytes(graph), is_pinned=graph.is_pinned, memory=memory, load=load, rates=rates
        )
    return ExecutionPlan(ways, made_for=made_for, passed_over=passed_over)


def placed_graph(graph: AnyGraph, way: Way, target: torch.device | None, visits: Visits | None) -> AnyGraph:
    """The graph as a way wants it. What is there already is shared."""
    if way.place == GIVEN:
        return graph
    assert isinstance(graph, Graph) and target is not None and visits is not None
    if way.place == DEVICE:
        return graph.to(target)
    assert way.place in (PINNED, CACHED)
    pinned = graph.pin_memory()
    if way.place == CACHED:
        node_type, name = _largest_table(pinned)
        rows = pinned.node_data[node_type][name]
        scores = visits()[node_type]
        pinned.set_node_data(
            name, DeviceCache.from_scores(rows, scores, bytes=way.device_bytes, device=target), node_type
        )
    return pinned


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
    return {"device": name, "cores": num_usable_cores(), "torch": torch.__version__}
