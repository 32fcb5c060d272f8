"""The plan of a loader: which ways its graph and hardware have, and the graph as each of them wants it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch

from gnnsys.graph import Graph, NodeType
from gnnsys.loader.default_threads import LoadingWork, default_num_threads
from gnnsys.loader.first_batch import FirstBatch, all_tables, largest, tables
from gnnsys.observe import num_local_ranks, num_usable_cores
from gnnsys.ops import HAS_CUDA_KERNELS
from gnnsys.planning import (
    DEVICE,
    GIVEN,
    PINNED,
    PRODUCTS,
    BatchLoad,
    ExecutionPlan,
    Memory,
    Way,
    measure_rates,
    propose_loading_threads,
    propose_places,
)
from gnnsys.sampling import AnyGraph
from gnnsys.store import DeviceCache, MemoryBudget

AUTO = "auto"
_WITH_SUMS = 2  # numbers of loading threads that are also tried with sums made ahead
Visits = Callable[[], Mapping[NodeType, torch.Tensor]]
"""How likely a batch is to hold each node."""


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
    num_threads: int, is_told_threads: bool, is_in_order: bool, first: FirstBatch | None,
) -> ExecutionPlan:  # fmt: skip
    """The ways of a loader of `graph` whose batches go to `target`, to be tried.

    `visits` is None where a sampler of the user's own reads the graph. The loader has `num_threads`, by the user's own
    word (`is_told_threads`) or not; `is_in_order`: functions of the user's are called for every batch, in order.
    `first` is the first batch, None where a sampler of the user's own draws it.
    """
    passed_over: dict[str, str] = {}
    fixed = _why_as_given(graph, target, visits, is_told_threads=is_told_threads, is_in_order=is_in_order)
    if fixed is not None:
        ways, passed_over = [Way()], {"other ways": fixed}
    elif target is None:
        cores = max(1, num_usable_cores() // num_local_ranks(os.environ))
        ways = propose_loading_threads(cores, num_threads)
        if first is not None and first.has_sums:
            ways += [replace(way, sums=(True,)) for way in ways[:_WITH_SUMS]]
        if first is not None:
            is_none = isinstance(first.products, str)
            passed_over[PRODUCTS] = str(first.products) if is_none else "batches stay on the host, which has the rows"
    else:
        assert isinstance(graph, Graph) and visits is not None
        memory = Memory(MemoryBudget.of(target).share(), MemoryBudget.of("cpu").share())
        load = _load_of(graph, visits)
        if first is not None:
            load = replace(load, sums=first.measure_sums(), sampling=first.measure_sampling())
            load = replace(load, products=first.measure_products())
        rates = measure_rates(target, default_num_threads(LoadingWork.HOST, target))
        ways, passed_over = propose_places(
            _num_bytes(graph), is_pinned=graph.is_pinned, memory=memory, load=load, rates=rates
        )
    if fixed is None and first is not None and isinstance(first.sums, str):
        passed_over["sums of the first layer made ahead"] = first.sums
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
    return None if tables(graph) else "the graph has no rows but those of sources of your own"


def check_room(way: Way, device: torch.device | None) -> None:
    """MemoryError where a device has no room any more for what a way takes: training has gone on since it was planned.

    Asked before anything is taken, so that it is not the user's own model that finds no room. What a `MemoryBudget`
    allows was looked at when ways were proposed, and other ways have their part of it meanwhile.
    """
    if device is None or not way.device_bytes:
        return
    free = MemoryBudget.of(device).room()
    if way.device_bytes > free:
        raise MemoryError(f"it takes {way.device_bytes:,} bytes of the device, and {free:,} are free now")


class GraphPlaces:
    """A graph as ways want it. What is there already is shared, and lives as long as a loader that reads it.

    All ways have what the graph has now, whenever they are made: as the loader, they do not see what it is given later.
    """

    def __init__(self, graph: AnyGraph, target: torch.device | None, visits: Visits | None) -> None:
        self._graph = graph.copy() if isinstance(graph, Graph) else graph
        self._target, self._visits = target, visits
        self._there: dict[tuple[str, int], weakref.ref[Graph]] = {}
        self._writes = self._count_writes()

    def place(self, way: Way) -> AnyGraph:
        """MemoryError where the device has no room for it any more."""
        if way.place == GIVEN:
            return self._graph
        key = way.place, way.device_bytes
        there = self._there[key]() if key in self._there else None
        if there is None:
            there = self._make(way)
            self._there[key] = weakref.ref(there)
        return there

    def were_written(self) -> bool:
        """Whether rows were written since this was last asked, as torch counts writes. Copies are then made anew."""
        before, self._writes = self._writes, self._count_writes()
        if before == self._writes:
            return False
        self._there.clear()
        return True

    def _count_writes(self) -> list[int]:
        data = (self._graph.node_data, self._graph.edge_data) if isinstance(self._graph, Graph) else ()
        rows = [rows for arrays in data for of_type in arrays.values() for rows in of_type.values()]
        tables = [each.table if isinstance(each, DeviceCache) else each for each in rows]
        return [each._version for each in tables if isinstance(each, torch.Tensor) and not each.is_inference()]

    def _make(self, way: Way) -> Graph:
        graph, target, visits = self._graph, self._target, self._visits
        assert isinstance(graph, Graph) and target is not None and visits is not None
        if way.place == PINNED:
            return graph.pin_memory()
        check_room(way, target)
        if way.place == DEVICE:
            return graph.to(target)
        pinned = self.place(Way(place=PINNED))
        assert isinstance(pinned, Graph)
        cached = pinned.pin_memory()  # the same tensors, and a dict of its own
        _, node_type, name = largest(tables(cached))
        rows, scores = cached.node_data[node_type][name], visits()[node_type]
        cache = DeviceCache.from_scores(rows, scores, bytes=way.device_bytes, device=target)
        cached.set_node_data(name, cache, node_type)
        return cached


def _load_of(graph: Graph, visits: Visits) -> BatchLoad:
    """By the largest table alone: it is what a cache is made of, and nearly all bytes of a batch."""
    _, node_type, name = largest(all_tables(graph))
    rows = graph.node_data[node_type][name]
    row_bytes = prod(rows.shape[1:]) * rows.dtype.itemsize
    visited = visits()[node_type]
    probability = visited.sort(descending=True).values.cumsum(0)
    in_batch = float(probability[-1]) if probability.numel() else 0.0

    def hit_rate(num_bytes: int) -> float:
        count = min(num_bytes // max(1, row_bytes), probability.numel())
        return float(probability[count - 1]) / in_batch if count > 0 and in_batch else 0.0

    given = None
    if isinstance(rows, DeviceCache):
        is_cached = rows.on_device()[1] >= 0
        given = float(visited.to(is_cached.device)[is_cached].sum()) / in_batch if in_batch else 0.0
    return BatchLoad(int(in_batch * row_bytes), hit_rate, given_hits=given)


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
