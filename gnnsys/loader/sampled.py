"""What flows between the stages of a loader, and the compact stage that makes a Batch of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, Graph, NodeType
from gnnsys.loader.batch import Batch, TypeValues, apply_to, apply_to_block, tensors_of, tensors_of_block
from gnnsys.loader.schedule import Ticket
from gnnsys.observe import BatchTrace
from gnnsys.ops import BY_DESTINATION, STRUCTURES, SUMMED, MultipliedRows, RowsOnHost, SummedRows, SumsOf
from gnnsys.sampling import DistGraph, Sample
from gnnsys.store import ColumnChoice, NarrowRows

FREE_THE_NAME = "rename it in the graph, or leave it out of batches with fetch=[...], the names of those you want"


class Inputs(NamedTuple):
    """What goes from the schedule to the sample stage: which of the loader's inputs make up the batch."""

    ticket: Ticket
    chosen: Tensor  # int64, positions in what the loader was given
    trace: BatchTrace | None  # None where no records are kept


class MadeSums(NamedTuple):
    """Sums over in-edges of the rows `name` of a node type, made before these are fetched: of all nodes but the first
    `num_own`, no rows are fetched then. `gather` reads the rows of ids, for whoever asks for them after all."""

    node_type: NodeType
    name: str
    num_own: int
    sums: Tensor
    of: SumsOf
    gather: Callable[[Tensor], Tensor]


class SummedParts(NamedTuple):
    """In the place of rows: own ones, and the sums that were made of the others."""

    own: Tensor
    sums: Tensor
    of: SumsOf
    gather: Callable[[Tensor], Tensor]

    def rows(self, ids: Tensor) -> SummedRows:
        gather = self.gather
        return SummedRows(self.own, self.sums, self.of, ids.numel(), lambda: gather(ids))


class UnfetchedRows:
    """In the place of the rows `name` of a node type, which stay on the host: the model's first layer multiplies them
    there. `gather` reads the rows of ids, for whoever asks for them after all."""

    __slots__ = ("gather", "host", "name", "node_type")

    def __init__(self, node_type: NodeType, name: str, host: RowsOnHost, gather: Callable[[Tensor], Tensor]) -> None:
        self.node_type, self.name, self.host, self.gather = node_type, name, host, gather

    def rows(self, ids: Tensor) -> MultipliedRows:
        gather = self.gather
        return MultipliedRows(self.host, ids.device, lambda: gather(ids))


