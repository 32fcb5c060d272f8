"""Where rows are that batches of the host share: in a flight that has asked for them, or in a slab of kept ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gnnsys.ops import IdTable
from gnnsys.store.source import Source

POSITION = 0xFFFFFFFF  # a row's place is (number of its flight or slab << 32) | position among the rows there


class NotedRows(NamedTuple):
    """Rows of `RowPlaces.place`, valid until that has been cleared again."""

    local: Tensor
    version: int


class RowPlaces:
    """Where the rows of ids are: the flight that asked for them, and which of its rows. `sources` is whose rows."""

    def __init__(self, id_bound: int, sources: Sequence[Source] = ()) -> None:
        self.sources = tuple(sources)
        self._table = IdTable(id_bound)
        self.place = torch.empty(0, dtype=torch.int64, device="cpu")  # by local id of the table; -1: nowhere
        self.num_ids = 0
        self.version = 0

    def clear(self) -> None:
        self._table.clear()
        self.num_ids, self.version = 0, self.version + 1

    def local(self, ids: Tensor) -> Tensor:
        """The rows of `place` that these ids have, made where they had none."""
        local, fresh = self._table.insert(ids)
        first, self.num_ids = self.num_ids, self.num_ids + fresh.numel()
        if self.num_ids > self.place.numel():
            grown = torch.empty(2 * self.num_ids, dtype=torch.int64, device="cpu")
            grown[:first] = self.place[:first]
            self.place = grown
        self.place[first : self.num_ids] = -1
        return local

    def put(self, local: Tensor, places: Tensor) -> Tensor:
        """Notes where these are; returns what is noted now: one place for all that are of the same id."""
        self.place.scatter_(0, local, places)
        return self.place.index_select(0, local)

    def note(self, ids: Tensor, first: int) -> None:
        """The ids are at the places from `first` on."""
        self.put(self.local(ids), torch.arange(ids.numel(), device="cpu") + first)

    def renote(self, noted: NotedRows | None, ids: Tensor, first: int) -> None:
        """The same, of ids that were written down before."""
        if noted is None or noted.version != self.version:
            self.note(ids, first)
        else:
            self.place.scatter_(0, noted.local, torch.arange(ids.numel(), device="cpu") + first)
