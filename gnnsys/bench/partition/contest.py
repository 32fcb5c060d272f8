"""One run of every partitioner on one graph, from which several rows are made: seconds, peak memory, cut, balance.

A partitioner may take a minute, so sides take turns and each turn yields all its figures at once; the row that asks
first makes them run. Memory is the peak of the process above where it stood, with the input already there.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnnsys.bench.case import OURS, Case, Side, Versus, value
from gnnsys.bench.measure import peak_extra_bytes
from gnnsys.bench.peers import set_threads
from gnnsys.graph import Graph

Partitioner = Callable[[], Tensor]  # the part of every node


@dataclass(frozen=True)
class Figures:
    """One partitioner's figures: medians of its turns; the partition is that of the last."""

    seconds: float
    peak_bytes: float
    part: Tensor


class Contest:
    """Runs `sides`, ours on all threads, in turns, when a figure is first asked for."""

    def __init__(self, sides: Callable[[], Mapping[str, Partitioner]], *, turns: int = 1, threads: int = 2) -> None:
        self._make, self._turns, self._threads = sides, turns, threads
        self._figures: dict[str, Figures] | None = None

    def figures(self, name: str) -> Figures:
        if self._figures is None:
            self._figures = self._run()
        return self._figures[name]

    def case(
        self,
        name: str,
        unit: str,
        read: Callable[[Figures], float],
        versus: tuple[Versus, ...],
        missing: dict[str, str],
    ) -> Case:
        """The row of one figure; `read` may raise to say that a partition does not count."""

        def sides() -> dict[str, Side]:
            names = [OURS, *(p for v in versus for p in v.peers if p not in missing)]
            return {n: Side(lambda n=n: read(self.figures(n)), self._threads) for n in names}  # type: ignore[misc]

        return Case(name, value(unit), sides, versus, repeats=1, missing=missing)

    def _run(self) -> dict[str, Figures]:
        sides = self._make()
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        parts: dict[str, Tensor] = {}
        set_threads(self._threads)
        for _ in range(self._turns):
            for name, run in sides.items():
                seconds = 0.0

                def timed(name: str = name, run: Partitioner = run) -> None:
                    nonlocal seconds
                    with contextlib.redirect_stdout(io.StringIO()):  # DGL prints its own times
                        start = time.perf_counter()
                        parts[name] = run()
                        seconds = time.perf_counter() - start

                found[name].append((peak_extra_bytes(timed), seconds))
        return {
            name: Figures(statistics.median(s for _, s in turns), statistics.median(b for b, _ in turns), parts[name])
            for name, turns in found.items()
        }


def flat_edges(graph: Graph) -> tuple[Tensor, Tensor]:
    """Sources and destinations of all edges, int64, nodes of all types in one numbering."""
    first, offset = {}, 0
    for node_type in graph.node_types:
        first[node_type] = offset
        offset += graph.num_nodes(node_type)
    pairs = [(graph.csc(t).indices.long() + first[t[0]], graph.csc(t).dst() + first[t[2]]) for t in graph.edge_types]
    return torch.cat([p[0] for p in pairs]), torch.cat([p[1] for p in pairs])


def cut_share(graph: Graph, part: Tensor) -> float:
    """Percent of all edges whose ends are in different parts."""
    src, dst = flat_edges(graph)
    return 100 * float((part[src] != part[dst]).sum()) / max(src.numel(), 1)


def imbalance_of(weight: Tensor, part: Tensor, num_parts: int) -> float:
    """The heaviest part to the average one."""
    loads = torch.zeros(num_parts, dtype=torch.float64).index_add_(0, part.long(), weight.double())
    return float(loads.max() * num_parts / loads.sum())


def without_isolated(graph: Graph) -> Graph:
    """A homogeneous graph without the nodes that have no edge."""
    edges = graph.edge_index()
    used = torch.zeros(graph.num_nodes(), dtype=torch.bool)
    used[edges.view(-1)] = True
    number = used.cumsum(0) - 1
    return Graph.from_edge_index(number[edges], int(used.sum()))


def dgl_graph(graph: Graph) -> Any:
    """A homogeneous graph as DGL's METIS stands it: with repeated edges or loops it corrupts the heap (DGL 1.1.3)."""
    import dgl

    csc = graph.csc()
    made = dgl.graph((csc.indices.long(), csc.dst()), num_nodes=csc.num_dst)
    return dgl.to_simple(dgl.remove_self_loop(made))


@dataclass(frozen=True)
class MetisInput:
    """A graph as METIS wants it: symmetric, no loops, no repeated edges, in the integers that pymetis does not copy."""

    xadj: np.ndarray
    adjncy: np.ndarray

    @classmethod
    def of_edges(cls, src: Tensor, dst: Tensor, num_nodes: int) -> MetisInput:
        import pymetis

        other = src != dst
        both = torch.cat([src[other] * num_nodes + dst[other], dst[other] * num_nodes + src[other]]).unique()
        xadj = torch.zeros(num_nodes + 1, dtype=torch.int64)
        xadj[1:] = torch.bincount(both // num_nodes, minlength=num_nodes).cumsum(0)
        dtype = pymetis.zero_copy_dtype()
        return cls(xadj.numpy().astype(dtype), (both % num_nodes).numpy().astype(dtype))

    def partition(self, num_parts: int, weight: Tensor | None, *, recursive: bool, volume: bool = False) -> Tensor:
        import pymetis

        options = pymetis.Options(objtype=pymetis.ObjType.VOL) if volume else pymetis.Options()
        weights = None if weight is None else weight.numpy().astype(pymetis.zero_copy_dtype())
        adjacency = pymetis.CSRAdjacency(self.xadj, self.adjncy)
        _, part = pymetis.part_graph(num_parts, adjacency, vweights=weights, recursive=recursive, options=options)
        return torch.as_tensor(np.asarray(part))
