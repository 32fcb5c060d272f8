"""Rows shared in flight: what one batch has asked a source for, those behind it copy instead of asking again.

`SharedInFlight` wraps a source whose rows never change. A flight is one batch whose rows are on their way. Whoever
completes it (its own batch in its turn, or a flight that waits for its rows) hands its rows on to all that registered
for them and leaves the window, before anybody else sees the batch: a user may change a batch in place, the rows that
others got are those that arrived. A copy of what it asked for stays with the window for a while. Every row is kept
once, where the flight that asked for it has put it: first in, first out, which for the same memory saves more than
keeping whole batches (`kept_rows.py`). `row_places.py` says where the row of an id is.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gnnsys.ops import bucket_ids, gather_rows, move_rows
from gnnsys.store.candidates import Located, Policy, remote_positions
from gnnsys.store.kept_rows import KeptRows, RowSlab
from gnnsys.store.row_places import POSITION, NotedRows, RowPlaces
from gnnsys.store.source import HOST, PendingRead, ReadContext, Source, begin_scattered, row_bytes

_SLACK = 1 << 16


class SharedInFlight:
    """`source`, whose rows must never change, with the rows shared that other batches of `window` have asked for.

    Sources of the same `kind` in a window are read with the same ids; those of them that have their rows in the same
    places are planned together. By default a source is a kind of its own.
    """

    mutable = False

    def __init__(self, source: Source, window: InFlightWindow, kind: Hashable = None) -> None:
        if source.mutable is not False:
            raise ValueError("rows that may change are not shared between batches: the source must say mutable=False")
        if source.device.type != "cpu":
            raise ValueError(f"rows are shared on the host, and the source brings them to {source.device}")
        self._source, self._window = source, window
        self._kind = object() if kind is None else kind

    @property
    def shape(self) -> tuple[int, ...]:
        return self._source.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._source.dtype

    @property
    def device(self) -> torch.device:
        return self._source.device

    @property
    def is_remote(self) -> bool:
        return self._source.is_remote

    @property
    def placement(self) -> Hashable:
        return self._source.placement

    def locate(self, ids: Tensor, policy: Policy | None = None) -> list[Located]:
        """As the source says; which rows are in flight is known only to a read."""
        return self._source.locate(ids, policy)

    def begin(self, ids: Tensor, out: Tensor | None, context: ReadContext, at: Tensor | None = None) -> PendingRead:
        if at is not None:
            return begin_scattered(self, ids, out, context, at)
        ids = context.on(ids, HOST)
        out = context.empty((ids.numel(), *self.shape[1:]), self.dtype) if out is None else out
        flight = context.collect(self._window, lambda: Flight(self._window), wraps=True)
        flight.add((self._kind, self.placement), self._source, ids, out, context)
        return _Arriving(flight, out)


class _Arriving(NamedTuple):
    """Rows of a flight."""

    flight: Flight
    out: Tensor

    def result(self) -> Tensor:
        self.flight.complete()
        return self.out


class ArrivingRows(Protocol):
    """Rows that were asked for; `result` waits until they are where they belong."""

    def result(self) -> object: ...


@dataclass
class Leg:
    """Rows of one kind that a batch needs: of sources that have the same ids and the same owners."""

    key: Hashable
    ids: Tensor  # [num_rows]
    remote: Tensor  # int64, positions in ids of rows that must be asked for, in any order
    outs: list[Tensor]  # one per source, [num_rows, ...]
    id_bound: int
    asked: Tensor | None = None  # int64, positions of ids to ask for, the local ones too; None: all
    held: Tensor | None = None  # int64, positions of ids that others may have from this leg; None: `remote`
    noted: NotedRows | None = None  # where the window has written down the places of `held`
    num_shared: int = 0  # rows that come from other batches, or a second time in this one
    sources: list[Source] = field(default_factory=list)  # as outs

    def begin(self, context: ReadContext) -> list[ArrivingRows]:
        """Asks the sources for what is not shared."""
        if self.asked is not None and self.asked.numel() == 0:
            return []
        ids = self.ids if self.asked is None else self.ids[self.asked]
        return [s.begin(ids, out, context, self.asked) for s, out in zip(self.sources, self.outs, strict=True)]


class _Move(NamedTuple):
    """dst[to] = src[rows], for each pair of tables."""

    src: list[Tensor]
    rows: Tensor
    dst: list[Tensor]
    to: Tensor

    def __call__(self) -> None:
        for src, dst in zip(self.src, self.dst, strict=True):
            rows = gather_rows(src, self.rows) if src is dst else None
            move_rows(src if rows is None else rows, dst, index=self.rows if rows is None else None, order=self.to)


class Flight:
    """One batch on its way. `lock` is held by whoever sends its requests, and by whoever completes it."""

    def __init__(self, window: InFlightWindow | None = None) -> None:
        self.lock = threading.Lock()
        self.number = -1
        self.legs: dict[Hashable, Leg] = {}
        self.pending: list[ArrivingRows] = []
        self.donors: list[Flight] = []  # flights that bring rows of this one; all of them entered before it
        self.copies: list[_Move] = []  # rows that were kept of flights before it
        self.repeats: list[_Move] = []  # rows that this flight needs more than once
        self.moves: list[_Move] = []  # rows for others
        self._window: InFlightWindow | None = None  # once it has entered
        self._to_enter = window
        self._waiting: dict[Hashable, Leg] = {}  # legs that are not sent yet
        self._is_done = False
        self._error: BaseException | None = None

    def add(self, key: Any, source: Source, ids: Tensor, out: Tensor, context: ReadContext) -> None:
        """A read that is sent with the flight."""
        while key in self._waiting and self._waiting[key].ids is not ids:
            key = (key, "again")  # of the same source, with other ids
        if key not in self._waiting:
            remote = remote_positions(source.locate(ids, context.policy), ids.numel())
            self._waiting[key] = Leg(key, ids, remote, [], source.shape[0])
        self._waiting[key].outs.append(out)
        self._waiting[key].sources.append(source)

    @contextmanager
    def sending(self, context: ReadContext) -> Iterator[None]:
        """Enters the window and begins what has to be asked for. Nobody completes the flight before it is all sent."""
        legs, self._waiting = list(self._waiting.values()), {}
        for leg in legs:  # rows are exchanged with legs of the very same sources: the window keeps these alive
            leg.key = (leg.key, *map(id, leg.sources))
        with self.lock:
            try:
                shared = [leg for leg in legs if leg.remote.numel()]
                if shared and self._to_enter is not None:
                    self._to_enter.enter(self, shared)
                for leg in legs:
                    self.pending += leg.begin(context)
                    num_bytes = sum(row_bytes(source) for source in leg.sources)
                    context.count(rows_shared=leg.num_shared * len(leg.outs), bytes_shared=leg.num_shared * num_bytes)
                yield
            except BaseException as error:
                self.fail(error)
                raise

    def complete(self) -> None:
        """Returns when every row is in place and has been handed on. Idempotent; raises what went wrong each time."""
        with self.lock:
            if not self._is_done:
                try:
                    self._complete()
                except BaseException as error:
                    self.fail(error)
                self._is_done = True
                self.legs, self.pending, self.donors = {}, [], []
                self.copies, self.repeats, self.moves = [], [], []
        if self._error is not None:
            raise self._error

    def _complete(self) -> None:
        for pending in self.pending:
            pending.result()
        for donor in self.donors:
            donor.complete()
        for move in (*self.copies, *self.repeats):
            move()
        if self._window is not None:
            self._window.land(self)
        for move in self.moves:
            move()

    def fail(self, error: BaseException) -> None:
        """Its rows will not come: those that wait for them get the same error, new ones are not offered them."""
        self._error, self._is_done = error, True
        if self._window is not None:
            self._window.leave(self)


class InFlightWindow:
    """What others may take rows from: the last `size` flights that are not complete, and what is kept of others.

    Kept are at most `keep` times as many bytes as a flight has remote rows.
    """

    def __init__(self, size: int, keep: int = 0) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._flights: dict[int, Flight] = {}  # by number, oldest first
        self._kept = KeptRows(keep)
        self._places: dict[Hashable, RowPlaces] = {}
        self._next = 0

    def enter(self, flight: Flight, legs: Sequence[Leg]) -> None:
        """Decides which rows of the legs the flight asks for; the others are copied when their donors are complete.

        The caller holds the flight's lock until what it asks for is in `flight.pending`.
        """
        with self._lock:
            flight.number = self._new_number()
            flight._window = self
            self._drop_idle_places(legs)
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

    def land(self, flight: Flight) -> None:
        """Leaves, but for a copy of what the flight brought."""
        kept: list[tuple[Leg, Tensor, int, RowSlab, int]] = []
        if self._kept.keep:
            with self._lock:
                if flight.number not in self._flights:  # forgotten: nobody would find its rows
                    return
                for leg in flight.legs.values():
                    held = leg.remote if leg.held is None else leg.held
                    if held.numel():
                        num_remote = leg.remote.numel()
                        room = self._kept.room_for(leg.key, leg.outs, held.numel(), num_remote, self._new_number)
                        kept.append((leg, held, *room))
        for leg, held, _, slab, first in kept:
            for out, rows in zip(leg.outs, slab.rows, strict=True):
                gather_rows(out, held, out=rows[first : first + held.numel()])
        with self._lock:
            if self._flights.pop(flight.number, None) is None:
                return
            for leg, held, number, slab, first in kept:
                if number in self._kept:
                    slab.ids.append((first, leg.ids.index_select(0, held)))
                    self._places[leg.key].renote(leg.noted, slab.ids[-1][1], (number << 32) + first)
            num_remote = sum(leg.remote.numel() * out[:1].nbytes for leg in flight.legs.values() for out in leg.outs)
            self._kept.shrink(num_remote)

    def forget(self) -> None:
        """No later flight takes rows from those that are under way now, or were."""
        with self._lock:
            self._flights.clear()
            self._kept.clear()

    def __len__(self) -> int:
        return len(self._flights)

    def num_kept_bytes(self) -> int:
        with self._lock:
            return self._kept.num_bytes()

    def _new_number(self) -> int:
        """Of a flight or a slab: both are numbered in the order in which they are made."""
        number, self._next = self._next, self._next + 1
        return number

    def _plan(self, flight: Flight, leg: Leg) -> None:
        ids = leg.ids.index_select(0, leg.remote)  # also where all are remote: `remote` is in the order of their owners
        places = self._places_of(leg, ids.numel())
        local = places.local(ids)
        before = places.place.index_select(0, local)
        shared = self._is_live(before)
        taken, new = shared.nonzero().view(-1), (~shared).nonzero().view(-1)
        mine = torch.arange(new.numel(), device="cpu") + (flight.number << 32)
        # An id that comes twice has one place: the other rows are repeats of that one.
        leg.noted = NotedRows(local.index_select(0, new), places.version)
        repeated = (places.put(leg.noted.local, mine) != mine).nonzero().view(-1)
        leg.num_shared = taken.numel() + repeated.numel()
        if leg.num_shared == 0:
            return
        leg.held = leg.remote.index_select(0, new)
        ask = torch.ones(leg.ids.numel(), dtype=torch.bool, device="cpu")
        ask.index_fill_(0, leg.remote.index_select(0, taken), False)
        if repeated.numel():
            to = leg.held.index_select(0, repeated)
            rows = places.place.index_select(0, leg.noted.local.index_select(0, repeated)) & POSITION
            flight.repeats.append(_Move(leg.outs, leg.held.index_select(0, rows), leg.outs, to))
            ask.index_fill_(0, to, False)
        leg.asked = ask.nonzero().view(-1)
        self._take(flight, leg, before.index_select(0, taken), leg.remote.index_select(0, taken))

    def _places_of(self, leg: Leg, num_ids: int) -> RowPlaces:
        """Where rows of this kind are; made anew when most of what is noted there is about flights that are gone."""
        places = self._places.get(leg.key)
        if places is None:
            places = self._places[leg.key] = RowPlaces(leg.id_bound, leg.sources)
        if places.num_ids > 2 * (8 + self._size + self._kept.keep) * num_ids + _SLACK:
            places.clear()
            for number in self._kept:
                for first, ids in self._kept[number].ids if self._kept[number].key == leg.key else ():
                    places.note(ids, (number << 32) + first)
            for number, other in self._flights.items():
                if leg.key in other.legs:
                    theirs = other.legs[leg.key]
                    places.note(theirs.ids[theirs.remote if theirs.held is None else theirs.held], number << 32)
        return places

    def _drop_idle_places(self, legs: Sequence[Leg]) -> None:
        """Of sources that no flight reads any more, columns say that others have replaced; looked for when there are
        new ones."""
        if all(leg.key in self._places for leg in legs):
            return
        live = {leg.key for leg in legs} | self._kept.keys()
        live |= {key for flight in self._flights.values() for key in flight.legs}
        self._places = {key: places for key, places in self._places.items() if key in live}

    def _take(self, flight: Flight, leg: Leg, places: Tensor, to: Tensor) -> None:
        """Has the rows at `places` brought to the positions `to` of the leg: by flights, or from what was kept."""
        numbers = sorted((*self._kept, *self._flights))
        bounds = torch.tensor([0, *(number << 32 for number in (*numbers, self._next))], device="cpu")
        grouped = bucket_ids(places, bounds)
        sizes, begin = grouped.counts.tolist(), 0
        for number, size in zip((-1, *numbers), sizes, strict=True):  # nothing is before the first
            if size == 0:
                continue
            end = begin + size
            theirs, at = grouped.local[begin:end], to.index_select(0, grouped.order[begin:end])
            begin = end
            if number in self._kept:
                flight.copies.append(_Move(self._kept[number].rows, theirs, leg.outs, at))
                continue
            donor = self._flights[number]
            other = donor.legs[leg.key]
            held = other.remote if other.held is None else other.held
            donor.moves.append(_Move(other.outs, held.index_select(0, theirs), leg.outs, at))
            flight.donors.append(donor)

    def _is_live(self, places: Tensor) -> Tensor:
        """Which places are in flights of the window or in slabs."""
        numbers = sorted((*self._kept, *self._flights))
        if not numbers:
            return torch.zeros(places.numel(), dtype=torch.bool, device="cpu")
        before = numbers[0] - 1  # and all that are older, are gone
        is_live = torch.zeros(self._next - before, dtype=torch.bool, device="cpu")
        is_live[torch.tensor(numbers, device="cpu") - before] = True
        return is_live.index_select(0, ((places >> 32) - before).clamp_(min=0))
