"""Rows of `gnnsys bench execution` of pre-transform: the first layer's products made by the host's cores.

Rows are in pinned host memory and the device has no room for them. A batch of 34,493 rows of 8,415 values and a layer
of 16: who multiplies on the host has a five-hundredth of the bytes to move, and bus and cores share the batches. Rows
of 100 values and a layer of 256: products are more than the rows, so it must not be tried, and the report says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from statistics import median
from typing import Any

from gnnsys.bench.case import OURS, Benchmark, Case, Side, Versus, score, value
from gnnsys.bench.execution.workloads import UntrimmedModel, check_device, next_epoch, repeated_ids, tried
from gnnsys.bench.gpu.epoch import DeviceModel, Steps, epoch_seconds
from gnnsys.bench.gpu.inputs import FANOUTS, NUM_CLASSES, NUM_FEATURES, device, is_gpu, pinned_graph
from gnnsys.bench.lab_jobs import say
from gnnsys.bench.samplers.outcome import figure_case
from gnnsys.bench.workload import FULL, SEED, Workload
from gnnsys.graph import EDGE, NODE, Graph, sbm
from gnnsys.loader import NeighborLoader
from gnnsys.nn import GCN, GraphSAGE
from gnnsys.ops import CSC
from gnnsys.planning import PRODUCTS, ExecutionPlan, Way
from gnnsys.store import MemoryBudget, limited

DEFAULT, ALL, STALE = "without a plan", "all batches by the host", "the same, staleness=1"
IS_SO = "it is so"
FASTER = 1.05
_NODES, _DEGREE, _WIDE, _HIDDEN = 34_493, 14.4, 8_415, 16  # DAHA, Table 2: coauthor_physics
_BROAD = 256
_SIDES = (OURS, DEFAULT, ALL, STALE)
_REPEATS = 3


class WideRows:
    """A GCN on batches that have nearly all nodes of a graph with wide rows."""

    def __init__(self, work: Workload) -> None:
        check_device(work)
        self._work, self._graph = work, work.once("execution/very wide rows", lambda: _wide_graph(work))
        is_full = work.sizes is FULL
        self.steps = Steps(all=1, first=4, timed=32) if is_full else Steps(all=1, first=1, timed=2)
        num_nodes = self._graph.num_nodes()
        self._batch_size, num_batches = max(1, num_nodes // 8), 64 if is_full else 8
        self._seeds = repeated_ids(work, num_nodes, num_batches * self._batch_size)
        self.model = GCN(_WIDE, _HIDDEN, 2, NUM_CLASSES)
        self.step = UntrimmedModel(work, self.model).step

    def loader(self, **options: Any) -> NeighborLoader:
        return NeighborLoader(
            self._graph, [15, 10], input_nodes=self._seeds, batch_size=self._batch_size, shuffle=True,
            device=device(self._work), across_epochs=False, **options,
        )  # fmt: skip

    def by_hand(self, made_for: dict[str, Any], staleness: int) -> NeighborLoader:
        """All batches are multiplied by the host."""
        plan = ExecutionPlan([Way(), Way(products=(True,))], made_for=made_for, chosen=1)
        return self.loader(execution=plan, model=self.model, staleness=staleness)

    def milliseconds(self, loader: NeighborLoader) -> float:
        return 1000 * epoch_seconds(next_epoch(loader), self.step, self.steps, self.steps.timed)

    def times(self) -> tuple[Way, dict[str, float]]:
        """What a plan chose, and milliseconds of a step by each side, in turn."""
        with ExitStack() as stack:
            with _without_room(self._work, self._graph):
                auto = stack.enter_context(closing(self.loader(execution="auto", model=self.model)))
            plan = tried(auto, self.step).plan
            assert plan is not None and plan.way is not None
            say(plan.report())
            loaders = {OURS: auto, DEFAULT: stack.enter_context(closing(self.loader()))}
            for name, staleness in ((ALL, 0), (STALE, 1)):
                loaders[name] = stack.enter_context(closing(self.by_hand(plan.made_for, staleness)))
            found: dict[str, list[float]] = {side: [] for side in _SIDES}
            for _ in range(_REPEATS):
                for side in _SIDES:
                    found[side].append(self.milliseconds(loaders[side]))
        return plan.way, {side: median(samples) for side, samples in found.items()}


def _without_room(work: Workload, graph: Graph) -> Any:
    """A cap that leaves the device room for a fortieth of the rows, beside what others have taken."""
    on = device(work)
    used = sum(use.bytes for use in MemoryBudget.of(on).uses())
    return limited(on, graph.node_data[NODE]["x"].nbytes // 20 + used)


def _wide_graph(work: Workload) -> Graph:
    count = _NODES * work.sizes.num_nodes // FULL.num_nodes
    made = sbm(count, num_classes=NUM_CLASSES, avg_degree=_DEGREE, num_features=_WIDE, seed=SEED)
    csc, rows = made.csc(), {column: made.node_data[NODE][column] for column in ("x", "y")}
    graph = Graph({NODE: count}, {EDGE: CSC(csc.indptr, csc.indices, csc.num_src)}, {NODE: rows})
    return graph.pin_memory() if is_gpu(work) else graph


def refused_reason(work: Workload) -> str:
    """What a plan says of products where they are wider than rows; "" where they are tried."""
    check_device(work)
    graph, model = pinned_graph(work), GraphSAGE(NUM_FEATURES, _BROAD, len(FANOUTS), NUM_CLASSES)
    seeds = work.sizes.num_seeds
    DeviceModel(work, model)  # where it trains
    with _without_room(work, graph):
        loader = NeighborLoader(
            graph, FANOUTS, input_nodes=repeated_ids(work, graph.num_nodes(), 8 * seeds), batch_size=seeds,
            device=device(work), execution="auto", model=model,
        )  # fmt: skip
    with closing(loader):
        plan = loader.plan
        assert plan is not None
        say(f"{NUM_FEATURES} to {_BROAD}: {plan.passed_over.get(PRODUCTS)}")
        return "" if any(any(way.products) for way in plan.ways) else plan.passed_over.get(PRODUCTS, "")


def host_products(work: Workload) -> Iterator[Case]:
    """Where products pay, and where they do not."""

    def found() -> tuple[Way, dict[str, float]]:
        return work.once("execution/products", lambda: WideRows(work).times())

    def sides() -> dict[str, Side]:
        figures = found()[1]
        return {side: Side(lambda side=side: figures[side]) for side in _SIDES}  # type: ignore[misc]

    def is_chosen() -> float:
        return float(any(found()[0].products))

    def is_refused() -> float:
        return float(bool(refused_reason(work)))

    versus = (Versus((DEFAULT,), FASTER), Versus((ALL,)), Versus((STALE,)))
    yield Case(f"execution/products, {_WIDE} to {_HIDDEN}", value("ms"), sides, versus, repeats=1)
    told = {f"{_WIDE} to {_HIDDEN}, chosen": is_chosen, f"{NUM_FEATURES} to {_BROAD}, refused": is_refused}
    for name, call in told.items():
        of: dict[str, Callable[[], float]] = {OURS: call, IS_SO: lambda: 1.0}
        yield figure_case(f"execution/products, {name}", score("of 1"), OURS, of, Versus((IS_SO,), 1.0))


BENCHMARKS: list[Benchmark] = [host_products]
