"""Batches in flight share their rows: what one has asked for, the next copies from it instead of asking again.

A flight is one batch whose rows are on their way. Whoever completes it (the fetch stage in the batch's turn, or a
flight that waits for its rows) hands its rows on to all that registered for them and then leaves the window, before
anybody else sees the batch: a user may change a batch in place, the rows that others got are those that arrived.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from gnnsys.ops import IdTable, gather_rows, move_rows

_POSITION = 0xFFFFFFFF  # a place is a flight's number, shifted by 32, and a position in its rows
_SLACK = 1 << 16


class Pending(Protocol):
    """Rows that were asked for; `result` waits until they are where they belong."""

    def result(self) -> object: ...


@dataclass
class Leg:
    """Rows of one kind that a batch needs: tables that have the same ids and the same owners."""

    key: Hashable
    ids: Tensor  # [num_rows]
    remote: Tensor  # int64, positions in ids of rows that must be asked for, in any order
    outs: list[Tensor]  # one per table, [num_rows, ...]
    id_bound: int
    asked: Tensor | None = None  # int64, positions of ids to ask for, the local ones too; None: all
    num_shared: int = 0  # rows that come from other batches, or a second time in this one


class _Move(NamedTuple):
    """dst[to] = src[rows], for each pair of tables."""

    src: list[Tensor]
    rows: Tensor
    dst: list[Tensor]
    to: Tensor

    def __call__(self) -> None:
        for src, dst in zip(self.src, self.dst):
            rows = gather_rows(src, self.rows) if src is dst else None
            move_rows(src if rows is None else rows, dst, index=self.rows if rows is None else None, order=self.to)


class Flight:
    """One batch on its way. `lock` is held by whoever sends its requests, and by whoever completes it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.number = -1
        self.legs: dict[Hashable, Leg] = {}
        self.pending: list[Pending] = []
        self.donors: list[Flight] = []  # flights that bring rows of this one; all of them entered before it
        self.repeats: list[_Move] = []  # rows that this flight needs more than once
        self.moves: list[_Move] = []  # rows for others
        self._window: Window | None = None
        self._is_done = False
        self._error: BaseException | None = None

    def complete(self) -> None:
        """Returns when every row is in place and has been handed on. Idempotent; raises what went wrong each time."""
        with self.lock:
            if not self._is_done:
                try:
                    self._complete()
                except BaseException as error:
                    self.fail(error)
                self._is_done = True
                self.legs, self.pending, self.donors, self.repeats, self.moves = {}, [], [], [], []
        if self._error is not None:
            raise self._error

    def _complete(self) -> None:
        for pending in self.pending:
            pending.result()
        for donor in self.donors:
            donor.complete()
        for move in self.repeats:
            move()
        self._leave()
        for move in self.moves:
            move()

    def fail(self, error: BaseException) -> None:
        """Its rows will not come: those that wait for them get the same error, new ones are not offered them."""
        self._error, self._is_done = error, True
        self._leave()

    def _leave(self) -> None:
        if self._window is not None:
            self._window.leave(self)


