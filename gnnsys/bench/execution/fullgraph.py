"""Rows of `gnnsys bench execution` that train on the whole graph: `HybridParallel(..., execution="auto")`.

A GCN of two layers with 16 hidden columns on graphs of the sizes of DAHA's Table 2, generated, with dense rows: beside
what is done without a plan, and beside torch's own sparse product in both orders, (AH)W as in the paper and A(HW). All
sides start from nothing, train the same model and take turns of some epochs, so that whatever else the machine does
meets all of them. "100 epochs from nothing" is the mean of all epochs, with planning, sums that are kept and trials;
"an epoch" the median of the last ones. Besides: PyG's own layers, and a process with one thread, as torchrun starts it.
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gnnsys.bench import peers
from gnnsys.bench.case import OURS, Benchmark, Case, Side, Versus, value
from gnnsys.bench.gpu.inputs import device, is_gpu, num_cores, synchronize
from gnnsys.bench.lab_jobs import say
from gnnsys.bench.workload import FULL, SEED, Workload
from gnnsys.fullgraph import HybridParallel
from gnnsys.graph import Graph
from gnnsys.nn import GCNConv

DEFAULT, SUMS_FIRST, PRODUCT_FIRST = "without a plan", "torch (AH)W", "torch A(HW)"
NEVER_SLOWER = 0.98
HIDDEN, EPOCHS, TURN, LAST = 16, 100, 5, 20
_AGREE = 1e-3  # of the first losses


@dataclass(frozen=True)
class TableRow:
    """A graph of Table 2, as large as there."""

    num_nodes: int
    num_edges: int
    num_features: int
    num_classes: int


TABLE = {
    "cora": TableRow(2708, 10556, 1433, 7),
    "citeseer": TableRow(3327, 9104, 3703, 6),
    "pubmed": TableRow(19717, 88648, 500, 3),
    "cs": TableRow(18333, 163788, 6805, 15),
    "physics": TableRow(34493, 495924, 8415, 5),
}


@dataclass(frozen=True)
class Given:
    """What all sides train on, where rows are."""

    graph: Graph
    x: Tensor
    y: Tensor
    device: torch.device  # of the model and the labels


@dataclass(frozen=True)
class Figures:
    """Milliseconds of an epoch of one side: of all of them, and of the last ones."""

    all: float
    last: float


Epoch = Callable[[], float]
"""One step of training; the loss."""


class Race:
    """Trains all sides from nothing, a few epochs each in turns, once."""

    def __init__(self, make: Mapping[str, Callable[[], Epoch]], num_epochs: int) -> None:
        self._make, self._num_epochs = make, num_epochs
        self._figures: dict[str, Figures] = {}

    def figures(self, side: str) -> Figures:
        if not self._figures:
            self._run()
        return self._figures[side]

    def _run(self) -> None:
        seconds: dict[str, list[float]] = {name: [] for name in self._make}
        epochs: dict[str, Epoch] = {}
        first: dict[str, float] = {}
        made: dict[str, float] = {}
        order = list(self._make)
        for start in range(0, self._num_epochs, TURN):
            for name in order:
                if name not in epochs:
                    began = time.perf_counter()
                    epochs[name] = self._make[name]()
                    made[name] = time.perf_counter() - began
                for _ in range(min(TURN, self._num_epochs - start)):
                    synchronize()
                    began = time.perf_counter()
                    loss = epochs[name]()
                    synchronize()
                    seconds[name].append(time.perf_counter() - began)
                    first.setdefault(name, loss)
            order = [*order[1:], order[0]]  # nobody always follows the same one, and meets what that left of memory
        differs = max(first.values()) - min(first.values())
        if differs > _AGREE * max(first.values()):
            raise RuntimeError(f"sides do not train the same model: first losses are {first}")
        for name, each in seconds.items():
            mean = (made[name] + sum(each)) / len(each)
            self._figures[name] = Figures(1e3 * mean, 1e3 * statistics.median(each[-LAST:]))
        epochs.clear()
        gc.collect()


def full_graph(work: Workload) -> Iterator[Case]:
    """The sizes of Table 2, all on one device."""
    for name in TABLE:
        versus = (Versus((DEFAULT,), NEVER_SLOWER), Versus((SUMS_FIRST,)), Versus((PRODUCT_FIRST,)))
        yield from _cases(work, f"full graph, {name}", lambda name=name: _race(work, name), versus)  # type: ignore[misc]


def rows_on_host(work: Workload) -> Iterator[Case]:
    """The model on a GPU, rows in host memory."""
    if is_gpu(work) and torch.cuda.is_available():
        for name in ("pubmed", "physics"):
            versus = (Versus((DEFAULT,), NEVER_SLOWER),)
            race = lambda name=name: _race(work, name, rows_on_host=True, with_torch=False)  # noqa: E731
            yield from _cases(work, f"full graph, {name}, rows on the host", race, versus)


def one_thread(work: Workload) -> Iterator[Case]:
    """A process as torchrun starts it: one thread, whatever cores there are."""
    versus = (Versus((DEFAULT,), NEVER_SLOWER),)
    race = lambda: _race(work, "pubmed", on_host=True, with_torch=False)  # noqa: E731
    yield from _cases(work, "full graph, pubmed, one thread", race, versus, threads=1)


def pyg_layers(work: Workload) -> Iterator[Case]:
    """PyG's SAGEConv: called without a plan, taken apart by one."""
    if not peers.missing("pyg"):
        versus = (Versus((DEFAULT,), NEVER_SLOWER),)
        for name in ("pubmed", "cs"):
            race = lambda name=name: _race(work, name, layer="SAGEConv", with_torch=False)  # noqa: E731
            yield from _cases(work, f"full graph, {name}, PyG's SAGEConv", race, versus)


