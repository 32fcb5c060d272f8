"""PyG's (FeatureStore, GraphStore) pair on a graph in parts: `stores(gnnsys.open(DIR))`.

PyG's own code reads our tables through the pair, and our loaders recognise it. Ids are global ids; PyG's own loaders
take them as plain tensors. The rows of a batch come in one round trip. Edge rows are read by edge id, which is the
edge's position in the CSC of the whole graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData, TensorAttr
from torch_geometric.data.graph_store import EdgeAttr, EdgeLayout

from gnnsys.graph import EDGE, NODE, EdgeType, NodeType, ids_of
from gnnsys.sampling import DistGraph, core_csc
from gnnsys.store import DistTensor, as_source, read_rows

AnyType: TypeAlias = NodeType | EdgeType
_PIECE = 1 << 20  # edges that are looked up together


def stores(graph: DistGraph) -> tuple[PartsFeatureStore, PartsGraphStore]:
    """The pair that PyG's loaders take as `data`.

    >>> features, edges = stores(graph)  # doctest: +SKIP
    >>> features.get_tensor(group_name="paper", attr_name="x", index=torch.tensor([7, 3]))  # doctest: +SKIP
    """
    if not isinstance(graph, DistGraph):
        raise ValueError(f"stores are made of what gnnsys.open returns, got {type(graph).__name__}")
    return PartsFeatureStore(graph), PartsGraphStore(graph)


def graph_of(data: Any) -> DistGraph | None:
    """The graph in parts, if a loader's `data` is one or is its pair of stores; None for anything else."""
    if isinstance(data, DistGraph):
        return data
    if isinstance(data, (tuple, list)) and len(data) == 2:
        features, edges = data
        if isinstance(features, PartsFeatureStore) and isinstance(edges, PartsGraphStore):
            if features.graph is not edges.graph:
                raise ValueError(
                    "the FeatureStore and the GraphStore are of different graphs: make both by one stores()"
                )
            return features.graph
    return None


