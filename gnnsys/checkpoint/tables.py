"""Trained tables in a checkpoint: shards copy their own rows; restoring pushes rows by number, to any parts.

Row numbers of nodes are global ids, which depend on the parts. So the original ids are saved beside such rows, and with
other parts each row goes to the number that its node has there.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import torch
from torch import Tensor

from gnnsys.checkpoint.files import read_array, write_array
from gnnsys.graph import MANIFEST
from gnnsys.store import DistTensor, PendingPush, TableSpec, load_part, part_folder

if TYPE_CHECKING:
    from gnnsys.sampling import DistGraph
    from gnnsys.session import Session

_PIECE_BYTES = 8 << 20
_PIECES = 4  # pushes under way at a time

Holders = Mapping[str, list[int]]  # file -> machines that have it


def table_folder(name: str) -> str:
    """The folder of a table inside a checkpoint."""
    return f"tables/{quote(name, safe='')}"


def graph_of(table: DistTensor, session: Session | None) -> DistGraph | None:
    """The open graph whose store has the table, or None."""
    graphs = [] if session is None else session.graphs
    return next((graph for graph in graphs if graph.store is table.store), None)


def digest_of(graph: DistGraph) -> str:
    return hashlib.sha256((graph.parts.path / MANIFEST).read_bytes()).hexdigest()


def rows_of(table: DistTensor, graph: DistGraph | None) -> dict[str, Any] | None:
    """What a table's rows belong to: {"graph", "what", "type"}; None if not to nodes or edges of a graph in parts.

    `what` is "node" or "edge" if the table's name or its bounds say so, "unsure" if only its length fits.
    """
    if graph is None:
        return None
    spec = table.store.spec(table.name)
    types: list[Any] = [*graph.node_types, *graph.edge_types]
    fit = [of for of in types if graph.book.num_ids(of) == spec.num_rows]
    for of in fit:
        prefix = f"node/{of}/" if isinstance(of, str) else f"edge/{'|'.join(of)}/"
        if spec.name.startswith(prefix):
            return _belongs(graph, of)
    cut = [of for of in fit if _bounds(graph, of) == spec.bounds]
    if len(cut) == 1 and spec.num_parts > 1:
        return _belongs(graph, cut[0])
    if not fit:
        return None
    return _belongs(graph, fit[0]) | {"what": "unsure"}


def originals_key(rows: Mapping[str, Any]) -> str:
    """The manifest's key for the original ids of a node type. Two graphs may use the same type name."""
    return f"{rows['graph']}/{rows['type']}"


def write_originals(originals: Mapping[str, tuple[DistGraph, str]], staging: Path) -> dict[str, list[int]]:
    """Writes the original ids of the nodes that rows belong to. Returns size and CRC-32 of each file."""
    files = {}
    for number, (_, (graph, node_type)) in enumerate(sorted(originals.items())):
        (staging / "originals").mkdir(exist_ok=True)
        for part in graph.parts_here:
            size = len(graph.book.part_range(part, node_type))
            file = f"originals/{number}-{part:05d}.npy"
            files[file] = write_array(staging / file, graph.parts.part(part).original_ids(node_type)[:size])
    return files


def _belongs(graph: DistGraph, of: Any) -> dict[str, Any]:
    what = "node" if isinstance(of, str) else "edge"
    return {"graph": digest_of(graph), "what": what, "type": of if what == "node" else "|".join(of)}


def _bounds(graph: DistGraph, of: Any) -> tuple[int, ...]:
    ranges = graph.book.ranges(of)
    return (0, *ranges[:, 1].tolist())


