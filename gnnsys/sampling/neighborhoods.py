"""What a sampler asks of a graph: the neighbours of many seeds, for all edge types of a hop at once.

A graph in memory answers from its CSCs, a parted one (`DistGraph`) from its own parts and over the network. Both draw
by the same keys, so whoever asks gets the same neighbours. A graph in a GPU's memory, or in pinned memory that it
reads, answers there: what is asked with seeds on the device comes back on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, Graph, NodeType
from gnnsys.ops import (
    CSC,
    HAS_CUDA_KERNELS,
    WHY_NO_KERNELS,
    DeviceReads,
    Neighbors,
    find_edges,
    gather_rows,
    sample_neighbors,
)
from gnnsys.sampling.draw_rule import RuleSeeds, RuleSource
from gnnsys.sampling.edge_filter import EdgeFilter
from gnnsys.sampling.edge_sources import edge_sources
from gnnsys.sampling.pinned_structure import read_by_device
from gnnsys.sampling.rules import find_rule

if TYPE_CHECKING:
    from gnnsys.sampling.dist_graph import DistGraph

AnyGraph: TypeAlias = "Graph | DistGraph"
_ROOMY = 1024  # fanouts up to this are given to kernels as they are


class HopRequest(NamedTuple):
    """One edge type's part of a hop: up to `fanout` in-edges of each seed, drawn by `key`.

    `exclude` is what `Neighborhoods.find_edges` returned; `tree` and `seed_time` have an entry per seed. A seed's time
    counts only where the edge type has times. Where a rule draws, `requester` is the part that the sample is for
    (None: the first part here) and `version` that of what steers the rule; both are the same for a whole hop.
    """

    edge_type: EdgeType
    seeds: Tensor
    fanout: int
    key: int
    exclude: Tensor | None = None
    tree: Tensor | None = None
    seed_time: Tensor | None = None
    requester: int | None = None
    version: int = 0


class Neighborhoods(Protocol):
    """In-edges of a graph, seen with the weights or the times that were asked for."""

    @property
    def id_dtypes(self) -> Mapping[NodeType, torch.dtype]:
        """The dtype of neighbours' ids of each node type."""

    def sample(
        self,
        requests: Sequence[HopRequest],
        *,
        replace: bool = False,
        last: bool = False,
        hop: int = -1,
    ) -> list[Neighbors]:
        """An answer per request, seeds in their order. Messages say `hop`, and what the `RequestContext` says."""

    def edge_ids(self, edge_type: EdgeType, positions: Tensor) -> Tensor:
        """The graph's edge ids of sampled `positions`, int64."""

    def find_edges(self, edge_type: EdgeType, src: Tensor, dst: Tensor) -> Tensor:
        """All edges src[i] -> dst[i], ascending, each once: what a request excludes."""

    def begin_find_edges(self, edge_type: EdgeType, src: Tensor, dst: Tensor) -> Callable[[], Tensor]:
        """The same in two halves: other machines are asked now, and the answer is there when the result is called."""

    def csc(self, edge_type: EdgeType) -> CSC:
        """What is sampled from, in memory; ValueError where no process has it."""


def neighborhoods(
    graph: AnyGraph,
    *,
    weight: str | None = None,
    time: str | None = None,
    rule: str | None = None,
    edges: EdgeFilter | None = None,
    device: torch.device | None = None,
) -> Neighborhoods:
    """In-edges of any graph, to be drawn uniformly, by `weight`, up to a `time` or by a `rule` (`draw_rule.py`).

    Seeds will be on `device`. With a filter of `edges` (`edge_filter.py`) the others are not there.
    """
    if isinstance(graph, Graph):
        return GraphNeighborhoods(graph, weight=weight, time=time, rule=rule, edges=edges, device=device)
    where = sampling_device(graph, device)
    return graph.neighborhoods(weight=weight, time=time, rule=rule, edges=edges, device=where)


def sampling_device(graph: AnyGraph, device: torch.device | str | None = None) -> torch.device:
    """Where in-edges of `graph` are drawn: on `device`, by default where the structure is.

    ValueError where the structure cannot be read from there: a GPU reads its own memory and pinned host memory, and
    parts that were opened for it; the host reads all parts.
    """
    if isinstance(graph, Graph):
        here, is_readable = graph.device, graph.is_pinned
    else:
        here, is_readable = graph.sampled_on, False
    wanted = here if device is None else torch.device(device)
    if wanted == here or (wanted.type == "cpu" and not isinstance(graph, Graph)):
        return wanted
    if not HAS_CUDA_KERNELS:
        raise ValueError(f"sampling on {wanted} needs CUDA kernels; {WHY_NO_KERNELS}. Or sample on the CPU")
    if wanted.type == "cuda" and wanted.index is None:
        wanted = here if here.type == "cuda" else torch.device("cuda", torch.cuda.current_device())
    if here.type == "cuda" and wanted != here:
        remedy = f"pass graph.to({str(wanted)!r})" if isinstance(graph, Graph) else f"open it for {wanted}"
        raise ValueError(f"the graph is on {here} and cannot be sampled on {wanted}: {remedy}")
    if here.type == "cpu" and not is_readable:
        remedy = f"pass graph.pin_memory(), or where it fits graph.to({str(wanted)!r})"
        if not isinstance(graph, Graph):
            raise ValueError(f"these parts were not opened for {wanted}: gnnsys.open(parts, device={str(wanted)!r})")
        raise ValueError(f"a graph in host memory can be sampled on {wanted} only if it is pinned: {remedy}")
    return wanted


