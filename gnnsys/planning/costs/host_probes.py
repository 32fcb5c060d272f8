"""Calls of our own operators on the host, at sizes that batches have, for the profile of a machine."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gnnsys.graph import EDGE, NODE, Graph
from gnnsys.ops import CSC, IdTable, gather_rows, spmm
from gnnsys.planning.costs.operators import CostContext
from gnnsys.planning.costs.shapes import WIDTHS, halton, listed_width, spread, width_at
from gnnsys.planning.costs.timing import CostProbe
from gnnsys.sampling import NeighborSampler, SampleKey

POINTS, OF_PRODUCTS = 14, 20  # sizes of each operator; of those with three of them more
ROWS = (1e3, 1e6)
MOST_EDGES = 2_000_000  # of a sum
FANOUTS = ((15, 10, 5), (10, 10), (25,), (5, 5, 5), (20, 10))
_MOST_TABLES = 64
_VARIANTS, _DRAWN = 32, 1 << 21  # of ids at most, and of all of them: the next batch asks for other rows
_MACS_PER_THREAD = 4e8
_MB = 1 << 20


def on_host(tensor_bytes: float) -> Tensor:
    """float32 memory that has been written to: untouched pages are all the same one."""
    return torch.empty(int(tensor_bytes) // 4, dtype=torch.float32, device="cpu").fill_(1.0)


def random_block(num_edges: int, num_dst: int, num_src: int, generator: torch.Generator) -> CSC:
    """Edges from any of `num_src` nodes. Those that have one are left, in the order of edges, as in a batch."""
    csc = random_sums(num_edges, num_dst, num_src, generator)
    table = IdTable(num_src, room=min(num_src, num_edges))
    local, fresh = table.insert(csc.indices)
    return CSC(csc.indptr, local.to(torch.int32), fresh.numel())


def random_sums(num_edges: int, num_dst: int, num_src: int, generator: torch.Generator) -> CSC:
    """Edges from any of `num_src` rows of a table, as of a batch that is summed straight from there."""
    dst = torch.randint(num_dst, (num_edges,), generator=generator, device="cpu")
    indptr = torch.zeros(num_dst + 1, dtype=torch.int64, device="cpu")
    torch.cumsum(torch.bincount(dst, minlength=num_dst), 0, out=indptr[1:])
    indices = torch.randint(num_src, (num_edges,), generator=generator, dtype=torch.int32, device="cpu")
    return CSC(indptr, indices, num_src)


def random_graph(num_nodes: int, num_edges: int, skew: float, generator: torch.Generator) -> CSC:
    """In-degrees between none and twice the mean; with `skew` above 1 sources crowd among few nodes."""
    degrees = torch.randint(2 * num_edges // num_nodes + 1, (num_nodes,), generator=generator, device="cpu")
    indptr = torch.zeros(num_nodes + 1, dtype=torch.int64, device="cpu")
    torch.cumsum(degrees, 0, out=indptr[1:])
    total = int(indptr[-1])
    if skew == 1:
        even = torch.randint(num_nodes, (total,), generator=generator, dtype=torch.int32, device="cpu")
        return CSC(indptr, even, num_nodes)
    drawn = torch.rand(total, generator=generator, device="cpu").pow_(skew).mul_(num_nodes)
    order = torch.randperm(num_nodes, generator=generator, device="cpu").to(torch.int32)
    return CSC(indptr, order[drawn.to(torch.int64).clamp_(max=num_nodes - 1)], num_nodes)


class HostProbes:
    """Makes probes. `rows` is memory that tables of any width are views of, several times the last cache.

    `first` is where in the sequence of shapes to begin: other shapes for checking than for fitting. A `scale` below 1
    makes the largest sizes smaller, for those who have little time.
    """

    def __init__(
        self,
        context: CostContext,
        pool: SamplingThreads | None = None,
        *,
        first: int = 0,
        seed: int = 0,
        scale: float = 1.0,
    ) -> None:
        self.context, self.first, self._scale = context, first, scale
        self.generator = torch.Generator("cpu").manual_seed(seed)
        self.rows = on_host(scale * min(max(4 * context.last_cache, 256 * _MB), 1024 * _MB))
        self._out = on_host(self.rows.nbytes / 2)
        self._pool = pool
        self._known: dict[int, tuple[Graph, Tensor]] = {}

    def all(self, points: int = POINTS, by_width: int = len(WIDTHS)) -> list[CostProbe]:
        """Of every operator, the small sizes first: `points` each, of gathers twice `by_width`, of sums three times."""
        numbers, twice = (range(self.first, self.first + count) for count in (points, 2 * by_width))
        made = [sorted(map(self.gather, twice), key=work_of)]
        made.append(sorted(map(self.spmm, range(self.first, self.first + 3 * by_width)), key=work_of))
        more = range(self.first, self.first + max(points, points * OF_PRODUCTS // POINTS))
        made += [sorted(map(make, more), key=work_of) for make in (self.product, self.backward)]
        made.append(sorted(map(self.optimizer, numbers), key=work_of))
        if self._pool is not None:
            made.append(self.samples(self.graphs(), numbers))
        return [probe for some in made for probe in some]

    def _rows_at(self, number: int) -> float:
        return spread(number, 0, ROWS[0], max(2 * ROWS[0], self._scale * ROWS[1]))

    def gather(self, number: int) -> CostProbe:
        width = width_of(number, self.first)
        num_rows = int(min(self._rows_at(number), self._out.numel() // width))
        return self.gather_of(num_rows, width)

    def gather_of(self, num_rows: int, width: int) -> CostProbe:
        table = self.rows[: self.rows.numel() // width * width].view(-1, width)
        num_rows = min(num_rows, table.shape[0])
        out = self._out[: num_rows * width].view(num_rows, width)
        drawn, count = distinct_ids(num_rows, table.shape[0], self.generator), variants(num_rows)
        begins = torch.randint(table.shape[0], (count,), generator=self.generator, device="cpu").tolist()
        ids = itertools.cycle([(drawn + begin) % table.shape[0] for begin in begins])
        sizes = {"rows": num_rows, "row_bytes": 4 * width, "table_rows": table.shape[0]}
        return CostProbe("gather/host", sizes, lambda: gather_rows(table, next(ids), out=out))

    def spmm(self, number: int) -> CostProbe:
        width = width_of(number, self.first)
        most = self.rows.numel() // width
        num_src = int(min(self._rows_at(number), most))
        num_edges = max(16, min(int(num_src * spread(number, 2, 1.0, 8.0)), most, MOST_EDGES))
        num_dst = max(1, int(num_edges / spread(number, 3, 2.0, 20.0)))
        if is_straight(number):
            num_edges, num_dst = min(num_edges, most // 2), min(num_dst, most // 4)
            return self.spmm_of(random_sums(num_edges, num_dst, most, self.generator), width)
        return self.spmm_of(random_block(num_edges, num_dst, num_src, self.generator), width)

    def spmm_of(self, csc: CSC, width: int) -> CostProbe:
        """The sums of a block, where its rows fit what there is: other rows every time, as of batches."""
        size = csc.num_src * width
        assert size <= self.rows.numel(), "these rows do not fit"
        if csc.num_src > csc.num_edges + csc.num_dst:
            return self._sums_of(csc, width)
        first = range(0, self.rows.numel() - size + 1, max(1, size))[:_MOST_TABLES]
        tables = itertools.cycle([self.rows[at : at + size].view(-1, width) for at in first])
        sizes = {"edges": csc.num_edges, "destinations": csc.num_dst, "width": width, "sources": csc.num_src}
        return CostProbe("spmm/host", sizes, lambda: spmm(csc, next(tables), reduce="mean"))

    def _sums_of(self, csc: CSC, width: int) -> CostProbe:
        """Sums straight from a table: other rows of it every time."""
        rows = self.rows[: csc.num_src * width].view(-1, width)
        shape = variants(csc.num_edges), csc.num_edges
        ids = torch.randint(csc.num_src, shape, generator=self.generator, dtype=torch.int32, device="cpu")
        batches = itertools.cycle([CSC(csc.indptr, some, csc.num_src) for some in (csc.indices, *ids[1:])])
        sizes = {"edges": csc.num_edges, "destinations": csc.num_dst, "width": width, "sources": csc.num_src}
        return CostProbe("spmm/host", sizes, lambda: spmm(next(batches), rows, reduce="mean"))

    def _product_shape(self, number: int) -> tuple[int, int, int]:
        inner, width = width_at(number, 1), width_at(number, 2)
        macs = self._scale * _MACS_PER_THREAD * self.context.threads
        most = min(self.rows.numel() // inner, self._out.numel() // width, macs / inner / width)
        return max(64, int(min(self._rows_at(number), most))), inner, width

    def product(self, number: int) -> CostProbe:
        return self.product_of(*self._product_shape(number))

    def product_of(self, num_rows: int, inner: int, width: int) -> CostProbe:
        rows = self.rows[: num_rows * inner].view(num_rows, inner)
        weight = on_host(4 * inner * width).view(inner, width)
        return CostProbe("product/host", _product_sizes(num_rows, inner, width), lambda: torch.mm(rows, weight))

    def backward(self, number: int) -> CostProbe:
        num_rows, inner, width = self._product_shape(number)
        return self.backward_of(num_rows, inner, width, is_either(number))

    def backward_of(self, num_rows: int, inner: int, width: int, input_gradient: bool) -> CostProbe:
        rows = self.rows[: num_rows * inner].view(num_rows, inner)
        weight = on_host(4 * inner * width).view(inner, width)
        gradient = self._out[: num_rows * width].view(num_rows, width)
        sizes = _product_sizes(num_rows, inner, width) | {"input_gradient": float(input_gradient)}
        return CostProbe("backward/host", sizes, backward_call(rows, weight, gradient, input_gradient))

    def optimizer(self, number: int) -> CostProbe:
        count = int(spread(number, 0, 1e3, max(2e3, self._scale * 4e6)))
        return CostProbe("optimizer/host", {"parameters": count}, optimizer_step(count, torch.device("cpu")))

    def graphs(self) -> list[CSC]:
        """A large one, beyond all caches, whose sources are even, and a small one whose sources crowd."""
        num_edges = int(self._scale * min(max(3 * self.context.last_cache, 64 * _MB), 384 * _MB)) // 4
        small = max(1 << 16, self.context.last_cache // 32)
        return [
            random_graph(num_edges // 24, num_edges, 1.0, self.generator),
            random_graph(small // 12, small, 2.0, self.generator),
        ]

    def samples(self, graphs: Sequence[CSC], numbers: Sequence[int]) -> list[CostProbe]:
        assert self._pool is not None
        made = []
        for number in numbers:
            csc = graphs[is_either(number)]
            fanouts = FANOUTS[number % len(FANOUTS)]
            num_seeds = int(min(spread(number, 0, 64, max(128, self._scale * 8192)), csc.num_dst / 4))
            made.append(self.sample_of(csc, fanouts, num_seeds))
        return sorted(made, key=work_of)

    def sample_of(self, csc: CSC, fanouts: Sequence[int], num_seeds: int) -> CostProbe:
        assert self._pool is not None
        graph, order = self._graph_of(csc)
        seeds = order[: 4 * num_seeds].split(num_seeds)
        sampler = NeighborSampler(graph, list(fanouts))
        found = sampler.sample({NODE: seeds[0]}, key=SampleKey())
        sizes = {
            "edges": sum(found.num_sampled_edges[EDGE]),
            "nodes": sum(found.num_sampled_nodes[NODE]),
            "hops": len(fanouts),
            "graph_bytes": csc.indptr.nbytes + csc.indices.nbytes,
        }
        batches = itertools.count(1)  # taken by several threads, which Python gives one at a time

        def sample() -> None:
            batch = next(batches)
            sampler.sample({NODE: seeds[batch % len(seeds)]}, key=SampleKey(0, 0, batch))

        return CostProbe("sample/host", sizes, self._pool.on_all(sample), share=self._pool.count)

    def _graph_of(self, csc: CSC) -> tuple[Graph, Tensor]:
        """What all samples of a structure share, as both take long to make: the graph, and its nodes in some order."""
        if id(csc) not in self._known:  # which keeps the structure, so that its id is nobody else's
            order = torch.randperm(csc.num_dst, generator=self.generator, device="cpu")
            self._known[id(csc)] = Graph({NODE: csc.num_dst}, {EDGE: csc}), order
        return self._known[id(csc)]


class SamplingThreads:
    """Threads that sample as those of a loader do: each its own batch, alone."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._executor = ThreadPoolExecutor(count, "gnnsys-profile")

    def on_all(self, call: Callable[[], object]) -> Callable[[], object]:
        """`call` by every thread at once."""
        if self.count == 1:
            return lambda: self._executor.submit(call).result()

        def run() -> None:
            for future in [self._executor.submit(call) for _ in range(self.count)]:
                future.result()

        return run