class Window:
    """The flights that others may take rows from: the last `size` that are not complete."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._flights: dict[int, Flight] = {}  # by number, oldest first
        self._places: dict[Hashable, _Places] = {}
        self._next = 0

    def enter(self, flight: Flight, legs: Sequence[Leg]) -> None:
        """Decides which rows of the legs the flight asks for; the others are copied when their donors are complete.

        The caller holds the flight's lock until what it asks for is in `flight.pending`.
        """
        with self._lock:
            flight.number, self._next = self._next, self._next + 1
            flight._window = self
            for leg in legs:
                if leg.remote.numel():
                    self._plan(flight, leg)
                flight.legs[leg.key] = leg
            self._flights[flight.number] = flight
            while len(self._flights) > self._size:  # abandoned ones are never completed
                del self._flights[next(iter(self._flights))]

    def leave(self, flight: Flight) -> None:
        """After this nobody registers with the flight any more."""
        with self._lock:
            self._flights.pop(flight.number, None)

    def forget(self) -> None:
        """No later flight takes rows from those that are under way now."""
        with self._lock:
            self._flights.clear()

    def __len__(self) -> int:
        return len(self._flights)

    def _plan(self, flight: Flight, leg: Leg) -> None:
        places = self._places.get(leg.key)
        if places is None:
            places = self._places[leg.key] = _Places(leg.id_bound)
        ids = leg.ids.index_select(0, leg.remote)  # also where all are remote: `remote` is in the order of their owners
        if places.is_crowded(ids.numel()):
            places.clear()
            for other in self._flights.values():
                if leg.key in other.legs:
                    theirs = other.legs[leg.key]
                    places.put(theirs.ids[theirs.remote], other.number, theirs.remote)
        before, now = places.put(ids, flight.number, leg.remote)
        shared = self._is_live(before)
        repeated = (now & _POSITION != leg.remote).logical_and_(~shared).nonzero().view(-1)
        taken = shared.nonzero().view(-1)
        leg.num_shared = taken.numel() + repeated.numel()
        if leg.num_shared == 0:
            return
        ask = torch.ones(leg.ids.numel(), dtype=torch.bool)
        for rows in (taken, repeated):
            ask.index_fill_(0, leg.remote.index_select(0, rows), False)
        leg.asked = ask.nonzero().view(-1)
        self._take(flight, leg, before.index_select(0, taken), leg.remote.index_select(0, taken))
        if repeated.numel():
            rows = now.index_select(0, repeated) & _POSITION
            flight.repeats.append(_Move(leg.outs, rows, leg.outs, leg.remote.index_select(0, repeated)))

    def _take(self, flight: Flight, leg: Leg, places: Tensor, to: Tensor) -> None:
        """Registers with the flights that have the rows at `places`; they go to the positions `to` of the leg."""
        numbers, rows = places >> 32, places & _POSITION
        for number, donor in self._flights.items():
            mine = (numbers == number).nonzero().view(-1)
            if mine.numel():
                source = donor.legs[leg.key].outs
                move = _Move(source, rows.index_select(0, mine), leg.outs, to.index_select(0, mine))
                donor.moves.append(move)
                flight.donors.append(donor)

    def _is_live(self, places: Tensor) -> Tensor:
        """Which places are in flights of the window. Those completed in turn are its oldest: then numbers tell."""
        numbers = list(self._flights)
        if not numbers:
            return torch.zeros(places.numel(), dtype=torch.bool)
        if len(numbers) == self._next - 1 - numbers[0]:  # all between the oldest and the one that enters now
            return places >= numbers[0] << 32
        return torch.isin(places >> 32, torch.tensor(numbers))


class _Places:
    """Where the rows of ids are: the last flight that has them, and the position there."""

    def __init__(self, id_bound: int) -> None:
        self._table = IdTable(id_bound)
        self._place = torch.empty(0, dtype=torch.int64)  # by local id of the table
        self._num_ids = 0

    def is_crowded(self, num_ids: int) -> bool:
        """Whether most of what is known must be about flights that are gone."""
        return self._num_ids > 8 * num_ids + _SLACK

    def clear(self) -> None:
        self._table.clear()
        self._num_ids = 0

    def put(self, ids: Tensor, number: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Notes that flight `number` has these ids; returns where each was before, and where it is now.

        Before: -1 where nothing had it. Now: one of the positions where several are of the same id.
        """
        local, fresh = self._table.insert(ids)
        first, self._num_ids = self._num_ids, self._num_ids + fresh.numel()
        if self._num_ids > self._place.numel():
            grown = torch.empty(2 * self._num_ids, dtype=torch.int64)
            grown[:first] = self._place[:first]
            self._place = grown
        self._place[first : self._num_ids] = -1
        before = self._place.index_select(0, local)
        self._place.scatter_(0, local, (number << 32) + positions)
        return before, self._place.index_select(0, local)
