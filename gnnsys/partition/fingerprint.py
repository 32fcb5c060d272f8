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
from gnnsys.ops import CSC
from gnnsys.ops.parts import add_fingerprints, fingerprint_edge_rows, fingerprint_edges, fingerprint_rows
from gnnsys.partition.pieces import Meter, column_pieces, row_pieces, take

_DIGITS = 32


@dataclass
class EdgeFingerprints:
    structure: int
    edge_ids: int | None  # None where original edge ids are not kept
    data: dict[str, int]


@dataclass
class Fingerprints:
    nodes: dict[NodeType, dict[str, int]]
    edges: dict[EdgeType, EdgeFingerprints]

    def to_json(self) -> dict[str, Any]:
        return {
            "nodes": [[t, {name: _hex(value) for name, value in data.items()}] for t, data in self.nodes.items()],
            "edges": [
                [
                    list(t),
                    {
                        "structure": _hex(prints.structure),
                        "edge_ids": None if prints.edge_ids is None else _hex(prints.edge_ids),
                        "data": {name: _hex(value) for name, value in prints.data.items()},
                    },
                ]
                for t, prints in self.edges.items()
            ],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Fingerprints:
        nodes = {str(t): {name: int(value, 16) for name, value in data.items()} for t, data in values["nodes"]}
        edges = {}
        for (src, relation, dst), entry in values["edges"]:
            ids = None if entry["edge_ids"] is None else int(entry["edge_ids"], 16)
            data = {name: int(value, 16) for name, value in entry["data"].items()}
            edges[str(src), str(relation), str(dst)] = EdgeFingerprints(int(entry["structure"], 16), ids, data)
        return cls(nodes, edges)


def fingerprint_graph(graph: Graph, *, edge_ids: bool, meter: Meter | None = None) -> Fingerprints:
    """Reads the whole graph once. Without `edge_ids` the numbers of the edges do not count."""
    meter = meter or Meter(None, 0)
    nodes: dict[NodeType, dict[str, int]] = {}
    for node_type in graph.node_types:
        nodes[node_type] = {}
        for name, rows in graph.node_data[node_type].items():
            nodes[node_type][name] = node_rows(rows)
            meter.advance(rows.nbytes, "fingerprints")
    edges: dict[EdgeType, EdgeFingerprints] = {}
    for edge_type in graph.edge_types:
        csc = graph.csc(edge_type)
        prints = EdgeFingerprints(fingerprint_edges(csc.indptr, csc.indices), None, {})
        meter.advance(csc.indices.nbytes, "fingerprints")
        if edge_ids:
            prints.edge_ids = edge_rows(csc.indptr, partial(ids_at, csc))
        for name, rows in graph.edge_data[edge_type].items():
            prints.data[name] = _source_edge_rows(csc, rows)
            meter.advance(rows.nbytes, "fingerprints")
        edges[edge_type] = prints
    return Fingerprints(nodes, edges)


def node_rows(rows: Tensor, ids: Tensor | None = None) -> int:
    """Rows of nodes with the given ids (their places, where there are none), of any layout."""
    total = 0
    for first, end in row_pieces(rows, rows.shape[0]):
        piece = rows[first:end].detach().contiguous()
        part = fingerprint_rows(piece, first=first) if ids is None else fingerprint_rows(piece, ids[first:end])
        total = add_fingerprints(total, part)
    return total


def edge_rows(indptr: Tensor, rows_at: Callable[[int, int], Tensor], dst: Tensor | None = None) -> int:
    """Rows by position, made piece by piece: `rows_at(first, end)` gives those of positions first to end."""
    total = 0
    for first, end in column_pieces(indptr):
        start = int(indptr[first])
        piece = rows_at(start, int(indptr[end])).contiguous()
        names = torch.arange(first, end) if dst is None else dst[first:end]
        total = add_fingerprints(total, fingerprint_edge_rows(indptr[first : end + 1] - start, piece, names))
    return total


def _source_edge_rows(csc: CSC, rows: Tensor) -> int:
    """Rows in the user's edge order, hashed in place where they are contiguous."""
    if rows.is_contiguous():
        order = None if csc.edge_ids is None else csc.edge_ids.contiguous()
        return fingerprint_edge_rows(csc.indptr, rows.detach(), None, order)
    return edge_rows(csc.indptr, lambda first, end: take(rows, ids_at(csc, first, end)))


def ids_at(csc: CSC, first: int, end: int) -> Tensor:
    """The user's edge ids of positions first to end, int64."""
    return torch.arange(first, end) if csc.edge_ids is None else csc.edge_ids[first:end].long()


def _hex(value: int) -> str:
    return f"{value:0{_DIGITS}x}"
