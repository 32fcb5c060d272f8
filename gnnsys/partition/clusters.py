"""Clusters: subparts cut into small pieces with few edges between them, each a contiguous range of global ids.

What Cluster-GCN (Chiang et al. 2019) trains on. A cluster lies inside one subpart, so a batch of a part's clusters
needs nothing of other parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from gnnsys.graph import Graph, NodeType
from gnnsys.ops import Level, Neighbors32, both_directions, induced_subgraph
from gnnsys.partition.assignment import Assignment
from gnnsys.partition.metis import metis
from gnnsys.partition.partition_book import PartitionBook

_IMBALANCE = 0.1  # how far above the average a cluster may be


@dataclass(frozen=True, eq=False)
class ClusterBook:
    """Who has which cluster, and which global ids a cluster has: what the manifest of parts keeps.

    `bounds` int64 [num_subparts + 1]: subpart s has clusters bounds[s] to bounds[s + 1]. `node_offsets[t]` int64
    [num_clusters + 1]: cluster c has the global ids offsets[c] to offsets[c + 1] of node type t.
    """

    bounds: Tensor
    node_offsets: Mapping[NodeType, Tensor]

    @property
    def num_clusters(self) -> int:
        return int(self.bounds[-1])

    def check(self, book: PartitionBook) -> ClusterBook:
        """ValueError unless every cluster lies inside one subpart and all nodes are in one; returns self."""
        if self.bounds.shape != (book.num_subparts + 1,) or int(self.bounds[0]) or bool((self.bounds.diff() < 0).any()):
            raise ValueError(f"clusters of {book.num_subparts} subparts cannot be bounded by {self.bounds.tolist()}")
        if set(self.node_offsets) != set(book.node_offsets):
            raise ValueError(f"clusters have node types {[*self.node_offsets]}, the book {[*book.node_offsets]}")
        for node_type, offsets in self.node_offsets.items():
            if offsets.shape != (self.num_clusters + 1,) or bool((offsets.diff() < 0).any()):
                raise ValueError(f"clusters of {node_type!r} must have {self.num_clusters + 1} ascending offsets")
            if not torch.equal(offsets[self.bounds], book.node_offsets[node_type]):
                raise ValueError(f"clusters of {node_type!r} do not end where the subparts do")
        return self

    def to_json(self) -> dict[str, Any]:
        nodes = [[node_type, offsets.tolist()] for node_type, offsets in self.node_offsets.items()]
        return {"bounds": self.bounds.tolist(), "nodes": nodes}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ClusterBook:
        numbers = [values["bounds"], *(offsets for _, offsets in values["nodes"])]
        if not all(isinstance(number, int) for listed in numbers for number in listed):
            raise ValueError("clusters must be given by whole numbers")
        bounds, *offsets = (torch.tensor(listed, dtype=torch.int64, device="cpu") for listed in numbers)
        types = [str(node_type) for node_type, _ in values["nodes"]]
        return cls(bounds, dict(zip(types, offsets, strict=True)))


@dataclass(frozen=True, eq=False)
class Clustering:
    """The cluster of every node, `cluster[node_type]` int32 [num_nodes]; clusters are numbered subpart by subpart."""

    cluster: Mapping[NodeType, Tensor]
    bounds: Tensor  # int64 [num_subparts + 1], as in `ClusterBook`

    @property
    def num_clusters(self) -> int:
        return int(self.bounds[-1])

    def num_cut(self, graph: Graph) -> int:
        """Edges between two clusters."""
        cut = 0
        for edge_type in graph.edge_types:
            src, dst = (
                self.cluster[t][ends] for t, ends in zip(edge_type[::2], graph.edge_index(edge_type), strict=True)
            )
            cut += int((src != dst).sum())
        return cut


def check_clusters(num_clusters: int, num_subparts: int) -> None:
    if num_clusters < num_subparts:
        raise ValueError(
            f"clusters are cut inside subparts, of which there are {num_subparts}: at least so many, got {num_clusters}"
        )


def cut_clusters(
    graph: Graph, assignment: Assignment, num_clusters: int, *, seed: int = 0, recursive: bool = False
) -> Clustering:
    """Cuts every subpart into clusters by METIS, num_clusters in all, as many for each subpart as for the others.

    Takes the memory of one subpart at a time. No cluster is empty where its subpart has as many nodes as clusters.
    """
    check_clusters(num_clusters, assignment.num_subparts)
    num_subparts = assignment.num_subparts
    bounds = [num_clusters * s // num_subparts for s in range(num_subparts + 1)]
    cluster = {t: torch.empty(graph.num_nodes(t), dtype=torch.int32, device="cpu") for t in graph.node_types}
    for subpart in range(num_subparts):
        nodes = {t: (assignment.subpart[t] == subpart).nonzero().view(-1) for t in graph.node_types}
        number = bounds[subpart + 1] - bounds[subpart]
        cut = _without_empty(
            metis(_level(graph, nodes), number, recursive=recursive, seed=seed, imbalance=_IMBALANCE), number
        )
        for (node_type, ids), own in zip(
            nodes.items(), cut.split([ids.numel() for ids in nodes.values()]), strict=True
        ):
            cluster[node_type][ids] = own + bounds[subpart]
    return Clustering(cluster, torch.tensor(bounds, dtype=torch.int64, device="cpu"))


def _level(graph: Graph, nodes: Mapping[NodeType, Tensor]) -> Level:
    """The edges among some nodes, from both ends; nodes of all types in one numbering."""
    sizes = [ids.numel() for ids in nodes.values()]
    first = dict(zip(nodes, accumulate([0, *sizes]), strict=False))
    lists: list[Neighbors32] = []
    for edge_type in graph.edge_types:
        src, _, dst = edge_type
        csc = induced_subgraph(graph.csc(edge_type), nodes[dst], nodes[src])
        lists += both_directions(csc, first[src], first[dst])
    return Level(tuple(lists), torch.ones(sum(sizes), 1, dtype=torch.int64, device="cpu"))


def _without_empty(cluster: Tensor, num_clusters: int) -> Tensor:
    """The same where no cluster is empty; an empty one gets half of the largest, as long as that has two nodes."""
    sizes = torch.bincount(cluster, minlength=num_clusters)
    for empty in (sizes == 0).nonzero().view(-1).tolist():
        largest = int(sizes.argmax())
        if sizes[largest] < 2:
            break
        moved = (cluster == largest).nonzero().view(-1)[int(sizes[largest]) // 2 :]
        cluster[moved] = empty
        sizes[empty], sizes[largest] = moved.numel(), sizes[largest] - moved.numel()
    return cluster
