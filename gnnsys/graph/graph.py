"""A graph in memory: node and edge types, one CSC per edge type, and named arrays of rows.

Homogeneous graphs are graphs of one node type (`NODE`) and one edge type (`EDGE`); every method that takes a type
may then be called without it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gnnsys.graph.schema import EDGE, NODE, EdgeType, NodeType
from gnnsys.ops import CSC


class Graph:
    """Structure as CSC, features as rows in the user's node order and edge order.

    `node_data[ntype][name]` has num_nodes(ntype) rows; `edge_data[etype][name]` has num_edges(etype) rows, row i
    belonging to the i-th edge the user gave (the CSC's `edge_ids`, not its positions).
    """

    def __init__(
        self,
        num_nodes: Mapping[NodeType, int],
        csc: Mapping[EdgeType, CSC],
        node_data: Mapping[NodeType, Mapping[str, Tensor]] | None = None,
        edge_data: Mapping[EdgeType, Mapping[str, Tensor]] | None = None,
    ) -> None:
        self._num_nodes = dict(num_nodes)
        self._csc = dict(csc)
        self.node_data: dict[NodeType, dict[str, Tensor]] = {t: {} for t in self._num_nodes}
        self.edge_data: dict[EdgeType, dict[str, Tensor]] = {t: {} for t in self._csc}
        for edge_type, structure in self._csc.items():
            self._check_structure(edge_type, structure)
        for node_type, arrays in (node_data or {}).items():
            for name, rows in arrays.items():
                self.set_node_data(name, rows, node_type)
        for edge_type, arrays in (edge_data or {}).items():
            for name, rows in arrays.items():
                self.set_edge_data(name, rows, edge_type)

    @classmethod
    def from_edge_index(
        cls,
        edge_index: Tensor,
        num_nodes: int,
        node_data: Mapping[str, Tensor] | None = None,
        edge_data: Mapping[str, Tensor] | None = None,
    ) -> Graph:
        """A homogeneous graph from COO edges (row 0 source, row 1 destination)."""
        csc = CSC.from_edge_index(edge_index, num_nodes)
        return cls({NODE: num_nodes}, {EDGE: csc}, {NODE: node_data or {}}, {EDGE: edge_data or {}})

    @classmethod
    def from_edge_indices(
        cls,
        edge_index: Mapping[EdgeType, Tensor],
        num_nodes: Mapping[NodeType, int],
        node_data: Mapping[NodeType, Mapping[str, Tensor]] | None = None,
        edge_data: Mapping[EdgeType, Mapping[str, Tensor]] | None = None,
    ) -> Graph:
        """A heterogeneous graph from COO edges per edge type."""
        csc = {t: CSC.from_edge_index(e, num_nodes[t[0]], num_nodes[t[2]]) for t, e in edge_index.items()}
        return cls(num_nodes, csc, node_data, edge_data)

    # -- schema ------------------------------------------------------------------------------------------------------

    @property
    def node_types(self) -> list[NodeType]:
        return list(self._num_nodes)

    @property
    def edge_types(self) -> list[EdgeType]:
        return list(self._csc)

    @property
    def is_homogeneous(self) -> bool:
        return self.node_types == [NODE] and self.edge_types == [EDGE]

    def num_nodes(self, node_type: NodeType | None = None) -> int:
        return self._num_nodes[self._node_type(node_type)]

    def num_edges(self, edge_type: EdgeType | None = None) -> int:
        return self.csc(edge_type).num_edges

    def csc(self, edge_type: EdgeType | None = None) -> CSC:
        return self._csc[self._edge_type(edge_type)]

    # -- rows --------------------------------------------------------------------------------------------------------

    def set_node_data(self, name: str, rows: Tensor, node_type: NodeType | None = None) -> None:
        node_type = self._node_type(node_type)
        if rows.dim() == 0 or rows.shape[0] != self._num_nodes[node_type]:
            raise ValueError(
                f"node_data[{node_type!r}][{name!r}] has shape {tuple(rows.shape)}, "
                f"expected {self._num_nodes[node_type]} rows, one per node"
            )
        self.node_data[node_type][name] = rows

    def set_edge_data(self, name: str, rows: Tensor, edge_type: EdgeType | None = None) -> None:
        edge_type = self._edge_type(edge_type)
        if rows.dim() == 0 or rows.shape[0] != self._csc[edge_type].num_edges:
            raise ValueError(
                f"edge_data[{edge_type!r}][{name!r}] has shape {tuple(rows.shape)}, "
                f"expected {self._csc[edge_type].num_edges} rows, one per edge"
            )
        self.edge_data[edge_type][name] = rows

    # -- checks ------------------------------------------------------------------------------------------------------

    def _node_type(self, node_type: NodeType | None) -> NodeType:
        if node_type is None:
            if len(self._num_nodes) != 1:
                raise ValueError(f"node_type must be named, one of {self.node_types}")
            return next(iter(self._num_nodes))
        if node_type not in self._num_nodes:
            raise ValueError(f"node type {node_type!r} does not exist, the graph has {self.node_types}")
        return node_type

    def _edge_type(self, edge_type: EdgeType | None) -> EdgeType:
        if edge_type is None:
            if len(self._csc) != 1:
                raise ValueError(f"edge_type must be named, one of {self.edge_types}")
            return next(iter(self._csc))
        if edge_type not in self._csc:
            raise ValueError(f"edge type {edge_type!r} does not exist, the graph has {self.edge_types}")
        return edge_type

    def _check_structure(self, edge_type: EdgeType, csc: CSC) -> None:
        src, _, dst = edge_type
        for end in (src, dst):
            if end not in self._num_nodes:
                raise ValueError(f"edge type {edge_type!r} names node type {end!r}, which num_nodes does not have")
        if csc.num_src != self._num_nodes[src] or csc.num_dst != self._num_nodes[dst]:
            raise ValueError(
                f"edge type {edge_type!r}: its CSC is {csc.num_src} x {csc.num_dst}, "
                f"but num_nodes says {self._num_nodes[src]} x {self._num_nodes[dst]}"
            )

    def __repr__(self) -> str:
        nodes = ", ".join(f"{t}: {n:,}" for t, n in self._num_nodes.items())
        edges = ", ".join(f"{'|'.join(t)}: {c.num_edges:,}" for t, c in self._csc.items())
        return f"Graph(nodes {{{nodes}}}, edges {{{edges}}})"


def as_ids(values: Tensor | list[int] | range, num_nodes: int, name: str) -> Tensor:
    """A user's selection of nodes (ids, a bool mask, a list, a range) as int64 ids; ValueError when out of range."""
    if isinstance(values, Tensor):
        ids = values
    else:
        ids = torch.as_tensor(list(values) if not isinstance(values, range) else list(values), dtype=torch.int64)
    if ids.dtype == torch.bool:
        if ids.numel() != num_nodes:
            raise ValueError(f"{name}: a mask must have {num_nodes} entries, one per node, got {ids.numel()}")
        ids = ids.nonzero().view(-1)
    if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} must be one-dimensional int32, int64 or bool, got {tuple(ids.shape)} {ids.dtype}")
    if ids.numel() and not (0 <= int(ids.min()) and int(ids.max()) < num_nodes):
        raise ValueError(f"{name} must be in [0, {num_nodes}), got {int(ids.min())} to {int(ids.max())}")
    return ids
