"""Proves that parts are the graph they were made of: no node, edge or row lost, duplicated or changed.

Without the source, what the parts hold is hashed under original ids and compared with the fingerprints that were taken
of the source; with it, everything is also compared bit for bit. What follows from the structure (ids are a permutation,
a halo is exactly the remote sources, copied columns are their owners') is checked directly. Memory: the original ids of
all nodes, and pieces.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from gnnsys.graph import MANIFEST, EdgeType, Graph, NodeType
from gnnsys.ops import add_fingerprints, empty_bits, fingerprint_edges, gather_rows, mark_ids
from gnnsys.partition.array_pieces import Meter, Progress
from gnnsys.partition.compare import compare_copies, compare_with_source
from gnnsys.partition.fingerprint import edge_rows, node_rows
from gnnsys.partition.layout import original_bounds
from gnnsys.partition.merge import core_ids, original_by_global, original_by_local
from gnnsys.partition.part import Part
from gnnsys.partition.parts_directory import Parts, open_parts

# What reading a manifest that says something impossible can end in, besides the ValueError that names it.
_MALFORMED = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError, OSError)


@dataclass
class VerifyReport:
    """What was found. `ok` when there are no `problems`; each of them names the part and what is wrong with it."""

    num_parts: int = 0
    num_nodes: int = 0
    num_edges: int = 0
    num_bytes: int = 0
    with_source: bool = False
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        if self.problems:
            return "\n".join(self.problems)
        oracle = "the source, bit for bit" if self.with_source else "the fingerprints of the source"
        sizes = f"{self.num_nodes:,} nodes, {self.num_edges:,} edges, {self.num_bytes:,} bytes"
        return f"{self.num_parts} parts agree with {oracle}: {sizes}"


def verify_parts(
    path: str | os.PathLike[str], against: Graph | None = None, progress: Progress | None = None
) -> VerifyReport:
    """Reads all parts and reports every problem; never raises for what is wrong with them."""
    report = VerifyReport(with_source=against is not None)
    try:
        parts = open_parts(path)
    except _MALFORMED as error:
        report.problems.append(_sentence(error, f"{Path(path) / MANIFEST} is malformed"))
        return report
    report.num_parts = parts.num_parts
    report.num_nodes = sum(parts.book.num_ids(t) for t in parts.schema.node_types)
    report.num_edges = sum(parts.book.num_ids(t) for t in parts.schema.edge_types)
    sizes = [_bytes_of(parts, index) for index in range(parts.num_parts)]
    report.num_bytes = sum(sizes)
    meter = Meter(progress, report.num_bytes * (2 if against is None else 3))
    for index in range(parts.num_parts):
        try:
            parts.part(index)
        except _MALFORMED as error:
            report.problems.append(_sentence(error, f"{Path(path) / MANIFEST} is malformed: part {index}"))
        meter.advance(sizes[index], "checksums")
    if report.ok:
        report.problems.extend(_problems(parts, meter))
        if against is not None:
            report.problems.extend(_found(compare_with_source(parts, against, meter), "beside the source"))
    return report


def _bytes_of(parts: Parts, index: int) -> int:
    """From the manifest; 0 where it is malformed, which is reported when the part is opened."""
    try:
        return sum(parts.stored_bytes(index).values())
    except _MALFORMED:
        return 0


def _sentence(error: Exception, where: str) -> str:
    return str(error) if isinstance(error, ValueError) else f"{where}: {error!r}"


def _problems(parts: Parts, meter: Meter) -> Iterator[str]:
    yield from _sizes(parts)
    for node_type in parts.schema.node_types:
        yield from _found(_permutation(parts, node_type), "all parts")
        yield from _found(_inverse(parts, node_type), "all parts")
    sums = _Sums(parts)
    for index in range(parts.num_parts):
        yield from _found(_problems_of(parts, parts.part(index), sums), f"part {index}")
        meter.advance(_bytes_of(parts, index), f"part {index}")
    yield from sums.compare()


def _problems_of(parts: Parts, part: Part, sums: _Sums) -> Iterator[str]:
    for node_type in parts.schema.node_types:
        yield from _halo(parts, part, node_type)
    for edge_type in parts.schema.edge_types:
        yield from compare_copies(parts, part, edge_type)
    sums.add(part)


def _found(problems: Iterator[str], where: str) -> Iterator[str]:
    """The problems; where arrays fit so badly that looking for more is refused, that is the last of them."""
    try:
        yield from problems
    except _MALFORMED as error:
        yield f"{where}: {error}"


def _sizes(parts: Parts) -> Iterator[str]:
    for node_type, nodes in parts.fingerprints.nodes.items():
        if parts.book.num_ids(node_type) != nodes.num_nodes:
            yield f"{node_type!r}: the parts have {parts.book.num_ids(node_type)} nodes, the source {nodes.num_nodes}"
    for edge_type, edges in parts.fingerprints.edges.items():
        if parts.book.num_ids(edge_type) != edges.num_edges:
            yield f"{edge_type}: the parts have {parts.book.num_ids(edge_type)} edges, the source {edges.num_edges}"


def _permutation(parts: Parts, node_type: NodeType) -> Iterator[str]:
    """Every original id is core in exactly one part, ascending inside each subpart, or cluster where there are some."""
    seen, trainers = empty_bits(parts.book.num_ids(node_type)), parts.trainers_per_part
    complete = True
    for index in range(parts.num_parts):
        ids, own = core_ids(parts.part(index), node_type), parts.book.part_range(index, node_type)
        repeated = ids.numel() - mark_ids(seen, ids)
        if repeated:
            complete = False
            yield f"part {index}: {repeated} nodes of type {node_type!r} are duplicates"
        for subpart in range(index * trainers, (index + 1) * trainers):
            mine = parts.book.subpart_range(subpart, node_type)
            descends = ids[mine.start - own.start : mine.stop - own.start].diff() <= 0
            if parts.clusters is not None:  # between two clusters it may
                starts = parts.clusters.node_offsets[node_type] - mine.start - 1
                descends[starts[(starts >= 0) & (starts < descends.numel())]] = False
            if bool(descends.any()):
                yield f"part {index}: original ids of type {node_type!r} do not ascend in subpart {subpart}"
    if not complete:
        missing = torch.ones(parts.book.num_ids(node_type), dtype=torch.bool, device="cpu")
        missing[original_by_global(parts, node_type).long()] = False
        lost = missing.nonzero().view(-1)
        yield f"{lost.numel()} nodes of type {node_type!r} are missing, the first is {int(lost[0])}"


def _inverse(parts: Parts, node_type: NodeType) -> Iterator[str]:
    """The stored global id of every original id leads back to it."""
    if not parts.has_global_ids:
        return
    original = original_by_global(parts, node_type)
    bounds = original_bounds(original.numel(), parts.num_parts)
    for index in range(parts.num_parts):
        back = gather_rows(original, parts.part(index).global_of_original(node_type))
        if not torch.equal(back.long(), torch.arange(bounds[index], bounds[index + 1], device="cpu")):
            yield f"part {index}: global ids of original ids of type {node_type!r} are of other nodes"


def _halo(parts: Parts, part: Part, node_type: NodeType) -> Iterator[str]:
    """Hop h of the halo is exactly what the columns of hop h - 1 need and no earlier hop has."""
    where = f"part {part.index}: the halo of type {node_type!r}"
    halo, hops = part.halo(node_type), part.hops(node_type)
    if mark_ids(empty_bits(parts.book.num_ids(node_type)), halo) != halo.numel():
        yield f"{where} has a node twice"
    needed = empty_bits(hops[-1])
    count = mark_ids(needed, torch.arange(hops[0], device="cpu"))
    for hop in range(1, len(hops)):
        highest = -1
        for edge_type in parts.schema.edge_types:
            if edge_type[0] != node_type:
                continue
            csc, columns = part.csc(edge_type), [0, *part.hops(edge_type[2])]
            sources = csc.indices[int(csc.indptr[columns[hop - 1]]) : int(csc.indptr[columns[hop]])]
            count += mark_ids(needed, sources)
            highest = max(highest, int(sources.max()) if sources.numel() else -1)
        if count != hops[hop] or highest >= hops[hop]:
            yield f"{where} has {hops[hop] - hops[0]} nodes up to hop {hop}, its edges need others"
            return


class _Sums:
    """Fingerprints of what the parts hold, added up part by part."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._original = {t: original_by_global(parts, t) for t in parts.schema.node_types}
        self._found: dict[str, int] = {}

    def add(self, part: Part) -> None:
        for node_type, arrays in part.node_data.items():
            for name, rows in arrays.items():
                self._count(f"{node_type!r}: rows of {name!r}", node_rows(rows, core_ids(part, node_type)))
        for edge_type in self._parts.schema.edge_types:
            self._add_edges(part, edge_type)

    def _add_edges(self, part: Part, edge_type: EdgeType) -> None:
        src, _, dst = edge_type
        csc, columns = part.csc(edge_type), core_ids(part, dst)
        indptr = csc.indptr[: columns.numel() + 1]
        names = original_by_local(part, src, self._original[src])
        self._count(f"{edge_type}: edges", fingerprint_edges(indptr, csc.indices, columns, names))
        if self._parts.has_edge_ids:
            self._count(f"{edge_type}: edge ids", edge_rows(indptr, _ids_of(part, edge_type), columns))
        for name, rows in part.edge_data[edge_type].items():
            self._count(f"{edge_type}: rows of {name!r}", edge_rows(indptr, _rows_of(indptr, rows), columns))

    def _count(self, what: str, value: int) -> None:
        self._found[what] = add_fingerprints(self._found.get(what, 0), value)

    def compare(self) -> Iterator[str]:
        expected: dict[str, int] = {}
        for node_type, nodes in self._parts.fingerprints.nodes.items():
            expected |= {f"{node_type!r}: rows of {name!r}": value for name, value in nodes.data.items()}
        for edge_type, edges in self._parts.fingerprints.edges.items():
            expected[f"{edge_type}: edges"] = edges.structure
            if edges.edge_ids is not None:
                expected[f"{edge_type}: edge ids"] = edges.edge_ids
            expected |= {f"{edge_type}: rows of {name!r}": value for name, value in edges.data.items()}
        for what in expected.keys() | self._found.keys():
            if expected.get(what) != self._found.get(what):
                yield f"{what} are not those of the source"


def _ids_of(part: Part, edge_type: EdgeType) -> Callable[[int, int], Tensor]:
    def ids_of_columns(first: int, end: int) -> Tensor:
        ids = part.column_edge_ids(first, end, edge_type)
        assert ids is not None, "a part without edge ids does not open where they are promised"
        return ids.long()

    return ids_of_columns


def _rows_of(indptr: Tensor, rows: Tensor) -> Callable[[int, int], Tensor]:
    return lambda first, end: rows[int(indptr[first]) : int(indptr[end])]
