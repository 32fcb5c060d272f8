"""Induced subgraphs: of the nodes of a sample, every edge of the graph among them instead of those that were drawn.

Where the sample has trees, every edge among the nodes of a tree: shaDow's subgraphs, one per seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, Graph, NodeType
from gnnsys.ops import expand_indptr, induced_coo
from gnnsys.sampling.edges_within import WithinRequest, inner_edges
from gnnsys.sampling.neighborhoods import AnyGraph, neighborhoods
from gnnsys.sampling.sample import Sample


def induced(sample: Sample, graph: AnyGraph, exclude: Mapping[EdgeType, Tensor] | None = None) -> Sample:
    """Every edge of the graph between nodes of the sample, of one tree where it has trees, but for excluded positions.

    Destinations in the order of the sample's nodes, in-edges in the graph's. A seed that is there twice has its
    in-edges twice, and edges leave its first copy.
    """
    row, col, edge = induced_edges(graph, sample.node, list(sample.row), sample.tree, exclude)
    return with_edges(sample, row, col, edge)


def induced_edges(
    graph: AnyGraph,
    node: Mapping[NodeType, Tensor],
    edge_types: list[EdgeType],
    tree: Mapping[NodeType, Tensor] | None = None,
    exclude: Mapping[EdgeType, Tensor] | None = None,
) -> tuple[dict[EdgeType, Tensor], dict[EdgeType, Tensor], dict[EdgeType, Tensor]]:
    """Local ids of sources and destinations, and edge ids, of all edges among `node`."""
    row, col, edge = {}, {}, {}
    without, of = exclude or {}, tree or {}
    device = next((ids.device for ids in node.values()), None)
    if isinstance(graph, Graph) and graph.device.type == "cpu" and (device is None or device.type == "cpu"):
        for t in edge_types:
            trees = {"dst_tree": of.get(t[2]), "src_tree": of.get(t[0])}
            found = induced_coo(graph.csc(t), node[t[2]], node[t[0]], exclude=without.get(t), **trees)
            row[t], col[t], edge[t] = found
        return row, col, edge
    requests = [
        WithinRequest(t, node[t[2]], node[t[0]], of.get(t[2]), of.get(t[0]), without.get(t)) for t in edge_types
    ]
    hoods = neighborhoods(graph, device=device)
    for edge_type, inner in zip(edge_types, inner_edges(graph, requests), strict=True):
        row[edge_type] = inner.places
        col[edge_type] = expand_indptr(inner.indptr, 0, torch.empty_like(inner.places))
        edge[edge_type] = hoods.edge_ids(edge_type, inner.positions)
    return row, col, edge


def with_edges(
    sample: Sample, row: dict[EdgeType, Tensor], col: dict[EdgeType, Tensor], edge: dict[EdgeType, Tensor]
) -> Sample:
    """Of a sample its nodes alone, with other edges: its hops say nothing about these."""
    hops: dict[str, Any] = {"num_sampled_nodes": {}, "num_sampled_edges": {}, "blocks": [], "by_destination": False}
    hops["edge_weight"] = None
    return replace(sample, row=row, col=col, edge=edge, **hops)
