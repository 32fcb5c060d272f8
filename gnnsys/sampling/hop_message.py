"""A hop's request to one machine and its answer, as objects and as the arrays of a SAMPLE message.

One message has the seeds of all edge types of the hop: seeds that several edge types share travel once, in int32 local
ids, grouped by part. Numbers travel in one int64 array, `head`; the hot path has no JSON. Whatever does not add up is a
ValueError.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gnnsys.ops import PartNeighbors

_FORMAT = 2  # of requests and their answers
_REPLACE, _LAST = 1, 2
_TREE, _TIME = 1, 2
_MAX_NUMBERS = 1 << 18


@dataclass(frozen=True)
class Slot:
    """Seeds of one node type, grouped by part: part i of the request has the next `counts[i]`."""

    counts: list[int]
    seeds: Tensor  # int32 local ids
    tree: Tensor | None  # int64, one per seed
    seed_time: Tensor | None  # int64, one per seed

    def of_part(self, index: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        begin = sum(self.counts[:index])
        end = begin + self.counts[index]
        tree, time = (None if rows is None else rows[begin:end] for rows in (self.tree, self.seed_time))
        return self.seeds[begin:end], tree, time


@dataclass(frozen=True)
class Draw:
    """What is drawn of one edge type: from `slot`'s seeds, by `key`, but for the excluded positions of each part."""

    edge_type: int  # its place in the schema
    slot: int
    fanout: int
    key: int
    exclude: list[Tensor | None]  # int64 ascending, per part of the request


@dataclass(frozen=True)
class PartsRequest:
    """What one machine is asked in one hop. `requester` is the part it is for (-1: none): draws by scores need it."""

    view: int
    parts: list[int]
    slots: list[Slot]
    draws: list[Draw]
    replace: bool = False
    last: bool = False
    requester: int = -1
    score_version: int = 0

    def to_arrays(self) -> list[Tensor]:
        flags = _REPLACE * self.replace + _LAST * self.last
        head = [_FORMAT, self.view, self.requester, self.score_version, flags, len(self.parts), *self.parts]
        arrays: list[Tensor] = []
        head.append(len(self.slots))
        for slot in self.slots:
            head += [_TREE * (slot.tree is not None) + _TIME * (slot.seed_time is not None), *slot.counts]
            arrays += [rows for rows in (slot.seeds, slot.tree, slot.seed_time) if rows is not None]
        head.append(len(self.draws))
        for draw in self.draws:
            sizes = [0 if positions is None else positions.numel() for positions in draw.exclude]
            head += [draw.edge_type, draw.slot, draw.fanout, draw.key, *sizes]
            arrays += [positions for positions in draw.exclude if positions is not None and positions.numel()]
        return [torch.tensor(head, dtype=torch.int64, device="cpu"), *arrays]

    @classmethod
    def from_arrays(cls, arrays: Sequence[Tensor]) -> PartsRequest:
        """Reads what `to_arrays` wrote."""
        rest = _Arrays(arrays)
        head = _Numbers(rest.take("head", torch.int64))
        version, view, requester, score_version, flags = head.take(5)
        if version != _FORMAT:
            raise ValueError(f"a hop's request must have format {_FORMAT}, got {version}")
        if score_version < 0:
            raise ValueError(f"a hop's request must name a version of scores, 0 for none, got {score_version}")
        parts = head.take(head.count())
        slots = [_read_slot(head, rest, len(parts)) for _ in range(head.count())]
        draws = [_read_draw(head, rest, len(parts), len(slots)) for _ in range(head.count())]
        head.finish()
        rest.finish()
        return cls(view, parts, slots, draws, bool(flags & _REPLACE), bool(flags & _LAST), requester, score_version)


class HopAnswer(NamedTuple):
    """In-edges of `size` seeds of a draw, from seed `first` of the draw's part `part` (a place in the request) on."""

    draw: int
    part: int
    first: int
    size: int
    piece: PartNeighbors


def answers_to_arrays(answers: Sequence[HopAnswer]) -> list[Tensor]:
    head = [n for answer in answers for n in (*answer[:4], int(answer.piece.weight is not None))]
    pieces = (rows for answer in answers for rows in answer.piece if rows is not None)
    return [torch.tensor(head, dtype=torch.int64, device="cpu"), *pieces]


def answers_from_arrays(arrays: Sequence[Tensor]) -> Iterator[HopAnswer]:
    rest = _Arrays(arrays)
    head = rest.take("head", torch.int64)
    if head.numel() % 5:
        raise ValueError(f"a hop's answer must have five numbers per piece, got {head.numel()} in all")
    for draw, part, first, size, has_weight in head.view(-1, 5).tolist():
        counts, ids = rest.take("counts", torch.int32, size), rest.take("ids")
        edges = rest.take("edges", size=ids.numel())
        weight = rest.take("weight", torch.float32, ids.numel()) if has_weight else None
        yield HopAnswer(draw, part, first, size, PartNeighbors(counts, ids, edges, weight))
    rest.finish()


class _Numbers:
    """Reads a head from front to back."""

    def __init__(self, head: Tensor) -> None:
        if head.numel() > _MAX_NUMBERS:
            raise ValueError(f"a hop's request says {head.numel()} numbers, at most {_MAX_NUMBERS} are read")
        self._numbers, self._at = head.tolist(), 0

    def take(self, count: int) -> list[int]:
        if count > len(self._numbers) - self._at:
            raise ValueError("a hop's request ends before it says everything")
        self._at += count
        return self._numbers[self._at - count : self._at]

    def count(self) -> int:
        count = self.take(1)[0]
        if not 0 <= count <= len(self._numbers):
            raise ValueError(f"a hop's request says that it has {count} entries")
        return count

    def finish(self) -> None:
        if self._at != len(self._numbers):
            raise ValueError("a hop's request says more than can be read")


