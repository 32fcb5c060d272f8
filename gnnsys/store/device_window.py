"""Rows of other machines that a device keeps: what one batch has asked for, those behind it read on the device.

The device's side of `in_flight.py`. A ring of rows in the device's memory has a place for every row that a batch asks
for, from the moment on that it is asked for: first in, first out. Which rows a batch finds there is decided on the
device, so only the ids of the others go to the host, and only their rows come over the network and the bus.

Batches take their rows in the order in which they were planned. So a place is read by all that count on its row before
somebody else's row is put there. A batch whose rows do not come fails alone: its places are void, and the first behind
it that counts on one of them asks for that row itself.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnsys.comm import RequestContext, current_context, use_context
from gnnsys.ops import DeviceReads, gather_rows, to_host_together
from gnnsys.store.memory_budget import MemoryBudget
from gnnsys.store.source import PendingRead, ReadContext, Source, row_bytes, send

_SHARE_OF_DEVICE = 4  # a ring takes at most this part of what the device has left


class DeviceWindow:
    """What the batches of one loader share on `device`: as many rows as `keep` batches and one more have to ask for."""

    def __init__(self, device: torch.device, keep: int) -> None:
        self.device, self._keep = device, keep
        self._lock = threading.Lock()
        self._rings: dict[Hashable, _Ring | None] = {}  # None: the device has no memory for it
        self._last: DeviceFlight | None = None
        self._planned = _Order(device)

    def flight(self, context: ReadContext) -> DeviceFlight:
        """That of the batch which reads in this context."""
        return context.collect(self, lambda: DeviceFlight(self), wraps=True)

    def enter(self, flight: DeviceFlight, legs: Sequence[DeviceLeg]) -> None:
        """Finds out which rows of the legs have to be asked for, and gives these their places."""
        with self._lock, self._planned:
            if any(leg.key not in self._rings for leg in legs):  # rings of columns that others have replaced, say, go
                keys = {leg.key for leg in legs}
                self._rings = {key: ring for key, ring in self._rings.items() if key in keys}
            for leg in legs:
                ring = self._ring_of(leg)
                if ring is not None:
                    leg.plan = ring.plan(leg.ids)
            flight.before, self._last = self._last, flight

    def withdraw(self, legs: Sequence[DeviceLeg]) -> None:
        """Rows that these legs were to bring will not come: batches that are planned from now on ask for them."""
        with self._lock, self._planned:
            for leg in legs:
                if leg.plan is not None:
                    leg.plan.withdraw()

    def forget(self) -> None:
        """No later batch takes rows that were asked for before. Batches under way keep what they count on."""
        with self._lock:
            self._rings, self._last = {}, None

    def num_bytes(self) -> int:
        """That rings take on the device."""
        return sum(ring.num_bytes for ring in list(self._rings.values()) if ring is not None)

    def _ring_of(self, leg: DeviceLeg) -> _Ring | None:
        if not leg.ids.numel():  # the first batch of a small share, say: it does not tell how large a ring should be
            return None
        capacity = (self._keep + 1) * leg.ids.numel()
        if leg.key not in self._rings:
            self._rings[leg.key] = self._made(leg, capacity)
        ring = self._rings[leg.key]
        if ring is not None and 2 * ring.capacity < capacity:  # it was made for a small batch
            self._rings[leg.key] = ring = None  # and goes first
            self._rings[leg.key] = ring = self._made(leg, capacity)
        return ring if ring is not None and leg.ids.numel() <= ring.capacity else None

    def _made(self, leg: DeviceLeg, capacity: int) -> _Ring | None:
        needed = _Ring.bytes_for(leg.num_ids, capacity, leg.sources)
        if needed > MemoryBudget.of(self.device).left() // _SHARE_OF_DEVICE:
            return None
        try:
            return _Ring(leg.num_ids, capacity, leg.sources, self.device)
        except torch.OutOfMemoryError:  # another process was faster, or what is left is in pieces
            return None


class DeviceLeg:
    """Rows of one kind that a batch needs: of sources that are read with the same ids and have them in one place."""

    def __init__(self, key: Hashable, ids: Tensor, num_ids: int) -> None:
        self.key, self.ids, self.num_ids = key, ids, num_ids  # ids on the device, of [0, num_ids)
        self.sources: list[Source] = []
        self.otherwise: list[Source] = []  # as sources: what to ask where there is no ring
        self.plan: _RingPlan | None = None  # None: all rows are asked for, and none is kept
        self.asked: list[Tensor] = []  # page-locked, one for each source
        self.pending: list[PendingRead] = []
        self.rows: list[Tensor] = []  # on the device, one for each source, once the flight is complete
        self._context, self._said = ReadContext(), RequestContext()  # of the batch

    def begin(self, context: ReadContext) -> None:
        """Asks for the rows that are in no place. The host waits for their ids."""
        self._context, self._said = context, current_context()
        ids = self.ids.to("cpu") if self.plan is None else self.plan.asked
        num_shared = self.ids.numel() - ids.numel()
        pin = self.ids.device.type == "cuda"
        for source in self.otherwise if self.plan is None else self.sources:
            rows = torch.empty((ids.numel(), *source.shape[1:]), dtype=source.dtype, pin_memory=pin, device="cpu")
            self.asked.append(rows)
            if ids.numel():
                self.pending.append(source.begin(ids, rows, context))
            context.count(rows_shared=num_shared, bytes_shared=num_shared * row_bytes(source))

    def land(self, device: torch.device) -> None:
        """Waits for what was asked for, and makes the rows of all ids of it and of what is in the ring."""
        for rows, read in zip(self.asked, self.pending, strict=False):  # nothing is pending where nothing was asked
            arrived = read.result()
            if arrived is not rows:
                rows.copy_(arrived)
        moved = [send(rows, device) for rows in self.asked]
        if self.plan is None:
            self.rows = moved
        else:
            missing = self.plan.missing()
            again = [] if missing is None else [send(rows, device) for rows in self._ask_again(missing)]
            self.rows = self.plan.take(moved, missing, again)
        self.asked, self.pending, self.plan = [], [], None

    def _ask_again(self, missing: Tensor) -> list[Tensor]:
        """Rows that another batch was to bring and did not, of each source, asked for in this batch's name."""
        assert self.plan is not None
        self.plan.ring.note_reads(self.ids)
        ids, which = self.ids.index_select(0, missing).to("cpu").unique(return_inverse=True)
        context = ReadContext(
            batch=self._context.batch, wire_dtype=self._context.wire_dtype, policy=self._context.policy
        )
        with use_context(self._said):
            reads = [source.begin(ids, None, context) for source in self.sources]
            context.send()
        rows = [read.result().index_select(0, which) for read in reads]
        num_bytes = missing.numel() * sum(map(row_bytes, self.sources))
        self._context.count(**context.counts)
        self._context.count(rows_shared=-missing.numel() * len(self.sources), bytes_shared=-num_bytes)
        return rows

    def void(self) -> None:
        """Its rows have not come: its places have none, for all that were planned behind it."""
        if self.plan is not None:
            self.plan.void()
        self.asked, self.pending, self.plan = [], [], None