class PartsFeatureStore(FeatureStore):
    """Node and edge data of a graph in parts. A group is a node type or an edge type.

    In a graph of one type the group is None, as in PyG: for nodes, and for edge data whose name no node data has. There
    only node data is listed, because PyG reads everything that is listed by node id. `add_edge_data`, a transform, adds
    the edge data.
    """

    def __init__(self, graph: DistGraph) -> None:
        super().__init__()
        self.__dict__["graph"] = graph  # FeatureStore overrides attribute access

    graph: DistGraph

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        """All arrays, except tables that train (`mutable`): those are read only if asked for by name."""
        graph = self.graph
        attrs = []
        for node_type, arrays in graph.node_data.items():
            group = None if graph.is_homogeneous else node_type
            attrs += [TensorAttr(group, name) for name, source in arrays.items() if not _trains(source)]
        if not graph.is_homogeneous:
            attrs += self.get_all_edge_data_attrs()
        return attrs

    def get_all_edge_data_attrs(self) -> list[TensorAttr]:
        """Arrays of edges. Their group is the edge type, also in a graph of one type."""
        return [
            TensorAttr(edge_type, name)
            for edge_type, arrays in self.graph.edge_data.items()
            for name, source in arrays.items()
            if not _trains(source)
        ]

    def add_edge_data(self, batch: Data | HeteroData) -> Data | HeteroData:
        """Adds the rows of a batch's edges, by its `e_id`. Stock PyG loaders take it as their `transform`."""
        stores = {EDGE: batch} if isinstance(batch, Data) else {t: batch[t] for t in batch.edge_types}
        wanted = []
        for attr in self.get_all_edge_data_attrs():
            if attr.group_name in stores and "e_id" in stores[attr.group_name]:
                attr.index = stores[attr.group_name]["e_id"]
                wanted.append(attr)
        for attr, rows in zip(wanted, self.multi_get_tensor(wanted), strict=True):
            stores[attr.group_name][attr.attr_name] = rows
        return batch

    def _multi_get_tensor(self, attrs: Sequence[TensorAttr]) -> list[Tensor]:
        sources = [self._source(attr) for attr in attrs]
        return read_rows((source, self._ids(source, attr.index)) for source, attr in zip(sources, attrs, strict=True))

    def _get_tensor(self, attr: TensorAttr) -> Tensor:
        return self._multi_get_tensor([attr])[0]

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...] | None:
        found = self._find(attr)
        if found is None:
            return None
        if attr.index is None:
            return tuple(found.shape)
        return (self._ids(found, attr.index).numel(), *found.shape[1:])

    def _put_tensor(self, tensor: Any, attr: TensorAttr) -> bool:
        """Writes rows of a table that trains. Other tables never change, because any process may have cached them."""
        source = self._source(attr)
        if not isinstance(source, DistTensor) or not _trains(source):
            raise ValueError(
                f"{attr.attr_name!r} of {attr.group_name!r} never changes: write to a table that does, made by "
                "graph.store.create(...) and named by graph.set_node_data or graph.set_edge_data"
            )
        source[self._ids(source, attr.index)] = torch.as_tensor(tensor, device="cpu")
        return True

    def _remove_tensor(self, attr: TensorAttr) -> bool:
        raise ValueError(f"{attr.attr_name!r} of {attr.group_name!r} belongs to the graph and cannot be removed")

    def _find(self, attr: TensorAttr) -> Any:
        graph, group, name = self.graph, attr.group_name, str(attr.attr_name)
        if group is None and graph.is_homogeneous:
            return graph.node_data[NODE].get(name, graph.edge_data[EDGE].get(name))
        data: Any = graph.edge_data if isinstance(group, tuple) else graph.node_data
        return data.get(group, {}).get(name)

    def _source(self, attr: TensorAttr) -> Any:
        source = self._find(attr)
        if source is None:
            known = [
                (a.group_name, a.attr_name) for a in [*self.get_all_tensor_attrs(), *self.get_all_edge_data_attrs()]
            ]
            raise KeyError(f"there is no {attr.attr_name!r} of {attr.group_name!r}, only {list(dict.fromkeys(known))}")
        return source

    @staticmethod
    def _ids(source: Any, index: Any) -> Tensor:
        num_rows = int(source.shape[0])
        if index is None:
            return torch.arange(num_rows, device="cpu")
        if isinstance(index, slice):
            return torch.arange(*index.indices(num_rows), device="cpu")
        if isinstance(index, int):
            return torch.tensor([index], device="cpu")
        return ids_of(index, num_rows, "index", "row")

    def __repr__(self) -> str:
        return f"PartsFeatureStore({self.graph})"


def _trains(source: Any) -> bool:
    return as_source(source).mutable is True


class PartEdgeAttr(EdgeAttr):
    """PyG's EdgeAttr with a part; None means the edges of all parts."""

    def __init__(
        self,
        edge_type: EdgeType | None,
        layout: EdgeLayout | str,
        is_sorted: bool = False,
        size: tuple[int, int] | None = None,
        part: int | None = None,
    ) -> None:
        super().__init__(edge_type, layout, is_sorted, size)
        self.part = part

    @classmethod
    def cast(cls, *args: Any, **kwargs: Any) -> PartEdgeAttr:
        """Also takes PyG's own EdgeAttr, as one without a part."""
        if len(args) == 1 and not kwargs and isinstance(args[0], EdgeAttr) and not isinstance(args[0], cls):
            plain = args[0]
            return cls(plain.edge_type, plain.layout, plain.is_sorted and plain.layout != EdgeLayout.CSR, plain.size)
        return super().cast(*args, **kwargs)


