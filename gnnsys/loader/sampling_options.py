"""Which options of sampling go together: ValueErrors that say what to leave away, before anything is sampled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnnsys.graph import Graph, NodeType
from gnnsys.loader.batch_memory import NumNeighbors
from gnnsys.loader.padding import PadSizes
from gnnsys.loader.subgraph import SUBGRAPH_TYPES
from gnnsys.sampling import DistGraph, EdgeFilter, NeighborSampler, Sampler, check_fanouts, check_no_idle_hop
from gnnsys.seeds import SeedsByType


@dataclass(frozen=True, kw_only=True)
class DrawOptions:
    """How neighbours are drawn where the loader makes the sampler: see `NeighborLoader`."""

    replace: bool
    subgraph_type: str
    disjoint: bool
    temporal_strategy: str
    time_attr: str | None
    weight_attr: str | None
    expand: str
    edge_mask: str | EdgeFilter | None

    @property
    def has_trees(self) -> bool:
        return self.disjoint or self.time_attr is not None

    @property
    def are_default(self) -> bool:
        """Whether the user has chosen nothing: then another sampler may decide it."""
        named = (self.time_attr, self.weight_attr, self.edge_mask)
        is_named = self.replace or self.disjoint or any(option is not None for option in named)
        return not is_named and (self.subgraph_type, self.expand) == ("directional", "new")

    def make_sampler(
        self, graph: Graph | DistGraph, num_neighbors: NumNeighbors, device: torch.device | None
    ) -> NeighborSampler:
        if self.expand == "new":  # blocks are made of a hop without edges too
            check_no_idle_hop(check_fanouts(graph, num_neighbors))
        return make_sampler(
            graph,
            num_neighbors,
            self.subgraph_type,
            replace=self.replace,
            disjoint=self.has_trees,
            weight=self.weight_attr,
            time=self.time_attr,
            temporal_strategy=self.temporal_strategy,
            expand=self.expand,
            edges=self.edge_mask,
            device=device or torch.device("cpu"),
        )


def make_sampler(
    graph: Graph | DistGraph, num_neighbors: NumNeighbors, subgraph_type: str, *, disjoint: bool, **options: Any
) -> NeighborSampler:
    if subgraph_type not in SUBGRAPH_TYPES:
        raise ValueError(f"subgraph_type must be one of {SUBGRAPH_TYPES}, got {subgraph_type!r}")
    if subgraph_type != "directional" and options.get("expand") == "frontier":
        raise ValueError(
            f"expand='frontier' makes blocks of what was sampled: subgraph_type={subgraph_type!r} has none"
        )
    if subgraph_type == "induced" and options.get("time") is not None:
        raise ValueError(
            "subgraph_type='induced' does not go with temporal sampling: it would have edges later than the seeds"
        )
    if subgraph_type == "induced" and options.get("edges") is not None:
        raise ValueError("subgraph_type='induced' takes every edge among the nodes: it does not go with edge_mask")
    return NeighborSampler(graph, num_neighbors, disjoint=disjoint, **options)


def check_sampler(sampler: Sampler, graph: Graph | DistGraph) -> dict[str, Any]:
    """The options of a user's sampler; ValueError where it samples another graph, or by arrays that were changed."""
    if sampler.graph is not graph and not (isinstance(graph, Graph) and graph.is_copy_of(sampler.graph)):
        raise ValueError("the sampler was made for another graph: make it for the one that the loader is given")
    sampler.check_current()
    return sampler.options()


def check_typed(sampler: object | None, guide: object | None, pad: bool | PadSizes) -> None:
    """ValueError for what seeds of several types do not go with."""
    is_able = sampler is None or isinstance(sampler, NeighborSampler) or not isinstance(sampler, Sampler)
    if not is_able or guide is not None or pad:
        raise ValueError(
            "seeds of several node types go with num_neighbors, a NeighborSampler or a function of your own: leave "
            "another sampler, guide and pad away"
        )


def check_can_pad(sampler: object | None, subgraph_type: str, expand: str) -> None:
    """ValueError for batches that do not come hop by hop: padding goes between hops."""
    if sampler is not None:
        raise ValueError("pad=True needs to know a batch's hops: it goes with our samplers, not with one of your own")
    if subgraph_type != "directional":
        raise ValueError(
            f"pad=True pads hop by hop, and subgraph_type={subgraph_type!r} has no hops: leave one of them away"
        )
    if expand != "new":
        raise ValueError(f"pad=True pads one edge_index, and expand={expand!r} makes blocks: leave one of them away")


def typed_times(
    graph: Graph | DistGraph, nodes: SeedsByType | None, given: Any, time_attr: str | None
) -> dict[NodeType, Tensor]:
    """Times of seeds by type, where they were given; ValueError where they are not those of the seeds."""
    if nodes is None:
        if isinstance(given, Mapping):
            raise ValueError("input_time is by node type, and input_nodes is not: give both as a dict by type")
        return {}
    if given is not None and (not isinstance(given, Mapping) or set(given) != set(nodes.ids)):
        raise ValueError(f"input_time must be a dict by node type, as input_nodes is: {list(nodes.ids)}")
    times = {t: given[t].cpu() for t in nodes.ids} if given is not None else {}
    for node_type, ids in nodes.ids.items():
        check_input_time(graph, node_type, len(ids), times.get(node_type), time_attr)
    return times


def check_input_time(
    graph: Graph | DistGraph, node_type: NodeType, num_seeds: int, input_time: Tensor | None, time_attr: str | None
) -> None:
    """ValueError unless the seeds' times are given, one each, or are their own where the attribute is a node's."""
    check_times("input_time", input_time)
    if input_time is not None:
        if time_attr is None:
            raise ValueError("input_time was given without time_attr: name the attribute that holds times")
        if input_time.shape != (num_seeds,):
            raise ValueError(f"input_time must have one entry per seed, {num_seeds}, got {tuple(input_time.shape)}")
    elif time_attr is not None and time_attr not in graph.node_data[node_type]:
        raise ValueError(f"input_time must be given: nodes of type {node_type!r} have no {time_attr!r} of their own")


def check_times(name: str, times: Tensor | None) -> None:
    """Times are compared exactly: whole numbers only."""
    if times is not None and (times.is_floating_point() or times.is_complex()):
        raise ValueError(f"{name} must hold integers, such as seconds, got {times.dtype}")
