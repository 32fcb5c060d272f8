"""Rows of `gnnsys bench execution` where the bus binds: the graph is in pinned host memory, and stays there.

Beside today's default, which has the device gather all rows over the bus, the host makes the sums of the first layer
for some of the batches. What each takes of cores, bus and GPU is printed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from typing import Any

import torch

from gnnsys.bench.case import OURS, Benchmark, Case, NotHere, Side, Versus, value
from gnnsys.bench.gpu.epoch import CACHED, DeviceModel, epoch_seconds, first_epoch, steps_of
from gnnsys.bench.gpu.inputs import (
    FANOUTS,
    NUM_CLASSES,
    NUM_FEATURES,
    batches_of_seeds,
    device,
    graph_sizes,
    is_gpu,
    pinned_graph,
    structure_on,
    synchronize,
)
from gnnsys.bench.lab_jobs import say
from gnnsys.bench.workload import Workload
from gnnsys.graph import EDGE, NODE, Graph
from gnnsys.loader import NeighborLoader
from gnnsys.nn import GraphSAGE
from gnnsys.planning import GIVEN, ExecutionPlan
from gnnsys.sampling import expected_visits
from gnnsys.store import DeviceCache

DEFAULT = "without a plan"
NO_MODEL = "100 features, no model given"  # so no sums: the host can sample
AT_LEAST = {"100 features": 1.15, "100 features, a fifth cached": 1.12, "1024 features": 1.12, NO_MODEL: 0.98}
_WIDE = 1024


class BusBound:
    """A model that trains on batches of a graph in pinned memory."""

    def __init__(self, work: Workload, name: str) -> None:
        if not (is_gpu(work) and torch.cuda.is_available()):
            raise NotHere("it needs a GPU")
        self._work, self.steps, self._says_model = work, steps_of(work), name != NO_MODEL
        width = _WIDE if name.startswith("1024") else NUM_FEATURES
        self._graph = _wide(work) if width == _WIDE else pinned_graph(work)
        if name.endswith("cached"):
            self._graph = _with_cache(work, self._graph, self.steps.all)
        self.model = GraphSAGE(width, 256, 3, NUM_CLASSES)
        self.step = DeviceModel(work, self.model).step

    def loader(self, **options: Any) -> NeighborLoader:
        num_nodes = self._graph.num_nodes()
        seeds = torch.cat(batches_of_seeds(self._work, self.steps.all)) % num_nodes
        return NeighborLoader(
            self._graph, FANOUTS, input_nodes=seeds, batch_size=self._work.sizes.num_seeds, shuffle=True,
            device=device(self._work), across_epochs=False, **options,
        )  # fmt: skip

    def planned(self) -> NeighborLoader:
        """A loader whose trial is over, among the ways that leave the graph where it is."""
        model = self.model if self._says_model else None
        with closing(self.loader(execution="auto", model=model)) as told:
            assert told.plan is not None
            ways = [way for way in told.plan.ways if way.place == GIVEN]
            plan = ExecutionPlan(ways, made_for=told.plan.made_for, passed_over=told.plan.passed_over)
        loader = self.loader(execution=plan, model=model)
        own = loader.plan
        assert own is not None
        while own.chosen is None:
            for batch in loader:
                self.step(batch)
                if own.chosen is not None:
                    break
        say(own.report())
        return loader

    def epoch(self, loader: NeighborLoader) -> Callable[[], float]:
        return lambda: epoch_seconds(first_epoch(loader), self.step, self.steps, self.steps.timed)

    def shares(self, loader: NeighborLoader) -> str:
        """Busy shares of cores and of the GPU while some steps run, and bytes up the bus for a batch."""
        with closing(first_epoch(loader)) as batches:
            for batch in islice(batches, self.steps.first):
                self.step(batch)
            synchronize()
            began, used = time.perf_counter(), sum(os.times()[:2])
            for batch in islice(batches, self.steps.peer):
                self.step(batch)
            synchronize()
            elapsed, used = time.perf_counter() - began, sum(os.times()[:2]) - used
        return f"{used / elapsed:.1f} cores busy, {1000 * elapsed / self.steps.peer:.2f} ms a step"


def bus_bound(work: Workload) -> Iterator[Case]:
    """Epochs whose rows cross the bus."""
    for name, least in AT_LEAST.items():

        def sides(name: str = name) -> dict[str, Side]:
            one = BusBound(work, name)
            chosen, without = one.planned(), one.loader()
            say(f"{name}: without a plan {one.shares(without)}; with one {one.shares(chosen)}")
            return {OURS: Side(one.epoch(chosen)), DEFAULT: Side(one.epoch(without))}

        yield Case(f"execution/bus, {name}", value("s"), sides, (Versus((DEFAULT,), least),), repeats=3)


def _wide(work: Workload) -> Graph:
    """The same graph with wide rows, in pinned memory."""

    def make() -> Graph:
        whole = pinned_graph(work)
        num_nodes = whole.num_nodes()
        narrow = whole.node_data[NODE]["x"]
        rows = torch.empty(num_nodes, _WIDE, device="cpu", pin_memory=True)
        for first in range(0, _WIDE, NUM_FEATURES):
            width = min(NUM_FEATURES, _WIDE - first)
            rows[:, first : first + width] = narrow[:, :width]
        return Graph({NODE: num_nodes}, {EDGE: whole.csc()}, {NODE: {"x": rows, "y": whole.node_data[NODE]["y"]}})

    return work.once("execution/wide graph", make)


def _with_cache(work: Workload, graph: Graph, num_steps: int) -> Graph:
    """A fifth of the rows on the device, those that batches are expected to visit most."""
    seeds = torch.cat(batches_of_seeds(work, num_steps)).to(device(work))
    rows, csc = graph.node_data[NODE], structure_on(work, graph_sizes(work)[1])
    visits = expected_visits(csc, FANOUTS, seeds, batch_size=work.sizes.num_seeds)
    num_bytes = round(CACHED * rows["x"].nbytes) + 4 * graph.num_nodes()
    cache = DeviceCache.from_scores(rows["x"], visits, bytes=num_bytes, device=device(work))
    return Graph({NODE: graph.num_nodes()}, {EDGE: graph.csc()}, {NODE: {"x": cache, "y": rows["y"]}})  # type: ignore[dict-item]


BENCHMARKS: list[Benchmark] = [bus_bound]
