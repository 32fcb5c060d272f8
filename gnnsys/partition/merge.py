"""The whole graph again from its parts, in original ids and order: the inverse of writing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, Graph, NodeType
from gnnsys.ops import CSC, gather_rows, scatter_rows
from gnnsys.partition.array_pieces import column_pieces, ramps, row_pieces

if TYPE_CHECKING:
    from gnnsys.partition.part import Part
    from gnnsys.partition.parts_directory import Parts


def merge_parts(parts: Parts) -> Graph:
    """Reads every part once. ValueError where parts do not hold every node once."""
    original = {t: original_by_global(parts, t) for t in parts.schema.node_types}
    node_data: dict[NodeType, dict[str, Tensor]] = {}
    for node_type, arrays in parts.schema.node_data.items():
        node_data[node_type] = {}
        for name, spec in arrays.items():
            merged = torch.zeros(parts.book.num_ids(node_type), *spec.row_shape, dtype=spec.dtype, device="cpu")
            for part in map(parts.part, range(parts.num_parts)):
                rows, ids = part.node_data[node_type][name], part.original_ids(node_type)
                for first, end in row_pieces(rows, rows.shape[0]):
                    scatter_rows(merged, ids[first:end], rows[first:end])
            node_data[node_type][name] = merged
    csc: dict[EdgeType, CSC] = {}
    edge_data: dict[EdgeType, dict[str, Tensor]] = {}
    for edge_type in parts.schema.edge_types:
        csc[edge_type], edge_data[edge_type] = _merge_edges(parts, edge_type, original[edge_type[0]])
    num_nodes = {t: parts.book.num_ids(t) for t in parts.schema.node_types}
    return Graph(num_nodes, csc, node_data, edge_data, parts.graph_info)


def original_by_global(parts: Parts, node_type: NodeType) -> Tensor:
    """The original id of every global id, as stored."""
    return torch.cat([core_ids(parts.part(i), node_type) for i in range(parts.num_parts)])


def core_ids(part: Part, node_type: NodeType) -> Tensor:
    """The original ids of a part's core nodes, as stored."""
    return part.original_ids(node_type)[: part.num_core(node_type)]


def original_by_local(part: Part, node_type: NodeType, original: Tensor) -> Tensor:
    """The original id of every local id of a part; `original` is `original_by_global`."""
    return torch.cat([core_ids(part, node_type), gather_rows(original, part.halo(node_type))])


def _merge_edges(parts: Parts, edge_type: EdgeType, original: Tensor) -> tuple[CSC, dict[str, Tensor]]:
    src, _, dst = edge_type
    num_edges = parts.book.num_ids(edge_type)
    indptr = _merge_indptr(parts, edge_type)
    if int(indptr[-1]) != num_edges:
        raise ValueError(f"{parts.path}: the parts do not hold every node of type {dst!r} once")
    indices = torch.empty(num_edges, dtype=parts.schema.index_dtype[edge_type], device="cpu")
    id_dtype = parts.schema.edge_id_dtype[edge_type] if parts.has_edge_ids else None
    edge_ids = None if id_dtype is None else torch.empty(num_edges, dtype=id_dtype, device="cpu")
    data = {
        name: torch.zeros(num_edges, *spec.row_shape, dtype=spec.dtype, device="cpu")
        for name, spec in parts.schema.edge_data[edge_type].items()
    }
    for part in map(parts.part, range(parts.num_parts)):
        num_core, local, columns = part.num_core(dst), part.csc(edge_type), part.original_ids(dst)
        names = original_by_local(part, src, original)
        for first, end in column_pieces(local.indptr[: num_core + 1]):
            piece = slice(int(local.indptr[first]), int(local.indptr[end]))
            places = ramps(local.indptr[first : end + 1], gather_rows(indptr[:-1], columns[first:end]))
            scatter_rows(indices, places, gather_rows(names, local.indices[piece]).to(indices.dtype))
            rows_at = places
            stored = None if edge_ids is None else part.column_edge_ids(first, end, edge_type)
            if edge_ids is not None and stored is not None:
                scatter_rows(edge_ids, places, stored.to(edge_ids.dtype))
                rows_at = stored
            for name, rows in part.edge_data[edge_type].items():
                scatter_rows(data[name], rows_at, rows[piece])
    return CSC(indptr, indices, parts.book.num_ids(src), edge_ids), data


def _merge_indptr(parts: Parts, edge_type: EdgeType) -> Tensor:
    dst = edge_type[2]
    indptr = torch.zeros(parts.book.num_ids(dst) + 1, dtype=torch.int64, device="cpu")
    for part in map(parts.part, range(parts.num_parts)):
        num_core = part.num_core(dst)
        degrees = part.csc(edge_type).indptr[: num_core + 1].diff()
        scatter_rows(indptr[1:], part.original_ids(dst)[:num_core], degrees)
    return torch.cumsum(indptr, 0, out=indptr)
