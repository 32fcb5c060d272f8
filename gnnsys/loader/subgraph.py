"""What a batch keeps of the graph around its nodes: sampled edges, those and their reverses, or all among the nodes.

Functions from Sample to Sample. Both drop the counts per hop, which no longer describe the edges.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, Graph
from gnnsys.ops import IdTable
from gnnsys.sampling import AnyGraph, DistGraph, HopRequest, Sample, neighborhoods

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
    return _other_edges(sample, row, col, edge)


def induced(sample: Sample, graph: AnyGraph, exclude: Mapping[EdgeType, Tensor] | None = None) -> Sample:
    """Every edge of the graph between nodes of the sample, but for excluded positions."""
    row, col, edge = {}, {}, {}
    tables = {}
    for node_type, ids in sample.node.items():
        tables[node_type] = IdTable(graph.num_nodes(node_type), ids.numel(), device=ids.device)
        tables[node_type].clear()
        tables[node_type].insert_seeds(ids)
    device = next((ids.device for ids in sample.node.values()), None)
    hoods, without = neighborhoods(graph, device=device), exclude or {}
    nodes = {t: ids.to(hoods.id_dtypes[t]) for t, ids in sample.node.items()}
    requests = [HopRequest(t, nodes[t[2]], -1, key=0, exclude=without.get(t)) for t in sample.row]
    for edge_type, (indptr, ids, positions, _) in zip(sample.row, hoods.sample(requests), strict=True):
        local = tables[edge_type[0]].lookup(ids.to(sample.node[edge_type[0]].dtype))
        inside = (local >= 0).nonzero().view(-1)
        row[edge_type] = local[inside]
        col[edge_type] = torch.repeat_interleave(indptr.diff(), output_size=ids.numel())[inside]
        edge[edge_type] = hoods.edge_ids(edge_type, positions[inside])
    return _other_edges(sample, row, col, edge)


def _other_edges(
    sample: Sample, row: dict[EdgeType, Tensor], col: dict[EdgeType, Tensor], edge: dict[EdgeType, Tensor]
) -> Sample:
    """Of a sample its nodes alone: its hops say nothing about these edges."""
    hops: dict[str, Any] = {"num_sampled_nodes": {}, "num_sampled_edges": {}, "blocks": [], "by_destination": False}
    hops["edge_weight"] = None
    return replace(sample, row=row, col=col, edge=edge, **hops)


def shape_subgraph(
    sample: Sample, graph: AnyGraph, subgraph_type: str, exclude: Mapping[EdgeType, Tensor] | None = None
) -> Sample:
    """The sample as `subgraph_type` wants it."""
    if subgraph_type == "bidirectional":
        return bidirectional(sample, graph)
    return induced(sample, graph, exclude) if subgraph_type == "induced" else sample


def reverse_of(edge_type: EdgeType, graph: AnyGraph) -> EdgeType | None:
    """The edge type that holds the reverses of this one's edges, by PyG's naming; None if there is none."""
    src, relation, dst = edge_type
    named = (dst, relation[4:] if relation.startswith("rev_") else f"rev_{relation}", src)
    if named in graph.edge_types:
        return named
    return edge_type if src == dst else None


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
