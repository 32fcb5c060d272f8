"""Which subpart every node belongs to: what partitioners make, and what relabelling and writing start from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnsys.graph import Graph, NodeType, some


@dataclass(frozen=True)
class Assignment:
    """`subpart[node_type]` int32 [num_nodes], values in [0, num_parts * trainers_per_part).

    Subpart s belongs to part s // trainers_per_part: a machine's subparts are neighbours in the numbering.
    """

    num_parts: int
    trainers_per_part: int
    subpart: Mapping[NodeType, Tensor]

    @property
    def num_subparts(self) -> int:
        return self.num_parts * self.trainers_per_part

    @property
    def num_empty(self) -> int:
        """Subparts without a node of any type."""
        has = torch.zeros(self.num_subparts, dtype=torch.bool, device="cpu")
        for subpart in self.subpart.values():
            has[subpart.long()] = True
        return int((~has).sum())

    def part(self, node_type: NodeType) -> Tensor:
        """The part of every node, int32 [num_nodes]."""
        return self.subpart[node_type].div(self.trainers_per_part, rounding_mode="floor")

    def check(self, graph: Graph) -> Assignment:
        """ValueError unless every node of `graph` has exactly one subpart that exists; returns self."""
        if self.num_parts < 1 or self.trainers_per_part < 1:
            raise ValueError(
                f"parts and trainers must be at least 1, got {self.num_parts} and {self.trainers_per_part}"
            )
        if set(self.subpart) != set(graph.node_types):
            raise ValueError(f"the assignment has node types {some(self.subpart)}, the graph {some(graph.node_types)}")
        for node_type, subpart in self.subpart.items():
            if subpart.dtype != torch.int32 or subpart.shape != (graph.num_nodes(node_type),):
                raise ValueError(
                    f"the assignment of {node_type!r} must be int32 [{graph.num_nodes(node_type)}], "
                    f"got {subpart.dtype} {list(subpart.shape)}"
                )
            if subpart.numel() and not 0 <= int(subpart.min()) <= int(subpart.max()) < self.num_subparts:
                raise ValueError(
                    f"the assignment of {node_type!r} must be in [0, {self.num_subparts}), "
                    f"got {int(subpart.min())} to {int(subpart.max())}"
                )
        return self
