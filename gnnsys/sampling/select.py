"""Which rows of a mask are true, asked where the mask lives: how many, and the k-th to the l-th of them.

What `gnnsys.split` needs to give every rank its share without any rank reading the whole mask. A server answers for
its own parts; masks are scanned in blocks, and counts are kept.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnsys.comm import Reply, Request
from gnnsys.graph import EdgeType, NodeType
from gnnsys.partition import Parts

BLOCK = 1 << 20  # rows looked at together: a megabyte of mask

_MASK_TYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)  # integers: 0 and 1 alone


def count_true(mask: Tensor, bounds: Sequence[int], name: str = "the mask") -> list[int]:
    """How many rows of `mask` are true in each [bounds[i], bounds[i + 1]); ValueError for integers beside 0 and 1."""

    def count(block: Tensor) -> int:
        if block.dtype != torch.bool and block.numel():
            low, high = torch.stack(block.aminmax()).tolist()
            if low < 0 or high > 1:
                raise ValueError(
                    f"{name} must be a mask, bools or integers of 0 and 1, got {block.dtype} with "
                    f"{high if high > 1 else low}: give the mask of what you mean as bools (rows != 0), or ids as "
                    "int64 (.long() or .astype(int))"
                )
        return int(torch.count_nonzero(block))

    return [
        sum(count(mask[at : min(at + BLOCK, end)]) for at in range(first, end, BLOCK))
        for first, end in pairwise(bounds)
    ]


def select_true(mask: Tensor, first: int, end: int) -> Tensor:
    """Rows of the first-th to the (end - 1)-th true entry of `mask`, ascending, int64. Needs a block and the result."""
    found, seen = [], 0
    for at in range(0, mask.numel(), BLOCK):
        if seen >= end:
            break
        block = mask[at : at + BLOCK]
        count = int(torch.count_nonzero(block))
        if count and seen + count > first:
            found.append(block.nonzero().view(-1)[max(first - seen, 0) : end - seen] + at)
        seen += count
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device="cpu")


def mask_column(rows: Tensor, column: int | None, name: str) -> Tensor:
    """One truth value per row: `rows` itself, or a column where there are several; ValueError for what is no mask."""
    if rows.dtype not in _MASK_TYPES or rows.dim() not in (1, 2):
        raise ValueError(
            f"{name} must be a mask, bool [num_rows], got {rows.dtype} {list(rows.shape)}: store rows.bool(), or the "
            "mask of what you mean, such as rows > 0, in the graph"
        )
    if rows.dim() == 1 and column is None:
        return rows
    if rows.dim() == 1 or column is None or not 0 <= column < rows.shape[1]:
        allowed = "None" if rows.dim() == 1 else f"one of 0 to {rows.shape[1] - 1}: it has a mask for each split"
        raise ValueError(f"column of {name} must be {allowed}, got {column}")
    return rows[:, column]


class Mask(NamedTuple):
    """A mask among the rows of a graph: of nodes where `type` is a node type, of edges where it is an edge type."""

    type: NodeType | EdgeType
    name: str
    column: int | None = None

    def to_json(self) -> dict[str, Any]:
        return self._asdict()

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Mask:
        """The mask that `to_json` described; ValueError where it did not describe one."""
        try:
            type, column = values["type"], values["column"]
            if not isinstance(type, str):
                src, relation, dst = map(str, type)
                type = (src, relation, dst)
            return cls(type, str(values["name"]), None if column is None else int(column))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not the description of a mask: {error!r}") from error


class PartMasks:
    """Masks among the rows of the parts this process has mapped."""

    def __init__(self, parts: Parts, own_parts: Sequence[int]) -> None:
        self._parts = parts
        self._own = frozenset(own_parts)
        self._counts: dict[tuple[Mask, int], list[int]] = {}
        self._lock = threading.Lock()

    def counts(self, mask: Mask, part: int) -> list[int]:
        """True entries of each subpart of `part`."""
        with self._lock:
            known = self._counts.get((mask, part))
        if known is None:
            book = self._parts.book
            first = part * book.trainers_per_part
            ranges = [book.subpart_range(first + i, mask.type) for i in range(book.trainers_per_part)]
            bounds = [0, *(ids.stop - ranges[0].start for ids in ranges)]
            known = count_true(self._rows(mask, part), bounds, f"{mask.name!r} of {mask.type!r}")
            with self._lock:
                self._counts[mask, part] = known
        return known

    def ids(self, mask: Mask, part: int, first: int, end: int) -> Tensor:
        """Global ids of the first-th to the (end - 1)-th true entry of `part`."""
        return select_true(self._rows(mask, part), first, end) + self._parts.book.part_range(part, mask.type).start

    def handle(self, request: Request) -> Reply:
        """Answers SELECT: a mask with "count": parts by counts per subpart, with "ids": [part, first, end] by ids."""
        mask, options = Mask.from_json(request.options), request.options
        if "count" in options:
            counts = [self.counts(mask, int(part)) for part in options["count"]]
            return Reply([torch.tensor(counts, dtype=torch.int64, device="cpu").view(-1)])
        return Reply([self.ids(mask, *map(int, options["ids"]))])

    def _rows(self, mask: Mask, part: int) -> Tensor:
        if part not in self._own:
            raise ValueError(f"part {part} is not served here, only {sorted(self._own)}")
        own = self._parts.part(part)
        data = own.node_data.get(mask.type) if isinstance(mask.type, str) else own.edge_data.get(mask.type)
        if data is None or mask.name not in data:
            raise ValueError(f"{mask.type!r} has no {mask.name!r}, it has {sorted(data or {})}")
        rows = mask_column(data[mask.name], mask.column, f"{mask.name!r} of {mask.type!r}")
        return rows[: len(self._parts.book.part_range(part, mask.type))]
