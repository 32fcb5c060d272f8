"""Which edges messages may pass: those of a mask, or of one side of a split of links. The others are never sampled.

A filter is known by its text, which goes from machine to machine: each applies it to its own parts. A graph seen
through a filter is sampled exactly as the graph that has these edges alone, as edges keep their order.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, did_you_mean, some
from gnnsys.ops import CSC

_MASK, _LINKS = "mask:", "links:"
_PIECE = 1 << 22  # edges that are looked at together
_LONGEST = 4096
_BITS = 53  # of a link's number, by which it falls into a side

MESSAGE, SUPERVISION, VAL, TEST = range(4)  # sides of a split; the first two are both of the training links

Ends = Callable[[int, int], tuple[Tensor, Tensor]]  # original ids of the ends of edges at [first, end)


class EdgeFilter(ABC):
    """Says which edges are kept."""

    @property
    @abstractmethod
    def text(self) -> str:
        """What `find_filter` makes the filter of again."""

    @property
    @abstractmethod
    def array(self) -> str | None:
        """The name of the array of edges that it reads, if it reads one."""

    @property
    @abstractmethod
    def needs_ends(self) -> bool:
        """Whether it has to know the original ids of edges' ends."""

    @abstractmethod
    def check(self, edge_data: Mapping[EdgeType, Mapping[str, Any]]) -> None:
        """ValueError where the graph does not have what it reads; arrays by edge type and name."""

    @abstractmethod
    def keeps(self, edge_type: EdgeType, rows: Mapping[str, Tensor], num_edges: int, ends: Ends) -> Tensor | None:
        """Of the edges at [0, num_edges), bool; None where all are kept. `rows` are by the same positions."""


def find_filter(text: str) -> EdgeFilter:
    """The filter of a text, which may have come from another machine; ValueError where it is none."""
    if len(text) > _LONGEST:
        raise ValueError(f"a filter of edges is said in {_LONGEST} characters at most, got {len(text)}")
    if text.startswith(_MASK):
        return MaskFilter(text.removeprefix(_MASK))
    if text.startswith(_LINKS):
        return LinkFilter.from_text(text)
    raise ValueError(f"no filter of edges: {text[:80]!r}")


def as_filter(given: str | EdgeFilter | None) -> EdgeFilter | None:
    """What a user means: the name of a mask of the edges, or one side of `gnnsys.split_links`."""
    if given is None or isinstance(given, EdgeFilter):
        return given
    if isinstance(given, str):
        return MaskFilter(given)
    raise ValueError(
        f"edge_mask must be the name of a mask of the edges, or messages of gnnsys.split_links, got {given!r}"
    )


@dataclass(frozen=True)
class MaskFilter(EdgeFilter):
    """The edges for which a mask is true; of edge types without such a mask all. A reverse type needs one, too."""

    name: str

    @property
    def text(self) -> str:
        return _MASK + self.name

    @property
    def array(self) -> str | None:
        return self.name

    @property
    def needs_ends(self) -> bool:
        return False

    def check(self, edge_data: Mapping[EdgeType, Mapping[str, Any]]) -> None:
        having = {edge_type: rows[self.name] for edge_type, rows in edge_data.items() if self.name in rows}
        if not having:
            known = sorted({name for rows in edge_data.values() for name in rows})
            raise ValueError(
                f"edge_mask: no edge type has an array {self.name!r}, only {some(known, near=self.name)}"
                f"{did_you_mean(self.name, known)}"
            )
        for edge_type, rows in having.items():
            if rows.dtype not in (torch.bool, torch.uint8) or not _is_column(rows):
                raise ValueError(
                    f"edge_mask: {self.name!r} of {edge_type!r} must be a mask, bool [num_edges], got {rows.dtype} "
                    f"{['num_edges', *_row_shape(rows)]}: store one true or false per edge, one array for each mask"
                )
            check_reverse_mask(self.name, edge_type, _reverse_among(edge_type, edge_data), edge_data)

    def keeps(self, edge_type: EdgeType, rows: Mapping[str, Tensor], num_edges: int, ends: Ends) -> Tensor | None:
        mask = rows.get(self.name)
        return None if mask is None else mask[:num_edges].reshape(num_edges).bool()


def check_reverse_mask(
    name: str, edge_type: EdgeType, reverse: EdgeType | None, edge_data: Mapping[EdgeType, Mapping[str, Any]]
) -> None:
    """ValueError where a type has a mask and its reverse has none."""
    if reverse is not None and name in edge_data[edge_type] and name not in edge_data[reverse]:
        raise ValueError(
            f"edge_mask: {edge_type!r} has a mask {name!r} and its reverse type {reverse!r} has none, so messages "
            "would pass the reverses of links that are held out: give it the same mask, or one of all true to keep all "
            "its edges"
        )


