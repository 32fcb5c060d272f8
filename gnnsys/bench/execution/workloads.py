"""`gnnsys bench execution --only workloads`: 24 workloads, each planned, without a plan, and every way by hand.

Graphs have the sizes of DAHA's Table 2: arxiv, products and reddit. Models are SAGE, GCN and GAT, rows have 100 to
1,024 columns, and the device's memory is free or capped. Graphs are in host memory; in pinned memory where the name
says so. By hand a graph is placed as a user would do it, with the memory of the cap for itself. Sides take turns, in
another order each time; those that a trial found far from the fastest are timed once, as no noise decides there. Which
way by hand is the best is told by every other turn, and what it and ours take by the turns between: the least of some
noisy figures would be none of theirs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from gnnsys.bench.case import OURS, Benchmark, Case, NotHere, Side, Versus, score, value
from gnnsys.bench.gpu.epoch import DeviceModel, Steps, epoch_seconds
from gnnsys.bench.gpu.inputs import FANOUTS, NUM_CLASSES, NUM_FEATURES, device, is_gpu, large_graph, pinned_graph
from gnnsys.bench.lab_jobs import NOTHING, say
from gnnsys.bench.samplers.outcome import figure_case
from gnnsys.bench.workload import FULL, SEED, Workload
from gnnsys.graph import EDGE, NODE, Graph, sbm
from gnnsys.loader import Batch, NeighborLoader
from gnnsys.nn import GAT, GCN, GraphSAGE
from gnnsys.ops import CSC
from gnnsys.planning import CACHED, DEVICE, GIVEN, ExecutionPlan, Way, is_given
from gnnsys.sampling import expected_visits
from gnnsys.store import DeviceCache, MemoryBudget, limited

DEFAULT, BEST, TWO = "without a plan", "the best way by hand", "two of them"
NEVER_SLOWER, OF_THE_BEST = 0.98, 1 / 1.05
KINDS = ("device", "cache", "mix")
REPEATS = 8
_SIZES = {"arxiv": (169_343, 1_166_243), "reddit": (232_965, 114_615_892)}  # nodes and edges; products: `large_graph`
_FEW = [10, 5]  # neighbours where rows are wide: a batch then has about as many bytes. And where a step takes long
_FAR = 1.25  # times the fastest of a trial
_GB = 1 << 30


@dataclass(frozen=True)
class PlannedWorkload:
    """`cap`: gigabytes of the device that may be taken, None for all. `is_pinned`: where the graph is given."""

    graph: str
    model: str
    width: int
    cap: int | None = None
    is_pinned: bool = False

    @property
    def name(self) -> str:
        memory = "free" if self.cap is None else f"{self.cap}GB"
        return f"{self.graph} {self.model} {self.width} {memory}{' pinned' if self.is_pinned else ''}"


WORKLOADS = (  # of one graph and width together: their rows are made once
    PlannedWorkload("arxiv", "SAGE", 128),
    PlannedWorkload("arxiv", "GCN", 128),
    PlannedWorkload("arxiv", "GAT", 128, 4),
    PlannedWorkload("arxiv", "SAGE", 128, 1, is_pinned=True),
    PlannedWorkload("arxiv", "SAGE", 1024, 4),
    PlannedWorkload("arxiv", "SAGE", 1024, 1, is_pinned=True),
    PlannedWorkload("arxiv", "GCN", 1024, 1),
    PlannedWorkload("arxiv", "GAT", 1024, 1, is_pinned=True),
    PlannedWorkload("products", "SAGE", 100),
    PlannedWorkload("products", "SAGE", 100, 4),
    PlannedWorkload("products", "SAGE", 100, 1),
    PlannedWorkload("products", "SAGE", 100, 1, is_pinned=True),
    PlannedWorkload("products", "GCN", 100, is_pinned=True),
    PlannedWorkload("products", "GAT", 100, 1),
    PlannedWorkload("products", "GCN", 256, 4, is_pinned=True),
    PlannedWorkload("products", "SAGE", 800, 4, is_pinned=True),  # 8 GB: torch pins powers of two
    PlannedWorkload("products", "SAGE", 800, 1, is_pinned=True),
    PlannedWorkload("products", "GAT", 800, is_pinned=True),
    PlannedWorkload("reddit", "SAGE", 602),
    PlannedWorkload("reddit", "SAGE", 602, 1, is_pinned=True),
    PlannedWorkload("reddit", "GCN", 602, 4),
    PlannedWorkload("reddit", "GAT", 602, 1),
    PlannedWorkload("reddit", "SAGE", 1024, 1, is_pinned=True),
    PlannedWorkload("reddit", "GCN", 1024, 1, is_pinned=True),
)


@dataclass
class WorkloadOutcome:
    """Milliseconds of a step, by side; what the plan chose; seconds that all of it took."""

    chosen: Way
    milliseconds: dict[str, float]
    seconds: float

    @property
    def kind(self) -> str:
        """One of `KINDS`, or the place."""
        if self.chosen.place == DEVICE:
            return "device"
        if self.chosen.has_patterns:  # host and device share the work
            return "mix"
        return "cache" if self.chosen.place == CACHED else self.chosen.place

    def ratio(self, side: str) -> float:
        return self.milliseconds[side] / self.milliseconds[OURS]


class WorkloadRun:
    """One workload: its graph in all places, its model, and loaders of the same batches."""

    def __init__(self, work: Workload, workload: PlannedWorkload) -> None:
        check_device(work)
        self._work, self._workload = work, workload
        self.steps = Steps(all=1, first=8, timed=48) if work.sizes is FULL else Steps(all=1, first=1, timed=2)
        self._num_batches = 64 if work.sizes is FULL else 8
        self._fanouts = FANOUTS if workload.model == "SAGE" and workload.width <= 128 else _FEW
        self.model = _MODELS[workload.model](workload.width, hidden_width(work), len(self._fanouts))
        trained = UntrimmedModel if workload.model == "GCN" else DeviceModel
        self.step = trained(work, self.model).step
        self._placed: dict[str, Graph] = {}
        num_nodes = self.graph().num_nodes()
        self._batch_size = min(work.sizes.num_seeds, max(1, num_nodes // 4))
        self._seeds = repeated_ids(work, num_nodes, self._num_batches * self._batch_size)

    def graph(self) -> Graph:
        """As it is given. What the device keeps of its structure it finds out anew."""
        return sized_graph(self._work, self._workload.graph, self._workload.width, is_pinned=self._workload.is_pinned)

    def room(self) -> AbstractContextManager[object]:
        """The cap, beside what others have taken already."""
        cap, on = self._workload.cap, device(self._work)
        if cap is None:
            return nullcontext()
        return limited(on, cap * _GB + sum(use.bytes for use in MemoryBudget.of(on).uses()))

    def loader(self, graph: Graph, **options: Any) -> NeighborLoader:
        return NeighborLoader(
            graph, self._fanouts, input_nodes=self._seeds, batch_size=self._batch_size, shuffle=True,
            device=device(self._work), across_epochs=False, **options,
        )  # fmt: skip

    def planned(self) -> NeighborLoader:
        """A loader whose trial is over."""
        return tried(self.loader(self.graph(), execution="auto", model=self.model), self.step)

    def by_hand(self, way: Way, made_for: dict[str, Any]) -> NeighborLoader:
        """A loader that goes one way, its graph being placed before."""
        if way.place not in self._placed:
            self._placed[way.place] = self.place(way)
        here = replace(way, place=GIVEN, device_bytes=0, host_bytes=0)
        plan = None if is_given(here) else ExecutionPlan([here], made_for=made_for, chosen=0)
        options = {} if plan is None else {"execution": plan, "model": self.model}
        return self.loader(self._placed[way.place], **options)

    def place(self, way: Way) -> Graph:
        """The graph as a user would place it for a way."""
        if way.place == GIVEN:
            return self.graph()
        if way.place == DEVICE:
            return self.graph().to(device(self._work))
        pinned = sized_graph(self._work, self._workload.graph, self._workload.width, is_pinned=True)
        if way.place == CACHED:
            csc, on = pinned.csc(), device(self._work)
            there = CSC(csc.indptr.to(on), csc.indices.to(on), csc.num_src)
            visits = expected_visits(there, self._fanouts, self._seeds.to(on), batch_size=self._batch_size)
            rows = pinned.node_data[NODE]["x"]
            pinned.set_node_data("x", DeviceCache.from_scores(rows, visits, bytes=way.device_bytes, device=on), NODE)
        return pinned

    def step_milliseconds(self, loader: NeighborLoader) -> float:
        return 1000 * epoch_seconds(next_epoch(loader), self.step, self.steps, self.steps.timed)


def run_workload(work: Workload, workload: PlannedWorkload) -> WorkloadOutcome:
    """Has ways tried by a plan, then times what it chose beside all of them."""
    began = time.perf_counter()
    one = WorkloadRun(work, workload)
    with ExitStack() as stack:
        with one.room():
            auto = stack.enter_context(closing(one.planned()))
        plan = auto.plan
        assert plan is not None and plan.way is not None
        planned = time.perf_counter() - began
        sides = [_TimedSide(OURS, auto, None)]
        for number, way in enumerate(plan.ways):
            if number not in plan.trial.refused:
                with one.room():
                    loader = one.by_hand(way, plan.made_for) if number else one.loader(one.graph())
                    stack.enter_context(closing(loader))
                sides.append(_TimedSide(way.name if number else DEFAULT, loader, _times_the_fastest(plan, number)))
        order = random.Random(SEED)
        for turn in range(REPEATS):
            for side in order.sample(sides, len(sides)):
                if turn == 0 or side.is_close:
                    side.samples.append(one.step_milliseconds(side.loader))
    best = min((side for side in sides if side.name != OURS), key=lambda side: median(side.samples[::2])).name
    found = {side.name: median(side.samples[1::2] or side.samples) for side in sides}
    outcome = WorkloadOutcome(plan.way, found | {BEST: found[best]}, time.perf_counter() - began)
    told = ", ".join(f"{name} {found[name]:.2f}" for name in found)
    say(f"{workload.name}: {plan.way.name}, {plan.reason}; best by hand: {best}; ms a step: {told}")
    say(f"{workload.name}: {outcome.seconds:.1f} s, of which {planned:.1f} for inputs, plan and trial")
    return outcome


@dataclass
class _TimedSide:
    """`times`: what it took in the trial, as a multiple of the fastest."""

    name: str
    loader: NeighborLoader
    times: float | None
    samples: list[float] = field(default_factory=list)

    @property
    def is_close(self) -> bool:
        return self.times is None or self.times <= _FAR


def _times_the_fastest(plan: ExecutionPlan, number: int) -> float | None:
    """None where it was not measured."""
    found = [plan.trial.median(way) for way in range(len(plan.ways))]
    this = found[number]
    return None if this is None else this / min(seconds for seconds in found if seconds is not None)


# -- inputs ------------------------------------------------------------------------------------------------------------


class UntrimmedModel(DeviceModel):
    """A model that sees all edges of a batch in every layer: GCN divides by degrees in the whole batch."""

    def step(self, batch: Batch) -> None:
        self._finish(self._model(batch.x, batch.edge_index), batch)


_MODELS: dict[str, Callable[[int, int, int], nn.Module]] = {
    "SAGE": lambda width, hidden, num_layers: GraphSAGE(width, hidden, num_layers, NUM_CLASSES),
    "GCN": lambda width, hidden, num_layers: GCN(width, hidden, num_layers, NUM_CLASSES),
    "GAT": lambda width, hidden, num_layers: GAT(width, hidden, num_layers, NUM_CLASSES, heads=4),
}


def hidden_width(work: Workload) -> int:
    return 256 if work.sizes is FULL else 16


def check_device(work: Workload) -> None:
    """NotHere without a GPU, unless the host was asked for, as tests do."""
    if is_gpu(work) and not torch.cuda.is_available():
        raise NotHere("it needs a GPU")


def tried(loader: NeighborLoader, step: Callable[[Batch], None]) -> NeighborLoader:
    """The loader, once its trial is over."""
    assert loader.plan is not None
    while loader.plan.chosen is None:
        for batch in loader:
            step(batch)
            if loader.plan.chosen is not None:
                break
    return loader


def next_epoch(loader: NeighborLoader) -> Generator[Batch, None, None]:
    """From its first batch on."""
    yield from loader


def repeated_ids(work: Workload, num_nodes: int, count: int) -> Tensor:
    """Ids of nodes in a random order, again and again."""
    return work.ids(num_nodes, num_nodes).repeat(-(-count // num_nodes))[:count]


def sized_graph(work: Workload, name: str, width: int, *, is_pinned: bool = False) -> Graph:
    """A graph of Table 2 with rows of a width. Tensors are shared by all that ask for the same; the graph is new.

    Wide rows repeat narrow ones. Those of the graph and width that were asked for last are kept, and no others.
    """
    graph = _narrow(work, name, is_pinned=is_pinned).to("cpu")
    if width != NUM_FEATURES:
        kept = work.once("execution/wide rows", dict[tuple[str, int, bool], Tensor])
        for other in [key for key in kept if key[:2] != (name, width)]:
            del kept[other]
        key = (name, width, is_pinned)
        if key not in kept:
            kept[key] = _widened(graph.node_data[NODE]["x"], width, pin=is_pinned and is_gpu(work))
        graph.set_node_data("x", kept[key], NODE)
    return graph


def _narrow(work: Workload, name: str, *, is_pinned: bool) -> Graph:
    if name == "products":
        return pinned_graph(work) if is_pinned else large_graph(work)
    if is_pinned and is_gpu(work):
        return work.once(f"execution/{name}, pinned", _narrow(work, name, is_pinned=False).pin_memory)

    def make() -> Graph:
        num_nodes, num_edges = _SIZES[name]
        count = num_nodes * work.sizes.num_nodes // FULL.num_nodes
        made = sbm(
            count, num_classes=NUM_CLASSES, avg_degree=num_edges / num_nodes, num_features=NUM_FEATURES, seed=SEED
        )
        csc = made.csc()  # without ids of edges
        rows = {column: made.node_data[NODE][column] for column in ("x", "y")}
        return Graph({NODE: count}, {EDGE: CSC(csc.indptr, csc.indices, csc.num_src)}, {NODE: rows})

    return work.once(f"execution/{name}", make)


def _widened(narrow: Tensor, width: int, *, pin: bool) -> Tensor:
    rows = torch.empty(narrow.shape[0], width, device="cpu", pin_memory=pin)
    for first in range(0, width, narrow.shape[1]):
        some = min(narrow.shape[1], width - first)
        rows[:, first : first + some] = narrow[:, :some]
    return rows


# -- rows --------------------------------------------------------------------------------------------------------------


def workloads(work: Workload) -> Iterator[Case]:
    """Each workload beside today's default and beside the best of its ways; then what was chosen, and how often."""

    def outcome(workload: PlannedWorkload) -> WorkloadOutcome:
        check_device(work)
        found = work.once(f"execution/workload {workload.name}", partial(run_workload, work, workload))
        outcomes()[workload.name] = found
        return found

    def outcomes() -> dict[str, WorkloadOutcome]:
        return work.once("execution/workload outcomes", dict[str, WorkloadOutcome])

    versus = (Versus((DEFAULT,), NEVER_SLOWER), Versus((BEST,), OF_THE_BEST))
    for each in WORKLOADS:

        def sides(each: PlannedWorkload = each) -> dict[str, Side]:
            found = outcome(each).milliseconds
            return {side: Side(partial(found.__getitem__, side)) for side in (OURS, DEFAULT, BEST)}

        yield Case(f"execution/workloads/{each.name}", value("ms"), sides, versus, repeats=1)
    yield from summary_cases(outcomes)


