"""Looks at a directory of parts and counts everything a user decides by: sizes, cut, halo, traffic, balance, bytes.

All of it from the parts' own arrays; the manifest only says which constraints were asked for. `gnnsys inspect` prints
the table (`gnnsys.partition.inspection_table`) and draws the plot (`gnnsys.partition.plot`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from gnnsys.graph import NodeType
from gnnsys.partition.array_pieces import PIECE_EDGES, Meter, Progress
from gnnsys.partition.part import Part
from gnnsys.partition.parts_directory import Parts, open_parts
from gnnsys.partition.remote_share import RemoteShare, expected_remote
from gnnsys.partition.subpart_loads import Load, loads_of

_STRUCTURE = ("indptr", "indices", "halo", "original_ids", "edge_ids")
_FEATURES = ("node_data", "edge_data")


@dataclass(frozen=True)
class SubpartCounts:
    """`num_cut` of its in-edges have their source in another part; `num_sent` counts (node, remote part) pairs."""

    num_nodes: int
    num_edges: int
    num_cut: int
    num_sent: int


@dataclass(frozen=True)
class PartCounts:
    """What a part holds. Rows are sent and received once per layer: the first hop of a halo is what is received."""

    subparts: tuple[SubpartCounts, ...]
    num_halo: int
    num_received: int
    stored_bytes: dict[str, int]

    @property
    def num_nodes(self) -> int:
        return sum(subpart.num_nodes for subpart in self.subparts)

    @property
    def num_edges(self) -> int:
        return sum(subpart.num_edges for subpart in self.subparts)

    @property
    def num_cut(self) -> int:
        return sum(subpart.num_cut for subpart in self.subparts)

    @property
    def num_sent(self) -> int:
        return sum(subpart.num_sent for subpart in self.subparts)

    @property
    def structure_bytes(self) -> int:
        return sum(self.stored_bytes[role] for role in _STRUCTURE)

    @property
    def feature_bytes(self) -> int:
        return sum(self.stored_bytes[role] for role in _FEATURES)


@dataclass(frozen=True)
class TypeCounts:
    """One node type over all parts. `balance` is its largest part to the average one, edges are its in-edges."""

    name: NodeType
    num_nodes: int
    num_halo: int
    num_edges: int
    num_cut: int
    num_sent: int
    balance: float
    feature_bytes: int


@dataclass(frozen=True)
class Inspection:
    """Everything that was counted. `traffic[p][q]` is the rows that part p sends to part q, once per layer.

    `info` is what the writer recorded; `notes` are sentences about what could not be counted.
    """

    path: str
    trainers_per_part: int
    halo_hops: int
    has_edge_ids: bool
    parts: tuple[PartCounts, ...]
    types: tuple[TypeCounts, ...]
    traffic: tuple[tuple[int, ...], ...]
    loads: tuple[Load, ...]
    remote: RemoteShare
    info: dict[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def num_nodes(self) -> int:
        return sum(part.num_nodes for part in self.parts)

    @property
    def num_edges(self) -> int:
        return sum(part.num_edges for part in self.parts)

    @property
    def cut_fraction(self) -> float:
        return sum(part.num_cut for part in self.parts) / max(self.num_edges, 1)

    @property
    def replication(self) -> float:
        """Core and halo nodes of all parts to the nodes of the graph; 1.0 for a graph without nodes."""
        copies = sum(part.num_halo for part in self.parts)
        return (self.num_nodes + copies) / self.num_nodes if self.num_nodes else 1.0

    @property
    def stored_bytes(self) -> dict[str, int]:
        """Bytes on disk by what they hold, of all parts."""
        return {role: sum(part.stored_bytes[role] for part in self.parts) for role in (*_STRUCTURE, *_FEATURES)}

    def table(self) -> str:
        """A row per part, the totals, and a second small table where there are several node types."""
        from gnnsys.partition.inspection_table import inspection_table

        return inspection_table(self)

    def __str__(self) -> str:
        return self.table()

    def to_json(self) -> dict[str, Any]:
        """Plain values: every count, and what follows from them."""
        values = asdict(self)
        for counts, part in zip(values["parts"], self.parts, strict=True):
            counts |= {"num_nodes": part.num_nodes, "num_edges": part.num_edges, "num_cut": part.num_cut}
            counts |= {"num_sent": part.num_sent, "structure_bytes": part.structure_bytes}
            counts |= {"feature_bytes": part.feature_bytes}
        for counts, load in zip(values["loads"], self.loads, strict=True):
            counts |= {"ratio": load.balance.ratio, "met": load.balance.met, "reason": load.balance.reason}
        for counts, batch in zip(values["remote"]["parts"], self.remote.parts, strict=True):
            counts["fraction"] = batch.fraction
        values["remote"]["fraction"] = self.remote.fraction
        totals = {"num_nodes": self.num_nodes, "num_edges": self.num_edges, "stored_bytes": self.stored_bytes}
        return values | totals | {"cut_fraction": self.cut_fraction, "replication": self.replication}


def inspect_parts(
    path: str | os.PathLike[str],
    *,
    fanouts: Sequence[int] | None = None,
    batch_size: int = 1024,
    progress: Progress | None = None,
) -> Inspection:
    """Counts what is in the parts at `path`; ValueError names the file where they do not open.

    `fanouts` and `batch_size` are of the sampled batch whose remote share is expected (`expected_remote`). Files are
    mapped, their sizes and ids checked; whether they are the graph they were made of is `verify_parts`' question.
    """
    parts = open_parts(path, verify=False)
    num_edges = sum(parts.book.num_ids(t) for t in parts.schema.edge_types)
    meter = Meter(progress, num_edges)
    opened = [_count(parts, index, meter) for index in range(parts.num_parts)]
    sent = torch.stack([_total(count.received, parts.book.num_subparts) for count in opened], dim=1)
    loads, notes = loads_of(parts)
    return Inspection(
        path=str(path),
        trainers_per_part=parts.trainers_per_part,
        halo_hops=parts.halo_hops,
        has_edge_ids=parts.has_edge_ids,
        parts=tuple(count.part(sent) for count in opened),
        types=tuple(_type_counts(parts, t, opened) for t in parts.schema.node_types),
        traffic=tuple(map(tuple, sent.view(parts.num_parts, -1, parts.num_parts).sum(1).tolist())),
        loads=tuple(loads),
        remote=expected_remote(parts, fanouts, batch_size=batch_size, progress=progress),
        info=parts.info,
        notes=tuple(notes),
    )


class _Counted:
    """One part's counts by type and subpart, before it is known what it sends."""

    def __init__(self, parts: Parts, part: Part) -> None:
        types, trainers = parts.schema.node_types, parts.trainers_per_part
        self.index, self.stored_bytes = part.index, parts.stored_bytes(part.index)
        self.nodes = {t: torch.zeros(trainers, dtype=torch.int64, device="cpu") for t in types}
        self.edges = {
            t: torch.zeros(trainers, dtype=torch.int64, device="cpu") for t in types
        }  # by type of the destination
        self.cut = {t: torch.zeros(trainers, dtype=torch.int64, device="cpu") for t in types}
        self.num_halo = {t: part.num_halo(t) for t in types}
        self.received = {t: _owners(parts, part, t) for t in types}  # by the subpart that sends
        self.feature_bytes = {t: sum(rows.nbytes for rows in part.node_data[t].values()) for t in types}

    def part(self, sent: Tensor) -> PartCounts:
        """With what every subpart sends to every part, int64 [num_subparts, num_parts]."""
        trainers = sent.shape[0] // sent.shape[1]
        counts = [_total(by_type, trainers).tolist() for by_type in (self.nodes, self.edges, self.cut)]
        own = sent.sum(1).view(-1, trainers)[self.index].tolist()
        subparts = tuple(SubpartCounts(*row) for row in zip(*counts, own, strict=True))
        received = int(sent[:, self.index].sum())
        return PartCounts(subparts, sum(self.num_halo.values()), received, self.stored_bytes)


