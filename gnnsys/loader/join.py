"""The gather stage: joins the structure of a batch with the graph's rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, Graph, NodeType
from gnnsys.loader.batch import Batch, Store
from gnnsys.ops import gather_rows
from gnnsys.ops.buffers import BufferPool
from gnnsys.sampling import Sample


@dataclass
class Sampled:
    """What goes from the sample stage to the gather stage."""

    sample: Sample
    input_type: NodeType | EdgeType
    values: dict[NodeType | EdgeType, dict[str, Any]] = field(default_factory=dict)  # about the seeds, by type


class Rows:
    """Gathers rows into pooled buffers, or pinned ones where the batch goes on to a device."""

    def __init__(self, pool: BufferPool, pin: bool = False) -> None:
        self._pool = pool
        self._pin = pin

    def __call__(self, source: Tensor, index: Tensor) -> Tensor:
        if source.requires_grad or not source.is_cpu or not source.is_contiguous():
            return source.index_select(0, index.to(source.device))
        shape = (index.numel(), *source.shape[1:])
        if self._pin:  # torch keeps pinned memory for reuse by itself
            out = torch.empty(shape, dtype=source.dtype, pin_memory=True)
        else:
            out = self._pool.empty(shape, source.dtype)
        return gather_rows(source, index, out)


class Join:
    """Sampled -> Batch: every array of the graph's node and edge data, of the sampled nodes and edges."""

    def __init__(self, graph: Graph, rows: Rows) -> None:
        self._graph = graph
        self._rows = rows

    def __call__(self, sampled: Sampled) -> Batch:
        sample = sampled.sample
        nodes = {t: self._node_store(t, sample) for t in self._graph.node_types}
        edges = {t: self._edge_store(t, sample) for t in self._graph.edge_types}
        for key, values in sampled.values.items():
            store = edges.setdefault(key, Store()) if isinstance(key, tuple) else nodes[key]
            store.update({name: value for name, value in values.items() if value is not None})
        return Batch(
            nodes,
            edges,
            is_homogeneous=self._graph.is_homogeneous,
            input_type=sampled.input_type,
            blocks=sample.blocks,
        )

    def _node_store(self, node_type: NodeType, sample: Sample) -> Store:
        ids = sample.node[node_type]
        store = Store({name: self._rows(rows, ids) for name, rows in self._graph.node_data[node_type].items()})
        store["n_id"] = ids
        if node_type in sample.num_sampled_nodes:
            store["num_sampled_nodes"] = sample.num_sampled_nodes[node_type]
        if sample.tree is not None:
            store["batch"] = sample.tree[node_type]
        return store

    def _edge_store(self, edge_type: EdgeType, sample: Sample) -> Store:
        store = Store()
        if edge_type in sample.row:  # with expand="frontier" edges are in the blocks, with their ids
            ids = sample.edge.get(edge_type)
            store["edge_index"] = torch.stack([sample.row[edge_type], sample.col[edge_type]])
            if ids is not None:
                store.update({name: self._rows(rows, ids) for name, rows in self._graph.edge_data[edge_type].items()})
                store["e_id"] = ids
        if edge_type in sample.num_sampled_edges:
            store["num_sampled_edges"] = sample.num_sampled_edges[edge_type]
        return store