@contextmanager
def sampling_threads(count: int) -> Iterator[SamplingThreads]:
    """Each with one thread of torch's; the caller's own stay as many as they were."""
    before, ready = torch.get_num_threads(), threading.Barrier(count + 1)
    threads = SamplingThreads(count)

    def set_up() -> None:
        torch.get_num_threads()  # a thread takes the process's number when it first asks, and no later
        torch.set_num_threads(1)
        ready.wait(60)

    try:
        waiting = [threads._executor.submit(set_up) for _ in range(count)]
        ready.wait(60)
        for each in waiting:
            each.result()
        torch.set_num_threads(before)
        yield threads
    finally:
        threads._executor.shutdown(cancel_futures=True)
        torch.set_num_threads(before)


def distinct_ids(count: int, below: int, generator: torch.Generator) -> Tensor:
    """Any `count` rows of a table in no order, none twice, as a batch has them: one of each part of the table."""
    assert count <= below, "a table has no more rows"
    bounds = (
        torch.arange(count + 1, dtype=torch.int64, device="cpu").mul_(below).div_(max(1, count), rounding_mode="floor")
    )
    drawn = torch.rand(count, dtype=torch.float64, generator=generator, device="cpu")
    ids = drawn.mul_(bounds[1:] - bounds[:-1]).long().add_(bounds[:-1])
    return ids[torch.randperm(count, generator=generator, device="cpu")]


