"""What a batch keeps of the graph around its nodes: sampled edges, those and their reverses, or all among the nodes.

Functions from Sample to Sample, `gnnsys.sampling.induced` among them. Both drop the counts per hop, which no longer
describe the edges.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, Graph
from gnnsys.sampling import AnyGraph, DistGraph, Sample, induced, reverse_of, with_edges

SUBGRAPH_TYPES = ("directional", "bidirectional", "induced")


def bidirectional(sample: Sample, graph: AnyGraph) -> Sample:
    """Adds the reverse of every sampled edge and merges parallel edges; sorted by destination, then source.

    Edge types are their own reverse where they join a type to itself and no `rev_` type exists (PyG's rule); an edge
    that stands for several has the smallest of their edge ids. Between two edge types ids cannot be kept.
    """
    row, col, edge = dict(sample.row), dict(sample.col), dict(sample.edge)
    for edge_type in [t for t in sample.row if not t[1].startswith("rev_")]:
        reverse = reverse_of(edge_type, graph)
        if reverse is None:
            raise ValueError(
                f"subgraph_type='bidirectional': edge type {edge_type!r} has no reverse type "
                f"{(edge_type[2], 'rev_' + edge_type[1], edge_type[0])!r}"
            )
        num_src = sample.node[edge_type[0]].numel()
        rows = torch.cat([sample.row[edge_type], sample.col[reverse]])
        cols = torch.cat([sample.col[edge_type], sample.row[reverse]])
        ids = torch.cat([sample.edge[edge_type], sample.edge[reverse]])
        order = ids
        if reverse == edge_type and not isinstance(graph, Graph):
            order = _original_order(sample, edge_type, graph).repeat(2)
        row[edge_type], col[edge_type], edge[edge_type] = _coalesce(rows, cols, ids, num_src, order)
        if reverse != edge_type:
            num_dst = sample.node[edge_type[2]].numel()
            row[reverse], col[reverse], _ = _coalesce(cols, rows, ids, num_dst, ids)
            del edge[edge_type], edge[reverse]
    return with_edges(sample, row, col, edge)


def shape_subgraph(
    sample: Sample, graph: AnyGraph, subgraph_type: str, exclude: Mapping[EdgeType, Tensor] | None = None
) -> Sample:
    """The sample as `subgraph_type` wants it."""
    if subgraph_type == "bidirectional":
        return bidirectional(sample, graph)
    return induced(sample, graph, exclude) if subgraph_type == "induced" else sample


def _original_order(sample: Sample, edge_type: EdgeType, graph: DistGraph) -> Tensor:
    """Numbers that order the sampled edges of a graph in parts as their ids do in the whole graph."""
    edges = sample.edge[edge_type]
    if graph.parts.has_edge_ids:
        return graph.original_edge_ids(edges, edge_type)
    # Without edge ids edges are numbered by position: by destination, and among its in-edges as they are in its part.
    dst = graph.original_ids(sample.node[edge_type[2]], edge_type[2])[sample.col[edge_type]]
    order = torch.argsort(edges, stable=True)
    order = order[torch.argsort(dst[order], stable=True)]
    new = torch.cat([order.new_zeros(1, dtype=torch.bool), edges[order].diff() != 0])[: order.numel()]
    return torch.empty_like(edges).scatter_(0, order, new.cumsum(0))


def _coalesce(row: Tensor, col: Tensor, edge: Tensor, num_src: int, order: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each (col, row) once, ascending; of parallel edges the one that comes first in `order`."""
    pairs, which = torch.unique(col * max(1, num_src) + row, return_inverse=True)
    first = torch.full_like(pairs, torch.iinfo(torch.int64).max).scatter_reduce_(0, which, order, "amin")
    is_first = order == first[which]
    chosen = torch.empty_like(pairs).scatter_(0, which[is_first], edge[is_first])
    return pairs % max(1, num_src), pairs // max(1, num_src), chosen
