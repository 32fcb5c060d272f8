"""What a sampler returns: the structure of one batch, without features.

A `Sample` is plain tensors, so it can be stored, sent and checked (`serialize.py`). Nodes are in PyG's order: seeds
first (in the order given, duplicates kept), then every node in the order it was first seen, hop by hop.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, NodeType
from gnnsys.ops import CSC


@dataclass
class Block:
    """One layer's bipartite structure: destination nodes are the first `num_dst` of the source nodes, per type."""

    csc: dict[EdgeType, CSC]  # local ids; csc.edge_ids are the user's edge ids
    num_src: dict[NodeType, int]
    num_dst: dict[NodeType, int]
    edge_weight: dict[EdgeType, Tensor] | None = None  # float32 [num_edges], in the order of csc.indices


@dataclass
class Sample:
    """Local structure of one batch; `node` is all that fetching features needs."""

    node: dict[NodeType, Tensor]  # int64 or int32 [num_nodes], the user's ids
    row: dict[EdgeType, Tensor]  # int64 [num_edges], local id of the source (the sampled neighbour)
    col: dict[EdgeType, Tensor]  # int64 [num_edges], local id of the destination
    edge: dict[EdgeType, Tensor]  # int64 [num_edges], the user's edge id
    num_sampled_nodes: dict[NodeType, list[int]]  # per hop, entry 0 the seeds; hops + 1 entries
    num_sampled_edges: dict[EdgeType, list[int]]  # per hop; hops entries
    tree: dict[NodeType, Tensor] | None = None  # int64 [num_nodes], the seed a node belongs to; disjoint only
    blocks: list[Block] = field(default_factory=list)  # outermost hop first (DGL's order); expand="frontier" only
    by_destination: bool = False  # a promise: col never decreases, and hop h ends where its destinations do
    edge_weight: dict[EdgeType, Tensor] | None = None  # float32 [num_edges]: what an aggregate multiplies edges by
    node_weight: dict[NodeType, Tensor] | None = None  # float32 [num_nodes]: what a loss multiplies nodes by

    @property
    def device(self) -> torch.device:
        """Where it is: all tensors of a sample are on one device."""
        for tensors in (self.node, self.row):
            for tensor in tensors.values():
                return tensor.device
        return torch.device("cpu")

    def ends(self, edge_type: EdgeType) -> dict[int, int]:
        """Of a sample by destination: how many edges the destinations within each number of hops have."""
        nodes, edges = self.num_sampled_nodes[edge_type[2]], self.num_sampled_edges[edge_type]
        within = accumulate(nodes)
        return dict(zip(within, accumulate([*edges, 0]), strict=True))
