"""NeighborLoader: mini-batches of seed nodes with their sampled neighbourhoods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gnnsys.graph import NODE, EdgeType, Graph, NodeType, as_ids
from gnnsys.loader.batch import Batch
from gnnsys.loader.join import Sampled
from gnnsys.loader.loader import Loader
from gnnsys.loader.schedule import Schedule, Ticket
from gnnsys.loader.subgraph import SUBGRAPH_TYPES, shape_subgraph
from gnnsys.sampling import NeighborSampler, SampleKey

Ids: TypeAlias = Tensor | list[int] | range
InputNodes: TypeAlias = Ids | NodeType | tuple[NodeType, Ids | None] | None
NumNeighbors: TypeAlias = Sequence[int] | Mapping[EdgeType, Sequence[int]]


class NeighborLoader(Loader):
    """Batches of `batch_size` seed nodes, each with `num_neighbors[h]` neighbours of every node at hop h.

    `input_nodes`: ids, a bool mask, a list or a range; in a heterogeneous graph a node type or (node type, ids). None:
    all nodes. `num_neighbors`: one number per hop (-1: all), or a list per edge type. `input_time` is the seeds' time
    under temporal sampling (default: their own `time_attr`). Everything random is a function of (seed, epoch, batch).

    >>> loader = NeighborLoader(graph, [15, 10], input_nodes=train_ids, batch_size=1024, shuffle=True)
    >>> for batch in loader:
    ...     out = model(batch.x, batch.edge_index)[: batch.batch_size]
    """

    def __init__(
        self,
        graph: Graph,
        num_neighbors: NumNeighbors,
        *,
        input_nodes: InputNodes = None,
        input_time: Tensor | None = None,
        batch_size: int = 1,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
        replace: bool = False,
        subgraph_type: str = "directional",
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        time_attr: str | None = None,
        weight_attr: str | None = None,
        expand: str = "new",
        transform: Callable[[Batch], Batch] | None = None,
        num_threads: int = 1,
        prefetch: int = 2,
        device: torch.device | str | None = None,
        across_epochs: bool = True,
    ) -> None:
        node_type, nodes = resolve_nodes(graph, input_nodes)
        schedule = Schedule(nodes.numel(), batch_size, shuffle, drop_last, seed)
        disjoint = disjoint or time_attr is not None
        sampler = make_sampler(
            graph,
            num_neighbors,
            subgraph_type,
            replace=replace,
            disjoint=disjoint,
            weight=weight_attr,
            time=time_attr,
            temporal_strategy=temporal_strategy,
            expand=expand,
        )
        times = check_input_time(graph, node_type, nodes, input_time, time_attr)
        sample = _SampleNodes(graph, sampler, subgraph_type, node_type, nodes, times, input_time is not None, seed)
        super().__init__(
            graph,
            schedule,
            sample,
            transform=transform,
            num_threads=num_threads,
            prefetch=prefetch,
            device=device,
            across_epochs=across_epochs,
        )


class _SampleNodes:
    """The sample stage: from chosen inputs to the structure around them."""

    def __init__(
        self,
        graph: Graph,
        sampler: NeighborSampler,
        subgraph_type: str,
        node_type: NodeType,
        nodes: Tensor,
        times: Tensor | None,
        shows_time: bool,
        seed: int,
    ) -> None:
        self._graph = graph
        self._sampler = sampler
        self._subgraph_type = subgraph_type
        self._node_type = node_type
        self._nodes = nodes
        self._times = times
        self._shows_time = shows_time
        self._seed = seed

    def __call__(self, ticket: Ticket, chosen: Tensor) -> Sampled:
        times = None if self._times is None else self._times[chosen]
        sample = self._sampler.sample(
            {self._node_type: self._nodes[chosen]},
            key=SampleKey(self._seed, ticket.epoch, ticket.batch),
            seed_time=None if times is None else {self._node_type: times},
        )
        values: dict[str, Any] = {"input_id": chosen, "batch_size": chosen.numel()}
        if self._shows_time:
            values["seed_time"] = times
        sample = shape_subgraph(sample, self._graph, self._subgraph_type)
        return Sampled(sample, self._node_type, {self._node_type: values})


def resolve_nodes(graph: Graph, input_nodes: InputNodes) -> tuple[NodeType, Tensor]:
    """The node type and ids (int64) that a user's `input_nodes` stands for; ValueError where there is none."""
    node_type: NodeType = NODE
    ids: Ids | None
    if isinstance(input_nodes, str):
        node_type, ids = input_nodes, None
    elif isinstance(input_nodes, tuple) and len(input_nodes) == 2 and isinstance(input_nodes[0], str):
        node_type, ids = input_nodes
    else:
        ids = input_nodes  # type: ignore[assignment]
        if len(graph.node_types) != 1:
            raise ValueError(f"input_nodes must name a node type, as a name or (name, ids), one of {graph.node_types}")
        node_type = graph.node_types[0]
    num_nodes = graph.num_nodes(node_type)
    nodes = torch.arange(num_nodes) if ids is None else as_ids(ids, num_nodes, "input_nodes").long()
    if nodes.numel() == 0:
        raise ValueError(f"input_nodes is empty: no seeds of node type {node_type!r}")
    return node_type, nodes


def make_sampler(
    graph: Graph, num_neighbors: NumNeighbors, subgraph_type: str, *, disjoint: bool, **options: Any
) -> NeighborSampler:
    if subgraph_type not in SUBGRAPH_TYPES:
        raise ValueError(f"subgraph_type must be one of {SUBGRAPH_TYPES}, got {subgraph_type!r}")
    if subgraph_type != "directional" and options.get("expand") == "frontier":
        raise ValueError(
            f"expand='frontier' makes blocks of what was sampled: subgraph_type={subgraph_type!r} has none"
        )
    if subgraph_type == "induced" and disjoint:
        raise ValueError("subgraph_type='induced' does not go with disjoint or temporal sampling: trees have no cycles")
    return NeighborSampler(graph, num_neighbors, disjoint=disjoint, **options)


def check_input_time(
    graph: Graph, node_type: NodeType, nodes: Tensor, input_time: Tensor | None, time_attr: str | None
) -> Tensor | None:
    """The seeds' times: as given, or their own where the time attribute is a node's."""
    check_times("input_time", input_time)
    if input_time is not None:
        if time_attr is None:
            raise ValueError("input_time was given without time_attr: name the attribute that holds times")
        if input_time.shape != nodes.shape:
            raise ValueError(f"input_time must have one entry per seed, {nodes.numel()}, got {tuple(input_time.shape)}")
        return input_time
    if time_attr is None:
        return None
    if time_attr not in graph.node_data[node_type]:
        raise ValueError(f"input_time must be given: nodes of type {node_type!r} have no {time_attr!r} of their own")
    return graph.node_data[node_type][time_attr][nodes]


def check_times(name: str, times: Tensor | None) -> None:
    """Times are compared exactly: whole numbers only."""
    if times is not None and (times.is_floating_point() or times.is_complex()):
        raise ValueError(f"{name} must hold integers, such as seconds, got {times.dtype}")