def host_of(graph: AnyGraph, who: str) -> torch.device:
    """The host, for samplers that draw nowhere else; ValueError where it does not have the structure."""
    if isinstance(graph, Graph) and graph.device.type != "cpu":
        raise ValueError(
            f"{who} draws on the host, and the graph is on {graph.device}: give sampler and loader the same graph in "
            f"host memory, graph.to('cpu').pin_memory(), and the loader device={str(graph.device)!r}"
        )
    return torch.device("cpu")


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`. From the host through pinned memory: then nobody waits for the device."""
    if tensor.device == device or not tensor.is_cpu:
        return tensor.to(device)
    pinned = tensor if tensor.numel() == 0 or tensor.is_pinned() else tensor.pin_memory()
    return pinned.to(device, non_blocking=True)


class GraphNeighborhoods:
    """Of a graph in memory."""

    def __init__(
        self,
        graph: Graph,
        *,
        weight: str | None = None,
        time: str | None = None,
        rule: str | None = None,
        edges: EdgeFilter | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._device = sampling_device(graph, device)
        self._sources = edge_sources(graph, weight, time, edges)
        self._rule = None if rule is None else find_rule(rule)
        if self._device != graph.device:
            self._sources = read_by_device(graph, self._sources, self._device)
        self._reads = DeviceReads()
        self._largest: dict[EdgeType, int] = {}  # in-degrees, where they were asked for
        self.id_dtypes = dict.fromkeys(graph.node_types, torch.int32)
        for edge_type, source in self._sources.items():
            if source.csc.indices.dtype == torch.int64:
                self.id_dtypes[edge_type[0]] = self.id_dtypes[edge_type[2]] = torch.int64

    @property
    def is_plain(self) -> bool:
        """Whether in-edges are drawn uniformly, on the host."""
        weighs = any(source.weight is not None or source.time is not None for source in self._sources.values())
        return self._rule is None and self._device.type == "cpu" and not weighs

    def sample(
        self,
        requests: Sequence[HopRequest],
        *,
        replace: bool = False,
        last: bool = False,
        hop: int = -1,
    ) -> list[Neighbors]:
        return [self._sample(request, replace, last) for request in requests]

    def _sample(self, request: HopRequest, replace: bool, last: bool) -> Neighbors:
        source, fanout = self._sources[request.edge_type], request.fanout
        self.note_read(request.edge_type)
        if self._device.type == "cuda":
            fanout = fanout if replace else self.bounded(request.edge_type, fanout)
        exclude = None if request.exclude is None else request.exclude.to(request.seeds.device)
        if self._rule is not None:
            seeds, at = request.seeds.to(source.csc.indices.dtype), RuleSource(source.csc, version=request.version)
            return self._rule.draw(at, RuleSeeds(seeds, fanout, request.key, exclude, request.tree))
        timed: dict[str, Any] = {}
        if source.time is not None and request.seed_time is not None:
            timed = {"time": source.time, "seed_time": request.seed_time, "last": last}
            timed |= {"node_time": source.node_time, "time_sorted": source.time_sorted}
        return sample_neighbors(
            source.csc,
            request.seeds.to(source.csc.indices.dtype),
            fanout,
            key=request.key,
            replace=replace,
            weight=source.weight,
            exclude=exclude,
            tree=request.tree,
            **timed,
        )

    def note_read(self, edge_type: EdgeType) -> None:
        """The structure of an edge type is about to be read, on a GPU by its current stream."""
        if self._device.type == "cuda":
            source = self._sources[edge_type]
            csc = source.csc
            self._reads(self._device, csc.indptr, csc.indices, source.weight, source.time)

    def bounded(self, edge_type: EdgeType, fanout: int) -> int:
        """A fanout that takes all in-edges of every node, as the smallest such: kernels reserve room for a fanout."""
        if fanout <= _ROOMY:
            return fanout
        if edge_type not in self._largest:
            degrees = self.csc(edge_type).in_degrees()
            self._largest[edge_type] = int(degrees.max()) if degrees.numel() else 0
        return min(fanout, max(_ROOMY, self._largest[edge_type]))

    def edge_ids(self, edge_type: EdgeType, positions: Tensor) -> Tensor:
        edge_ids = self._sources[edge_type].csc.edge_ids
        if edge_ids is None:
            return positions
        if positions.is_cuda:
            self._reads(positions.device, edge_ids)
        return gather_rows(edge_ids, positions).to(torch.int64)

    def find_edges(self, edge_type: EdgeType, src: Tensor, dst: Tensor) -> Tensor:
        csc = self.csc(edge_type)
        where = csc.indices.device  # few edges are looked for: pinned structure is read by the host
        return to_device(find_edges(csc, to_device(src, where), to_device(dst, where)), self._device)

    def begin_find_edges(self, edge_type: EdgeType, src: Tensor, dst: Tensor) -> Callable[[], Tensor]:
        return partial(self.find_edges, edge_type, src, dst)

    def csc(self, edge_type: EdgeType) -> CSC:
        return self._sources[edge_type].csc
