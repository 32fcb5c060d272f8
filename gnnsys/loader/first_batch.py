"""Whether sums of a model's first layer can be made ahead for a loader, and what they take: by its first batch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import nn

from gnnsys.graph import Graph, NodeType
from gnnsys.loader.default_threads import SumThreads
from gnnsys.loader.fetch import Names
from gnnsys.loader.first_sums import FirstSums, SumTable, first_layer, first_structure
from gnnsys.loader.sample_stages import SampleStage
from gnnsys.loader.schedule import Schedule
from gnnsys.planning import SumLoad
from gnnsys.sampling import DistGraph
from gnnsys.store import DeviceCache

_TIMES = 3


class Table(NamedTuple):
    """Rows of a node type in memory, by what they take."""

    num_bytes: int
    node_type: NodeType
    name: str


class FirstBatch(NamedTuple):
    """The first batch of a loader, drawn on the host by `sample`, and what makes the sums of its first layer."""

    sample: SampleStage
    schedule: Schedule
    sums: FirstSums

    def measure(self) -> SumLoad | None:
        """What its sums take by the cores that would make them; None where there are none to make."""
        before = torch.get_num_threads()
        at_once, each = SumThreads.here()
        torch.set_num_threads(at_once * each)
        try:
            ticket = self.schedule.ticket(0)
            found = first_structure(self.sample(ticket, self.schedule.inputs(ticket)), self.sums.table)
            if found is None:
                return None
            seconds = []
            for _ in range(_TIMES):
                began = time.perf_counter()
                made = self.sums.make(found)
                seconds.append(time.perf_counter() - began)
        finally:
            torch.set_num_threads(before)
        return SumLoad(made.nbytes, min(seconds))


def sums_for(
    graph: Graph | DistGraph, model: nn.Module | None, fetch: Names | None, pattern: Sequence[bool], pin: bool
) -> FirstSums | str:
    """What makes the first layer's sums, or why nobody does."""
    layer = first_layer(model)
    if isinstance(layer, str):
        return layer
    if not isinstance(graph, Graph) or not graph.is_homogeneous:
        return "the graph is in parts, or of several types"
    found = all_tables(graph)
    if not found:
        return "nodes have no rows in memory"
    _, node_type, name = largest(found)
    named = fetch.get(node_type, ()) if isinstance(fetch, Mapping) else fetch
    table = SumTable.of(graph, name) if named is None or name in named else None
    if table is None:
        return f"{name!r}, the largest rows, are no table of floats that batches have"
    return FirstSums(table, layer.reduce, pattern, pin)


def tables(graph: Graph) -> list[Table]:
    """Rows of nodes that are tensors."""
    return [
        Table(rows.nbytes, node_type, name)
        for node_type, arrays in graph.node_data.items()
        for name, rows in arrays.items()
        if isinstance(rows, torch.Tensor)
    ]


def all_tables(graph: Graph) -> list[Table]:
    """The same, and rows of which a device caches some."""
    caches = [
        Table(prod(rows.shape) * rows.dtype.itemsize, node_type, name)
        for node_type, arrays in graph.node_data.items()
        for name, rows in arrays.items()
        if isinstance(rows, DeviceCache)
    ]
    return tables(graph) + caches


def largest(found: Sequence[Table]) -> Table:
    return max(found, key=lambda table: (table.num_bytes, str(table[1:])))
