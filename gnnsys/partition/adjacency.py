"""Both directions of every edge of a graph, in mapped files: what the streaming partitioner reads, run by run.

All node types in one numbering, type after type as in `graph.node_types`; loops are left out, repeated edges stay. One
sequential read visits every node with all its neighbours, which a CSC alone (in-neighbours) does not offer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from gnnsys.graph import EdgeSort, Graph, NodeType
from gnnsys.ops import CSC, NodeRun, drop_pages

_INT32_MAX = 2**31 - 1
_PIECE_BYTES = 96  # memory per edge on its way into the adjacency


def first_nodes(graph: Graph) -> dict[NodeType, int]:
    """Where each node type begins in the one numbering of all nodes."""
    first, begins = 0, {}
    for node_type in graph.node_types:
        begins[node_type] = first
        first += graph.num_nodes(node_type)
    return begins


class Adjacency:
    """The neighbours of every node, in mapped files that may be larger than memory."""

    def __init__(self, indptr: Tensor, indices: Tensor, memory: int) -> None:
        self._indptr, self._indices = indptr, indices
        self._keep = indices.numel() * indices.element_size() <= memory  # small enough to stay in memory
        self._run_edges, self._run_nodes = max(memory // 64, 1), max(memory // 512, 1)

    @classmethod
    def build(
        cls, graph: Graph, folder: Path, memory: int, progress: Callable[[float], None] | None = None
    ) -> Adjacency:
        """Sorts the edges of `graph`, both ways, into files in `folder`, holding at most `memory` bytes."""
        num_nodes = sum(graph.num_nodes(node_type) for node_type in graph.node_types)
        if num_nodes > _INT32_MAX:
            raise ValueError(f"streaming assignment takes at most 2^31 - 1 nodes, the graph has {num_nodes}")
        begins = first_nodes(graph)
        edges = EdgeSort(folder, memory, (num_nodes, num_nodes), id_dtype=torch.int32)
        for edge_type in graph.edge_types:
            for src, dst in _edges(graph.csc(edge_type), max(memory // _PIECE_BYTES, 1)):
                src, dst = src + begins[edge_type[0]], dst + begins[edge_type[2]]
                other = src != dst
                edges.add(src[other], dst[other])
                edges.add(dst[other], src[other])
        csc = edges.sort(edge_ids=False, progress=progress)
        return cls(csc.indptr, csc.indices, memory)

    @property
    def num_nodes(self) -> int:
        return self._indptr.numel() - 1

    @property
    def num_neighbors(self) -> int:
        """Over all nodes: twice the number of edges."""
        return self._indices.numel()

    def runs(self) -> Iterator[NodeRun]:
        """All nodes in order. What does not fit in memory leaves it again behind the reader."""
        first = 0
        while first < self.num_nodes:
            begin = int(self._indptr[first])
            last = int(torch.searchsorted(self._indptr, begin + self._run_edges, right=True)) - 1
            last = min(max(last, first + 1), first + self._run_nodes, self.num_nodes)
            indptr = self._indptr[first : last + 1]
            indices = self._indices[begin : int(indptr[-1])]
            yield NodeRun(first, indptr, indices)
            if not self._keep:
                drop_pages(indices)
                drop_pages(indptr)
            first = last


def _edges(csc: CSC, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(src, dst) int64, position after position, at most `size` at a time; pages that were read are dropped."""
    for begin in range(0, csc.num_edges, size):
        end = min(begin + size, csc.num_edges)
        first = int(torch.searchsorted(csc.indptr, begin, right=True)) - 1
        last = int(torch.searchsorted(csc.indptr, end))
        degrees = csc.indptr[first : last + 1].clamp(begin, end).diff()
        dst = torch.repeat_interleave(torch.arange(first, last, device="cpu"), degrees, output_size=end - begin)
        yield csc.indices[begin:end].long(), dst
        drop_pages(csc.indices[begin:end])