@dataclass(frozen=True)
class LinkFilter(EdgeFilter):
    """Some sides of a split of the links of one edge type; of other types all edges.

    At random: a number in [0, 1) is computed of (seed, original ids of both ends), the same for a link, its parallel
    edges and its reverse, whoever asks. Below `test` the link is a test link, below `test + val` one for validation.
    By `time`: links from `test` on are test links, those before it from `val` on for validation. Of training links a
    share of `disjoint`, at random, is for supervision alone: no message passes them.
    """

    edge_type: EdgeType
    reverse: EdgeType | None
    seed: int
    val: float
    test: float
    disjoint: float = 0.0
    time: str | None = None
    sides: tuple[int, ...] = (MESSAGE,)

    @property
    def text(self) -> str:
        values = [list(self.edge_type), None if self.reverse is None else list(self.reverse), self.seed]
        return _LINKS + json.dumps([*values, self.val, self.test, self.disjoint, self.time, list(self.sides)])

    @classmethod
    def from_text(cls, text: str) -> LinkFilter:
        try:
            edge_type, reverse, seed, val, test, disjoint, time, sides = json.loads(text.removeprefix(_LINKS))
            if not (time is None or isinstance(time, str)) or not all(side in range(4) for side in sides):
                raise ValueError(f"time {time!r}, sides {sides!r}")
            return cls(
                _as_type(edge_type), None if reverse is None else _as_type(reverse), int(seed), _number(val),
                _number(test), _number(disjoint), time, tuple(sides),
            )  # fmt: skip
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"no split of links: {text[:200]!r}") from error

    @property
    def array(self) -> str | None:
        return self.time

    def only(self, *sides: int) -> LinkFilter:
        """Other sides of the same split."""
        return replace(self, sides=sides)

    @property
    def needs_ends(self) -> bool:
        return self.time is None or self.disjoint > 0

    def check(self, edge_data: Mapping[EdgeType, Mapping[str, Any]]) -> None:
        for edge_type in {self.edge_type, self.reverse} - {None}:
            rows = edge_data.get(edge_type)  # type: ignore[arg-type]
            if rows is None:
                raise ValueError(f"split_links: edge type {edge_type!r} does not exist, only {some(edge_data)}")
            if self.time is not None and self.time not in rows:
                raise ValueError(
                    f"split_links: edges {edge_type!r} have no times {self.time!r}, only "
                    f"{some(rows, near=self.time)}{did_you_mean(self.time, rows)}"
                )
            if self.time is not None and not _is_column(rows[self.time]):
                raise ValueError(
                    f"split_links: times {self.time!r} of {edge_type!r} must be one number per edge, [num_edges], got "
                    f"{['num_edges', *_row_shape(rows[self.time])]}"
                )

    def keeps(self, edge_type: EdgeType, rows: Mapping[str, Tensor], num_edges: int, ends: Ends) -> Tensor | None:
        if edge_type not in (self.edge_type, self.reverse):
            return None
        kept = torch.empty(num_edges, dtype=torch.bool, device="cpu")
        chosen = torch.zeros(4, dtype=torch.bool, device="cpu")
        chosen[list(self.sides)] = True
        for first in range(0, num_edges, _PIECE):
            end = min(first + _PIECE, num_edges)
            times = None if self.time is None else rows[self.time][first:end].reshape(-1).cpu()
            kept[first:end] = chosen[self._sides(edge_type, times, first, end, ends)]
        return kept

    def _sides(self, edge_type: EdgeType, times: Tensor | None, first: int, end: int, ends: Ends) -> Tensor:
        """The side of each edge, int64."""
        pairs = None
        if self.needs_ends:
            src, dst = (ids.cpu().long() for ids in ends(first, end))
            pairs = self._ordered(edge_type, src, dst)
        if times is None:
            assert pairs is not None
            number, limit = _link_numbers(*pairs, self.seed, 0), 1 << _BITS
            is_test, is_held = number < int(self.test * limit), number < int((self.test + self.val) * limit)
        else:
            is_test, is_held = (_not_before(times, cut) for cut in (self.test, self.val))
        side = torch.where(is_test, TEST, torch.where(is_held, VAL, MESSAGE))
        if pairs is not None and self.disjoint > 0:
            alone = _link_numbers(*pairs, self.seed, 1) < int(self.disjoint * (1 << _BITS))
            side = torch.where((side == MESSAGE) & alone, SUPERVISION, side)
        return side

    def _ordered(self, edge_type: EdgeType, src: Tensor, dst: Tensor) -> tuple[Tensor, Tensor]:
        """Both ends so that a link and its reverse have the same first and second."""
        if self.reverse == self.edge_type:
            return torch.minimum(src, dst), torch.maximum(src, dst)
        return (src, dst) if edge_type == self.edge_type else (dst, src)


