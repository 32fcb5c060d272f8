"""From PyG's `Data`, `HeteroData` or (FeatureStore, GraphStore) to the Graph we sample from.

Reads structure, weights and times once. Features stay where they are.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData, remote_backend_utils
from torch_geometric.data.graph_store import EdgeLayout
from torch_geometric.data.storage import EdgeStorage
from torch_geometric.sampler.base import DataType

from gnnsys.graph import EDGE, NODE, EdgeType, Graph, NodeType
from gnnsys.ops import CSC
from gnnsys.pyg.stores import graph_of
from gnnsys.sampling import AnyGraph, DistGraph


@dataclass
class PygStructure:
    """A Graph to sample from, and what PyG's outputs need to know of the data that it was made from."""

    graph: AnyGraph
    is_hetero: bool
    index_dtype: torch.dtype  # of edge_index and n_id in outputs: that of the user's edge_index
    time_attr: str | None = None
    node_time: dict[NodeType, Any] | None = None  # tensors, or tables of a graph in parts
    edge_time: dict[EdgeType, Any] | None = None


def read_structure(data: Any, time_attr: str | None, weight_attr: str | None, is_sorted: bool) -> PygStructure:
    """ValueError, or NotImplementedError where PyG raises that, for data that cannot be sampled from."""
    parted = graph_of(data)
    if parted is not None:
        return _read_parts(parted, time_attr, weight_attr)
    kind = DataType.from_data(data)
    if kind == DataType.remote:
        if weight_attr is not None:
            raise NotImplementedError(
                "weight_attr is not supported for (FeatureStore, GraphStore): PyG has no place for it"
            )
        return _read_remote(data[0], data[1], time_attr)
    if kind == DataType.homogeneous:
        graph, dtype = _read_data(data, is_sorted)
        stores: list[tuple[Any, Any]] = [(EDGE, data._store)]
        node_stores: list[tuple[Any, Any]] = [(NODE, data._store)]
    else:
        graph, dtype = _read_hetero(data, is_sorted)
        stores, node_stores = data.edge_items(), data.node_items()
    structure = PygStructure(graph, kind == DataType.heterogeneous, dtype, time_attr)
    if weight_attr is not None:
        _read_weight(graph, stores, weight_attr)
    if time_attr is not None:
        node_time = {t: s[time_attr] for t, s in node_stores if time_attr in s and s.is_node_attr(time_attr)}
        edge_time = {t: s[time_attr] for t, s in stores if time_attr in s and s.is_edge_attr(time_attr)}
        if kind == DataType.homogeneous and node_time:
            edge_time = {}  # PyG prefers a node-level attribute
        _set_time(structure, node_time, edge_time)
    return structure


def _read_parts(graph: DistGraph, time_attr: str | None, weight_attr: str | None) -> PygStructure:
    """Reads nothing: the machine that has a part samples from it, with the weights and times of the part's edges."""
    structure = PygStructure(graph, not graph.is_homogeneous, torch.int64, time_attr)
    if weight_attr is not None:
        missing = [t for t in graph.edge_types if weight_attr not in graph.edge_data[t]]
        if missing:
            raise ValueError(f"weight_attr: edges of type {missing[0]} have no attribute {weight_attr!r}")
    if time_attr is not None:
        node_time = {t: rows[time_attr] for t, rows in graph.node_data.items() if time_attr in rows}
        edge_time = {t: rows[time_attr] for t, rows in graph.edge_data.items() if time_attr in rows}
        if graph.is_homogeneous and node_time:
            edge_time = {}
        _check_time_level(time_attr, node_time, edge_time)
        structure.node_time, structure.edge_time = node_time or None, edge_time or None
    return structure


def _check_time_level(name: str, node_time: dict[NodeType, Any], edge_time: dict[EdgeType, Any]) -> None:
    if node_time and edge_time:
        raise ValueError(f"The time attribute '{name}' holds both node-level and edge-level information")
    if not node_time and not edge_time:
        raise ValueError(f"The time attribute '{name}' is neither a node-level or edge-level attribute")
    for time in (*node_time.values(), *edge_time.values()):
        if time.dtype.is_floating_point or time.dtype.is_complex:
            raise ValueError(f"time_attr={name!r} must hold integers, such as seconds, got {time.dtype}")


