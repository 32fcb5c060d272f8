"""`external_graph`: what `load` and `save` do together, for a graph that does not fit in memory.

The result is the same to the last byte. Edges go through `EdgeSort`, rows from file to file in pieces, and the members
of an `.npz` are unpacked beside the output and mapped. What is held in memory is bounded by `memory_limit`, whatever
the number of edges; only labels and masks that are stored in another type than they came in are held whole.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from gnnsys.graph.capacity import check_rows_fit
from gnnsys.graph.disk_room import NoRoom, check_room, naming, room_for
from gnnsys.graph.edge_sort import EdgeSort, RawFile
from gnnsys.graph.files import unknown_ending
from gnnsys.graph.graph import Graph
from gnnsys.graph.npy import UNREADABLE, check_member, map_npy, member_name, unreadable
from gnnsys.graph.npz import Content, as_rows, describe
from gnnsys.graph.npz_checks import Arrays, as_float32, check_csr
from gnnsys.graph.saved_graph import load_saved, save
from gnnsys.graph.schema import EDGE, NODE, EdgeType
from gnnsys.graph.tables import NO_EDGES, is_table, table_pieces
from gnnsys.ops import CSC, drop_pages

MIN_MEMORY = 64 << 20
_SORT_SHARE = 2  # a half of the limit for what is sorted; the rest for the allocator's slack and the writer
_TEXT_SHARE = 64  # a byte of text becomes up to 12 of numbers, and vectors grow by doubling
_PIECE_SHARE = 512  # edges of an .npz at a time: ids, a type and what chooses by it
_PLAIN_BYTES = 1 << 16  # smaller members of an .npz are read, not mapped
_COPY_BYTES = 1 << 20

Progress = Callable[[int, int, str], None]
_Report = Callable[[str, float], None]


def external_graph(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    memory_limit: int,
    columns: Sequence[str] | None = None,
    num_nodes: int | None = None,
    overwrite: bool = False,
    verify: bool = True,
    progress: Progress | None = None,
) -> None:
    """Makes the saved graph that `save(load(source, ...), out)` makes, with at most `memory_limit` bytes of memory.

    `source`, `columns`, `num_nodes` and `verify` are those of `load`. Temporary files of up to 30 bytes per edge lie
    beside `out` meanwhile. `progress(percent, 100, what)` is told how far along it is.

    >>> external_graph("edges.txt", "web/", memory_limit=1 << 30)  # doctest: +SKIP
    >>> graph = gnnsys.graph.load("web/", verify=False)  # mapped  # doctest: +SKIP
    """
    source, target = Path(source), Path(out)
    if memory_limit < MIN_MEMORY:
        raise ValueError(f"memory_limit must be at least {MIN_MEMORY} bytes (64 MiB), got {memory_limit}")
    if not source.exists():
        raise ValueError(f"path {str(source)!r} does not exist")
    if target.exists() and not overwrite:
        raise ValueError(f"path {str(target)!r} exists: choose another or pass overwrite=True")

    def report(stage: str, share: float) -> None:
        if progress is not None:
            progress(int(100 * share), 100, stage)

    if source.is_dir():
        save(load_saved(source, verify=verify), target, overwrite=overwrite)
        return
    if source.suffix != ".npz" and not is_table(source):
        raise unknown_ending(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    files = tempfile.TemporaryDirectory(prefix=f".{target.name}-build-", dir=target.parent)
    with room_for(f"the saved graph {str(target)!r}", target.parent), files as folder:
        work = Path(folder)
        if source.suffix == ".npz":
            graph = _from_npz(source, work, memory_limit, report)
        else:
            graph = _from_table(source, work, memory_limit, columns, num_nodes, report)
        save(graph, target, overwrite=overwrite)


def _from_table(
    path: Path, work: Path, memory: int, columns: Sequence[str] | None, num_nodes: int | None, report: _Report
) -> Graph:
    rows: dict[str, RawFile] = {}
    pieces = table_pieces(path, columns, piece_bytes=memory // _TEXT_SHARE, progress=partial(report, "reading"))
    try:
        edges = EdgeSort(work / "edges", memory // _SORT_SHARE, None if num_nodes is None else (num_nodes, num_nodes))
        for piece in pieces:
            edges.add(piece["src"].long(), piece["dst"].long())
            for name, column in piece.items():
                if name not in ("src", "dst"):
                    if name not in rows:
                        rows[name] = RawFile(work / f"rows-{len(rows)}")
                    rows[name].append(column)
        csc = edges.sort(progress=partial(report, "sorting"))
        if csc.num_edges == 0 and num_nodes is None:
            raise ValueError(NO_EDGES)
        return Graph({NODE: csc.num_src}, {EDGE: csc}, None, {EDGE: {name: file.map() for name, file in rows.items()}})
    except ValueError as error:
        raise error if str(path) in str(error) else ValueError(f"{path}: {error}") from error


def _from_npz(path: Path, work: Path, memory: int, report: _Report) -> Graph:
    try:
        arrays = _unpack(path, work, partial(report, "unpacking"))
    except NoRoom:
        raise
    except UNREADABLE as error:
        raise unreadable(path, error) from error
    try:
        content = describe(arrays, partial(_dense_rows, work, memory), work)
        return _sort_edges(content, work, memory, report)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _unpack(path: Path, work: Path, report: Callable[[float], None]) -> Arrays:
    """The members of an `.npz`, which are `.npy` files, unpacked under numbers and mapped."""
    arrays: Arrays = {}
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        total, done = sum(member.file_size for member in members), 0
        check_room(total, f"what {path} holds, unpacked,", work)
        for i, member in enumerate(members):
            name, file = member_name(member, arrays), work / f"{i}.npy"
            with archive.open(member) as packed:
                check_member(member, packed)
            with room_for(f"what {path} holds", work), naming(file), open(file, "wb") as unpacked:
                _copy_member(archive, member, unpacked)
            array = map_npy(file)
            arrays[name] = array if member.file_size >= _PLAIN_BYTES else np.array(array)
            done += member.file_size
            report(done / max(total, 1))
    return arrays


def _copy_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, unpacked: IO[bytes]) -> None:
    with archive.open(member) as packed:
        shutil.copyfileobj(packed, unpacked, _COPY_BYTES)


def _dense_rows(
    work: Path, memory: int, data: np.ndarray, indices: np.ndarray, indptr: np.ndarray, shape: np.ndarray
) -> Tensor:
    """Features in CSR form as float32 rows in a file."""
    num_rows, num_columns = check_csr(data, indices, indptr, shape)
    check_rows_fit(num_rows, num_columns, "x", folder=work)
    out = RawFile(work / f"dense-{len(list(work.glob('dense-*')))}")
    out.append(torch.empty(0, num_columns, device="cpu"))
    size = max(memory // _PIECE_SHARE // max(num_columns, 1), 1)
    for first in range(0, num_rows, size):
        last = min(first + size, num_rows)
        begin, end = int(indptr[first]), int(indptr[last])
        block = torch.zeros(last - first, num_columns, device="cpu")
        row = np.repeat(np.arange(last - first), np.diff(indptr[first : last + 1]))
        column = torch.from_numpy(indices[begin:end].astype(np.int64))
        block[torch.from_numpy(row), column] = as_float32("x_data", data[begin:end])
        out.append(block)
    return out.map()


class _EdgesOfType:
    """One edge type's edges and rows, on their way to disk."""

    def __init__(self, folder: Path, memory: int, content: Content, edge_type: EdgeType) -> None:
        src, _, dst = edge_type
        num_nodes = content.num_nodes[src], content.num_nodes[dst]
        ids = torch.from_numpy(content.edge_index[:, :0]).dtype if content.edge_type is None else torch.int64
        if ids not in (torch.int32, torch.int64):
            raise ValueError(f"edge_index must be int32 or int64, got {content.edge_index.dtype}")
        self._first = content.first_node[src], content.first_node[dst]
        self._edges = EdgeSort(folder, memory // _SORT_SHARE, num_nodes, id_dtype=ids)
        self._rows = {name: RawFile(folder / f"rows-{i}") for i, name in enumerate(content.edge_rows)}

    def add(self, src: Tensor, dst: Tensor, rows: dict[str, Tensor]) -> None:
        self._edges.add(src - self._first[0], dst - self._first[1])
        for name, file in self._rows.items():
            file.append(rows[name])

    def finish(self, report: Callable[[float], None]) -> tuple[CSC, dict[str, Tensor]]:
        return self._edges.sort(progress=report), {name: file.map() for name, file in self._rows.items()}


def _sort_edges(content: Content, work: Path, memory: int, report: _Report) -> Graph:
    types = [_EdgesOfType(work / f"edges-{i}", memory, content, t) for i, t in enumerate(content.edge_types)]
    num_edges, size = content.edge_index.shape[1], max(memory // _PIECE_SHARE, 1)
    for first in range(0, max(num_edges, 1), size):
        chosen = slice(first, first + size)
        edges = torch.from_numpy(np.array(content.edge_index[:, chosen]))
        rows = {name: as_rows(name, np.array(array[chosen])) for name, array in content.edge_rows.items()}
        for i, edges_of_type in enumerate(types):
            if content.edge_type is None:
                edges_of_type.add(edges[0], edges[1], rows)
            else:
                of_type = torch.from_numpy(np.flatnonzero(content.edge_type[chosen] == i))
                src, dst = edges[:, of_type].long()
                edges_of_type.add(src, dst, {name: array[of_type] for name, array in rows.items()})
        for row in content.edge_index[:, chosen]:
            if row.flags.c_contiguous:
                drop_pages(torch.from_numpy(row))
        report("reading", min(first + size, num_edges) / max(num_edges, 1))
    csc, edge_data = {}, {}
    for edge_type, edges_of_type in zip(content.edge_types, types, strict=True):
        csc[edge_type], edge_data[edge_type] = edges_of_type.finish(partial(report, "sorting"))
    assert sum(of_type.num_edges for of_type in csc.values()) == num_edges, "every edge has exactly one type"
    return Graph(content.num_nodes, csc, content.node_data, edge_data, content.info)