class DeviceFlight:
    """The legs of one batch. `lock` is held by whoever sends its requests, and by whoever completes it."""

    def __init__(self, window: DeviceWindow) -> None:
        self.lock = threading.Lock()
        self.before: DeviceFlight | None = None  # planned before it, until it is complete
        self._window = window
        self._legs: dict[Hashable, DeviceLeg] = {}
        self._order = window._planned.another()
        self._is_done = False
        self._error: BaseException | None = None

    def add(self, key: Hashable, ids: Tensor, source: Source, otherwise: Source) -> tuple[DeviceLeg, int]:
        """A read that is sent with the flight: its leg, and the number of its rows there."""
        while key in self._legs and self._legs[key].ids is not ids:
            key = (key, "again")  # of the same kind, with other ids
        leg = self._legs.setdefault(key, DeviceLeg(key, ids, source.shape[0]))
        leg.sources.append(source)
        leg.otherwise.append(otherwise)
        return leg, len(leg.sources) - 1

    @contextmanager
    def sending(self, context: ReadContext) -> Iterator[None]:
        """Plans, and begins what has to be asked for. Nobody completes the flight before it is all sent."""
        legs = list(self._legs.values())
        for leg in legs:  # places are shared by reads of the very same sources: the ring keeps these alive
            leg.key = (leg.key, *map(id, leg.sources))
        with self.lock:
            try:
                self._window.enter(self, legs)
            except BaseException as error:
                self._error, self._is_done, self._legs = error, True, {}
                self._window.forget()  # what was planned of it has no turn
                raise
            try:
                for leg in legs:
                    leg.begin(context)
                yield
            except BaseException as error:
                self._error = error
                self._window.withdraw(legs)
                raise

    def complete(self) -> None:
        """Returns when the rows of all legs are on the device, in the order of the stream that is current here.
        Idempotent; raises what went wrong each time. Whoever is interrupted hears of it at once, whichever batch's rows
        it was that the thread waited for."""
        chain: list[DeviceFlight] = []
        flight: DeviceFlight | None = self
        while flight is not None:
            chain.append(flight)
            flight = flight.before
        for flight in reversed(chain):
            flight._complete()
        if self._error is not None:
            raise self._error
        self._order.wait()

    def _complete(self) -> None:
        with self.lock:
            if self._is_done:
                return
            before, self.before = self.before, None
            if before is not None:
                before._order.wait()
            interrupt: BaseException | None = None
            if self._error is None:
                try:
                    for leg in self._legs.values():
                        leg.land(self._window.device)
                except BaseException as error:
                    self._error = error
                    interrupt = None if isinstance(error, Exception) else error
                    self._window.withdraw(list(self._legs.values()))
            if self._error is not None:
                for leg in self._legs.values():
                    leg.void()
            self._order.note()
            self._is_done, self._legs = True, {}
            if interrupt is not None:  # Ctrl-C, say: it is no failure of the batch
                raise interrupt