def _not_before(times: Tensor, cut: float) -> Tensor:
    """Whole times are compared as 64-bit whole numbers: in floating point or in fewer bits a cut would be another."""
    return times >= cut if times.is_floating_point() else times.long() >= math.ceil(cut)


def _row_shape(rows: Any) -> list[int]:
    """Of an array in memory, or of what a schema says of it."""
    return list(rows.row_shape if hasattr(rows, "row_shape") else rows.shape[1:])


def _is_column(rows: Any) -> bool:
    return math.prod(_row_shape(rows)) == 1


def _as_type(names: Sequence[Any]) -> EdgeType:
    src, relation, dst = names
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"an edge type is three names, got {names!r}")
    return src, relation, dst


def _number(value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"a number is wanted, got {value!r}")
    return value


def _link_numbers(first: Tensor, second: Tensor, seed: int, which: int) -> Tensor:
    """`_BITS` random bits of each pair: rounds of SplitMix64, in whole numbers, the same on every machine."""
    value = torch.full_like(first, _signed(seed * 2 + which))
    for part in (first, second):
        value = _mix(value ^ _mix(part + _signed(0x9E3779B97F4A7C15)))
    return _shift(value, 64 - _BITS)


def _mix(value: Tensor) -> Tensor:
    value = (value ^ _shift(value, 30)) * _signed(0xBF58476D1CE4E5B9)
    value = (value ^ _shift(value, 27)) * _signed(0x94D049BB133111EB)
    return value ^ _shift(value, 31)


def _shift(value: Tensor, bits: int) -> Tensor:
    """To the right, zeros from the left."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def keep_edges(csc: CSC, kept: Tensor) -> tuple[CSC, Tensor]:
    """The same structure with some of its edges, in their order, and where each was. `kept`: bool by position."""
    kept = kept.to(csc.indices.device)
    positions = kept.nonzero().view(-1)
    indptr = torch.searchsorted(positions, csc.indptr)
    edge_ids = positions if csc.edge_ids is None else csc.edge_ids[positions]
    return CSC(indptr, csc.indices[positions], csc.num_src, edge_ids), positions


def rows_by_position(csc: CSC, rows: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """Arrays of edges in the order of a CSC, each put into it when it is asked for."""
    return _RowsByPosition(csc, rows)


class _RowsByPosition(Mapping[str, Tensor]):
    def __init__(self, csc: CSC, rows: Mapping[str, Any]) -> None:
        self._csc, self._rows = csc, rows

    def __getitem__(self, name: str) -> Tensor:
        rows = self._rows[name]
        if not isinstance(rows, Tensor):
            raise ValueError(f"{name!r} is a {type(rows).__name__}: masks and times of edges must be tensors in memory")
        rows = rows.to(self._csc.indices.device)
        return rows if self._csc.edge_ids is None else rows.index_select(0, self._csc.edge_ids)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def reverse_of(edge_type: EdgeType, graph: HasEdgeTypes) -> EdgeType | None:
    """The edge type that holds the reverses of this one's edges, by PyG's naming; None if there is none."""
    return _reverse_among(edge_type, graph.edge_types)


def _reverse_among(edge_type: EdgeType, known: Container[EdgeType]) -> EdgeType | None:
    src, relation, dst = edge_type
    named = (dst, relation[4:] if relation.startswith("rev_") else f"rev_{relation}", src)
    if named in known:
        return named
    return edge_type if src == dst else None


class HasEdgeTypes(Protocol):
    """A graph, in memory or in parts."""

    @property
    def edge_types(self) -> list[EdgeType]: ...


def ends_of_csc(csc: CSC, sources: Tensor | None = None, destinations: Tensor | None = None) -> Ends:
    """Original ids of the ends of a CSC's edges: as it names nodes, or looked up in `sources` and `destinations`."""

    def ends(first: int, end: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(first, end, device=csc.indptr.device)
        dst = torch.searchsorted(csc.indptr, positions, right=True) - 1
        src = csc.indices[first:end].long()
        return src if sources is None else sources[src], dst if destinations is None else destinations[dst]

    return ends
