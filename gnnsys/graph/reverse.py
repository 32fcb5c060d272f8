"""Edges in both directions: `Graph.add_reverse`, which says what is added and what is not."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnsys.graph.graph import Graph
from gnnsys.graph.schema import EDGE, NODE, EdgeType

REVERSED = "rev_"


def with_reverse(graph: Graph) -> Graph:
    graph.check_in_memory("adding reverse edges")
    if graph.is_homogeneous:
        return _both_ways(graph)
    there = set(graph.edge_types)
    edges: dict[EdgeType, Tensor] = {}
    rows: dict[EdgeType, dict[str, Tensor]] = {}
    for edge_type in graph.edge_types:
        if reverse_of(edge_type) not in there and not _is_reverse(edge_type, there):
            reverse = reverse_of(edge_type)
            edges[reverse] = graph.edge_index(edge_type).flip(0)
            rows[reverse] = dict(graph.edge_data[edge_type])
    num_nodes = {t: graph.num_nodes(t) for t in graph.node_types}
    added = Graph.from_edge_indices(edges, num_nodes)
    structure = {t: graph.csc(t) for t in graph.edge_types} | {t: added.csc(t) for t in added.edge_types}
    return Graph(num_nodes, structure, graph.node_data, {**graph.edge_data, **rows}, graph.info)


def reverse_of(edge_type: EdgeType) -> EdgeType:
    src, relation, dst = edge_type
    return dst, f"{REVERSED}{relation}", src


def _is_reverse(edge_type: EdgeType, there: set[EdgeType]) -> bool:
    src, relation, dst = edge_type
    return relation.startswith(REVERSED) and (dst, relation.removeprefix(REVERSED), src) in there


def _both_ways(graph: Graph) -> Graph:
    edges, num_nodes = graph.edge_index(), graph.num_nodes()
    src, dst = edges
    lacks = (src != dst) & ~torch.isin(dst * num_nodes + src, src * num_nodes + dst)
    both = torch.cat([edges, edges[:, lacks].flip(0)], 1)
    rows = {name: torch.cat([array, array[lacks]]) for name, array in graph.edge_data[EDGE].items()}
    return Graph.from_edge_index(both, num_nodes, graph.node_data[NODE], rows, graph.info)
