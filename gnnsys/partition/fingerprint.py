"""Fingerprints of a graph, taken from the source: what verification compares the parts with when the source is gone.

One 128-bit hash per multiset: edges as (destination, rank in its column, source), rows of node data as (node, bytes),
rows of edge data and edge ids as (destination, rank, bytes), all in original ids. Neither the order of parts nor that
of nodes inside them changes it. Everything is read once, in pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, Graph, NodeType
from gnnsys.ops import CSC, add_fingerprints, fingerprint_edge_rows, fingerprint_edges, fingerprint_rows
from gnnsys.partition.array_pieces import Meter, column_pieces, row_pieces, take

_DIGITS = 32


@dataclass(frozen=True)
class NodeFingerprints:
    num_nodes: int
    data: Mapping[str, int]


@dataclass(frozen=True)
class EdgeFingerprints:
    num_edges: int
    structure: int
    edge_ids: int | None  # None where original edge ids are not kept
    data: Mapping[str, int]


@dataclass(frozen=True)
class Fingerprints:
    nodes: Mapping[NodeType, NodeFingerprints]
    edges: Mapping[EdgeType, EdgeFingerprints]

    def to_json(self) -> dict[str, Any]:
        nodes = [[t, {"num_nodes": of.num_nodes, "data": _hex_all(of.data)}] for t, of in self.nodes.items()]
        edges = [
            [
                list(t),
                {
                    "num_edges": of.num_edges,
                    "structure": _hex(of.structure),
                    "edge_ids": None if of.edge_ids is None else _hex(of.edge_ids),
                    "data": _hex_all(of.data),
                },
            ]
            for t, of in self.edges.items()
        ]
        return {"nodes": nodes, "edges": edges}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Fingerprints:
        nodes = {str(t): NodeFingerprints(int(of["num_nodes"]), _int_all(of["data"])) for t, of in values["nodes"]}
        edges = {}
        for (src, relation, dst), of in values["edges"]:
            ids = None if of["edge_ids"] is None else int(of["edge_ids"], 16)
            edges[str(src), str(relation), str(dst)] = EdgeFingerprints(
                int(of["num_edges"]), int(of["structure"], 16), ids, _int_all(of["data"])
            )
        return cls(nodes, edges)


def fingerprint_graph(graph: Graph, *, edge_ids: bool, meter: Meter | None = None) -> Fingerprints:
    """Reads the whole graph once. Without `edge_ids` the numbers of the edges do not count."""
    meter = meter or Meter(None, 0)
    nodes: dict[NodeType, NodeFingerprints] = {}
    for node_type in graph.node_types:
        data = {}
        for name, rows in graph.node_data[node_type].items():
            data[name] = node_rows(rows)
            meter.advance(rows.nbytes, "fingerprints")
        nodes[node_type] = NodeFingerprints(graph.num_nodes(node_type), data)
    edges: dict[EdgeType, EdgeFingerprints] = {}
    for edge_type in graph.edge_types:
        csc, data = graph.csc(edge_type), {}
        structure = fingerprint_edges(csc.indptr, csc.indices)
        meter.advance(csc.indices.nbytes, "fingerprints")
        ids = edge_rows(csc.indptr, partial(ids_of_columns, csc)) if edge_ids else None
        for name, rows in graph.edge_data[edge_type].items():
            data[name] = _source_edge_rows(csc, rows)
            meter.advance(rows.nbytes, "fingerprints")
        edges[edge_type] = EdgeFingerprints(csc.num_edges, structure, ids, data)
    return Fingerprints(nodes, edges)


def node_rows(rows: Tensor, ids: Tensor | None = None) -> int:
    """Rows of nodes with the given ids (their places, where there are none), of any layout."""
    total = 0
    for first, end in row_pieces(rows, rows.shape[0]):
        piece = rows[first:end].detach().contiguous()
        part = fingerprint_rows(piece, first=first) if ids is None else fingerprint_rows(piece, ids[first:end])
        total = add_fingerprints(total, part)
    return total


def edge_rows(indptr: Tensor, rows_of: Callable[[int, int], Tensor], dst: Tensor | None = None) -> int:
    """Rows by position, piece by piece: `rows_of(first, end)` gives those of columns first to end."""
    total = 0
    for first, end in column_pieces(indptr):
        piece = rows_of(first, end).contiguous()
        names = torch.arange(first, end, device="cpu") if dst is None else dst[first:end]
        part = fingerprint_edge_rows(indptr[first : end + 1] - indptr[first], piece, names)
        total = add_fingerprints(total, part)
    return total


def _source_edge_rows(csc: CSC, rows: Tensor) -> int:
    """Rows in the user's edge order, hashed in place where they are contiguous."""
    if rows.is_contiguous():
        order = None if csc.edge_ids is None else csc.edge_ids.contiguous()
        return fingerprint_edge_rows(csc.indptr, rows.detach(), None, order)
    return edge_rows(csc.indptr, lambda first, end: take(rows, ids_of_columns(csc, first, end)))


def ids_of_columns(csc: CSC, first: int, end: int) -> Tensor:
    """The user's edge ids of the edges of columns first to end, int64."""
    start, stop = int(csc.indptr[first]), int(csc.indptr[end])
    return torch.arange(start, stop, device="cpu") if csc.edge_ids is None else csc.edge_ids[start:stop].long()


def _hex(value: int) -> str:
    return f"{value:0{_DIGITS}x}"


def _hex_all(values: Mapping[str, int]) -> dict[str, str]:
    return {name: _hex(value) for name, value in values.items()}


def _int_all(values: Mapping[str, str]) -> dict[str, int]:
    return {name: int(value, 16) for name, value in values.items()}
