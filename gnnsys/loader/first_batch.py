"""What the host could do for a device, and what it takes: sampling, and sums of a model's first layer.

It is measured on the first batch of a loader.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from gnnsys.graph import Graph, NodeType
from gnnsys.loader.default_threads import SumThreads
from gnnsys.loader.fetch import Names
from gnnsys.loader.first_products import FirstProducts, first_products
from gnnsys.loader.first_sums import FirstSums, SumTable, first_layer, first_structure
from gnnsys.loader.sample_stages import SampleStage
from gnnsys.loader.sampled import Sampled
from gnnsys.loader.schedule import Schedule
from gnnsys.planning import ProductLoad, SampleLoad, SumLoad, compute_threads
from gnnsys.sampling import DistGraph
from gnnsys.store import DeviceCache

_TIMES = 3
T = TypeVar("T")


class TableSize(NamedTuple):
    """Rows of a node type in memory, by what they take."""

    num_bytes: int
    node_type: NodeType
    name: str


class FirstBatch(NamedTuple):
    """The first batch of a loader, drawn on the host by `sample`, or by a device that reads the structure where it is.

    `sums` makes those of its first layer, and `products` its products, or they say why there are none.
    """

    sample: SampleStage
    on_device: SampleStage | None
    schedule: Schedule
    sums: FirstSums | str
    products: FirstProducts | str

    def _draw(self, sample: SampleStage, number: int = 0) -> Sampled:
        ticket = self.schedule.ticket(number)
        return sample(ticket, self.schedule.inputs(ticket))

    @property
    def has_sums(self) -> bool:
        """Whether there are some to make."""
        if isinstance(self.sums, str):
            return False
        return first_structure(self._draw(self.sample), self.sums.table) is not None

    def measure_sums(self) -> SumLoad | None:
        """What its sums take by the cores that would make them; None where there are none to make."""
        if isinstance(self.sums, str):
            return None
        at_once, each = SumThreads.here()
        with compute_threads(at_once * each):
            found = first_structure(self._draw(self.sample), self.sums.table)
            if found is None:
                return None
            made, seconds = _best(lambda: self.sums.make(found))  # type: ignore[union-attr]
        return SumLoad(made.nbytes, seconds)

    def measure_products(self) -> ProductLoad | str:
        """What its products take by the cores that would make them; or why there are none to make."""
        if isinstance(self.products, str):
            return self.products
        inside, outside = self.products.table.rows.shape[1], self.products.layer.width
        if outside >= inside:
            return f"the first layer makes {outside} values of the {inside} of a row"
        drawn = self._draw(self.sample)
        ids, num_own = drawn.sample.node[self.products.table.node_type], self.products.counts(drawn)[-1]
        products, gradients = self.products.measure(ids, num_own)
        num_bytes = self.products.layer.num_bytes(ids.numel(), num_own)
        return ProductLoad(num_bytes, products + gradients)

    def measure_sampling(self) -> SampleLoad:
        """What sampling takes by the host's threads, and by the device where that reads the structure already."""
        with compute_threads(1):
            drawn, on_host = _median(lambda number: self._draw(self.sample, number))
        num_bytes, sample, on_device = sum(tensor.nbytes for tensor in drawn.tensors()), self.on_device, None
        if sample is not None:
            _, on_device = _median(lambda number: self._drawn_there(sample, number))
        return SampleLoad(on_host / SumThreads.here().each, on_device, num_bytes)

    def _drawn_there(self, sample: SampleStage, number: int) -> Sampled:
        sampled = self._draw(sample, number)
        torch.accelerator.synchronize(sampled.sample.device)
        return sampled


def _best(call: Callable[[], T]) -> tuple[T, float]:
    """What the last of a few calls returned, and the seconds of the fastest."""
    seconds = []
    for _ in range(_TIMES):
        began = time.perf_counter()
        made = call()
        seconds.append(time.perf_counter() - began)
    return made, min(seconds)


def _median(draw: Callable[[int], T]) -> tuple[T, float]:
    """Of different batches, as a device may remember what it has read for one: what was drawn last, and the seconds.

    The first one is drawn to warm up."""
    seconds = []
    for number in range(1 + _TIMES):
        began = time.perf_counter()
        made = draw(number)
        seconds.append(time.perf_counter() - began)
    return made, statistics.median(seconds[1:])


_SEEN = "stages of your own see rows and edges"


def sums_for(
    graph: Graph | DistGraph, model: nn.Module | None, fetch: Names | None, pattern: Sequence[bool], *,
    pin: bool, has_stages: bool,
) -> FirstSums | str:  # fmt: skip
    """What makes the first layer's sums, or why nobody does."""
    layer = _SEEN if has_stages else first_layer(model)
    if isinstance(layer, str):
        return layer
    table = _table_of(graph, fetch)
    return table if isinstance(table, str) else FirstSums(table, layer.reduce, pattern, pin)


def products_for(
    graph: Graph | DistGraph, model: nn.Module | None, fetch: Names | None, pattern: Sequence[bool], *,
    for_device: bool, staleness: int, has_stages: bool,
) -> FirstProducts | str:  # fmt: skip
    """What makes the first layer's products on the host, or why nobody does."""
    layer = _SEEN if has_stages else first_products(model)
    table = layer if isinstance(layer, str) else _table_of(graph, fetch)
    if isinstance(layer, str) or isinstance(table, str):
        return str(table)
    why_not = layer.why_not(table.rows)
    return why_not or FirstProducts(table, layer, pattern, for_device=for_device, staleness=staleness)


def _table_of(graph: Graph | DistGraph, fetch: Names | None) -> SumTable | str:
    """The rows that a first layer takes, or why they cannot be read ahead."""
    if not isinstance(graph, Graph) or not graph.is_homogeneous:
        return "the graph is in parts, or of several types"
    found = all_tables(graph)
    if not found:
        return "nodes have no rows in memory"
    _, node_type, name = largest(found)
    named = fetch.get(node_type, ()) if isinstance(fetch, Mapping) else fetch
    table = SumTable.of(graph, name) if named is None or name in named else None
    return f"{name!r}, the largest rows, are no table of floats that batches have" if table is None else table


def tables(graph: Graph) -> list[TableSize]:
    """Rows of nodes that are tensors."""
    return [
        TableSize(rows.nbytes, node_type, name)
        for node_type, arrays in graph.node_data.items()
        for name, rows in arrays.items()
        if isinstance(rows, torch.Tensor)
    ]


def all_tables(graph: Graph) -> list[TableSize]:
    """The same, and rows of which a device caches some."""
    caches = [
        TableSize(prod(rows.shape) * rows.dtype.itemsize, node_type, name)
        for node_type, arrays in graph.node_data.items()
        for name, rows in arrays.items()
        if isinstance(rows, DeviceCache)
    ]
    return tables(graph) + caches


def largest(found: Sequence[TableSize]) -> TableSize:
    return max(found, key=lambda table: (table.num_bytes, str(table[1:])))
