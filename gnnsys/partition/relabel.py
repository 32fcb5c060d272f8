"""From original ids to global ids: one contiguous range per subpart, ascending by original id inside it.

Where subparts are cut into clusters, each of these is a contiguous range, and ids ascend inside it.

8 bytes per node (16 from 2^31 nodes on): the order and its inverse. Edges need no arrays: their global ids follow from
their destinations'.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, Graph, NodeType
from gnnsys.ops import CSC, gather_rows, scatter_rows
from gnnsys.partition.assignment import Assignment
from gnnsys.partition.clusters import ClusterBook, Clustering
from gnnsys.partition.partition_book import PartitionBook

INT32_END = 1 << 31
_PIECE = 1 << 20


@dataclass(frozen=True)
class Relabelling:
    """`original_ids[t][g]` is the original id of global id g, `global_ids[t]` the inverse; int32 where they fit."""

    book: PartitionBook
    original_ids: dict[NodeType, Tensor]
    global_ids: dict[NodeType, Tensor]
    clusters: ClusterBook | None = None


def relabel(graph: Graph, assignment: Assignment, clusters: Clustering | None = None) -> Relabelling:
    """Gives every node its global id, cluster by cluster where there are some. The assignment has been checked."""
    original_ids: dict[NodeType, Tensor] = {}
    global_ids: dict[NodeType, Tensor] = {}
    node_offsets: dict[NodeType, Tensor] = {}
    cluster_offsets: dict[NodeType, Tensor] = {}
    for node_type in graph.node_types:
        num_nodes = graph.num_nodes(node_type)
        numbers = torch.arange(num_nodes, dtype=id_dtype(num_nodes), device="cpu")
        # Nodes grouped by subpart, in order: a stable counting sort, which is what COO to CSC does to edges.
        group, num_groups = assignment.subpart[node_type], assignment.num_subparts
        if clusters is not None:  # numbered subpart by subpart: their groups are those of the subparts, cut
            group, num_groups = clusters.cluster[node_type], clusters.num_clusters
        grouped = CSC.from_edge_index(torch.stack([numbers, group.to(numbers.dtype)]), num_nodes, num_groups)
        node_offsets[node_type] = cluster_offsets[node_type] = grouped.indptr
        if clusters is not None:
            node_offsets[node_type] = grouped.indptr[clusters.bounds]
        original_ids[node_type] = grouped.indices
        global_ids[node_type] = scatter_rows(torch.empty_like(numbers), grouped.indices, numbers)
    edge_offsets: dict[EdgeType, Tensor] = {}
    for edge_type in graph.edge_types:
        subpart = assignment.subpart[edge_type[2]]
        edge_offsets[edge_type] = _edge_offsets(graph.csc(edge_type), subpart, assignment.num_subparts)
    book = PartitionBook(assignment.num_parts, assignment.trainers_per_part, node_offsets, edge_offsets)
    kept = None if clusters is None else ClusterBook(clusters.bounds, cluster_offsets).check(book)
    return Relabelling(book, original_ids, global_ids, kept)


def _edge_offsets(csc: CSC, subpart: Tensor, num_subparts: int) -> Tensor:
    counts = torch.zeros(num_subparts, dtype=torch.int64, device="cpu")
    for first in range(0, csc.num_dst, _PIECE):
        degrees = csc.indptr[first : first + _PIECE + 1].diff()
        counts.index_add_(0, subpart[first : first + _PIECE].long(), degrees)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def first_edges(csc: CSC, original_ids: Tensor) -> Tensor:
    """The global id of the first edge of each column, by global node id, int64: edges are numbered in column order."""
    ends = gather_rows(csc.indptr[1:], original_ids)
    degrees = ends.sub_(gather_rows(csc.indptr[:-1], original_ids))
    return degrees.cumsum(0).sub_(degrees)


def id_dtype(num_ids: int) -> torch.dtype:
    """The narrowest dtype that numbers so many ids."""
    return torch.int32 if num_ids < INT32_END else torch.int64
