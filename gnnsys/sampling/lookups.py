"""What is asked of single edges and nodes: an edge's ends, the user's edge id, a node's in-degree.

`look_up` answers for one part, `Lookups` for the whole graph: own parts at once, the others with one EDGE_ENDS message
per machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor

from gnnsys.comm import Kind
from gnnsys.graph import EdgeType
from gnnsys.ops import gather_rows
from gnnsys.partition import Part, Parts
from gnnsys.sampling.owners import Owners

if TYPE_CHECKING:
    from gnnsys.comm import Client, Pending
    from gnnsys.sampling.owners import Grouped

ENDS, EDGE_IDS, DEGREES = 1, 2, 3


def look_up(part: Part, edge_type: EdgeType, numbers: Tensor, what: int) -> list[Tensor]:
    """Of a part's own edges, by position: global ids of sources and destinations (`ENDS`) or the user's edge ids
    (`EDGE_IDS`). Of its core nodes, by local id: `DEGREES`. All int64."""
    csc, (src, _, dst) = part.csc(edge_type), edge_type
    num_core = part.num_core(dst)
    limit = num_core if what == DEGREES else int(csc.indptr[num_core])
    if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < limit:
        raise ValueError(f"numbers of part {part.index} must be in [0, {limit})")
    numbers = numbers.long()
    if what == ENDS:
        column = torch.searchsorted(csc.indptr[: num_core + 1], numbers, right=True) - 1
        sources = part.global_ids(gather_rows(csc.indices, numbers), src)
        return [sources, column + part.book.part_range(part.index, dst).start]
    if what == EDGE_IDS:
        ids = part.edge_ids(numbers, edge_type)
        if ids is None:
            raise ValueError("these parts were written without edge ids: partition the graph again, with them")
        return [ids.long()]
    if what == DEGREES:
        return [csc.indptr[numbers + 1] - csc.indptr[numbers]]
    raise ValueError(f"what is looked up must be {ENDS}, {EDGE_IDS} or {DEGREES}, got {what}")


_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Asked(Generic[_Answer]):
    """A look-up under way. `waits`: whether another machine was asked; `result` waits for it."""

    result: Callable[[], _Answer]
    waits: bool


class Lookups:
    """`look_up` for ids of any part."""

    def __init__(self, parts: Parts, owners: Owners, client: Client | None) -> None:
        self._parts, self._owners, self._client = parts, owners, client

    def __call__(self, edge_type: EdgeType, ids: Tensor, what: int) -> list[Tensor]:
        """Of global edge ids (or, for `DEGREES`, global ids of destinations), in their order."""
        return self.begin(edge_type, ids, what).result()

    def begin(self, edge_type: EdgeType, ids: Tensor, what: int) -> Asked[list[Tensor]]:
        """The same in two halves: other machines are asked now; `result` reads own parts, and has all answers."""
        if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"ids must be a vector of integers, got {list(ids.shape)} {ids.dtype}")
        grouped = self._owners.group(ids.contiguous(), edge_type[2] if what == DEGREES else edge_type)
        number = self._parts.schema.edge_types.index(edge_type)
        pending = []
        for machine, parts in self._owners.away.items():
            asked = [p for p in parts if grouped.count(p)]
            if asked:
                assert self._client is not None
                head = [what, number, *(value for p in asked for value in (p, grouped.count(p)))]
                numbers = torch.cat([grouped.local[grouped.of_part(p)] for p in asked])
                places = torch.cat([grouped.order[grouped.of_part(p)] for p in asked])
                pending.append(
                    (places, self._client.request(machine, Kind.EDGE_ENDS, [torch.tensor(head, device="cpu"), numbers]))
                )
        return Asked(partial(self._finish, edge_type, what, grouped, pending), waits=bool(pending))

    def _finish(
        self, edge_type: EdgeType, what: int, grouped: Grouped, pending: list[tuple[Tensor, Pending]]
    ) -> list[Tensor]:
        num_ids, num_answers = grouped.order.numel(), 2 if what == ENDS else 1
        out = [torch.empty(num_ids, dtype=torch.int64, device="cpu") for _ in range(num_answers)]
        for part in self._owners.here:
            if grouped.count(part):
                own = grouped.of_part(part)
                found = look_up(self._parts.part(part), edge_type, grouped.local[own], what)
                _place(out, grouped.order[own], found)
        for places, sent in pending:
            _place(out, places, sent.result().arrays)
        return out


def _place(out: list[Tensor], places: Tensor, found: list[Tensor]) -> None:
    if len(found) != len(out) or any(rows.shape != places.shape for rows in found):
        raise ValueError(f"asked for {len(out)} answers on {places.numel()} ids, got {[list(r.shape) for r in found]}")
    for rows, values in zip(out, found, strict=True):
        rows[places] = values