class PartsGraphStore(GraphStore):
    """The edges of a graph in parts, sorted by destination, in global ids; an edge's position is its edge id.

    `get_edge_index(edge_type, layout="coo")` reads all edges into this process, and warns: our samplers do not need
    that. With `part=p` it returns only the in-edges of part p's core nodes; as "csc", counted from the first of them.
    """

    def __init__(self, graph: DistGraph) -> None:
        super().__init__(PartEdgeAttr)
        self.__dict__["graph"] = graph

    graph: DistGraph

    def get_all_edge_attrs(self) -> list[EdgeAttr]:
        graph = self.graph
        attrs: list[EdgeAttr] = []
        for edge_type in graph.edge_types:
            size = graph.num_nodes(edge_type[0]), graph.num_nodes(edge_type[2])
            attrs.append(PartEdgeAttr(None if graph.is_homogeneous else edge_type, EdgeLayout.CSC, True, size))
        return attrs

    def _get_edge_index(self, edge_attr: EdgeAttr) -> tuple[Tensor, Tensor] | None:
        graph = self.graph
        edge_type = EDGE if edge_attr.edge_type is None and graph.is_homogeneous else edge_attr.edge_type
        if edge_type not in graph.edge_types:
            return None
        if edge_attr.layout == EdgeLayout.CSR:
            raise ValueError("edges lie by destination: ask for layout 'csc' or 'coo', or call csr() for all of them")
        part = getattr(edge_attr, "part", None)
        if part is not None:
            nodes, edges = graph.book.part_range(part, edge_type[2]), graph.book.part_range(part, edge_type)
            if part in graph.parts_here:
                return self._mapped(part, edge_type, edge_attr.layout)
        else:
            nodes, edges = range(graph.num_nodes(edge_type[2])), range(graph.num_edges(edge_type))
            size = 8 * (len(edges) * (2 if edge_attr.layout == EdgeLayout.COO else 1) + len(nodes)) / 2**20
            warnings.warn(
                f"the whole of {edge_type} is read into this process: {len(edges):,} edges, {size:,.1f} MiB. Sampling "
                "does not need it: give loaders neighbor_sampler=gnnsys.pyg.NeighborSampler(...), or use gnnsys.pyg's",
                stacklevel=3,
            )
        return self._looked_up(edge_type, nodes, edges, edge_attr.layout)

    def _mapped(self, part: int, edge_type: EdgeType, layout: EdgeLayout) -> tuple[Tensor, Tensor]:
        """Reads the mapped files of a part on this machine."""
        own = self.graph.parts.part(part)
        csc = core_csc(own, edge_type)
        row = own.global_ids(csc.indices, edge_type[0]).long()
        if layout == EdgeLayout.CSC:
            return row, csc.indptr.long()
        return row, csc.dst() + self.graph.book.part_range(part, edge_type[2]).start

    def _looked_up(self, edge_type: EdgeType, nodes: range, edges: range, layout: EdgeLayout) -> tuple[Tensor, Tensor]:
        """Asks the machines that have the edges."""
        row = torch.empty(len(edges), dtype=torch.int64, device="cpu")
        col = torch.empty(len(edges), dtype=torch.int64, device="cpu") if layout == EdgeLayout.COO else None
        for at, ids in _pieces(edges):
            src, dst = self.graph.edge_ends(ids, edge_type)
            row[at : at + ids.numel()] = src
            if col is not None:
                col[at : at + ids.numel()] = dst
        if col is not None:
            return row, col
        colptr = torch.zeros(len(nodes) + 1, dtype=torch.int64, device="cpu")
        for at, ids in _pieces(nodes):
            colptr[at + 1 : at + 1 + ids.numel()] = self.graph.in_degrees(ids, edge_type)
        return row, colptr.cumsum_(0)

    def _put_edge_index(self, edge_index: Any, edge_attr: EdgeAttr) -> bool:
        raise ValueError("the edges of a graph in parts never change: partition the new graph")

    def _remove_edge_index(self, edge_attr: EdgeAttr) -> bool:
        raise ValueError("the edges of a graph in parts never change: partition the new graph")

    def __repr__(self) -> str:
        return f"PartsGraphStore({self.graph})"


def _pieces(ids: range) -> Iterable[tuple[int, Tensor]]:
    for at in range(0, len(ids), _PIECE):
        yield at, torch.arange(ids.start + at, min(ids.start + at + _PIECE, ids.stop), device="cpu")
