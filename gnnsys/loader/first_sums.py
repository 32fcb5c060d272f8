"""The aggregate stage: sums of the first layer, made from the graph's own rows, so that only their results move.

A model whose first layer is linear in its neighbours' rows needs of most nodes of a batch nothing but sums. Where rows
are in host memory and the batch goes to a GPU, host threads make these sums and a fifth of the bytes cross the bus. On
one device rows are summed where they lie, and no copy of them is made. Sums need no weights, so batches may be made as
far ahead as one likes, and training is the same.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gnnsys.graph import EdgeType, Graph, NodeType
from gnnsys.loader.default_threads import SumThreads
from gnnsys.loader.sampled import MadeSums, Sampled
from gnnsys.ops import CSC, SumsOf, degrees, gather_rows, inverse_degrees, spmm_add, spmm_out, to_host_together
from gnnsys.store import DeviceCache, read_rows

SUMS = ("sum", "mean")  # reductions that are made ahead
_SUMMED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # dtypes of rows


class LayerSums(NamedTuple):
    """What a model's first layer takes: sums over in-edges by `reduce`. `name` is its class."""

    name: str
    reduce: str


def first_layer(model: nn.Module | None) -> LayerSums | str:
    """What a model's first layer takes; or why no sums can be made for it."""
    if model is None:
        return "model= was not given, so nobody knows what the first layer takes"
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be the torch.nn.Module that is trained, got {type(model).__name__}")
    if any(hasattr(each, "_orig_mod") or each._compiled_call_impl is not None for each in model.modules()):
        return "the model is compiled, or a part of it"
    for module in model.modules():
        name = type(module).__name__
        if any(kind.__name__ == "MessagePassing" for kind in type(module).__mro__):
            return f"the first layer, PyG's {name}, takes the rows of all nodes"
        if callable(getattr(module, "halves", None)):
            halves = module.halves()  # type: ignore[operator]
            if halves is None or halves.reduce not in SUMS:
                return f"the first layer, {name}, takes other things than sums of its neighbours' rows"
            return LayerSums(name, halves.reduce)
    return "the model has no layer of gnnsys.nn"


class SumTable(NamedTuple):
    """The rows that are summed: a table of the only node type of a graph, over its only edge type."""

    node_type: NodeType
    edge_type: EdgeType
    name: str
    rows: Tensor  # the table, on the host or on the device
    source: object  # what batches read: the same, or a cache of it

    @classmethod
    def of(cls, graph: Graph, name: str) -> SumTable | None:
        """None where the graph has several types, or no such table of float rows that lies in memory."""
        if len(graph.node_types) != 1 or len(graph.edge_types) != 1:
            return None
        node_type, edge_type = graph.node_types[0], graph.edge_types[0]
        source = graph.node_data[node_type].get(name)
        rows = source.table if isinstance(source, DeviceCache) else source
        if not isinstance(rows, Tensor) or rows.dim() != 2 or rows.dtype not in _SUMMED or rows.requires_grad:
            return None
        return cls(node_type, edge_type, name, rows, source) if rows.is_contiguous() else None