def _set_time(structure: PygStructure, node_time: dict[NodeType, Tensor], edge_time: dict[EdgeType, Tensor]) -> None:
    name = structure.time_attr
    assert name is not None and isinstance(structure.graph, Graph)
    _check_time_level(name, node_time, edge_time)
    for node_type, time in node_time.items():
        structure.graph.set_node_data(name, time.cpu(), node_type)
    for edge_type, time in edge_time.items():
        structure.graph.set_edge_data(name, time.cpu(), edge_type)
    structure.node_time = node_time or None
    structure.edge_time = edge_time or None


def _read_weight(graph: Graph, stores: list[tuple[EdgeType, EdgeStorage]], name: str) -> None:
    missing = [t for t, store in stores if name not in store]
    if missing:
        raise ValueError(f"weight_attr: edges of type {missing[0]} have no attribute {name!r}")
    for edge_type, store in stores:
        graph.set_edge_data(name, store[name].cpu(), edge_type)


def _read_data(data: Data, is_sorted: bool) -> tuple[Graph, torch.dtype]:
    num_nodes = data.num_nodes
    if num_nodes is None:
        raise ValueError("data.num_nodes is unknown: set it, or give the nodes features")
    csc, dtype = _read_edges(data._store, (num_nodes, num_nodes), is_sorted, "data")
    return Graph({NODE: num_nodes}, {EDGE: csc}), dtype


def _read_hetero(data: HeteroData, is_sorted: bool) -> tuple[Graph, torch.dtype]:
    num_nodes = {}
    for node_type in data.node_types:
        store = data[node_type]
        if len(store) == 0 and not any(node_type in (t[0], t[2]) for t in data.edge_types):
            num_nodes[node_type] = 0  # data["papre"], once looked at, is there
            continue
        count = store.num_nodes
        if count is None:
            raise ValueError(f"data[{node_type!r}].num_nodes is unknown: set it, or give its nodes features")
        num_nodes[node_type] = count
    csc: dict[EdgeType, CSC] = {}
    dtypes = set()
    for edge_type, store in data.edge_items():
        for end in (edge_type[0], edge_type[2]):
            if end not in num_nodes:
                raise ValueError(
                    f"data[{edge_type!r}] has edges of nodes {end!r}, which are not there: set "
                    f"data[{end!r}].num_nodes, or give them features"
                )
        size = num_nodes[edge_type[0]], num_nodes[edge_type[2]]
        csc[edge_type], dtype = _read_edges(store, size, is_sorted, f"data[{edge_type!r}]")
        dtypes.add(dtype)
    return Graph(num_nodes, csc), torch.int32 if dtypes == {torch.int32} else torch.int64


def check_adjacency(store: Any, name: str) -> None:
    """ValueError if `store` has a sparse adjacency, alone or beside `edge_index`."""
    for adjacency in ("adj_t", "adj"):
        if adjacency in store and store.get("edge_index") is None:
            raise ValueError(
                f"{name} stores its edges as {adjacency}, which needs torch-sparse: store edge_index instead"
            )
        if adjacency in store:
            raise ValueError(
                f"{name} has {adjacency} beside edge_index, and a batch cannot hold a part of {adjacency}: write "
                f"`del {name}.{adjacency}` to sample from edge_index"
            )


def _read_edges(store: Any, size: tuple[int, int], is_sorted: bool, name: str) -> tuple[CSC, torch.dtype]:
    check_adjacency(store, name)
    edge_index = store.get("edge_index")
    if edge_index is None:
        edge_index = torch.empty(2, 0, dtype=torch.int64, device="cpu")
    plain = edge_index.as_subclass(Tensor).cpu()
    csc = CSC.from_edge_index(plain, *size, narrow=True)
    if is_sorted and csc.edge_ids is not None:
        raise ValueError(f"is_sorted=True, but {name}.edge_index is not sorted by column: leave is_sorted away")
    return csc, plain.dtype


# -- (FeatureStore, GraphStore) ----------------------------------------------------------------------------------------