def summary_cases(outcomes: Callable[[], dict[str, WorkloadOutcome]]) -> Iterator[Case]:
    """Of the workloads that were run: how many chose what, and met which target; how long they took."""

    def counted(is_one: Callable[[WorkloadOutcome], bool]) -> float:
        if not outcomes():
            raise NotHere("no workload was run")
        return float(sum(map(is_one, outcomes().values())))

    def chose(kind: str) -> float:
        return counted(lambda found: found.kind == kind)

    def met(side: str, target: float) -> float:
        return counted(lambda found: found.ratio(side) >= target)

    unit = score("workloads")
    for kind in KINDS:
        sides: dict[str, Callable[[], float]] = {OURS: partial(chose, kind), TWO: lambda: 2.0}
        yield figure_case(f"execution/workloads/chose {kind}", unit, OURS, sides, Versus((TWO,), 1.0))
    for side, target in ((DEFAULT, NEVER_SLOWER), (BEST, OF_THE_BEST)):
        name = f"execution/workloads/met {target:.2f} beside {side}"
        yield figure_case(name, unit, OURS, {OURS: partial(met, side, target)}, NOTHING)

    def seconds() -> float:
        return sum(found.seconds for found in outcomes().values())

    yield figure_case("execution/workloads/all of it", value("s"), OURS, {OURS: seconds}, NOTHING)


BENCHMARKS: list[Benchmark] = [workloads]