def variants(count: int) -> int:
    """Of `count` ids: enough for a measurement to meet none of them again, where they are few; two at least."""
    return max(2, min(_VARIANTS, _DRAWN // max(1, count)))


def is_straight(number: int) -> bool:
    """Whether rows are summed straight from a table that has more than a batch asks for: a third, of all widths."""
    return (number + number // len(WIDTHS)) % 3 == 0


def is_either(number: int) -> bool:
    """One of two kinds, about as many of each among small sizes as among large ones: every other number would not do,
    as all odd ones have few rows."""
    return halton(number, 3) >= 0.5


def width_of(number: int, first: int) -> int:
    """Widths that are listed for fitting, `first` being 0; for checking, every other one may be any."""
    return listed_width(number) if first == 0 or number % 2 else width_at(number, 1)


def backward_call(rows: Tensor, weight: Tensor, gradient: Tensor, input_gradient: bool) -> Callable[[], Any]:
    """What autograd does for a product of rows and a weight."""
    if input_gradient:
        return lambda: (torch.mm(rows.t(), gradient), torch.mm(gradient, weight.t()))
    return lambda: torch.mm(rows.t(), gradient)


def optimizer_step(count: int, device: torch.device) -> Callable[[], object]:
    """Adam over as many parameters in four tensors, as a small model has them."""
    parameters = [torch.ones(max(1, count // 4), device=device, requires_grad=True) for _ in range(4)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    return torch.optim.Adam(parameters).step


def _product_sizes(num_rows: int, inner: int, width: int) -> dict[str, float]:
    return {"rows": num_rows, "inner": inner, "width": width}


def work_of(probe: CostProbe) -> float:
    """By which probes of one operator are ordered."""
    found = 1.0
    for name in ("rows", "inner", "width", "row_bytes", "edges", "parameters", "bytes", "calls"):
        found *= probe.sizes.get(name, 1.0) or 1.0
    return found
