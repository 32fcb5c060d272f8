"""A graph in memory: node and edge types, one CSC per edge type, and named arrays of rows.

Homogeneous graphs are graphs of one node type (`NODE`) and one edge type (`EDGE`); every method that takes a type
may then be called without it. What a graph is given is checked here, once, so that nothing later has to.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from operator import index
from typing import Any

import torch
from torch import Tensor

from gnnsys.graph.graph_ids import ORIGINAL, check_order, make_graph_ids
from gnnsys.graph.names_in_errors import MANY, some
from gnnsys.graph.row_checks import check_data, check_rows, check_weight, is_source, warn_of_unfit_rows
from gnnsys.graph.schema import EDGE, NODE, EdgeType, NodeType
from gnnsys.graph.user_ids import as_ids
from gnnsys.ops import ASK_DOCTOR, CSC, check_device, planned_kind


class Graph:
    """Structure as CSC, features as rows in the user's node order and edge order.

    `node_data[ntype][name]` has num_nodes(ntype) rows; `edge_data[etype][name]` has num_edges(etype) rows, row i
    belonging to the i-th edge the user gave (the CSC's `edge_ids`, not its positions). `info` holds what is neither,
    such as names of classes or how a graph was generated: plain JSON values, saved with the graph.

    Made from COO, indices and edge ids are stored as int32 wherever the nodes and the edges fit: half the memory, and
    half the bytes a sampler reads. Edges that come sorted by destination need no edge ids at all.

    >>> graph = Graph.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 0]]), 3, {"x": torch.rand(3, 8)})
    >>> graph
    Graph(nodes {node: 3}, edges {node|to|node: 3})
    """

    def __init__(
        self,
        num_nodes: Mapping[NodeType, int],
        csc: Mapping[EdgeType, CSC],
        node_data: Mapping[NodeType, Mapping[str, Tensor]] | None = None,
        edge_data: Mapping[EdgeType, Mapping[str, Tensor]] | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        self.info: dict[str, Any] = dict(info or {})
        self.planned_place = "host"  # where it would be, if an estimate has it made: host, pinned or device
        self.structure_copies: dict[torch.device, dict[EdgeType, CSC]] = {}  # of a pinned graph, by who samples it
        self._num_nodes = {node_type: int(count) for node_type, count in num_nodes.items()}
        self._csc = dict(csc)
        for node_type, count in self._num_nodes.items():
            if count < 0:
                raise ValueError(f"num_nodes[{node_type!r}] must be >= 0, got {count}")
        self.node_data: dict[NodeType, dict[str, Any]] = {t: {} for t in self._num_nodes}
        self.edge_data: dict[EdgeType, dict[str, Any]] = {t: {} for t in self._csc}
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
        info: Mapping[str, Any] | None = None,
    ) -> Graph:
        """A homogeneous graph from COO edges (row 0 source, row 1 destination)."""
        csc = CSC.from_edge_index(edge_index, _count(num_nodes), narrow=True)
        return cls({NODE: num_nodes}, {EDGE: csc}, {NODE: node_data or {}}, {EDGE: edge_data or {}}, info)

    @classmethod
    def from_edge_indices(
        cls,
        edge_index: Mapping[EdgeType, Tensor],
        num_nodes: Mapping[NodeType, int],
        node_data: Mapping[NodeType, Mapping[str, Tensor]] | None = None,
        edge_data: Mapping[EdgeType, Mapping[str, Tensor]] | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> Graph:
        """A heterogeneous graph from COO edges per edge type."""
        if not isinstance(num_nodes, Mapping):
            raise ValueError(f"num_nodes must be a dict by node type, got {num_nodes!r}")
        csc, num_nodes = {}, {node_type: _count(count) for node_type, count in num_nodes.items()}
        for edge_type, edges in edge_index.items():
            check_edge_type(edge_type, num_nodes)
            src, _, dst = edge_type
            try:
                csc[edge_type] = CSC.from_edge_index(edges, num_nodes[src], num_nodes[dst], narrow=True)
            except ValueError as error:
                raise ValueError(f"edge type {edge_type!r}: {error}") from error
        return cls(num_nodes, csc, node_data, edge_data, info)

    @classmethod
    def _of_checked(
        cls,
        num_nodes: Mapping[NodeType, int],
        csc: Mapping[EdgeType, CSC],
        node_data: Mapping[NodeType, Mapping[str, Tensor]],
        edge_data: Mapping[EdgeType, Mapping[str, Tensor]],
        info: Mapping[str, Any],
    ) -> Graph:
        """A graph of arrays that were a graph's before: nothing is looked at, and no device is waited for."""
        out = cls(num_nodes, {}, info=info)
        out._csc = dict(csc)
        out.node_data = {node_type: dict(node_data.get(node_type, {})) for node_type in out._num_nodes}
        out.edge_data = {edge_type: dict(edge_data.get(edge_type, {})) for edge_type in out._csc}
        return out

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

    def edge_index(self, edge_type: EdgeType | None = None) -> Tensor:
        """COO in the user's edge order, int64 [2, num_edges]."""
        csc = self.csc(edge_type)
        coo = torch.stack([csc.indices.long(), csc.dst()])
        if csc.edge_ids is None:
            return coo
        return torch.empty_like(coo).index_copy_(1, csc.edge_ids.long(), coo)

    # -- ids ---------------------------------------------------------------------------------------------------------

    @property
    def numbering(self) -> str:
        """`ORIGINAL`: in memory there is no other numbering than the user's."""
        return ORIGINAL

    def from_original(self, ids: Any, type: NodeType | EdgeType | None = None) -> Any:
        """`GraphIds` of the user's ids, or of a mask: what scripts pass that run on parts too, where plain ids are
        ambiguous.

        Nodes: ids or a mask of node type `type`. Edges: the same of an edge type. Links: [2, n] ids of both ends. By
        type: a dict, and so is the result.

        >>> loader = gnnsys.NeighborLoader(graph, [15, 10], input_nodes=graph.from_original(train_ids))
        """
        return make_graph_ids(self, ids, type, "from_original")

    def from_global(self, ids: Any, type: NodeType | EdgeType | None = None) -> Any:
        """`GraphIds` of ids that batches have. In memory these are the user's own."""
        return make_graph_ids(self, ids, type, "from_global")

    # -- rows --------------------------------------------------------------------------------------------------------

    def set_node_data(
        self, name: str, rows: Any, node_type: NodeType | None = None, *, order: str | None = None
    ) -> None:
        """Adds or replaces one array of rows, one row per node: a tensor, or a source of rows that loaders read by id
        (`gnnsys.store.FeatureSource`). `order`, which a tensor needs on parts, changes nothing here."""
        node_type = self._node_type(node_type)
        where = f"node_data[{node_type!r}][{name!r}]"
        check_order(self, order, where)
        check_data(rows, self._num_nodes[node_type], where, "node")
        warn_of_unfit_rows(rows, where)
        self.node_data[node_type][name] = rows

    def set_edge_data(
        self, name: str, rows: Any, edge_type: EdgeType | None = None, *, order: str | None = None
    ) -> None:
        """Adds or replaces one array of rows, row i for the i-th edge the user gave: a tensor, or a source of rows.

        An array called `weight` or `edge_weight` must be fit to draw by: finite and not negative.
        """
        edge_type = self._edge_type(edge_type)
        where = f"edge_data[{edge_type!r}][{name!r}]"
        check_order(self, order, where)
        check_data(rows, self._csc[edge_type].num_edges, where, "edge")
        if name in ("weight", "edge_weight") and isinstance(rows, Tensor) and rows.dim() == 1:
            check_weight(rows, where)
        warn_of_unfit_rows(rows, where)
        self.edge_data[edge_type][name] = rows

    def check_in_memory(self, purpose: str) -> None:
        """ValueError where some array is a source of rows: `purpose` needs them all in memory."""
        for arrays in (*self.node_data.values(), *self.edge_data.values()):
            for name, rows in arrays.items():
                if is_source(rows):
                    raise ValueError(f"{purpose} needs rows in memory, and {name!r} is a {type(rows).__name__}")

    def add_reverse(self) -> Graph:
        """The graph with its edges in both directions as well; what is there already is not added again.

        A homogeneous graph gets, behind its own edges and in their order, a reverse of every edge u -> v that is no
        self loop, unless it has an edge v -> u. A typed graph gets, for each type (src, relation, dst), a type
        (dst, "rev_" + relation, src) with all its edges reversed, also where src is dst; types that are such a reverse,
        or have one, get none. A reverse has the rows of its edge. Doing it twice changes nothing.

        >>> Graph.from_edge_index(torch.tensor([[0, 1], [1, 2]]), 3).add_reverse().edge_index().tolist()
        [[0, 1, 1, 2], [1, 2, 0, 1]]
        """
        from gnnsys.graph.reverse import with_reverse

        return with_reverse(self)

    # -- memory ------------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where the structure is; arrays of rows may be elsewhere."""
        return next((csc.indptr.device for csc in self._csc.values()), torch.device("cpu"))

    @property
    def is_pinned(self) -> bool:
        """Whether the structure is in pinned host memory, where a device can read it."""
        tensors = [t for csc in self._csc.values() for t in (csc.indptr, csc.indices)]
        return self.device.type == "cpu" and bool(tensors) and all(t.numel() == 0 or t.is_pinned() for t in tensors)

    def to(self, device: torch.device | str) -> Graph:
        """The graph with its structure and its tensors of rows on `device`; sources of rows stay what they are.

        On a GPU, samplers and loaders then do all their work there. What is there already is shared, not copied.
        """
        if planned_kind() is None:
            check_device(device)
        moved = self._moved(lambda csc: csc.to(device), lambda rows: rows.to(device))
        if planned_kind() not in (None, "cpu"):
            moved.planned_place = "device"
        return moved

    def pin_memory(self) -> Graph:
        """The graph with its structure and its tensors of rows in pinned host memory, which a GPU reads directly.

        For graphs that do not fit the device. Pinned memory is never paged out: it counts in full, and twice while the
        graph that it was made of lives.
        """
        if planned_kind() not in (None, "cpu"):  # by an estimate, on a machine that may have no device
            planned = self.copy()
            planned.planned_place = "pinned"
            return planned
        if not torch.accelerator.is_available():
            raise ValueError(f"pin_memory() is for graphs that a GPU reads, and torch finds none. {ASK_DOCTOR}")
        return self._moved(
            lambda csc: csc.pin_memory(),
            lambda rows: rows if not rows.is_cpu or rows.is_pinned() else rows.contiguous().pin_memory(),
        )

    def copy(self) -> Graph:
        """The same structure and rows as a graph of its own: what the one is given later, the other does not have."""
        out = self._moved(lambda csc: csc, lambda rows: rows)
        out.structure_copies = self.structure_copies
        return out

    def is_copy_of(self, other: object) -> bool:
        """Whether this is `other`, or a `copy` of the same graph: one structure in memory."""
        if self is other:
            return True
        return (
            isinstance(other, Graph)
            and self._csc.keys() == other._csc.keys()
            and bool(self._csc)
            and all(csc is other._csc[edge_type] for edge_type, csc in self._csc.items())
        )

    def _moved(self, structure: Callable[[CSC], CSC], rows: Callable[[Tensor], Tensor]) -> Graph:
        """Every part by itself; what was checked when the graph was made need not be checked again."""

        def through(arrays: Mapping[str, Any]) -> dict[str, Any]:
            return {name: rows(values) if isinstance(values, Tensor) else values for name, values in arrays.items()}

        out = copy.copy(self)
        out.info, out.structure_copies = dict(self.info), {}
        out._csc = {t: structure(csc) for t, csc in self._csc.items()}
        out.node_data = {t: through(arrays) for t, arrays in self.node_data.items()}
        out.edge_data = {t: through(arrays) for t, arrays in self.edge_data.items()}
        return out

    # -- checks ------------------------------------------------------------------------------------------------------

    def _node_type(self, node_type: NodeType | None) -> NodeType:
        if node_type is None:
            if len(self._num_nodes) != 1:
                raise ValueError(f"node_type must be named, one of {some(self.node_types)}")
            return next(iter(self._num_nodes))
        if node_type not in self._num_nodes:
            there = some(self.node_types, near=node_type)
            raise ValueError(f"node type {node_type!r} does not exist, the graph has {there}")
        return node_type

    def _edge_type(self, edge_type: EdgeType | None) -> EdgeType:
        if edge_type is None:
            if len(self._csc) != 1:
                raise ValueError(f"edge_type must be named, one of {some(self.edge_types)}")
            return next(iter(self._csc))
        if edge_type not in self._csc:
            there = some(self.edge_types, near=edge_type)
            raise ValueError(f"edge type {edge_type!r} does not exist, the graph has {there}")
        return edge_type

    def _check_structure(self, edge_type: EdgeType, csc: CSC) -> None:
        check_edge_type(edge_type, self._num_nodes)
        src, _, dst = edge_type
        if csc.num_src != self._num_nodes[src] or csc.num_dst != self._num_nodes[dst]:
            raise ValueError(
                f"edge type {edge_type!r}: its CSC is {csc.num_src} x {csc.num_dst}, "
                f"but num_nodes says {self._num_nodes[src]} x {self._num_nodes[dst]}"
            )
        try:
            csc.validate()
        except ValueError as error:
            raise ValueError(f"edge type {edge_type!r}: {error}") from error
        if csc.edge_ids is not None:
            where = f"edge type {edge_type!r}: edge_ids"
            check_rows(csc.edge_ids, csc.num_edges, where, "edge")
            as_ids(csc.edge_ids, csc.num_edges, where)

    def __repr__(self) -> str:
        nodes = [f"{t}: {n:,}" for t, n in self._num_nodes.items()]
        edges = [f"{'|'.join(t)}: {c.num_edges:,}" for t, c in self._csc.items()]
        return f"Graph(nodes {{{_first_few(nodes)}}}, edges {{{_first_few(edges)}}})"


def _count(num_nodes: Any) -> int:
    try:
        return index(num_nodes)
    except TypeError:
        hint = ": write int(edge_index.max()) + 1 where the last node has an edge" if num_nodes is None else ""
        raise ValueError(f"num_nodes must be a whole number, got {num_nodes!r}{hint}") from None


def _first_few(texts: list[str]) -> str:
    more = [f"and {len(texts) - MANY} more types"] if len(texts) > MANY else []
    return ", ".join(texts[:MANY] + more)


def check_edge_type(edge_type: EdgeType, num_nodes: Mapping[NodeType, int]) -> None:
    """ValueError unless `edge_type` is three names, the first and last of them node types."""
    if not (isinstance(edge_type, tuple) and len(edge_type) == 3 and all(isinstance(part, str) for part in edge_type)):
        raise ValueError(f"an edge type is three names (source, relation, destination), got {edge_type!r}")
    for end in (edge_type[0], edge_type[2]):
        if end not in num_nodes:
            raise ValueError(f"edge type {edge_type!r} names node type {end!r}, which num_nodes does not have")