def _cases(
    work: Workload, name: str, make: Callable[[], Race], versus: tuple[Versus, ...], threads: int | None = None
) -> Iterator[Case]:
    """Two of one race."""

    def sides(is_last: bool) -> dict[str, Side]:
        race = work.once(f"execution/{name}", make)

        def figure(side: str) -> float:
            figures = race.figures(side)
            return figures.last if is_last else figures.all

        names = [OURS, *(peer for row in versus for peer in row.peers)]
        return {
            side: Side(lambda side=side: figure(side), threads=threads or num_cores())  # type: ignore[misc]
            for side in names
        }

    for what, is_last in ((f"{EPOCHS} epochs from nothing", False), ("an epoch", True)):
        yield Case(
            f"execution/{name}, {what}", value("ms"), lambda is_last=is_last: sides(is_last), versus, repeats=1  # type: ignore[misc]
        )  # fmt: skip


def _race(
    work: Workload, name: str, *, rows_on_host: bool = False, on_host: bool = False, with_torch: bool = True,
    layer: str | None = None,
) -> Race:  # fmt: skip

    def sides(scale: float) -> dict[str, Callable[[], Epoch]]:
        given = _given(work, name, scale, rows_on_host=rows_on_host, on_host=on_host)
        make: dict[str, Callable[[], Epoch]] = {
            OURS: lambda: _ours(given, layer, execution="auto"),
            DEFAULT: lambda: _ours(given, layer),
        }
        if with_torch:
            make |= {SUMS_FIRST: lambda: _torch(given, True), PRODUCT_FIRST: lambda: _torch(given, False)}
        return make

    for make in sides(0.0).values():  # kernels and libraries are loaded by whoever comes first
        make()()
    return Race(sides(min(1.0, work.sizes.num_nodes / FULL.num_nodes)), EPOCHS)


def _given(work: Workload, name: str, scale: float, *, rows_on_host: bool, on_host: bool) -> Given:
    row, draws = TABLE[name], torch.Generator().manual_seed(SEED)
    sizes = ((40, row.num_nodes), (80, row.num_edges), (48, row.num_features))
    num_nodes, num_edges, width = (max(least, round(scale * size)) for least, size in sizes)
    half = torch.randint(num_nodes, (2, num_edges // 2), generator=draws)
    graph = Graph.from_edge_index(torch.cat([half, half.flip(0)], dim=1), num_nodes)
    x = torch.randn(num_nodes, width, generator=draws)
    y = torch.randint(row.num_classes, (num_nodes,), generator=draws)
    on = device(work) if is_gpu(work) and torch.cuda.is_available() and not on_host else torch.device("cpu")
    return Given(graph, x if rows_on_host else x.to(on), y.to(on), on)


def _ours(given: Given, layer: str | None, **options: Any) -> Epoch:
    torch.manual_seed(SEED)
    kind: Any = GCNConv
    if layer is not None:
        import torch_geometric.nn as pyg

        kind = getattr(pyg, layer)
    width, num_classes = given.x.shape[1], int(given.y.max()) + 1
    layers = [kind(width, HIDDEN), nn.ReLU(), kind(HIDDEN, num_classes)]
    model = HybridParallel(layers, given.graph, output_device=given.device, **options).to(given.device)
    optimizer = torch.optim.Adam(model.parameters())
    said = [False]

    def epoch() -> float:
        loss = F.cross_entropy(model(given.x), given.y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if model.execution is not None and int(model.step) == EPOCHS and not said[0]:
            said[0] = True
            say(model.execution.report())
        return float(loss.detach())

    return epoch


def _torch(given: Given, sums_first: bool) -> Epoch:
    """The same GCN by torch's own sparse product; what is constant is made once, sums are made in every epoch."""
    torch.manual_seed(SEED)
    width, num_classes = given.x.shape[1], int(given.y.max()) + 1
    convs = nn.ModuleList([GCNConv(width, HIDDEN), GCNConv(HIDDEN, num_classes)]).to(given.device)
    matrix = _normalised(given.graph).to(given.device)
    optimizer = torch.optim.Adam(convs.parameters())

    def product(conv: Any, rows: Tensor) -> Tensor:
        weight = conv.lin.weight.t()
        out = torch.sparse.mm(matrix, rows) @ weight if sums_first else torch.sparse.mm(matrix, rows @ weight)
        return out + conv.bias

    def epoch() -> float:
        loss = F.cross_entropy(product(convs[1], product(convs[0], given.x).relu()), given.y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return epoch


def _normalised(graph: Graph) -> Tensor:
    """D^-1/2 (A + I) D^-1/2 as torch's CSR: one self loop for every node, whatever it had."""
    num_nodes, edges = graph.num_nodes(), graph.edge_index()
    loops = torch.arange(num_nodes, device="cpu").expand(2, -1)
    src, dst = torch.cat([edges[:, edges[0] != edges[1]], loops], dim=1)
    scale = torch.bincount(dst, minlength=num_nodes).float().pow(-0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch calls its CSR a beta
        whole = torch.sparse_coo_tensor(torch.stack([dst, src]), scale[dst] * scale[src], (num_nodes, num_nodes))
        return whole.coalesce().to_sparse_csr()


BENCHMARKS: list[Benchmark] = [full_graph, rows_on_host, one_thread, pyg_layers]
