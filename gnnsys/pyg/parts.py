"""What a PyG-style loader needs for a graph in parts: its inputs, batches that are as many on every rank, and the join.

`input_nodes` and links are turned into what PyG's loaders take. Links that are edges stay in the parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import EdgeSamplerInput, HeteroSamplerOutput, SamplerOutput

from gnnsys.graph import EDGE, NODE, EdgeType, GraphIds, NodeType, ids_or_mask, numbered_ids, some
from gnnsys.loader import (
    EdgeInputs,
    Fetch,
    LinkReader,
    Names,
    PipelineOptions,
    Sampled,
    Schedule,
    Ticket,
    named_links,
    resolve_inputs,
)
from gnnsys.ops import BufferPool
from gnnsys.sampling import DistGraph, Sample
from gnnsys.seeds import InputIds, Share, check_alone, check_node_ids, read_mask, resolve_nodes, type_with_mask
from gnnsys.store import MemoryBudget, RowBuffers

# -- inputs ------------------------------------------------------------------------------------------------------------


def resolve_input_nodes(graph: DistGraph, input_nodes: Any) -> Any:
    """`input_nodes` as PyG takes them for a pair of stores: ids or a mask, with a node type if there are several."""
    if isinstance(input_nodes, Share):
        node_type, ids = resolve_nodes(graph, input_nodes)
        return _with_type(graph, node_type, ids if isinstance(ids, Tensor) else ids[:])
    node_type, chosen = _split_type(graph, input_nodes)
    if chosen is None or isinstance(chosen, str):
        check_alone(graph, node_type, chosen)
    if chosen is None:
        chosen = range(graph.num_nodes(node_type))
    elif isinstance(chosen, str):
        chosen = read_mask(graph, node_type, chosen)
    else:
        chosen = numbered_ids(graph, chosen, node_type, "input_nodes")
    return _with_type(graph, node_type, ids_or_mask(chosen, "input_nodes"))


def _split_type(graph: DistGraph, input_nodes: Any) -> tuple[NodeType, Any]:
    is_pair = isinstance(input_nodes, (tuple, list)) and len(input_nodes) == 2 and isinstance(input_nodes[0], str)
    if is_pair:
        node_type, chosen = input_nodes
    elif isinstance(input_nodes, GraphIds):
        node_type, chosen = check_node_ids(graph, input_nodes), input_nodes
    elif isinstance(input_nodes, str) and input_nodes in graph.node_types:
        node_type, chosen = input_nodes, None
    elif isinstance(input_nodes, str) and not graph.is_homogeneous:
        node_type, chosen = type_with_mask(graph, input_nodes), input_nodes
    elif graph.is_homogeneous:
        return NODE, input_nodes
    else:
        raise ValueError("input_nodes must name a node type, as 'type' or ('type', indices), for heterogeneous data")
    if node_type not in graph.node_types:
        there = some(graph.node_types, near=node_type)
        raise ValueError(f"input_nodes: node type {node_type!r} does not exist, the graph has {there}")
    return node_type, chosen


def _with_type(graph: DistGraph, node_type: NodeType, nodes: Tensor) -> Any:
    return nodes if graph.is_homogeneous else (node_type, nodes)


class LinkInputs:
    """Takes the place of PyG's EdgeSamplerInput if links are edges of the graph: their ends are read batch by batch.

    PyG also gets it as `edge_label_index`, of which it only asks the size and two rows, which are empty here.
    """

    def __init__(self, inputs: LinkReader, num_links: int, input_type: EdgeType | None) -> None:
        self._inputs = inputs
        self._num_links = num_links
        self.input_type = input_type
        self.label: Tensor | None = None
        self.time: Tensor | None = None
        self.weight: Tensor | None = None

    @property
    def ids(self) -> InputIds | None:
        """Ids of the edges, if the links are a share."""
        return self._inputs.ids if isinstance(self._inputs, EdgeInputs) else None

    def size(self, dim: int) -> int:
        return (2, self._num_links)[dim]

    def __getitem__(self, index: Tensor | int) -> Any:
        if isinstance(index, int):
            return torch.empty(0, dtype=torch.int64, device="cpu")
        links = self._inputs.take(index)
        label, time = (None if values is None else values[index] for values in (self.label, self.time))
        return EdgeSamplerInput(links.input_id, links.src, links.dst, label, time, self.input_type)

    def check(self) -> None:
        for name, values in (("edge_label", self.label), ("edge_label_time", self.time)):
            if values is not None and values.shape[0] != self._num_links:
                raise ValueError(f"{name} must have one entry per link, {self._num_links}, got {values.shape[0]}")


def resolve_links(graph: DistGraph, given: Any) -> tuple[Any, LinkInputs | None]:
    """`edge_label_index` as PyG takes it for a pair of stores; and the links, if they are read batch by batch."""
    if isinstance(given, (tuple, list)) and len(given) == 2 and given[0] is None and graph.is_homogeneous:
        given = (EDGE, given[1])
    if not isinstance(given, Share):
        edge_type, links = named_links(graph, given)
        if links is not None:
            return (None if graph.is_homogeneous else edge_type, links), None
    edge_type, inputs, num_links, _ = resolve_inputs(graph, given, None, None)
    input_type = None if graph.is_homogeneous else edge_type
    looked_up = LinkInputs(inputs, num_links, input_type)
    return (input_type, looked_up), looked_up


class EvenBatches:
    """Cuts torch's order of a rank's share into as many batches as the largest share needs, of nearly equal sizes."""

    def __init__(self, order: Any, num_inputs: int, batch_size: int, drop_last: bool, largest: int) -> None:
        self._order = order
        self._schedule = Schedule(num_inputs, batch_size, False, drop_last, 0, largest)

    def __len__(self) -> int:
        return len(self._schedule)

    def __iter__(self) -> Iterator[list[int]]:
        order = iter(self._order)
        for batch in range(len(self)):
            yield list(islice(order, self._schedule.inputs(Ticket(0, batch)).numel()))


# -- the join ----------------------------------------------------------------------------------------------------------


class Joining(NamedTuple):
    """A sampler's output whose rows have been requested."""

    out: SamplerOutput | HeteroSamplerOutput
    sampled: Sampled


