"""Writes a graph and an assignment as parts on disk, one part at a time.

The graph's arrays may be memory-mapped files larger than memory: beside them a writer needs 8 bytes per node for the
relabelling, a fifth of a byte per node and hop for the halo, the present part's list of columns, and pieces of 16 MiB.
A part's arrays are read from the source where they lie; nothing of the whole graph is copied.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnnsys.graph import (
    ArrayStream,
    ArrayWriter,
    EdgeType,
    Graph,
    NodeType,
    UnfitRows,
    staged,
    sync_folder,
    unfit_rows,
    write_manifest,
)
from gnnsys.ops import CSC, Halo, collect_halo, empty_bits, gather_rows, local_columns, mark_halo, mark_ids
from gnnsys.partition.array_pieces import Meter, Progress, column_pieces, row_pieces, take
from gnnsys.partition.assignment import Assignment
from gnnsys.partition.clusters import Clustering
from gnnsys.partition.fingerprint import fingerprint_graph
from gnnsys.partition.layout import FORMAT, VERSION, WHAT, Schema, original_bounds, part_folder
from gnnsys.partition.partition_book import PartitionBook
from gnnsys.partition.relabel import Relabelling, first_edges, id_dtype, relabel

_log = logging.getLogger(__name__)


def write_parts(
    graph: Graph,
    assignment: Assignment,
    out: str | os.PathLike[str],
    *,
    halo_hops: int = 1,
    edge_ids: bool = True,
    clusters: Clustering | None = None,
    info: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> PartitionBook:
    """Writes the directory `out`, whole or not at all, and returns its book.

    A part has the in-edges of its core nodes in the source's order, and with `halo_hops` k > 1 also those of its halo
    nodes up to hop k - 1. `edge_ids` keeps the user's edge numbers (4 bytes per edge, or 4 per node where edges came
    sorted by destination); without them edges are known by destination and rank alone. `clusters` are
    contiguous ranges of the global ids inside subparts (`cut_clusters`). `info` is the caller's, plain
    JSON values: method, objective, constraints. `progress(done, total, what)` counts bytes.
    """
    if halo_hops < 1:
        raise ValueError(f"halo_hops must be at least 1, got {halo_hops}")
    graph.check_in_memory("partitioning a graph")
    assignment.check(graph)
    for edge_type in graph.edge_types:
        _check_edge_ids(graph.csc(edge_type), edge_type)
    with staged(out, overwrite=overwrite, format=FORMAT, what=WHAT) as folder:
        meter = Meter(progress, 2 * _work(graph))
        labels = relabel(graph, assignment, clusters)
        prints = fingerprint_graph(graph, edge_ids=edge_ids, meter=meter)
        files: dict[str, dict[str, Any]] = {}
        parts, unfit = [], dict[str, UnfitRows]()
        for part in range(assignment.num_parts):
            writer = _PartWriter(graph, labels, part, halo_hops, edge_ids, meter, unfit)
            parts.append(writer.write(folder, files))
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "halo_hops": halo_hops,
            "edge_ids": edge_ids,
            "schema": Schema.of(graph).to_json(),
            "book": labels.book.to_json(),
            "graph_info": graph.info,
            "info": dict(info or {}),
            "fingerprints": prints.to_json(),
            "parts": parts,
            "files": files,
            **({} if labels.clusters is None else {"clusters": labels.clusters.to_json()}),
            **({"unfit_rows": {where: str(found) for where, found in unfit.items()}} if unfit else {}),
        }
        write_manifest(folder, manifest)
    for where, found in unfit.items():
        _log.warning("%s: of its rows %s. A model that reads them computes NaN", where, found)
    return labels.book


def _check_edge_ids(csc: CSC, edge_type: EdgeType) -> None:
    if csc.edge_ids is not None and mark_ids(empty_bits(csc.num_edges), csc.edge_ids) != csc.num_edges:
        raise ValueError(f"edge type {edge_type!r}: edge_ids must name every edge once, and some twice")


def _work(graph: Graph) -> int:
    """Bytes to be read and written, once: what progress counts."""
    arrays = [rows for data in (*graph.node_data.values(), *graph.edge_data.values()) for rows in data.values()]
    return sum(rows.nbytes for rows in arrays) + sum(graph.csc(t).indices.nbytes for t in graph.edge_types)


class _PartWriter:
    """One part: finds its halo, then writes its arrays."""

    def __init__(
        self, graph: Graph, labels: Relabelling, part: int, halo_hops: int, edge_ids: bool, meter: Meter,
        unfit: dict[str, UnfitRows],
    ) -> None:  # fmt: skip
        self._graph, self._labels, self._part, self._meter = graph, labels, part, meter
        self._edge_ids = edge_ids
        self._unfit = unfit  # features with NaN, by array: written to the manifest
        self._own = {t: labels.book.part_range(part, t) for t in graph.node_types}
        self._halo: dict[NodeType, list[Halo]] = {t: [] for t in graph.node_types}
        self._columns = self._find_halo(halo_hops)  # original ids of the nodes whose in-edges the part has

    def _find_halo(self, halo_hops: int) -> dict[NodeType, Tensor]:
        """Fills in the halo, hop by hop; a hop's nodes are columns too, except the last one's."""
        ids = self._labels.original_ids
        frontier = {t: ids[t][own.start : own.stop] for t, own in self._own.items()}
        columns = {t: [nodes] for t, nodes in frontier.items()}
        for hop in range(1, halo_hops + 1):
            bits = {t: empty_bits(self._graph.num_nodes(t)) for t in self._graph.node_types}
            for edge_type in self._graph.edge_types:
                src, _, dst = edge_type
                own, names = self._own[src], self._labels.global_ids[src]
                mark_halo(self._graph.csc(edge_type), frontier[dst], names, own, bits[src])
            for t in self._graph.node_types:
                halo = collect_halo(bits[t], self._halo[t], wide=ids[t].dtype == torch.int64)
                self._halo[t].append(halo)
                frontier[t] = gather_rows(ids[t], halo.ids)
                if hop < halo_hops:
                    columns[t].append(frontier[t])
        return {t: nodes[0] if len(nodes) == 1 else torch.cat(nodes) for t, nodes in columns.items()}

    def write(self, folder: Path, files: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """The part's entry in the manifest."""
        name = part_folder(self._part)
        (folder / name).mkdir()
        arrays = ArrayWriter(folder, files, name)
        entry = {
            "nodes": [self._write_nodes(t, arrays) for t in self._graph.node_types],
            "edges": [self._write_edges(t, arrays) for t in self._graph.edge_types],
        }
        sync_folder(folder / name)
        return entry

    def _write_nodes(self, node_type: NodeType, arrays: ArrayWriter) -> dict[str, Any]:
        own, halo = self._own[node_type], self._halo[node_type]
        core = self._columns[node_type][: len(own)]
        entry: dict[str, Any] = {
            "num_core": len(own),
            "num_halo": [hop.ids.numel() for hop in halo],
            "halo": arrays.add(torch.cat([hop.ids for hop in halo])),
            "original_ids": arrays.add(self._columns[node_type]),
            "global_ids": arrays.add(self._global_of_original(node_type)),
            "data": {},
        }
        for name, rows in self._graph.node_data[node_type].items():
            with arrays.stream(rows.dtype, (len(own), *rows.shape[1:])) as stream:
                for first, end in row_pieces(rows, len(own)):
                    piece = take(rows, core[first:end])
                    if (found := unfit_rows(piece, core[first:end])).count:
                        where = f"node_data[{node_type!r}][{name!r}]"
                        self._unfit[where] = self._unfit.get(where, UnfitRows()) + found
                    self._append(stream, piece)
            entry["data"][name] = stream.name
        return entry

    def _global_of_original(self, node_type: NodeType) -> Tensor:
        """Global ids of this part's share of all original ids: shares are equal, whoever owns the nodes."""
        global_ids = self._labels.global_ids[node_type]
        bounds = original_bounds(global_ids.numel(), self._labels.book.num_parts)
        return global_ids[bounds[self._part] : bounds[self._part + 1]]

    def _write_edges(self, edge_type: EdgeType, arrays: ArrayWriter) -> dict[str, Any]:
        csc, columns = self._graph.csc(edge_type), self._columns[edge_type[2]]
        starts = gather_rows(csc.indptr[:-1], columns)
        indptr = columns.new_zeros(columns.numel() + 1, dtype=torch.int64)
        torch.cumsum(gather_rows(csc.indptr[1:], columns) - starts, 0, out=indptr[1:])
        dtype = id_dtype(csc.num_edges)
        # Edges numbered by position are consecutive inside a column: the first one says them all.
        by_start = self._edge_ids and csc.edge_ids is None
        entry: dict[str, Any] = {
            "indptr": arrays.add(indptr),
            "edge_starts": arrays.add(starts.to(dtype)) if by_start else None,
            "global_starts": arrays.add(self._global_starts(edge_type, dtype)),
        }
        sources = dict(self._graph.edge_data[edge_type])
        with ExitStack() as stack:
            num_edges = int(indptr[-1])
            indices = stack.enter_context(arrays.stream(torch.int32, [num_edges]))
            keep_ids = self._edge_ids and not by_start
            ids = stack.enter_context(arrays.stream(dtype, [num_edges])) if keep_ids else None
            streams = {
                name: stack.enter_context(arrays.stream(rows.dtype, (num_edges, *rows.shape[1:])))
                for name, rows in sources.items()
            }
            for first, end in column_pieces(indptr):
                piece = self._local(edge_type, columns[first:end], positions=bool(sources) or ids is not None)
                self._append(indices, piece.indices)
                if piece.edge_ids is None:
                    continue
                numbers = piece.edge_ids if csc.edge_ids is None else take(csc.edge_ids, piece.edge_ids)
                if ids is not None:
                    ids.append(numbers.to(dtype))
                for name, rows in sources.items():
                    for low, high in row_pieces(rows, numbers.numel()):
                        self._append(streams[name], take(rows, numbers[low:high]))
        entry["indices"] = indices.name
        entry["edge_ids"] = None if ids is None else ids.name
        entry["data"] = {name: stream.name for name, stream in streams.items()}
        return entry

    def _local(self, edge_type: EdgeType, columns: Tensor, *, positions: bool) -> CSC:
        src = edge_type[0]
        names, own, halo = self._labels.global_ids[src], self._own[src], self._halo[src]
        return local_columns(self._graph.csc(edge_type), columns, names, own, halo, positions=positions)

    def _global_starts(self, edge_type: EdgeType, dtype: torch.dtype) -> Tensor | None:
        """The global id of the first edge of each halo column; core columns have consecutive ones."""
        dst = edge_type[2]
        hops = self._halo[dst][:-1]
        if not hops:
            return None
        first = first_edges(self._graph.csc(edge_type), self._labels.original_ids[dst])
        return gather_rows(first, torch.cat([hop.ids for hop in hops])).to(dtype)

    def _append(self, stream: ArrayStream, rows: Tensor) -> None:
        stream.append(rows)
        self._meter.advance(rows.nbytes, f"part {self._part}")
