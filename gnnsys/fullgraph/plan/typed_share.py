"""A rank's share of a typed graph: its nodes type by type, in global ids one contiguous range, and all their in-edges.

Rank r has the global ids from offsets[r] on, first its nodes of the first type, then those of the second. A node's
in-edges come edge type by edge type, and inside one as the user gave them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gnnsys.fullgraph.plan.graph_types import GraphTypes
from gnnsys.graph import EdgeType, Graph, NodeType
from gnnsys.ops import CSC, gather_rows, in_subgraph

if TYPE_CHECKING:
    from gnnsys.sampling import DistGraph


@dataclass(frozen=True, eq=False)
class TypedNodes:
    """Which nodes ranks have: `counts` int64 [world_size, types], and of this rank's the user's ids by type."""

    counts: Tensor
    original_ids: dict[NodeType, Tensor]

    @property
    def offsets(self) -> Tensor:
        """int64 [world_size + 1]: where each rank's global ids begin."""
        return torch.cat([self.counts.new_zeros(1), self.counts.sum(1).cumsum(0)])

    def first_ids(self) -> Tensor:
        """The global id of a rank's first node of a type, int64 [world_size, types]."""
        return self.offsets[:-1, None] + self.counts.cumsum(1) - self.counts


def nodes_of_ranks(
    graph: Graph, types: GraphTypes, ranks: Mapping[NodeType, Tensor], rank: int, size: int
) -> TypedNodes:
    """Of a graph in memory, by the rank of every node of each type."""
    missing = [t for t in types.node_types if t not in ranks] if isinstance(ranks, Mapping) else types.node_types
    if missing:
        raise ValueError(
            f"ranks must say the rank of every node by node type, {{{missing[0]!r}: int [nodes], ...}}: "
            f"{'there is none of ' + repr(missing[0]) if isinstance(ranks, Mapping) else 'got ' + type(ranks).__name__}"
        )
    counts, own = [], {}
    for node_type in types.node_types:
        of_type, num_nodes = ranks[node_type].cpu(), graph.num_nodes(node_type)
        if of_type.shape != (num_nodes,) or of_type.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"ranks[{node_type!r}] must be int [{num_nodes}], a rank per node, got {of_type.dtype} "
                f"{list(of_type.shape)}"
            )
        if num_nodes and not 0 <= int(of_type.min()) <= int(of_type.max()) < size:
            raise ValueError(
                f"ranks[{node_type!r}] must be in [0, {size}), got {int(of_type.min())} to {int(of_type.max())}"
            )
        counts.append(torch.bincount(of_type.long(), minlength=size))
        own[node_type] = (of_type == rank).nonzero().view(-1)
    return TypedNodes(torch.stack(counts, dim=1), own)


def edges_of_graph(
    graph: Graph, types: GraphTypes, nodes: TypedNodes, ranks: Mapping[NodeType, Tensor]
) -> tuple[CSC, Tensor]:
    """All in-edges of this rank's nodes of a graph in memory, and their types."""
    first_ids, names = nodes.first_ids(), {}
    for number, node_type in enumerate(types.node_types):
        of_type = ranks[node_type].cpu().long()
        listed = torch.sort(of_type, stable=True).indices  # by rank, then by original id
        begins = nodes.counts[:, number].cumsum(0) - nodes.counts[:, number]
        names[node_type] = torch.empty_like(listed)
        names[node_type][listed] = torch.arange(listed.numel()) + (first_ids[:, number] - begins)[of_type[listed]]

    def pieces() -> Iterator[tuple[EdgeType, CSC]]:
        for edge_type in types.edge_types:
            csc = graph.csc(edge_type)
            csc = csc if csc.indices.is_cpu else csc.to("cpu")
            mine = in_subgraph(csc, nodes.original_ids[edge_type[2]].to(csc.indices.dtype))
            yield edge_type, CSC(mine.indptr, gather_rows(names[edge_type[0]], mine.indices), types.num_nodes)

    return _joined(types, [len(nodes.original_ids[t]) for t in types.node_types], pieces())