class _RingPlan(NamedTuple):
    """Where the rows of a leg are: in the ring, or among those that are asked for and get places in it."""

    ring: _Ring
    places: Tensor  # int64 [num_ids], in the ring; anything for rows that are asked for
    new_at: Tensor  # int64, which of the ids are asked for, or the same as one that is
    new_rows: Tensor  # int64, beside new_at: which of the rows that are asked for
    new_ids: Tensor  # [num_asked], each once
    new_places: Tensor  # int64 [num_asked]
    asked: Tensor  # the same as new_ids, on the host

    def take(self, arrived: Sequence[Tensor], missing: Tensor | None, again: Sequence[Tensor]) -> list[Tensor]:
        """The rows of all ids, of each source; those that have arrived are put into the ring behind that.

        `missing` are positions of ids whose places are void, and `again` their rows.
        """
        found = []
        self.ring.note_reads(self.places, self.new_at, self.new_rows, self.new_ids, self.new_places)
        for number, (ring, rows) in enumerate(zip(self.ring.rows, arrived, strict=True)):
            whole = gather_rows(ring, self.places)
            if missing is not None:
                whole.index_copy_(0, missing, again[number])
                ring.index_copy_(0, self.places.index_select(0, missing), again[number])
            if rows.shape[0]:
                whole.index_copy_(0, self.new_at, gather_rows(rows, self.new_rows))
                ring.index_copy_(0, self.new_places, rows)
            found.append(whole)
        if missing is not None:
            self.ring.note_void(self.places.index_select(0, missing), False)
        self.ring.note_void(self.new_places, False)
        return found

    def missing(self) -> Tensor | None:
        """Positions of ids that it counts on and whose places are void; None: there are none."""
        void = self.ring.void
        if void is None:
            return None
        is_missing = gather_rows(void, self.places).index_fill_(0, self.new_at, False)
        found = is_missing.nonzero().view(-1)
        return found if found.numel() else None

    def void(self) -> None:
        self.ring.note_void(self.new_places, True)

    def withdraw(self) -> None:
        self.ring.withdraw(self.new_ids, self.new_places)


