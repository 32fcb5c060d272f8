"""What sampling needs of each edge type of a graph in memory: structure, and weights or times by position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, Graph, NodeType, check_weight, did_you_mean, is_source, some
from gnnsys.ops import CSC, gather_rows
from gnnsys.sampling.edge_filter import EdgeFilter, ends_of_csc, keep_edges, rows_by_position


@dataclass(frozen=True)
class EdgeSource:
    """What sampling one edge type needs; rows by CSC position, except node times."""

    csc: CSC
    weight: Tensor | None = None
    time: Tensor | None = None
    node_time: bool = False
    time_sorted: bool = False


def edge_sources(
    graph: Graph, weight: str | None, time: str | None, kept: EdgeFilter | None = None
) -> dict[EdgeType, EdgeSource]:
    """The sources of a graph, with the weights and times that `rows_to_draw_by` names, and the edges that are kept."""
    by = rows_to_draw_by(graph.node_data, graph.edge_data, weight, time)
    if kept is not None:
        kept.check(graph.edge_data)
    sources = {}
    for edge_type in graph.edge_types:
        source = EdgeSource(graph.csc(edge_type))
        rows = graph.edge_data[edge_type]
        if kept is not None:
            source = EdgeSource(_kept_of(graph, edge_type, kept))
        if by[edge_type] == "weight":
            of_edge = weight_rows(str(weight), _in_memory(str(weight), rows[str(weight)], graph.device))
            source = replace(source, weight=_by_position(source.csc, of_edge))
        elif by[edge_type] == "node time":
            of_node = _in_memory(str(time), graph.node_data[edge_type[0]][str(time)], graph.device)
            source = with_node_time(source, time_rows(str(time), of_node))
        elif by[edge_type] == "edge time":
            of_edge = time_rows(str(time), _in_memory(str(time), rows[str(time)], graph.device))
            source = with_edge_time(source, _by_position(source.csc, of_edge))
        sources[edge_type] = source
    return sources


def _kept_of(graph: Graph, edge_type: EdgeType, kept: EdgeFilter) -> CSC:
    """Structure of a graph in memory with the edges that a filter keeps."""
    csc, rows = graph.csc(edge_type), graph.edge_data[edge_type]
    mask = kept.keeps(edge_type, rows_by_position(csc, rows), csc.num_edges, ends_of_csc(csc))
    return csc if mask is None else keep_edges(csc, mask)[0]


def rows_to_draw_by(
    node_data: Mapping[NodeType, Mapping[str, object]],
    edge_data: Mapping[EdgeType, Mapping[str, object]],
    weight: str | None,
    time: str | None,
) -> dict[EdgeType, str]:
    """Per edge type 'weight', 'node time', 'edge time' or '' (uniform).

    A time that some node type has is a node time, else it is looked for on edges. ValueError where no type has it.
    """
    for argument, given in (("weight", weight), ("time", time)):
        if given is not None and not isinstance(given, str):
            raise ValueError(
                f"{argument}_attr must be the name of an array of the graph, got a {type(given).__name__}: give it to "
                f"the graph, graph.set_edge_data({argument!r}, rows), and write {argument}_attr={argument!r}"
            )
    on_nodes = time is not None and any(time in rows for rows in node_data.values())
    found: dict[EdgeType, str] = {}
    for edge_type, rows in edge_data.items():
        found[edge_type] = ""
        if weight is not None and weight in rows:
            found[edge_type] = "weight"
        elif time is not None and on_nodes and time in node_data[edge_type[0]]:
            found[edge_type] = "node time"
        elif time is not None and not on_nodes and time in rows:
            found[edge_type] = "edge time"
    for name, argument in ((weight, "weight"), (time, "time")):
        if name is not None and edge_data and not any(by.endswith(argument) for by in found.values()):
            where = list(edge_data.values()) + ([] if argument == "weight" else list(node_data.values()))
            known = sorted({known for rows in where for known in rows})
            raise ValueError(
                f"{argument}_attr: no {'edge' if argument == 'weight' else 'edge or node'} type has an array {name!r}, "
                f"only {some(known, near=name)}{did_you_mean(name, known)}"
            )
    return found


def written_arrays(graph: Graph, names: Sequence[str | None]) -> list[tuple[Any, int]]:
    """The arrays of these names, and how often torch has written into each."""
    data = (*graph.node_data.values(), *graph.edge_data.values())
    found = [rows[name] for rows in data for name in names if name is not None and name in rows]
    return [(rows, rows._version if isinstance(rows, Tensor) and not rows.is_inference() else 0) for rows in found]


def _in_memory(name: str, rows: Any, device: torch.device) -> Tensor:
    """The rows where the structure is."""
    if is_source(rows):
        raise ValueError(f"{name!r} is a {type(rows).__name__}: weights and times to draw by must be tensors in memory")
    return rows.to(device)


def pinned(source: EdgeSource) -> EdgeSource:
    """The same in pinned host memory, for a device to read; what is pinned already stays where it is."""

    def pin(rows: Tensor | None) -> Tensor | None:
        return rows if rows is None or rows.is_pinned() else rows.pin_memory()

    csc = source.csc if source.csc.indptr.is_cuda else source.csc.pin_memory()
    return replace(source, csc=csc, weight=pin(source.weight), time=pin(source.time))


def _by_position(csc: CSC, rows: Tensor) -> Tensor:
    return rows.contiguous() if csc.edge_ids is None else rows.index_select(0, csc.edge_ids)


def weight_rows(name: str, rows: Tensor) -> Tensor:
    """Weights as they are drawn by, float32 or float64 [num_edges]; ValueError where they cannot be."""
    rows = rows.view(-1) if rows.dim() == 2 and rows.shape[1] == 1 else rows
    check_weight(rows, f"weight {name!r}")
    return rows if rows.dtype == torch.float64 else rows.float()


def time_rows(name: str, rows: Tensor) -> Tensor:
    """Times as they are compared, int64; ValueError where they cannot be."""
    check_time(name, rows.shape, rows.dtype)
    return rows.reshape(-1).to(torch.int64).contiguous()


def check_time(name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
    """ValueError unless rows of this kind are times: one whole number each, so that they compare exactly."""
    is_column = len(shape) == 1 or (len(shape) == 2 and shape[1] == 1)
    if not is_column or dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise ValueError(f"time {name!r} must hold integers, such as seconds, got {list(shape)} {dtype}")


def with_node_time(source: EdgeSource, time: Tensor) -> EdgeSource:
    """The source seen in the order of its sources' times, `time` by source node."""
    csc, _ = _sort_by_time(source.csc, gather_rows(time, source.csc.indices))
    return replace(source, csc=csc, time=time, node_time=True, time_sorted=True)


def with_edge_time(source: EdgeSource, time: Tensor) -> EdgeSource:
    """The source seen in the order of its edges' times, `time` by position."""
    csc, of_position = _sort_by_time(source.csc, time)
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
