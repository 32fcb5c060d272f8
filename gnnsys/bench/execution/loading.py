"""Epochs of loaders that plan (`execution="auto"`), beside what is done without, and by hand.

On a GPU: a plain script, whose graph is in host memory and which says nothing but `device="cuda"`; and the same with
less and less of the device's memory left. On the host: how cores are divided between loading and computing. Figures are
of epochs after the trial; what planning and trying cost has rows of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from itertools import islice
from typing import Any

import torch

from gnnsys.bench.case import OURS, Benchmark, Case, NotHere, Side, Versus, value
from gnnsys.bench.gpu.epoch import DeviceModel, Steps, epoch_seconds, first_epoch, steps_of, widths_of
from gnnsys.bench.gpu.inputs import (
    FANOUTS,
    NUM_CLASSES,
    NUM_FEATURES,
    device,
    is_gpu,
    large_graph,
    synchronize,
)
from gnnsys.bench.lab_jobs import say
from gnnsys.bench.workload import Workload
from gnnsys.graph import EDGE, NODE, Graph
from gnnsys.loader import NeighborLoader
from gnnsys.nn import GraphSAGE
from gnnsys.planning import ExecutionPlan
from gnnsys.store import limited

DEFAULT, ONE_THREAD, BEST = "without a plan", "one loading thread", "the best way by hand"
NEVER_SLOWER, OF_THE_BEST = 0.98, 1 / 1.05
TEN_TIMES = 10.0
EPOCHS = 3
_GB = 1 << 30
_HOST_STEPS = Steps(all=40, first=4, timed=20, peer=20)
_CAPS = {"all memory": None, "4 GB": 4 * _GB, "1 GB": _GB}


class Contestant:
    """A model that trains on the batches of loaders of one graph, on the GPU or on the host."""

    def __init__(self, work: Workload, *, on_host: bool = False) -> None:
        if not on_host and not (is_gpu(work) and torch.cuda.is_available()):
            raise NotHere("it needs a GPU")
        self.steps = _HOST_STEPS if on_host else steps_of(work)
        self._work, self._device = work, torch.device("cpu") if on_host else device(work)
        self._graph = _host_graph(work) if on_host else large_graph(work)
        widths = (NUM_FEATURES, 64, 3, NUM_CLASSES) if on_host else widths_of(work)
        self.step = DeviceModel(work, GraphSAGE(*widths), on=self._device).step

    def loader(self, **options: Any) -> NeighborLoader:
        num_nodes = self._graph.num_nodes()
        num_seeds = min(self._work.sizes.num_seeds, num_nodes // 4)
        needed, ids = self.steps.all * num_seeds, self._work.ids(num_nodes, num_nodes)
        return NeighborLoader(
            self._graph,
            FANOUTS,
            input_nodes=ids.repeat(-(-needed // num_nodes))[:needed],
            batch_size=num_seeds,
            shuffle=True,
            device=self._device,
            across_epochs=False,  # nothing is prepared while other sides are timed
            **options,
        )

    def planned(self, plan: str | ExecutionPlan = "auto") -> NeighborLoader:
        """A loader whose trial is over."""
        loader = self.loader(execution=plan)
        while loader.plan is not None and loader.plan.chosen is None:
            for batch in loader:
                self.step(batch)
                if loader.plan.chosen is not None:
                    break
        return loader

    def epoch(self, loader: NeighborLoader, num_timed: int | None = None) -> Callable[[], float]:
        timed = self.steps.timed if num_timed is None else num_timed
        return lambda: epoch_seconds(first_epoch(loader), self.step, self.steps, timed)

    def whole_epochs(self, **options: Any) -> float:
        """Seconds of some epochs from nothing on: the loader, its plan and its trial."""
        synchronize()
        began = time.perf_counter()
        with closing(self.loader(**options)) as loader:
            for _ in range(EPOCHS):
                for batch in islice(loader, self.steps.all):
                    self.step(batch)
        synchronize()
        return time.perf_counter() - began


def plain_script(work: Workload) -> Iterator[Case]:
    """One line that says nothing but where batches go, and the same with a plan."""

    def sides() -> dict[str, Side]:
        one = Contestant(work)
        return {
            OURS: Side(one.epoch(one.planned())),
            ONE_THREAD: Side(one.epoch(one.loader(num_threads=1), one.steps.peer)),
            DEFAULT: Side(one.epoch(one.loader(), one.steps.peer)),
        }

    versus = (Versus((ONE_THREAD,), TEN_TIMES), Versus((DEFAULT,), NEVER_SLOWER))
    yield Case("execution/plain script", value("s"), sides, versus, repeats=3)


def capped(work: Workload) -> Iterator[Case]:
    """What a plan chooses with less memory, beside every way that it could have chosen."""
    for name, cap in _CAPS.items():

        def sides(cap: int | None = cap) -> dict[str, Side]:
            one = Contestant(work)

            def within(call: Callable[[], float]) -> Callable[[], float]:
                """Loaders look at what is left whenever they start."""

                def timed() -> float:
                    with limited(device(work), cap) if cap else nullcontext():
                        return call()

                return timed

            with limited(device(work), cap) if cap else nullcontext():
                chosen = one.planned()
                plan = chosen.plan
                assert plan is not None
                say(plan.report())
                by_hand = [
                    one.planned(ExecutionPlan(plan.ways, made_for=plan.made_for, chosen=number))
                    for number in range(len(plan.ways))
                    if number not in plan.trial.refused
                ]
                without = one.loader()
            epochs = [within(one.epoch(loader, one.steps.peer)) for loader in by_hand]
            return {
                OURS: Side(within(one.epoch(chosen, one.steps.peer))),
                DEFAULT: Side(within(one.epoch(without, one.steps.peer))),
                BEST: Side(lambda: min(epoch() for epoch in epochs)),
            }

        versus = (Versus((DEFAULT,), NEVER_SLOWER), Versus((BEST,), OF_THE_BEST))
        yield Case(f"execution/{name}", value("s"), sides, versus, repeats=3)


def from_nothing(work: Workload) -> Iterator[Case]:
    """Three epochs with all that planning costs: the plan, copies of the graph, turns of slower ways."""

    def sides() -> dict[str, Side]:
        one = Contestant(work)
        return {
            OURS: Side(lambda: one.whole_epochs(execution="auto")),
            DEFAULT: Side(lambda: one.whole_epochs()),
        }

    yield Case("execution/three epochs from nothing", value("s"), sides, (Versus((DEFAULT,), NEVER_SLOWER),), repeats=2)


def host_cores(work: Workload) -> Iterator[Case]:
    """Without a GPU: the cores of this process divided between loading and computing."""

    def sides() -> dict[str, Side]:
        one = Contestant(work, on_host=True)
        return {OURS: Side(one.epoch(one.planned())), DEFAULT: Side(one.epoch(one.loader()))}

    yield Case("execution/cores of the host", value("s"), sides, (Versus((DEFAULT,), NEVER_SLOWER),), repeats=3)


def _host_graph(work: Workload) -> Graph:
    def make() -> Graph:
        csc = work.small_graph.csc()
        rows = {"x": work.rows(csc.num_dst, NUM_FEATURES), "y": torch.arange(csc.num_dst) % NUM_CLASSES}
        return Graph({NODE: csc.num_dst}, {EDGE: csc}, {NODE: rows})

    return work.once("execution/host graph", make)


BENCHMARKS: list[Benchmark] = [plain_script, capped, from_nothing, host_cores]