def _read_remote(features: FeatureStore, edges: GraphStore, time_attr: str | None) -> PygStructure:
    attrs = edges.get_all_edge_attrs()
    if not attrs:
        raise ValueError("the GraphStore holds no edges: put_edge_index first")
    if time_attr is not None:
        for attr in attrs:
            if attr.layout == EdgeLayout.CSR:
                raise ValueError("Temporal sampling requires that edges are stored in either COO or CSC layout")
    by_type = {attr.edge_type: attr for attr in sorted(attrs, key=lambda attr: _LAYOUT_ORDER.index(attr.layout))}
    if None in by_type:
        if by_type[None].size is None:
            raise ValueError("the GraphStore's edges have no size: put_edge_index(..., size=(num_nodes, num_nodes))")
        size = max(by_type[None].size)
        csc, dtype = _read_remote_edges(edges, by_type[None], (size, size))
        structure = PygStructure(Graph({NODE: size}, {EDGE: csc}), False, dtype, time_attr)
    else:
        structure = _read_remote_hetero(features, edges, {attr.edge_type: by_type[attr.edge_type] for attr in attrs})
        structure.time_attr = time_attr
    if time_attr is not None:
        _set_time(structure, *_remote_time(features, structure, time_attr))
    return structure


_LAYOUT_ORDER = [EdgeLayout.CSR, EdgeLayout.COO, EdgeLayout.CSC]  # a type's last one is used: least work


def _read_remote_hetero(features: FeatureStore, edges: GraphStore, attrs: dict[EdgeType, Any]) -> PygStructure:
    ends = [end for edge_type in attrs for end in (edge_type[0], edge_type[2])]
    groups = [a.group_name for a in features.get_all_tensor_attrs() if isinstance(a.group_name, str)]
    num_nodes = {t: remote_backend_utils.num_nodes(features, edges, t) for t in dict.fromkeys(ends + groups)}
    csc, dtypes = {}, set()
    for edge_type, attr in attrs.items():
        size = num_nodes[edge_type[0]], num_nodes[edge_type[2]]
        csc[edge_type], dtype = _read_remote_edges(edges, attr, size)
        dtypes.add(dtype)
    return PygStructure(Graph(num_nodes, csc), True, torch.int32 if dtypes == {torch.int32} else torch.int64)


def _read_remote_edges(edges: GraphStore, attr: Any, size: tuple[int, int]) -> tuple[CSC, torch.dtype]:
    row, col = (part.cpu() for part in edges.get_edge_index(attr))
    if attr.layout == EdgeLayout.CSC:
        indptr = col.long()
        if indptr.numel() < size[1] + 1:  # stores may leave out trailing nodes without edges
            indptr = torch.cat([indptr, indptr[-1:].expand(size[1] + 1 - indptr.numel())])
        return CSC(indptr, row.contiguous(), size[0]).validate(), row.dtype
    if attr.layout == EdgeLayout.CSR:
        row = torch.repeat_interleave(torch.arange(row.numel() - 1, dtype=col.dtype, device="cpu"), row.diff())
    return CSC.from_edge_index(torch.stack([row, col]), *size, narrow=True), row.dtype


def _remote_time(
    features: FeatureStore, structure: PygStructure, time_attr: str
) -> tuple[dict[NodeType, Tensor], dict[EdgeType, Tensor]]:
    """Times by type. In a graph of one type the store may call the group as it likes, such as 'default'."""
    node_time: dict[NodeType, Tensor] = {}
    edge_time: dict[EdgeType, Tensor] = {}
    found = [attr for attr in features.get_all_tensor_attrs() if attr.attr_name == time_attr]
    if not structure.is_hetero and len(found) > 1:
        groups = [attr.group_name for attr in found]
        raise ValueError(f"time_attr: the groups {groups} all have {time_attr!r}, but the graph has one type of nodes")
    for attr in found:
        whole = copy.copy(attr)
        whole.index = None
        time = features.get_tensor(whole)
        if structure.is_hetero:
            times: dict[Any, Tensor] = edge_time if isinstance(attr.group_name, tuple) else node_time
            times[attr.group_name] = time
        elif is_edge_level(features, attr, structure.graph):
            edge_time[EDGE] = time
        else:
            node_time[NODE] = time
    return node_time, edge_time


def is_edge_level(features: FeatureStore, attr: Any, graph: AnyGraph) -> bool:
    """Whether an attribute without a group has a row per edge. Its name decides if there are as many nodes as edges."""
    size = features.get_tensor_size(attr)
    rows = None if size is None else size[0]
    if graph.num_nodes() == graph.num_edges() or rows is None:
        return str(attr.attr_name).startswith("edge_")
    return rows == graph.num_edges()
