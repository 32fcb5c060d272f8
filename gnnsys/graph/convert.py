"""Graphs of other libraries: from and to PyG, from DGL.

Neither library is needed to import this module: objects are recognised when they are given. Rows are taken over
without a copy; structure is converted once, to CSC.
"""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gnnsys.graph.graph import Graph
from gnnsys.graph.schema import EDGE, NODE, EdgeType, NodeType

if TYPE_CHECKING:
    from torch_geometric.data import Data, HeteroData

_NO_ROWS_OF_NODES = ("edge", "index", "idx", "adj", "face", "ptr", "batch", "num_")  # in names of PyG's attributes
_DGL_NODE, _DGL_EDGE = "_N", ("_N", "_E", "_N")


def as_graph(given: Any) -> Graph:
    """A graph of ours, of PyG's or of DGL's as ours; ValueError that says what to call for anything else."""
    if isinstance(given, Graph):
        return given
    if hasattr(given, "edge_stores") and hasattr(given, "node_stores"):
        return from_pyg(given)
    if hasattr(given, "canonical_etypes") and hasattr(given, "ntypes"):
        return from_dgl(given)
    if isinstance(given, (str, os.PathLike)):
        name = os.fspath(given)
        raise ValueError(f"graph must be a graph, got the path {name!r}: pass gnnsys.graph.load({name!r})")
    if hasattr(given, "parts") and hasattr(given, "placement"):
        raise ValueError("graph is open from parts: pass graph.parts.merge(), the whole graph in memory, or its source")
    kinds = "a gnnsys.graph.Graph, a torch_geometric Data or HeteroData, or a DGLGraph"
    make = "make one with gnnsys.graph.Graph.from_edge_index(edge_index, num_nodes, {'x': x})"
    raise ValueError(f"graph must be {kinds}, got {type(given).__name__}: {make}")


def check_ours(given: Any) -> None:
    """ValueError, with what to pass, for what is no graph of ours: other libraries', paths, tensors and the rest."""
    kind = type(given).__name__
    if hasattr(given, "edge_stores") and hasattr(given, "node_stores"):
        said = f"graph is PyG's {kind}: pass gnnsys.graph.from_pyg(data), or take the loaders of gnnsys.pyg"
    elif hasattr(given, "canonical_etypes") and hasattr(given, "ntypes"):
        said = f"graph is DGL's {kind}: pass gnnsys.graph.from_dgl(g), or take the loaders of gnnsys.dgl"
    elif isinstance(given, (str, os.PathLike)):
        name = os.fspath(given)
        said = f"graph is the path {name!r}: pass gnnsys.open({name!r}) of parts, or gnnsys.graph.load({name!r})"
    elif isinstance(given, Tensor):
        said = "graph is a tensor: pass gnnsys.graph.Graph.from_edge_index(edge_index, num_nodes, {'x': x})"
    elif not hasattr(given, "node_types"):
        said = (
            f"graph must be a Graph, or what gnnsys.open returns, got {kind}: pass gnnsys.open(path) of parts, or "
            "gnnsys.graph.Graph.from_edge_index(edge_index, num_nodes, {'x': x})"
        )
    else:
        return
    raise ValueError(said)


def from_pyg(data: Data | HeteroData) -> Graph:
    """A PyG `Data` or `HeteroData`: every node-level and edge-level tensor, by its own name.

    What is node-level and what is edge-level is PyG's own decision (`is_node_attr`); attributes of the whole graph are
    left behind, with a warning where they have several rows and look like rows of nodes. Arrays of numpy and lists of
    numbers become tensors. Edges must be in `edge_index`.
    """
    if not hasattr(data, "edge_stores") or not hasattr(data, "node_stores"):
        raise ValueError(f"data must be a torch_geometric Data or HeteroData, got {type(data).__name__}")
    stores: list[tuple[EdgeType, Any]]
    if hasattr(data, "edge_types"):
        num_nodes = {node_type: _pyg_num_nodes(data[node_type], node_type) for node_type in data.node_types}
        node_data = {node_type: _pyg_rows(data[node_type], "node") for node_type in data.node_types}
        for node_type in data.node_types:
            _warn_of_lengths(data[node_type], f"data[{node_type!r}]", num_nodes[node_type])
        stores = [(edge_type, data[edge_type]) for edge_type in data.edge_types]
    else:
        num_nodes = {NODE: _pyg_num_nodes(data, NODE)}
        node_data = {NODE: _pyg_rows(data, "node")}
        _warn_of_lengths(data, "data", num_nodes[NODE])
        stores = [(EDGE, data)]
    edge_index = {edge_type: _pyg_edge_index(store, edge_type) for edge_type, store in stores}
    edge_data = {edge_type: _pyg_rows(store, "edge") for edge_type, store in stores}
    return Graph.from_edge_indices(edge_index, num_nodes, node_data, edge_data)


