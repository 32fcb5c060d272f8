"""Where rows are: the candidates for every part of a table, nearest first, and the choice among them.

A candidate that this process can read by itself (a file, shared memory) holds the rows; a shard is asked by message.
Which candidate serves is a policy; `nearest` is the one in use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gnnsys.ops import bucket_ids
from gnnsys.store.rows import SHARD, PartRows
from gnnsys.store.spec import TableSpec


class Place(NamedTuple):
    """`kind` is "file", "shared" or "shard"; `rows` are None where the machine must be asked."""

    kind: str
    machine: int
    rows: PartRows | None


@dataclass(frozen=True, eq=False)
class Run:
    """The ids that fall into one part: `order[j]` is where the j-th stands among all ids (None: at j), `local[j]` its
    row in the part, `places` where that row may be had."""

    part: int
    order: Tensor | None
    local: Tensor
    places: Sequence[Place]

    def at(self, places: Sequence[Place]) -> Run:
        """The same rows of another table, which has them elsewhere."""
        return self if self.places is places else Run(self.part, self.order, self.local, places)


Policy = Callable[[Run], Place]


def nearest(run: Run) -> Place:
    """The first candidate."""
    return run.places[0]


def shard_place(machine: int) -> Place:
    return Place(SHARD, machine, None)


def locate(ids: Tensor, spec: TableSpec, places: Sequence[Sequence[Place]]) -> list[Run]:
    """The ids grouped by part, each group with the candidates for its rows; ValueError for an id out of range."""
    if spec.num_parts == 1:
        return [Run(0, None, ids, places[0])]
    try:
        counts, order, local = bucket_ids(ids, spec.bounds_tensor)
    except ValueError as error:
        raise ValueError(f"table {spec.name!r}: {error}") from error
    if local.dtype == torch.int64 and spec.narrow:
        local = local.to(torch.int32)  # half the bytes on the wire
    runs, first = [], 0
    for part, count in enumerate(counts.tolist()):
        if count:
            runs.append(Run(part, order[first : first + count], local[first : first + count], places[part]))
            first += count
    return runs