def _total(by_type: dict[NodeType, Tensor], size: int) -> Tensor:
    return sum(by_type.values(), torch.zeros(size, dtype=torch.int64, device="cpu"))


def _owners(parts: Parts, part: Part, node_type: NodeType) -> Tensor:
    """How many nodes of the first hop of the halo every subpart owns, int64 [num_subparts]."""
    hops = part.hops(node_type)
    owners = parts.book.subpart_of(part.halo(node_type)[: hops[1] - hops[0]], node_type)
    return torch.bincount(owners, minlength=parts.book.num_subparts)


def _count(parts: Parts, index: int, meter: Meter) -> _Counted:
    part = parts.part(index)
    counted = _Counted(parts, part)
    for t in parts.schema.node_types:
        counted.nodes[t] += _bounds(parts, index, t).diff()
    for edge_type in parts.schema.edge_types:
        src, _, dst = edge_type
        csc = part.csc(edge_type)
        bounds = csc.indptr[_bounds(parts, index, dst)]
        counted.edges[dst] += bounds.diff()
        for i, (first, end) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
            for piece in csc.indices[first:end].split(PIECE_EDGES):
                counted.cut[dst][i] += (piece >= part.num_core(src)).sum()
                meter.advance(piece.numel(), f"part {index}")
    return counted


def _bounds(parts: Parts, index: int, node_type: NodeType) -> Tensor:
    """Where the subparts of a part begin among its core nodes, int64 [trainers_per_part + 1]."""
    first, trainers = index * parts.trainers_per_part, parts.trainers_per_part
    offsets = parts.book.node_offsets[node_type][first : first + trainers + 1]
    return offsets - offsets[0]


def _type_counts(parts: Parts, node_type: NodeType, opened: list[_Counted]) -> TypeCounts:
    nodes = [int(count.nodes[node_type].sum()) for count in opened]
    return TypeCounts(
        node_type,
        sum(nodes),
        sum(count.num_halo[node_type] for count in opened),
        sum(int(count.edges[node_type].sum()) for count in opened),
        sum(int(count.cut[node_type].sum()) for count in opened),
        sum(int(count.received[node_type].sum()) for count in opened),
        max(nodes) * len(nodes) / sum(nodes) if sum(nodes) else 1.0,
        sum(count.feature_bytes[node_type] for count in opened),
    )