def _pyg_num_nodes(store: Any, node_type: NodeType) -> int:
    if store.num_nodes is None:
        raise ValueError(f"num_nodes of node type {node_type!r} cannot be inferred: set data.num_nodes")
    return int(store.num_nodes)


def _pyg_edge_index(store: Any, edge_type: EdgeType) -> Tensor:
    if "edge_index" not in store or store["edge_index"] is None:
        layouts = [name for name in ("adj_t", "adj") if name in store]
        found = f"{layouts[0]!r}" if layouts else "none"
        raise ValueError(
            f"data must have edge_index for {edge_type!r}, found {found}: convert a sparse adjacency with "
            "`data.edge_index = torch.stack(data.adj_t.t().coo()[:2])`"
        )
    # EdgeIndex is a Tensor subclass that checks itself on every operation.
    given = store["edge_index"]
    return given.as_subclass(Tensor) if isinstance(given, Tensor) else torch.as_tensor(given, device="cpu")


def _pyg_rows(store: Any, level: str) -> dict[str, Tensor]:
    chosen = {}
    for name in list(store.keys()):
        value = None if name == "edge_index" else _as_tensor(store[name])
        if value is None:
            continue
        if store.is_edge_attr(name) if level == "edge" else store.is_node_attr(name):
            chosen[name] = value
    return chosen


def _as_tensor(value: Any) -> Tensor | None:
    """A tensor, an array of numbers or a list of numbers as a tensor; None for anything else."""
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, (np.ndarray, list, tuple)):
        return None
    try:
        array = np.asarray(value)
        return torch.from_numpy(array if array.flags.writeable and array.dtype.isnative else array.copy())
    except (TypeError, ValueError):  # names, rows of several lengths
        return None


def _warn_of_lengths(store: Any, said: str, num_nodes: int) -> None:
    """Of what is left behind, names what looks like rows of nodes, but too few or too many."""
    for name in list(store.keys()):
        if any(part in name for part in _NO_ROWS_OF_NODES) or store.is_node_attr(name) or store.is_edge_attr(name):
            continue
        rows = _as_tensor(store[name])
        if rows is not None and rows.dim() and not rows.is_sparse and rows.shape[0] > 1:
            warnings.warn(
                f"{said}.{name} has {rows.shape[0]} rows and there are {num_nodes} nodes: it is left out. Give it a "
                "row for each node, or delete it",
                stacklevel=3,
            )


def to_pyg(graph: Graph) -> Data | HeteroData:
    """A PyG `Data`, or `HeteroData` where the graph has types, with edges in the user's order."""
    try:
        from torch_geometric.data import Data, HeteroData
    except ImportError as error:
        raise ImportError("to_pyg needs PyG: pip install torch-geometric") from error
    if graph.is_homogeneous:
        data = Data(edge_index=graph.edge_index(), **graph.node_data[NODE], **graph.edge_data[EDGE])
        data.num_nodes = graph.num_nodes()
        return data
    hetero = HeteroData()
    for node_type in graph.node_types:
        hetero[node_type].num_nodes = graph.num_nodes(node_type)
        for name, rows in graph.node_data[node_type].items():
            hetero[node_type][name] = rows
    for edge_type in graph.edge_types:
        hetero[edge_type].edge_index = graph.edge_index(edge_type)
        for name, rows in graph.edge_data[edge_type].items():
            hetero[edge_type][name] = rows
    return hetero


def from_dgl(g: Any) -> Graph:
    """A DGL graph with its `ndata` and `edata`, edges by DGL's edge ids.

    A graph without named types becomes a homogeneous one; named types keep their names.
    """
    if not hasattr(g, "canonical_etypes") or not hasattr(g, "ntypes"):
        raise ValueError(f"g must be a DGLGraph, got {type(g).__name__}")
    if getattr(g, "is_block", False):
        raise ValueError("g is a block, a part of a batch: pass the graph it was sampled from")
    plain = list(g.ntypes) == [_DGL_NODE] and list(g.canonical_etypes) == [_DGL_EDGE]
    num_nodes, node_data = {}, {}
    for node_type in g.ntypes:
        ours = NODE if plain else node_type
        num_nodes[ours] = g.num_nodes(node_type)
        node_data[ours] = dict(g.nodes[node_type].data)
    edge_index, edge_data = {}, {}
    for edge_type in g.canonical_etypes:
        relation = EDGE if plain else tuple(edge_type)
        edge_index[relation] = torch.stack(g.edges(etype=edge_type, order="eid"))
        edge_data[relation] = dict(g.edges[edge_type].data)
    return Graph.from_edge_indices(edge_index, num_nodes, node_data, edge_data)
