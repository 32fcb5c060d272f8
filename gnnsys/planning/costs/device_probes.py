"""Calls of our own operators on a GPU and over its bus, at sizes that batches have, for the profile of a machine.

Rows and structure that are read over the bus are in pinned host memory, as `graph.pin_memory()` has them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from gnnsys.ops import CSC, HopStructure, gather_cached, gather_rows, sample_hops, spmm
from gnnsys.planning.costs.host_probes import (
    FANOUTS,
    MOST_EDGES,
    OF_PRODUCTS,
    POINTS,
    ROWS,
    backward_call,
    distinct_ids,
    is_either,
    is_straight,
    optimizer_step,
    random_block,
    random_graph,
    random_sums,
    width_of,
    work_of,
)
from gnnsys.planning.costs.operators import CostContext
from gnnsys.planning.costs.shapes import WIDTHS, halton, spread, width_at
from gnnsys.planning.costs.timing import CostProbe

_MB = 1 << 20
_DEVICE_BYTES, _PINNED_BYTES = 2048 * _MB, 512 * _MB  # of rows, at most
_SHARE = 0.2  # of the device's free memory, at most
_MACS = 4e10
_CALLS = (64, 256, 1024)


class DeviceProbes:
    """Makes probes on `device`. Tables of any width are views of one memory there, and of another that is pinned."""

    def __init__(
        self, device: torch.device, context: CostContext, *, first: int = 0, seed: int = 0, scale: float = 1.0
    ) -> None:
        self.device, self.context, self.first = device, context, first
        self._graphs: dict[tuple[int, bool], list[CSC]] = {}
        self._orders: dict[int, tuple[CSC, Tensor]] = {}
        self.generator = torch.Generator("cpu").manual_seed(seed)
        is_gpu = device.type == "cuda"  # on the host all but samples can be called as well, without meaning
        free = torch.cuda.mem_get_info(device)[0] if is_gpu else _DEVICE_BYTES
        count = int(scale * min(_DEVICE_BYTES, max(_SHARE * free, 64 * _MB))) // 4
        self.rows = torch.ones(count, dtype=torch.float32, device=device)
        self._out = torch.empty(count // 2, dtype=torch.float32, device=device)
        pinned = int(scale * _PINNED_BYTES) // 4
        self.pinned = torch.empty(pinned, dtype=torch.float32, device="cpu", pin_memory=is_gpu).fill_(1.0)

    def all(self, points: int = POINTS, by_width: int = len(WIDTHS)) -> list[CostProbe]:
        """Of every operator, the small sizes first: `points` each, of gathers twice `by_width`, of sums three times."""
        numbers, twice = (range(self.first, self.first + count) for count in (points, 2 * by_width))
        made = [sorted(map(make, twice), key=work_of) for make in (self.gather, self.over_bus)]
        made.append(sorted(map(self.spmm, range(self.first, self.first + 3 * by_width)), key=work_of))
        more = range(self.first, self.first + max(points, points * OF_PRODUCTS // POINTS))
        made += [sorted(map(make, more), key=work_of) for make in (self.cached, self.product, self.backward)]
        made += [sorted(map(make, numbers), key=work_of) for make in (self.optimizer, self.compact)]
        for make in (self.copy_up, self.copy_down, self.copy_pageable):
            made.append(sorted(map(make, numbers), key=work_of))
        made.append([self.launches(count) for count in _CALLS])
        if self.device.type == "cuda":
            graphs = self.graphs()
            made += [self.samples(graphs, numbers, is_pinned) for is_pinned in (False, True)]
        return [probe for some in made for probe in some]

    def gather(self, number: int) -> CostProbe:
        return self.gather_of(int(spread(number, 0, *ROWS)), width_of(number, self.first))

    def gather_of(self, num_rows: int, width: int) -> CostProbe:
        return self._gathering("gather/device", self.rows, num_rows, width)

    def over_bus(self, number: int) -> CostProbe:
        return self.over_bus_of(int(spread(number, 0, *ROWS)), width_of(number, self.first))

    def over_bus_of(self, num_rows: int, width: int) -> CostProbe:
        return self._gathering("gather/bus", self.pinned, num_rows, width)

    def _gathering(self, name: str, memory: Tensor, num_rows: int, width: int) -> CostProbe:
        table = memory[: memory.numel() // width * width].view(-1, width)
        num_rows = max(1, min(num_rows, table.shape[0] // 2, self._out.numel() // width))
        out = self._out[: num_rows * width].view(num_rows, width)
        ids = self._ids(table.shape[0], num_rows)
        sizes = {"rows": num_rows, "row_bytes": 4 * width}
        if name == "gather/device":
            sizes["table_rows"] = table.shape[0]
        return self._probe(name, sizes, lambda: gather_rows(table, ids, out=out))

    def cached(self, number: int) -> CostProbe:
        return self.cached_of(int(spread(number, 0, *ROWS)), width_at(number, 1), halton(number, 2))

    def cached_of(self, num_rows: int, width: int, hit_rate: float) -> CostProbe:
        """The first half of the table has copies on the device, as far as there is room."""
        table = self.pinned[: self.pinned.numel() // width * width].view(-1, width)
        count = table.shape[0]
        kept = max(1, min(count // 2, self.rows.numel() // width))
        num_rows = max(1, min(num_rows, kept, self._out.numel() // width))
        slots = torch.full((count,), -1, dtype=torch.int32, device=self.device)
        slots[:kept] = torch.arange(kept, dtype=torch.int32, device=self.device)
        cache, out = self.rows[: kept * width].view(kept, width), self._out[: num_rows * width].view(num_rows, width)
        num_hits = round(num_rows * hit_rate)
        drawn = [self._ids(kept, num_hits), kept + self._ids(count - kept, num_rows - num_hits)]
        ids = torch.cat(drawn)[torch.randperm(num_rows, device=self.device)]
        sizes = {"rows": num_rows, "row_bytes": 4 * width, "hit_rate": num_hits / num_rows}
        return self._probe("gather/cached", sizes, lambda: gather_cached(cache, slots, table, ids, out))

    def spmm(self, number: int) -> CostProbe:
        width = width_of(number, self.first)
        most = self.rows.numel() // width
        num_src = int(min(spread(number, 0, *ROWS), most))
        num_edges = max(16, min(int(num_src * spread(number, 2, 1.0, 8.0)), most, MOST_EDGES))
        num_dst = max(1, int(num_edges / spread(number, 3, 2.0, 20.0)))
        if is_straight(number):
            num_edges, num_dst = min(num_edges, most // 2), min(num_dst, most // 4)
            return self.spmm_of(random_sums(num_edges, num_dst, most, self.generator), width)
        return self.spmm_of(random_block(num_edges, num_dst, num_src, self.generator), width)

    def spmm_of(self, csc: CSC, width: int) -> CostProbe:
        assert csc.num_src * width <= self.rows.numel(), "these rows do not fit"
        rows, there = self.rows[: csc.num_src * width].view(-1, width), csc.to(self.device)
        sizes = {"edges": csc.num_edges, "destinations": csc.num_dst, "width": width, "sources": csc.num_src}
        return self._probe("spmm/device", sizes, lambda: spmm(there, rows, reduce="mean"))

    def _product_shape(self, number: int) -> tuple[int, int, int]:
        inner, width = width_at(number, 1), width_at(number, 2)
        most = min(self.rows.numel() // inner, self._out.numel() // width, _MACS / inner / width)
        return max(64, int(min(spread(number, 0, *ROWS), most))), inner, width

    def product(self, number: int) -> CostProbe:
        return self.product_of(*self._product_shape(number))

    def product_of(self, num_rows: int, inner: int, width: int) -> CostProbe:
        rows, weight = self.rows[: num_rows * inner].view(num_rows, inner), self._weight(inner, width)
        sizes = {"rows": num_rows, "inner": inner, "width": width}
        return self._probe("product/device", sizes, lambda: torch.mm(rows, weight))

    def backward(self, number: int) -> CostProbe:
        return self.backward_of(*self._product_shape(number), is_either(number))

    def backward_of(self, num_rows: int, inner: int, width: int, input_gradient: bool) -> CostProbe:
        rows, weight = self.rows[: num_rows * inner].view(num_rows, inner), self._weight(inner, width)
        gradient = self._out[: num_rows * width].view(num_rows, width)
        sizes = {"rows": num_rows, "inner": inner, "width": width, "input_gradient": float(input_gradient)}
        return self._probe("backward/device", sizes, backward_call(rows, weight, gradient, input_gradient))

    def optimizer(self, number: int) -> CostProbe:
        count = int(spread(number, 0, 1e3, 1e7))
        return self._probe("optimizer/device", {"parameters": count}, optimizer_step(count, self.device), waits=True)

    def compact(self, number: int) -> CostProbe:
        num_edges = int(spread(number, 0, 1e3, 4e6))
        num_dst = max(1, int(num_edges / spread(number, 1, 2.0, 20.0)))
        return self.compact_of(num_edges, num_dst, max(num_dst, int(num_edges * spread(number, 2, 0.2, 1.0))))

    def compact_of(self, num_edges: int, num_dst: int, num_src: int) -> CostProbe:
        """A batch's edges as they come from the sampler, made a structure, and its transpose for the backward pass."""
        csc = random_block(num_edges, num_dst, num_src, self.generator)
        pairs, num_src = torch.stack([csc.indices.long(), csc.dst().long()]).to(self.device), csc.num_src

        def make() -> CSC:
            return CSC.from_sorted(pairs, num_src, num_dst).transpose()

        return self._probe("compact/device", {"nodes": num_src, "edges": num_edges}, make)

    def copy_up(self, number: int) -> CostProbe:
        return self.copy_of("copy/up", spread(number, 0, 4e3, 4e8))

    def copy_down(self, number: int) -> CostProbe:
        return self.copy_of("copy/down", spread(number, 0, 4e3, 4e8))

    def copy_pageable(self, number: int) -> CostProbe:
        return self.copy_of("copy/pageable", spread(number, 0, 4e3, 2e8))

    def copy_of(self, name: str, num_bytes: float) -> CostProbe:
        count = max(1, min(int(num_bytes) // 4, self.pinned.numel(), self.rows.numel()))
        here, there = self.pinned[:count], self.rows[:count]
        if name == "copy/pageable":
            here = torch.ones(count, dtype=torch.float32, device="cpu")
        to, source = (here, there) if name == "copy/down" else (there, here)
        waits = name == "copy/pageable"
        return self._probe(name, {"bytes": 4 * count}, lambda: to.copy_(source, non_blocking=not waits), waits=waits)

    def launches(self, count: int) -> CostProbe:
        """Small kernels, one after the other: what a step of many small calls waits for."""
        small = torch.ones(1024, device=self.device)

        def call() -> None:
            for _ in range(count):
                small.add_(1.0)

        return self._probe("launch/device", {"calls": count}, call, waits=True)

    def graphs(self) -> list[CSC]:
        """A large one whose sources are even, and a small one whose sources crowd."""
        large = min(max(3 * self.context.device_cache, 64 * _MB), 256 * _MB) // 4
        return [
            random_graph(large // 24, large, 1.0, self.generator),
            random_graph((1 << 20) // 12, 1 << 20, 2.0, self.generator),
        ]

    def samples(self, graphs: Sequence[CSC], numbers: Sequence[int], is_pinned: bool) -> list[CostProbe]:
        made = []
        for number in numbers:
            csc, fanouts = graphs[is_either(number)], FANOUTS[number % len(FANOUTS)]
            num_seeds = int(min(spread(number, 0, 64, 8192), csc.num_dst / 4))
            made.append(self.sample_of(csc, fanouts, num_seeds, is_pinned))
        return sorted(made, key=work_of)

    def sample_of(self, csc: CSC, fanouts: Sequence[int], num_seeds: int, is_pinned: bool) -> CostProbe:
        """In the device's memory, or in pinned memory that it reads over the bus."""
        structure, on = HopStructure.of(self._placed(csc, is_pinned)), torch.empty(0, device=self.device)
        seeds = self._order(csc)[: 4 * num_seeds].split(num_seeds)
        batches = itertools.count()

        def sample() -> tuple[int, int]:
            batch = next(batches)
            keys = [1 + len(fanouts) * batch + hop for hop in range(len(fanouts))]
            found = sample_hops(structure, [seeds[batch % len(seeds)]], list(fanouts), keys=keys, on=on)
            return sum(found.num_edges[0]), sum(found.num_nodes[0])

        num_edges, num_nodes = sample()
        size = csc.indptr.nbytes + csc.indices.nbytes
        sizes = {"edges": num_edges, "nodes": num_nodes, "hops": len(fanouts), "graph_bytes": size}
        return self._probe("sample/pinned" if is_pinned else "sample/device", sizes, sample, waits=True)

    def _order(self, csc: CSC) -> Tensor:
        """A graph's nodes in some order, drawn once for all probes."""
        if id(csc) not in self._orders:  # kept with the graph, as its id is another's later
            self._orders[id(csc)] = csc, torch.randperm(csc.num_dst, generator=self.generator, device="cpu")
        return self._orders[id(csc)][1]

    def _placed(self, csc: CSC, is_pinned: bool) -> CSC:
        """A graph where it is sampled, copied once for all probes."""
        kept = self._graphs.setdefault((id(csc), is_pinned), [csc])  # with the graph, as its id is another's later
        if len(kept) == 1:
            indptr, indices = (t.pin_memory() if is_pinned else t.to(self.device) for t in (csc.indptr, csc.indices))
            kept.append(CSC(indptr, indices, csc.num_src))
        return kept[1]

    def _weight(self, inner: int, width: int) -> Tensor:
        return torch.ones(inner, width, dtype=torch.float32, device=self.device)

    def _ids(self, below: int, count: int) -> Tensor:
        return distinct_ids(count, below, self.generator).to(self.device)

    def _probe(
        self, name: str, sizes: Mapping[str, float], call: Callable[[], object], waits: bool = False
    ) -> CostProbe:
        return CostProbe(name, sizes, call, self.device, waits)
