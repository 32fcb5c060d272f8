"""From a sampler's output to PyG's `Data` or `HeteroData`: the attributes of every node and edge that was sampled.

Does what PyG's own filter functions do, with two differences: rows are gathered by our kernel into reused buffers, and
edge features of a remote store are fetched by edge.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData
from torch_geometric.data.storage import EdgeStorage, NodeStorage
from torch_geometric.loader.utils import index_select
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

from gnnsys.pyg.structure import is_edge_level
from gnnsys.sampling import AnyGraph
from gnnsys.store import ReadContext, RowBuffers, TensorSource


class DataJoin:
    """Called with a SamplerOutput or HeteroSamplerOutput, whose `edge` must be positions in the user's edge order."""

    def __init__(
        self, data: Any, graph: Callable[[], AnyGraph | None], buffers: RowBuffers, custom_cls: Any = None
    ) -> None:
        self._data = data
        self._graph = graph
        self._buffers = buffers
        self._custom_cls = custom_cls

    def __call__(self, out: SamplerOutput | HeteroSamplerOutput) -> Any:
        if isinstance(out, SamplerOutput):
            if isinstance(self._data, Data):
                return self._from_data(self._data, out)
            return self._from_stores(out)
        if isinstance(self._data, HeteroData):
            return self._from_hetero_data(self._data, out)
        return self._from_hetero_stores(out)

    # -- data in memory ------------------------------------------------------------------------------------------------

    def _from_data(self, data: Data, out: SamplerOutput) -> Data:
        batch = copy.copy(data)
        self._fill_nodes(data._store, batch._store, out.node)
        self._fill_edges(data._store, batch._store, out.row, out.col, out.edge)
        return batch

    def _from_hetero_data(self, data: HeteroData, out: HeteroSamplerOutput) -> HeteroData:
        batch = copy.copy(data)
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        for node_type in data.node_types:
            self._fill_nodes(data[node_type], batch[node_type], out.node.setdefault(node_type, none))
        edges = {} if out.edge is None else out.edge
        for edge_type in data.edge_types:
            row, col = (part.get(edge_type, none) for part in (out.row, out.col))
            self._fill_edges(data[edge_type], batch[edge_type], row, col, edges.get(edge_type, none[: row.numel()]))
        return batch

    def _fill_nodes(self, store: NodeStorage, batch: NodeStorage, ids: Tensor) -> None:
        for name, value in store.items():
            if name == "num_nodes":
                batch.num_nodes = ids.numel()
            elif store.is_node_attr(name):
                batch[name] = self._select(store, name, value, ids)

    def _fill_edges(self, store: EdgeStorage, batch: EdgeStorage, row: Tensor, col: Tensor, ids: Tensor | None) -> None:
        for name, value in store.items():
            if name == "edge_index":
                batch.edge_index = torch.stack([row, col]).to(value.device)
            elif store.is_edge_attr(name):
                batch[name] = None if ids is None else self._select(store, name, value, ids)

    def _select(self, store: Any, name: str, value: Any, ids: Tensor) -> Any:
        kind = _unpickable(value)
        if kind:
            raise ValueError(
                f"{name!r} is a {kind}, of which no rows can be picked: store a dense tensor, or take it out of data "
                "before the loader is made"
            )
        dim = store._parent().__cat_dim__(name, value, store)
        if isinstance(value, Tensor) and dim == 0 and type(value) is Tensor:
            return TensorSource(value).gather(ids, None, ReadContext(buffers=self._buffers))
        if isinstance(value, np.ndarray):
            return index_select(value, ids.cpu(), dim=dim)
        return index_select(value, ids.to(value.device), dim=dim)

    # -- (FeatureStore, GraphStore) ------------------------------------------------------------------------------------

    def _from_stores(self, out: SamplerOutput) -> Data:
        features: FeatureStore = self._data[0]
        batch = Data() if self._custom_cls is None else self._custom_cls()
        batch.edge_index = torch.stack([out.row, out.col])
        graph = self._graph()
        wanted = []
        for attr in map(copy.copy, features.get_all_tensor_attrs()):
            on_edges = graph is not None and is_edge_level(features, attr, graph)
            attr.index = out.edge if on_edges else out.node
            if attr.index is not None:
                wanted.append(attr)
        batch.num_nodes = out.node.numel()
        for attr, value in zip(wanted, features.multi_get_tensor(wanted), strict=True):
            batch[attr.attr_name] = value
        return batch

    def _from_hetero_stores(self, out: HeteroSamplerOutput) -> HeteroData:
        features: FeatureStore = self._data[0]
        edges: GraphStore = self._data[1]
        batch = HeteroData() if self._custom_cls is None else self._custom_cls()
        ids = {**out.node, **{t: e for t, e in (out.edge or {}).items() if e is not None}}
        wanted = []
        for attr in map(copy.copy, features.get_all_tensor_attrs()):
            if attr.group_name in ids:
                attr.index = ids[attr.group_name]
                wanted.append(attr)
                if attr.group_name in out.node:
                    batch[attr.group_name].num_nodes = attr.index.numel()
        for attr, value in zip(wanted, features.multi_get_tensor(wanted), strict=True):
            batch[attr.group_name][attr.attr_name] = value
        for edge_type in dict.fromkeys(attr.edge_type for attr in edges.get_all_edge_attrs()):
            if edge_type in out.row and edge_type in out.col:
                batch[edge_type].edge_index = torch.stack([out.row[edge_type], out.col[edge_type]])
        return batch