@dataclass
class Sampled:
    """A batch from the sample stage on: structure, then rows as well, on the host and then on the device."""

    sample: Sample
    input_type: NodeType | EdgeType  # empty: seeds are of several types
    values: dict[NodeType | EdgeType, dict[str, Any]] = field(default_factory=dict)  # about the seeds, by type
    rows: dict[NodeType | EdgeType, dict[str, Any]] = field(
        default_factory=dict
    )  # what was fetched: Tensor or NarrowRows
    position: int = -1  # counted across epochs
    trace: BatchTrace | None = None
    pending: Any = None  # what the fetch stage has begun
    columns: ColumnChoice | None = None  # by which rows of other parts are read
    sums: MadeSums | None = None  # of the first layer, which takes them in place of most rows
    kept: UnfetchedRows | None = None  # rows that are not fetched
    made: Any = None  # an event: what a thread's stream has made of it so far is done, where another's goes on

    def apply(self, function: Callable[[Tensor], Tensor]) -> Sampled:
        """The same with `function` applied to every tensor."""

        def through(values: dict[Any, Any]) -> dict[Any, Any]:
            return {k: apply_to(v, function) for k, v in values.items()}

        sample = self.sample
        moved = replace(
            sample,
            node=through(sample.node),
            row=through(sample.row),
            col=through(sample.col),
            edge=through(sample.edge),
            tree=None if sample.tree is None else through(sample.tree),
            edge_weight=None if sample.edge_weight is None else through(sample.edge_weight),
            node_weight=None if sample.node_weight is None else through(sample.node_weight),
            blocks=[apply_to_block(block, function) for block in sample.blocks],
        )
        values = {t: through(named) for t, named in self.values.items()}
        rows = {t: through(named) for t, named in self.rows.items()}
        return replace(self, sample=moved, values=values, rows=rows)

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor of it."""
        sample = self.sample
        for part in (sample.node, sample.row, sample.col, sample.edge, sample.tree, self.values, self.rows):
            yield from tensors_of(part)
        for weights in (sample.edge_weight, sample.node_weight):
            yield from tensors_of(weights)
        for block in sample.blocks:
            yield from tensors_of_block(block)


class Compact:
    """Sampled -> Batch, on the device the sample is on."""

    def __init__(self, graph: Graph | DistGraph) -> None:
        self._graph = graph

    def __call__(self, sampled: Sampled) -> Batch:
        nodes = {t: _node_store(t, sampled) for t in self._graph.node_types}
        edges = {t: _edge_store(t, sampled) for t in self._graph.edge_types}
        if sampled.sums is not None and sampled.sample.blocks:
            for csc in sampled.sample.blocks[0].csc.values():
                sampled.sums.of.bind(csc)
        for key, values in sampled.values.items():
            store = edges.setdefault(key, TypeValues()) if isinstance(key, tuple) else nodes[key]
            store.update({name: value for name, value in values.items() if value is not None})
        return Batch(
            nodes,
            edges,
            is_homogeneous=self._graph.is_homogeneous,
            input_type=sampled.input_type or None,
            blocks=sampled.sample.blocks,
            record=sampled.trace,
            position=sampled.position,
        )


def _node_store(node_type: NodeType, sampled: Sampled) -> TypeValues:
    sample = sampled.sample
    rows = sampled.rows.get(node_type, {})
    store = TypeValues({name: _as_tensor(r, sample.node[node_type]) for name, r in rows.items()})
    store["n_id"] = sample.node[node_type]
    if node_type in sample.num_sampled_nodes:
        store["num_sampled_nodes"] = sample.num_sampled_nodes[node_type]
    if sample.tree is not None:
        store["batch"] = sample.tree[node_type]
    _put_weight(store, node_type, "node_weight", sample.node_weight)
    return store


def _as_tensor(rows: Any, ids: Tensor) -> Any:
    if isinstance(rows, (SummedParts, UnfetchedRows)):
        return rows.rows(ids)
    return rows.widen() if isinstance(rows, NarrowRows) else rows


def _edge_store(edge_type: EdgeType, sampled: Sampled) -> TypeValues:
    sample = sampled.sample
    store = TypeValues()
    if edge_type in sample.row:  # with expand="frontier" edges are in the blocks, with their ids
        store["edge_index"] = edge_index = _edge_index(sample.row[edge_type], sample.col[edge_type])
        if sample.by_destination and edge_index.is_cuda:  # layers need not look, which would mean to wait
            sizes = [sample.node[edge_type[at]].numel() for at in (0, 2)]
            STRUCTURES.put((*sizes, sample.ends(edge_type)), edge_index, key=BY_DESTINATION)
        if sampled.sums is not None:
            STRUCTURES.put(sampled.sums.of, edge_index, key=SUMMED)
        if edge_type in sample.edge:
            store.update(sampled.rows.get(edge_type, {}))
            store["e_id"] = sample.edge[edge_type]
        _put_weight(store, edge_type, "edge_weight", sample.edge_weight)
    if edge_type in sample.num_sampled_edges:
        store["num_sampled_edges"] = sample.num_sampled_edges[edge_type]
    return store


def _put_weight(store: TypeValues, key: Any, name: str, weights: Mapping[Any, Tensor] | None) -> None:
    """What the sampler says that each counts; ValueError where the graph has rows of that name as well."""
    if weights is None or key not in weights:
        return
    if name in store:
        raise ValueError(f"{key!r} has an array {name!r}, and so has what the sampler gives: {FREE_THE_NAME}")
    store[name] = weights[key]


def _edge_index(row: Tensor, col: Tensor) -> Tensor:
    """Both as one tensor [2, num_edges]; on a device, where samplers leave them side by side, that is a view."""
    num_edges = row.numel()
    base = row._base if row.is_cuda else None  # what both were taken from, if that is it
    if base is not None and base is col._base and base.shape == (2, num_edges) and base.is_contiguous():
        at, is_whole = base.storage_offset(), row.is_contiguous() and col.is_contiguous() and col.numel() == num_edges
        if is_whole and row.storage_offset() == at and col.storage_offset() == at + num_edges:
            return base
    if row.is_cuda and num_edges and col.data_ptr() == row.data_ptr() + row.nbytes:
        storage = row.untyped_storage()
        if storage.data_ptr() == col.untyped_storage().data_ptr() and row.is_contiguous() and col.is_contiguous():
            return row.as_strided((2, num_edges), (num_edges, 1))
    return torch.stack([row, col])