class _Ring:
    """Places for `capacity` rows of each source, which they get in turn, and which id has which place."""

    def __init__(self, num_ids: int, capacity: int, sources: Sequence[Source], device: torch.device) -> None:
        self.capacity, self.sources = capacity, tuple(sources)
        self.rows = [torch.empty((capacity, *s.shape[1:]), dtype=s.dtype, device=device) for s in sources]
        # One more id stands for none at all.
        self._place_of = torch.full((num_ids + 1,), -1, dtype=torch.int32, device=device)
        self._id_at = torch.full((capacity,), num_ids, dtype=torch.int64, device=device)
        self._no_place = torch.full((), -1, dtype=torch.int32, device=device)
        self._next = 0
        self.void: Tensor | None = None  # bool [capacity], in the order in which batches land; None: no place is
        self._device, self._reads = device, DeviceReads()
        self.num_bytes = _Ring.bytes_for(num_ids, capacity, sources)
        MemoryBudget.of(device).watch(self, "rows of other machines", lambda ring: ring.num_bytes)

    @staticmethod
    def bytes_for(num_ids: int, capacity: int, sources: Sequence[Source]) -> int:
        return 4 * (num_ids + 1) + capacity * (8 + sum(map(row_bytes, sources)))

    def note_reads(self, *planned: Tensor) -> None:
        """The current stream uses the ring, and what another stream may have planned."""
        if self._device.type == "cuda":
            self._reads(self._device, *self.rows, self._place_of, self._id_at, self._no_place)
            for tensor in planned:
                tensor.record_stream(torch.cuda.current_stream(self._device))

    def note_void(self, places: Tensor, is_void: bool) -> None:
        """Says of places, when it is their batch's turn, whether their rows are missing."""
        if self.void is None and is_void:
            self.void = torch.zeros(self.capacity, dtype=torch.bool, device=self._device)
        if self.void is not None:
            self.note_reads(places, self.void)
            self.void.index_fill_(0, places, is_void)
            if not is_void and not bool(self.void.any()):
                self.void = None

    def withdraw(self, ids: Tensor, places: Tensor) -> None:
        """The ids have no place any more, unless somebody else has got it meanwhile."""
        self.note_reads(ids, places, self._place_of, self._id_at)
        nobody = self._place_of.numel() - 1
        is_theirs = self._id_at.index_select(0, places) == ids
        self._place_of.index_put_((torch.where(is_theirs, ids, nobody),), self._no_place)
        self._id_at.index_copy_(0, places, torch.where(is_theirs, nobody, self._id_at.index_select(0, places)))

    def plan(self, ids: Tensor) -> _RingPlan:
        """Gives places to the ids that have none, at the cost of those that have had theirs for longest."""
        self.note_reads()
        num_ids, nobody = ids.numel(), self._place_of.numel() - 1
        places, numbers = gather_rows(self._place_of, ids), torch.arange(num_ids, device=ids.device)
        is_new = places < 0
        wanted = torch.where(is_new, ids, nobody).long()
        # Of equal ids one is asked for: the one whose number is left standing.
        self._place_of.index_put_((wanted,), numbers.int())
        standing = gather_rows(self._place_of, wanted).long()
        is_asked = is_new & (standing == numbers)
        # All at full length, so that the host waits once: for both numbers, and for the ids that it is to ask for.
        new_rank, asked_rank = is_new.cumsum(0), is_asked.cumsum(0)
        new_at, new_rows, new_ids = (
            _packed(chosen, rank, rows)
            for chosen, rank, rows in (
                (is_new, new_rank, numbers),
                (is_new, new_rank, asked_rank.index_select(0, standing) - 1),
                (is_asked, asked_rank, wanted),
            )
        )
        sizes, asked = to_host_together([torch.stack([new_rank[-1], asked_rank[-1]]), new_ids])
        num_new, num_asked = sizes.tolist()
        new_at, new_rows, new_ids = new_at[:num_new], new_rows[:num_new], new_ids[:num_asked]
        new_places = (numbers[:num_asked] + self._next) % self.capacity
        self._next = (self._next + num_asked) % self.capacity
        self._place_of.index_put_((self._id_at.index_select(0, new_places),), self._no_place)
        self._place_of.index_put_((new_ids,), new_places.int())
        self._id_at.index_copy_(0, new_places, new_ids)
        places = places.long().clamp_(min=0)
        return _RingPlan(self, places, new_at, new_rows, new_ids, new_places, asked[:num_asked])


def _packed(chosen: Tensor, rank: Tensor, rows: Tensor) -> Tensor:
    """The chosen rows one after the other, and anything behind them; `rank` counts those chosen up to each."""
    out = torch.empty(rows.numel() + 1, dtype=rows.dtype, device=rows.device)
    return out.index_put_((torch.where(chosen, rank - 1, rows.numel()),), rows)


class _Order:
    """Work on the device that comes one after the other, whichever stream its threads have."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._event = device, None if device.type != "cuda" else torch.cuda.Event()
        self._stream: Any = None

    def another(self) -> _Order:
        return _Order(self._device)

    def note(self) -> None:
        """All that was queued on the current stream so far."""
        if self._event is not None:
            self._stream = torch.cuda.current_stream(self._device)
            self._event.record(self._stream)

    def wait(self) -> None:
        """What is queued on the current stream from here on comes behind what was noted."""
        if self._event is not None and self._stream is not None:
            stream = torch.cuda.current_stream(self._device)
            if stream != self._stream:
                stream.wait_event(self._event)

    def __enter__(self) -> None:
        self.wait()

    def __exit__(self, *error: object) -> None:
        self.note()
