"""What a sampler needs of each edge type: structure, fanouts, and weights or times by position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, Graph, check_weight, edge_type_key
from gnnsys.ops import CSC

MAX_FANOUT = 1 << 28  # what the kernel's 32-bit arithmetic on draws leaves room for
Fanouts: TypeAlias = Sequence[int] | Mapping[EdgeType, Sequence[int]]


@dataclass(frozen=True)
class EdgeSource:
    """What sampling one edge type needs; rows by CSC position, except node times."""

    csc: CSC
    fanouts: tuple[int, ...]
    key: int
    weight: Tensor | None = None
    time: Tensor | None = None
    node_time: bool = False
    time_sorted: bool = False


def check_fanouts(graph: Graph, num_neighbors: Fanouts) -> dict[EdgeType, tuple[int, ...]]:
    """A fanout per hop for every edge type of the graph; ValueError says what is wrong with the user's."""
    if isinstance(num_neighbors, int):
        raise ValueError(
            f"num_neighbors must be a list, a fanout per hop, got {num_neighbors}: write [{num_neighbors}]"
        )
    if isinstance(num_neighbors, Mapping):
        for edge_type in num_neighbors:
            graph.csc(edge_type)
        missing = [t for t in graph.edge_types if t not in num_neighbors]
        if missing:
            raise ValueError(f"num_neighbors must cover all edge types, missing {missing} (use [0, ...] to skip one)")
        fanouts = {t: tuple(num_neighbors[t]) for t in graph.edge_types}
    else:
        fanouts = {t: tuple(num_neighbors) for t in graph.edge_types}
    if len({len(f) for f in fanouts.values()}) > 1:
        raise ValueError(f"num_neighbors: hops must be the same across all edge types, got {fanouts}")
    for edge_type, values in fanouts.items():
        if not values:
            raise ValueError("num_neighbors must have at least one hop")
        if any(int(f) != f or not -1 <= f < MAX_FANOUT for f in values):
            raise ValueError(
                f"num_neighbors must be -1 (all) or whole numbers >= 0, got {list(values)} for {edge_type}"
            )
    return {t: tuple(int(f) for f in values) for t, values in fanouts.items()}


def edge_sources(
    graph: Graph, fanouts: Mapping[EdgeType, tuple[int, ...]], weight: str | None, time: str | None
) -> dict[EdgeType, EdgeSource]:
    """The sources of a graph. A time that some node type has is a node time, else it is looked for on edges."""
    on_nodes = time is not None and any(time in rows for rows in graph.node_data.values())
    sources = {}
    for edge_type, values in fanouts.items():
        source = EdgeSource(graph.csc(edge_type), values, edge_type_key(edge_type))
        rows = graph.edge_data[edge_type]
        node_rows = graph.node_data[edge_type[0]]
        if weight is not None and weight in rows:
            source = replace(source, weight=_by_position(source.csc, _check_weight(weight, rows[weight])))
        if time is not None and on_nodes and time in node_rows:
            source = _with_node_time(source, _check_time(time, node_rows[time]))
        elif time is not None and not on_nodes and time in rows:
            source = _with_edge_time(source, _check_time(time, rows[time]))
        sources[edge_type] = source
    for name, argument in ((weight, "weight"), (time, "time")):
        found = any(getattr(s, argument) is not None for s in sources.values())
        if name is not None and not found and graph.edge_types:
            raise ValueError(f"{argument}: no edge or node type has rows named {name!r}")
    return sources


def _by_position(csc: CSC, rows: Tensor) -> Tensor:
    return rows.contiguous() if csc.edge_ids is None else rows.index_select(0, csc.edge_ids)


def _check_weight(name: str, rows: Tensor) -> Tensor:
    rows = rows.view(-1) if rows.dim() == 2 and rows.shape[1] == 1 else rows
    check_weight(rows, f"weight {name!r}")
    return rows if rows.dtype == torch.float64 else rows.float()


def _check_time(name: str, rows: Tensor) -> Tensor:
    rows = rows.view(-1) if rows.dim() == 2 and rows.shape[1] == 1 else rows
    if rows.dim() != 1 or rows.is_floating_point() or rows.is_complex() or rows.dtype == torch.bool:
        raise ValueError(f"time {name!r} must hold integers, such as seconds, got {list(rows.shape)} {rows.dtype}")
    return rows.to(torch.int64).contiguous()


def _with_node_time(source: EdgeSource, time: Tensor) -> EdgeSource:
    csc, _ = _sort_by_time(source.csc, time[source.csc.indices.to(torch.int64)])
    return replace(source, csc=csc, time=time, node_time=True, time_sorted=True)


def _with_edge_time(source: EdgeSource, time: Tensor) -> EdgeSource:
    csc, of_position = _sort_by_time(source.csc, _by_position(source.csc, time))
    return replace(source, csc=csc, time=of_position, time_sorted=True)


def _sort_by_time(csc: CSC, time: Tensor) -> tuple[CSC, Tensor]:
    """Neighbourhoods re-ordered by time, stably, so that what a seed may see is a prefix found by bisection."""
    if _is_sorted(csc, time):
        return csc, time
    by_time = torch.sort(time, stable=True).indices
    order = by_time[torch.sort(csc.dst()[by_time], stable=True).indices]
    edge_ids = order if csc.edge_ids is None else csc.edge_ids[order]
    return CSC(csc.indptr, csc.indices[order], csc.num_src, edge_ids), time[order]


def _is_sorted(csc: CSC, time: Tensor) -> bool:
    """Whether times ascend within each neighbourhood; between two neighbourhoods they may fall."""
    if time.numel() < 2:
        return True
    ascends = time[1:] >= time[:-1]
    starts = csc.indptr[1:-1]
    ascends[starts[(starts > 0) & (starts < time.numel())] - 1] = True
    return bool(ascends.all())