def _unpickable(value: Any) -> str:
    """What a value is of which PyG can pick no rows; nothing where it can."""
    if isinstance(value, Tensor):
        can = value.layout in (torch.strided, torch.sparse_coo)
        return "" if can else f"tensor of layout {value.layout}"
    return "" if isinstance(value, np.ndarray) or hasattr(value, "device") else type(value).__name__


def in_edge_order(out: SamplerOutput | HeteroSamplerOutput, permutation: Any) -> SamplerOutput | HeteroSamplerOutput:
    """The output with `edge` as int64 positions in the user's edge order. Undoes a sampler's own order of edges."""
    if out.edge is None:
        return out
    out = copy.copy(out)
    if isinstance(out, SamplerOutput):
        out.edge = out.edge.long() if permutation is None else permutation[out.edge.long()]
        return out
    edges = {}
    for edge_type, ids in out.edge.items():
        order = None if permutation is None else permutation.get(edge_type)
        edges[edge_type] = ids if ids is None else ids.long() if order is None else order[ids.long()]
    out.edge = edges
    return out


def describe(batch: Any, out: SamplerOutput | HeteroSamplerOutput) -> None:
    """Adds ids and counts of a sampler's output to the batch. Keeps an `n_id` or `e_id` of the user's own."""
    if isinstance(out, SamplerOutput):
        if "n_id" not in batch:
            batch.n_id = out.node
        if out.edge is not None and "e_id" not in batch:
            batch.e_id = out.edge
        batch.batch = out.batch
        batch.num_sampled_nodes = out.num_sampled_nodes
        batch.num_sampled_edges = out.num_sampled_edges
        if out.orig_row is not None and out.orig_col is not None:
            batch._orig_edge_index = torch.stack([out.orig_row, out.orig_col])
        return
    for node_type, ids in out.node.items():
        if "n_id" not in batch[node_type]:
            batch[node_type].n_id = ids
    for edge_type, ids in (out.edge or {}).items():
        if ids is not None and "e_id" not in batch[edge_type]:
            batch[edge_type].e_id = ids
    batch.set_value_dict("batch", out.batch)
    batch.set_value_dict("num_sampled_nodes", out.num_sampled_nodes)
    batch.set_value_dict("num_sampled_edges", out.num_sampled_edges)
    if out.orig_row is not None and out.orig_col is not None:
        for edge_type, row in out.orig_row.items():
            batch[edge_type]._orig_edge_index = torch.stack([row, out.orig_col[edge_type]])