class PartsJoin:
    """From a sampler's output to `Data` or `HeteroData`. Requests the rows of all types at once.

    `begin` sends the requests and `finish` waits for the rows. Other batches can be sampled in between.
    """

    def __init__(
        self,
        graph: DistGraph,
        custom_cls: Any = None,
        fetch: Names | None = None,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        self._fetch = Fetch(graph, names=fetch, wire_dtype=wire_dtype)
        if graph.is_homogeneous:
            both = set(self._fetch.names(NODE)) & set(self._fetch.names(EDGE))
            if both:
                raise ValueError(f"nodes and edges both have {sorted(both)}, for which PyG's Data has one place only")
        self._graph = graph
        self._custom_cls = custom_cls

    def prepare(self, num_batches: int) -> None:
        """Makes buffers for `num_batches` batches that are sampled and not used yet."""
        pool = BufferPool(max_free=num_batches * self._fetch.num_arrays)
        MemoryBudget.of("cpu").watch(pool, "loader buffers", BufferPool.held_bytes)
        self._fetch.prepare(RowBuffers(pool), num_batches if self.waits else 0, PipelineOptions().keep)

    @property
    def waits(self) -> bool:
        """Whether sampling or fetching waits for other machines."""
        return len(self._graph.parts_here) < self._graph.parts.num_parts or self._fetch.waits

    def forget(self) -> None:
        """Later batches share no rows with those that are under way now."""
        self._fetch.forget()

    def begin(self, out: SamplerOutput | HeteroSamplerOutput) -> Joining:
        if isinstance(out, SamplerOutput):
            node, row, col = {NODE: out.node}, {EDGE: out.row}, {EDGE: out.col}
            edge = {} if out.edge is None else {EDGE: out.edge}
        else:
            node, row, col = out.node, out.row, out.col
            edge = {t: ids for t, ids in (out.edge or {}).items() if ids is not None}
        return Joining(out, self._fetch.begin(Sampled(Sample(node, row, col, edge, {}, {}), NODE)))

    def finish(self, joining: Joining) -> Any:
        out, rows = joining.out, self._fetch.finish(joining.sampled).rows
        if isinstance(out, SamplerOutput):
            plain = Data() if self._custom_cls is None else self._custom_cls()
            plain.edge_index = torch.stack([out.row, out.col])
            plain.num_nodes = out.node.numel()
            for arrays in rows.values():
                for name, values in arrays.items():
                    plain[name] = values
            return plain
        batch = HeteroData() if self._custom_cls is None else self._custom_cls()
        for node_type in self._graph.node_types:
            batch[node_type].num_nodes = out.node[node_type].numel() if node_type in out.node else 0
        for edge_type in self._graph.edge_types:
            if edge_type in out.row and edge_type in out.col:
                batch[edge_type].edge_index = torch.stack([out.row[edge_type], out.col[edge_type]])
        for key, arrays in rows.items():
            for name, values in arrays.items():
                batch[key][name] = values
        return batch

    def __call__(self, out: SamplerOutput | HeteroSamplerOutput) -> Any:
        return self.finish(self.begin(out))