def nodes_of_parts(graph: DistGraph, types: GraphTypes, each: int, rank: int, needed: list[int]) -> TypedNodes:
    """Of parts, of whose subparts a rank has `each`; it reads the parts `needed`."""
    bounds = {t: graph.book.node_offsets[t][::each].contiguous() for t in types.node_types}
    counts = torch.stack([bounds[t].diff() for t in types.node_types], dim=1)
    own = {}
    for node_type in types.node_types:
        found = []
        for part in needed:
            here = _columns(graph, part, node_type, bounds[node_type], rank)
            found.append(graph.parts.part(part).original_ids(node_type)[here].long())
        own[node_type] = torch.cat(found)
    return TypedNodes(counts, own)


def edges_of_parts(
    graph: DistGraph, types: GraphTypes, nodes: TypedNodes, each: int, rank: int, needed: list[int]
) -> tuple[CSC, Tensor]:
    """All in-edges of this rank's nodes in parts, and their types."""
    bounds = {t: graph.book.node_offsets[t][::each].contiguous() for t in types.node_types}
    first_ids = nodes.first_ids()

    def pieces() -> Iterator[tuple[EdgeType, CSC]]:
        for edge_type in types.edge_types:
            src_type, dst_type, starts, sources = edge_type[0], edge_type[2], [torch.zeros(1, dtype=torch.int64)], []
            shift = first_ids[:, types.node_types.index(src_type)] - bounds[src_type][:-1]
            for part in needed:
                here, csc = (
                    _columns(graph, part, dst_type, bounds[dst_type], rank),
                    graph.parts.part(part).csc(edge_type),
                )
                indptr = csc.indptr[here.start : here.stop + 1]
                local = csc.indices[int(indptr[0]) : int(indptr[-1])]
                ids = graph.parts.part(part).global_ids(local, src_type)
                owner = torch.searchsorted(bounds[src_type], ids, right=True) - 1
                sources.append(ids + shift[owner])
                starts.append(indptr[1:] - indptr[0] + starts[-1][-1])
            yield edge_type, CSC(torch.cat(starts), torch.cat(sources), types.num_nodes)

    return _joined(types, [len(nodes.original_ids[t]) for t in types.node_types], pieces())


def _columns(graph: DistGraph, part: int, node_type: NodeType, bounds: Tensor, rank: int) -> slice:
    """Which of a part's nodes of a type a rank has, by local id; none where it has another part's alone."""
    own = graph.book.part_range(part, node_type)
    first, end = max(int(bounds[rank]), own.start), min(int(bounds[rank + 1]), own.stop)
    return slice(first - own.start, max(first, end) - own.start)


def _joined(types: GraphTypes, sizes: list[int], pieces: Iterator[tuple[EdgeType, CSC]]) -> tuple[CSC, Tensor]:
    """One structure of the edge types', whose columns are the nodes of one type each, and the type of every edge."""
    made = list(pieces)
    starts = dict(zip(types.node_types, torch.tensor([0, *sizes]).cumsum(0).tolist(), strict=False))
    degrees = torch.zeros(sum(sizes), dtype=torch.int64)
    for edge_type, csc in made:
        degrees[starts[edge_type[2]] :][: csc.num_dst] += csc.in_degrees()
    indptr = torch.cat([degrees.new_zeros(1), degrees.cumsum(0)])
    dtype = torch.int32 if types.num_nodes <= torch.iinfo(torch.int32).max else torch.int64
    indices, of_edges = torch.empty(int(indptr[-1]), dtype=dtype), torch.empty(int(indptr[-1]), dtype=torch.int16)
    free = indptr[:-1].clone()  # where a node's next in-edge goes
    for number, (edge_type, csc) in enumerate(made):
        here, count = free[starts[edge_type[2]] :][: csc.num_dst], csc.in_degrees()
        at = torch.arange(csc.num_edges) + (here - csc.indptr[:-1]).repeat_interleave(count)
        indices[at], of_edges[at] = csc.indices.to(dtype), number
        here += count
    return CSC(indptr, indices, types.num_nodes), of_edges