def merged_entries(told: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The manifest's entry of each table, from the entries of all machines. ValueError if those with rows disagree.

    A machine without rows of a table takes no optimizer steps on it, so its entry does not count.
    """
    merged: dict[str, dict[str, Any]] = {}
    for name in sorted({name for entries in told for name in entries}):
        said = [dict(entries[name]) for entries in told if name in entries]
        having = [entry for entry in said if entry["num_here"]] or said[:1]
        for entry in having:
            for what in ("steps", "states"):
                if entry[what] != having[0][what]:
                    raise ValueError(
                        f"table {name!r} cannot be saved: its machines are not at one step, one says {what} "
                        f"{having[0][what]} and another {entry[what]}. Step its optimizer on every rank"
                    )
        merged[name] = {key: value for key, value in having[0].items() if key != "num_here"}
    return merged


class SavedTable:
    """A table in a checkpoint, and how its rows get into the table of now."""

    def __init__(self, name: str, entry: Mapping[str, Any], table: DistTensor, graph: DistGraph | None) -> None:
        self.name, self._entry, self._table, self._graph = name, entry, table, graph
        self.spec = TableSpec.from_json(entry["spec"])
        self._is_moved = False

    def check(self) -> None:
        """ValueError, with the reason, if the saved rows do not fit the table."""
        now, saved = self._table.store.spec(self._table.name), self.spec
        for what, one, other in (
            ("rows", saved.num_rows, now.num_rows),
            ("values of shape", list(saved.row_shape), list(now.row_shape)),
            ("dtype", str(saved.dtype), str(now.dtype)),
        ):
            if one != other:
                raise ValueError(f"table {self.name!r} was saved with {what} {one} and now has {what} {other}")
        rows, here = self._entry["rows"], rows_of(self._table, self._graph)
        if rows is None and here is None:
            return
        if rows is not None and here is not None and rows["graph"] == here["graph"]:
            return
        if rows is None or here is None:
            which = "saved without any parts" if rows is None else "saved beside parts, and none are open now"
            raise ValueError(
                f"table {self.name!r} was {which}: what nodes or edges its rows are of cannot be told. "
                "Open what was open when it was saved"
            )
        if rows["what"] != "node" or self._graph is None:
            reason = (
                "edges are numbered by their parts alone"
                if rows["what"] == "edge"
                else f"it has as many rows as there are ids of {rows['type']!r} and nothing says whether it is theirs "
                f"(a table named 'node/{rows['type']}/...' is, and is saved so that it can follow its nodes)"
            )
            raise ValueError(
                f"table {self.name!r} was saved with other parts, which number nodes and edges otherwise, and cannot "
                f"follow them: {reason}. Open the parts it was saved with"
            )
        if not self._graph.parts.has_global_ids:
            raise ValueError(f"table {self.name!r}: {self._graph.parts.path} cannot tell where original ids are now")
        self._is_moved = True

    def begin(self) -> None:
        """Asks the shards to prepare the table. Every rank calls it."""
        self._table.store.begin_restore(self._table.name, int(self._entry["steps"]), self._entry["states"])

    @property
    def is_moved(self) -> bool:
        """Whether rows get other numbers than they had. Known after `check`."""
        return self._is_moved

    def reads(self, machine: int, holders: Holders) -> Iterator[str]:
        """The folders of a checkpoint that `push` reads on a machine."""
        for part in range(self.spec.num_parts):
            if any(True for _ in self._ranges(part, machine, holders)):
                yield part_folder(table_folder(self.name), self.spec.name, part).as_posix()

    def push(self, path: Path, machine: int, holders: Holders, originals: Mapping[str, list[Path]]) -> None:
        """Pushes this machine's share of the rows. One rank of each machine calls it."""
        under_way: deque[PendingPush] = deque()
        ids_of = self._originals(originals) if self._is_moved else []
        for part in range(self.spec.num_parts):
            ranges = list(self._ranges(part, machine, holders))
            if not ranges:
                continue
            saved = load_part(str(path / table_folder(self.name)), self.spec.name, part, verify=False)
            tables = {self._table.name: saved.rows}
            tables |= {f"{self._table.name}/{state}": rows for state, rows in saved.states.items()}
            for first, end in ranges:
                for begin, stop in self._pieces(first, end):
                    ids = self._ids(begin, stop, ids_of)
                    offset = self.spec.bounds[part]
                    for name, rows in tables.items():
                        under_way.append(self._table.store.push(name, ids, rows[begin - offset : stop - offset]))
                    while len(under_way) > _PIECES:
                        under_way.popleft().result()
        while under_way:
            under_way.popleft().result()

    def _ranges(self, part: int, machine: int, holders: Holders) -> Iterator[tuple[int, int]]:
        """The rows of a saved part that this machine pushes: those that it serves now, or that only it has on disk."""
        manifest = part_folder(table_folder(self.name), self.spec.name, part) / MANIFEST
        have = holders[manifest.as_posix()]
        first, end = self.spec.bounds[part : part + 2]
        if self._is_moved:
            if end > first and have[part % len(have)] == machine:
                yield first, end
            return
        now, owners = self._table.store.spec(self._table.name), self._table.store.machine_of_part
        for q, owner in enumerate(owners):
            low, high = max(first, now.bounds[q]), min(end, now.bounds[q + 1])
            if low < high and (owner if owner in have else have[0]) == machine:
                yield low, high

    def _pieces(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        size = max(1, _PIECE_BYTES // max(1, self.spec.row_size * self.spec.dtype.itemsize))
        for begin in range(first, end, size):
            yield begin, min(begin + size, end)

    def _originals(self, originals: Mapping[str, list[Path]]) -> list[Tensor]:
        """Original ids of the saved rows, one mapped array per saved part."""
        rows = self._entry["rows"]
        return [read_array(file) for file in originals.get(originals_key(rows)) or originals[rows["type"]]]

    def _ids(self, begin: int, end: int, originals: Sequence[Tensor]) -> Tensor:
        if not self._is_moved:
            return torch.arange(begin, end, device="cpu")
        assert self._graph is not None
        found, first = [], 0
        for values in originals:
            found.append(values[max(0, begin - first) : max(0, end - first)])
            first += values.numel()
        return self._graph.global_ids(torch.cat(found).long(), self._entry["rows"]["type"])
