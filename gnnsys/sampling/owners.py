"""Which machine answers for which part, and how ids are grouped for them: what every request about structure needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, NodeType
from gnnsys.ops import bucket_ids
from gnnsys.partition import PartitionBook


class Grouped(NamedTuple):
    """Ids by part, in their own order within each: part p has grouped ids starts[p] .. starts[p + 1]."""

    order: Tensor  # int64, where in the input the j-th grouped id stands
    local: Tensor  # the j-th grouped id less its part's first one
    starts: list[int]

    def of_part(self, part: int) -> slice:
        return slice(self.starts[part], self.starts[part + 1])

    def count(self, part: int) -> int:
        return self.starts[part + 1] - self.starts[part]


class Owners:
    """The book, and the machine that serves each part. `here` are parts that this process reads by itself."""

    def __init__(self, book: PartitionBook, machine_of_part: Sequence[int], here: Sequence[int]) -> None:
        if len(machine_of_part) != book.num_parts:
            raise ValueError(f"machine_of_part must have {book.num_parts} entries, got {len(machine_of_part)}")
        self.book = book
        self.here = sorted(here)
        away: dict[int, list[int]] = {}
        for part, machine in enumerate(machine_of_part):
            if part not in self.here:
                away.setdefault(machine, []).append(part)
        self.away = away  # machine -> parts, ascending
        types: list[NodeType | EdgeType] = [*book.node_offsets, *book.edge_offsets]
        self._bounds = {t: part_bounds(book, t) for t in types}

    def bounds(self, type: NodeType | EdgeType) -> Tensor:
        """First id of every part, and the end, int64 [num_parts + 1]."""
        return self._bounds[type]

    def group(self, ids: Tensor, type: NodeType | EdgeType) -> Grouped:
        """ValueError where an id is nobody's."""
        counts, order, local = bucket_ids(ids, self._bounds[type])
        return Grouped(order, local, [0, *counts.cumsum(0).tolist()])


def part_bounds(book: PartitionBook, type: NodeType | EdgeType) -> Tensor:
    """First id of every part, and the end, int64 [num_parts + 1]."""
    ranges = book.ranges(type)
    return torch.cat([ranges[:, 0], ranges[-1:, 1]]).contiguous()
