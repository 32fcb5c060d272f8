"""A typed graph as one graph: nodes of all types one after another, and the edge type of every edge.

Bins, ownership and exchange know nodes by one id and nothing of types, so they are the same for typed graphs as for
others. A node's id tells its type, as types are ranges of ids: no array of types is kept or sent. The other way, rows
and halos by type, would have multiplied messages and bins by the number of types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, Graph, NodeType

if TYPE_CHECKING:
    from gnnsys.sampling import DistGraph

EDGE_TYPE = "edge_type"  # of `EdgeData.rows`: the place of each edge's type among `edge_types`


@dataclass(frozen=True, eq=False)
class GraphTypes:
    """`offsets`: node `i` of the t-th type has the id offsets[t] + i."""

    node_types: list[NodeType]
    edge_types: list[EdgeType]
    offsets: list[int]
    _moved: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, graph: Graph | DistGraph) -> GraphTypes | None:
        """None for a graph of one node type and one edge type, whose layers take plain rows."""
        if len(graph.node_types) == 1 and len(graph.edge_types) == 1:
            return None
        count = graph.num_nodes if isinstance(graph, Graph) else graph.book.num_ids
        sizes = [count(node_type) for node_type in graph.node_types]
        return cls(list(graph.node_types), list(graph.edge_types), [0, *accumulate(sizes)])

    @property
    def num_nodes(self) -> int:
        return self.offsets[-1]

    def by_type(self, ids: Tensor) -> Tensor:
        """The place of each id's type among `node_types`, int64."""
        if ids.device not in self._moved:
            self._moved[ids.device] = torch.tensor(self.offsets[1:], device=ids.device)
        found = torch.bucketize(ids, self._moved[ids.device], right=True)
        return found.clamp_(max=len(self.node_types) - 1)  # id 0 of a graph without nodes

    def split(self, rows: Tensor, sizes: list[int]) -> dict[NodeType, Tensor]:
        """Rows that come type by type, so many of each."""
        return dict(zip(self.node_types, rows.split(sizes), strict=True))

    def own_ids(self, original_ids: Mapping[NodeType, Tensor]) -> Tensor:
        """Ids of nodes that are known by type and the user's ids."""
        starts = zip(self.node_types, self.offsets, strict=False)
        return torch.cat([original_ids[node_type].long() + start for node_type, start in starts])