class FirstSums:
    """`run(sampled)`: makes the sums of a batch whose turn it is, by `pattern` over positions; others stay as they are.

    Also those stay whose sampler weighs edges, or does not say in which order they come. `pin`: sums that are made on
    the host are left in pinned memory, as they go on to a device.
    """

    def __init__(self, table: SumTable, reduce: str, pattern: Sequence[bool], pin: bool = False) -> None:
        if reduce not in SUMS:
            raise ValueError(f"sums are made by {' or '.join(SUMS)}, got {reduce!r}")
        self.table, self._reduce, self._pattern, self._pin = table, reduce, tuple(pattern) or (True,), pin
        self._at_once = threading.Semaphore(SumThreads.here().at_once)  # for a device

    def run(self, sampled: Sampled) -> Sampled:
        if sampled.position < 0 or not self._pattern[sampled.position % len(self._pattern)]:
            return sampled
        found = first_structure(sampled, self.table)
        if found is not None:
            num_own = found.indptr.numel() - 1
            gather = RowsLater(self.table.source, self.table.rows)
            of = SumsOf(self._reduce, num_own, found.sources.numel())
            sampled.sums = MadeSums(self.table.node_type, self.table.name, num_own, self.make(found), of, gather)
        return sampled

    def make(self, found: FirstStructure) -> Tensor:
        """The sums over sources, ids in the whole graph; on the device that the structure is on."""
        with torch.no_grad():
            return self._sum(*found)

    def _sum(self, indptr: Tensor, sources: Tensor) -> Tensor:
        source, rows = self.table.source, self.table.rows
        scale = None
        if self._reduce == "mean":
            scale = inverse_degrees(CSC(indptr, sources, rows.shape[0]), rows.dtype)
        if not isinstance(source, DeviceCache) or source.device != sources.device or rows.device == source.device:
            return self._sum_where_rows_are(indptr, sources, scale)
        cached, slots = source.on_device()
        slot = gather_rows(slots, sources)
        is_cached = slot >= 0
        before = torch.cat([indptr.new_zeros(1), is_cached.cumsum(0)])  # cached ones before each edge
        hits = before[indptr]
        sums = self._sum_where_rows_are(indptr - hits, sources[~is_cached], scale)
        return spmm_add(CSC(hits, slot[is_cached], cached.shape[0]), cached, sums, dst_scale=scale)

    def _sum_where_rows_are(self, indptr: Tensor, sources: Tensor, scale: Tensor | None) -> Tensor:
        """By the host where rows are in its memory, and by the device where they are there."""
        rows, device = self.table.rows, sources.device
        by_host = rows.is_cpu and not sources.is_cpu
        if by_host:
            moved = to_host_together([indptr, sources, *([] if scale is None else [scale])])
            indptr, sources, scale = moved[0], moved[1], None if scale is None else moved[2]
        shape = (indptr.numel() - 1, rows.shape[1])
        pins = by_host or (self._pin and rows.is_cpu)
        out = torch.empty(shape, dtype=rows.dtype, device=rows.device, pin_memory=pins)
        with self._at_once if by_host else nullcontext():
            spmm_out(CSC(indptr, sources, rows.shape[0]), rows, out, scale)
        return out.to(device, non_blocking=True)


class RowsLater:
    """Reads rows of a table for whoever asks for them after a batch was made. They must be as they were then."""

    def __init__(self, source: Any, rows: Tensor) -> None:
        self._source, self._rows, self._version = source, rows, _version(rows)

    def check(self) -> None:
        if _version(self._rows) != self._version:
            raise RuntimeError(
                "rows of the graph were written since this batch was made, and it has not read them yet: look at "
                "batch.x before you write, or leave model= away"
            )

    def __call__(self, ids: Tensor) -> Tensor:
        self.check()
        is_cache = isinstance(self._source, DeviceCache)
        rows = self._source.read(ids) if is_cache else read_rows([(self._source, ids)])[0]
        return rows.to(ids.device)


def _version(rows: Tensor) -> int:
    """0 where torch does not count writes."""
    return 0 if rows.is_inference() else rows._version


class FirstStructure(NamedTuple):
    """What the first layer sees: where destinations' in-edges begin, and their sources as ids in the whole graph."""

    indptr: Tensor
    sources: Tensor


def first_structure(sampled: Sampled, table: SumTable) -> FirstStructure | None:
    """None where it is not known, or edges have weights."""
    sample = sampled.sample
    if sample.edge_weight is not None or sample.tree is not None:
        return None
    nodes, narrow = sample.node[table.node_type], table.rows.shape[0] <= torch.iinfo(torch.int32).max
    if sample.blocks:
        csc = sample.blocks[0].csc[table.edge_type]
        if sample.blocks[0].edge_weight is not None or csc.num_src != nodes.numel():
            return None
        indptr, local = csc.indptr, csc.indices
    elif sample.by_destination and table.edge_type in sample.row:
        found = sample.num_sampled_nodes[table.node_type]
        num_dst = nodes.numel() - found[-1]
        local, to = sample.row[table.edge_type], sample.col[table.edge_type]
        if to.is_cuda:
            indptr = torch.searchsorted(to, torch.arange(num_dst + 1, device=to.device))
        else:
            indptr = torch.cat([to.new_zeros(1), degrees(to, num_dst).cumsum(0)])
    else:
        return None
    ids = gather_rows(nodes, local)
    return FirstStructure(indptr, ids.to(torch.int32) if narrow else ids)