class _Arrays:
    """Hands out a message's arrays one after the other."""

    def __init__(self, arrays: Sequence[Tensor]) -> None:
        self._left = iter(arrays)

    def take(self, name: str, dtype: torch.dtype | None = None, size: int | None = None) -> Tensor:
        rows = next(self._left, None)
        if rows is None or rows.dim() != 1:
            raise ValueError(f"a message about a hop must have {name} as a vector")
        if dtype is not None and rows.dtype != dtype:
            raise ValueError(f"{name} must be {dtype}, got {rows.dtype}")
        if size is not None and rows.numel() != size:
            raise ValueError(f"{name} must have {size} entries, got {rows.numel()}")
        return rows

    def finish(self) -> None:
        if next(self._left, None) is not None:
            raise ValueError("a message about a hop has an array too many")


def _read_slot(head: _Numbers, arrays: _Arrays, num_parts: int) -> Slot:
    flags, *counts = head.take(1 + num_parts)
    if any(count < 0 for count in counts):
        raise ValueError(f"numbers of seeds must not be negative, got {counts}")
    size = sum(counts)
    seeds = arrays.take("seeds", torch.int32, size)
    tree = arrays.take("tree", torch.int64, size) if flags & _TREE else None
    seed_time = arrays.take("seed_time", torch.int64, size) if flags & _TIME else None
    return Slot(counts, seeds, tree, seed_time)


def _read_draw(head: _Numbers, arrays: _Arrays, num_parts: int, num_slots: int) -> Draw:
    edge_type, slot, fanout, key, *sizes = head.take(4 + num_parts)
    if not 0 <= slot < num_slots:
        raise ValueError(f"a draw must name one of {num_slots} slots, got {slot}")
    exclude = [arrays.take("exclude", torch.int64, size) if size else None for size in sizes]
    return Draw(edge_type, slot, fanout, key, exclude)


@dataclass(frozen=True)
class SourceList:
    """Nodes of one type that edges may come from: global ids, and the tree of each where trees are told apart."""

    ids: Tensor  # int32 or int64
    tree: Tensor | None  # int64


@dataclass(frozen=True)
class InnerDraw:
    """Of one edge type the in-edges of `slot`'s seeds that come from a list, but for the excluded positions."""

    edge_type: int  # its place in the schema
    slot: int
    sources: int
    exclude: list[Tensor | None]  # int64 ascending, per part of the request


@dataclass(frozen=True)
class InnerRequest:
    """What one machine is asked about edges among chosen nodes: the arrays of an INDUCED message.

    The answer is that of a hop (`HopAnswer`), with places in the list instead of ids.
    """

    parts: list[int]
    slots: list[Slot]
    sources: list[SourceList]
    draws: list[InnerDraw]

    def to_arrays(self) -> list[Tensor]:
        head = [_FORMAT, len(self.parts), *self.parts, len(self.slots)]
        arrays: list[Tensor] = []
        for slot in self.slots:
            head += [_TREE * (slot.tree is not None), *slot.counts]
            arrays += [rows for rows in (slot.seeds, slot.tree) if rows is not None]
        head.append(len(self.sources))
        for listed in self.sources:
            head.append(_TREE * (listed.tree is not None))
            arrays += [rows for rows in (listed.ids, listed.tree) if rows is not None]
        head.append(len(self.draws))
        for draw in self.draws:
            sizes = [0 if positions is None else positions.numel() for positions in draw.exclude]
            head += [draw.edge_type, draw.slot, draw.sources, *sizes]
            arrays += [positions for positions in draw.exclude if positions is not None and positions.numel()]
        return [torch.tensor(head, dtype=torch.int64, device="cpu"), *arrays]

    @classmethod
    def from_arrays(cls, arrays: Sequence[Tensor]) -> InnerRequest:
        """Reads what `to_arrays` wrote."""
        rest = _Arrays(arrays)
        head = _Numbers(rest.take("head", torch.int64))
        (version,) = head.take(1)
        if version != _FORMAT:
            raise ValueError(f"a request for edges among nodes must have format {_FORMAT}, got {version}")
        parts = head.take(head.count())
        slots = [_read_slot(head, rest, len(parts)) for _ in range(head.count())]
        sources = [_read_sources(head, rest) for _ in range(head.count())]
        draws = [_read_inner_draw(head, rest, len(parts), slots, sources) for _ in range(head.count())]
        head.finish()
        rest.finish()
        return cls(parts, slots, sources, draws)


def _read_sources(head: _Numbers, arrays: _Arrays) -> SourceList:
    (flags,) = head.take(1)
    ids = arrays.take("sources")
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"sources must be int32 or int64, got {ids.dtype}")
    return SourceList(ids, arrays.take("tree", torch.int64, ids.numel()) if flags & _TREE else None)


def _read_inner_draw(
    head: _Numbers, arrays: _Arrays, num_parts: int, slots: Sequence[Slot], sources: Sequence[SourceList]
) -> InnerDraw:
    edge_type, slot, listed, *sizes = head.take(3 + num_parts)
    if not (0 <= slot < len(slots) and 0 <= listed < len(sources)):
        raise ValueError(f"a draw names slot {slot} of {len(slots)} and list {listed} of {len(sources)}")
    if (slots[slot].tree is None) != (sources[listed].tree is None):
        raise ValueError("seeds and sources must both have trees, or neither")
    exclude = [arrays.take("exclude", torch.int64, size) if size else None for size in sizes]
    return InnerDraw(edge_type, slot, listed, exclude)
