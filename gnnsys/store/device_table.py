"""DeviceTable: a table as a device reads it. Rows of own parts come from its memory, or over the bus from mapped files.

Ids stay on the device. Only where a row is on another machine do ids go to the host: those rows are pulled as any
others, into page-locked memory, and put between the rest when they have come. A cache on the device may stand in front
of both, and is filled with the rows that would cost most: remote ones first.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gnnsys.comm import BACKGROUND, RequestContext, use_context
from gnnsys.graph import IdsLike
from gnnsys.ops import DeviceReads, gather_rows, read_table
from gnnsys.store.candidates import DEVICE, Candidate, Located, Policy
from gnnsys.store.columns import ColumnChoice, DeviceColumns
from gnnsys.store.device_cache import CacheCounters
from gnnsys.store.device_window import DeviceFlight, DeviceLeg, DeviceWindow
from gnnsys.store.dist_tensor import DistTensor
from gnnsys.store.memory_budget import MemoryBudget
from gnnsys.store.source import PendingRead, ReadContext, Source, begin_scattered, read_rows, send
from gnnsys.store.visit_counts import VisitCounts

_MAX_PIECES = 64  # that are read at once
_FILL_BYTES = 1 << 26  # rows that are read together while a cache is filled


class TablePiece(NamedTuple):
    """Rows `first` and on of a table, where the device reads them."""

    first: int
    rows: Tensor

    @property
    def end(self) -> int:
        return self.first + self.rows.shape[0]


class RowCache(NamedTuple):
    """Rows with a copy on the device: row i is `rows[slots[i]]` where `slots[i]` is not negative."""

    rows: Tensor
    slots: Tensor  # int32 [num_rows]
    hits: Tensor  # int64 [1], counted by whoever reads
    name: Hashable  # equal for caches of the same rows of several tables
    reads: DeviceReads  # its own: the next cache may lie where this one did

    def note_read(self) -> None:
        """The current stream reads it: its memory is given to others only when that is done."""
        if self.rows.is_cuda:
            self.reads(self.rows.device, self.rows, self.slots, self.hits)


class _Kept:
    """What the faces of one table share: the cache, how many rows were asked for since it was filled, and which."""

    def __init__(self) -> None:
        self.cache: RowCache | None = None
        self.visits: VisitCounts | None = None
        self.num_rows = 0
        self.lock = threading.Lock()

    def count(self, num_rows: int) -> None:
        if self.cache is not None:
            with self.lock:
                self.num_rows += num_rows


class DeviceTable:
    """Reads `table` on `device`, the rows of `pieces` by itself; a source. Rows must not change."""

    mutable = False

    def __init__(
        self,
        table: DistTensor,
        pieces: Sequence[TablePiece],
        device: torch.device,
        remote: Source | None = None,
        choice: ColumnChoice | None = None,
    ) -> None:
        if table.mutable:
            raise ValueError(f"table {table.name!r} changes while it is read: a device cannot keep its rows")
        self.table, self.device = table, device
        self.remote: Source = table if remote is None else remote
        self._pieces = sorted((piece for piece in pieces if piece.rows.shape[0]), key=lambda piece: piece.first)
        self._shape, self._dtype = table.shape, table.dtype
        self.row_bytes = prod(self._shape[1:]) * self._dtype.itemsize
        bounds = [bound for piece in self._pieces for bound in (piece.first, piece.end)]
        # Ids between an even and an odd bound are in a piece.
        self._bounds = torch.tensor(bounds, dtype=torch.int64, device=device)
        self.is_remote = sum(piece.rows.shape[0] for piece in self._pieces) < self._shape[0]
        self._kept = _Kept()
        self._window: DeviceWindow | None = None
        self._kind: Hashable = None
        self._otherwise: Source = self.remote
        self._reads = DeviceReads()
        self._choice = choice
        self.columns = None if choice is None else DeviceColumns(choice, self._dtype, device)
        if remote is None:  # the others share its rows
            MemoryBudget.of(device).watch(self, f"rows of {table.name}", DeviceTable._device_bytes)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def is_on_device(self) -> bool:
        """Whether the rows that are here are in the device's memory, and not in files that it reads."""
        return all(piece.rows.device == self.device for piece in self._pieces)

    @property
    def placement(self) -> Hashable:
        return id(self)

    @property
    def name(self) -> str:
        return self.table.name

    @property
    def _cache(self) -> RowCache | None:
        return self._kept.cache

    @property
    def num_cached(self) -> int:
        """Rows of the cache."""
        cache = self._cache  # which another may take the place of at any time
        return 0 if cache is None else cache.rows.shape[0]

    def cached_rows(self) -> Tensor:
        """Ids of the rows of the cache, ascending, on the host."""
        cache = self._cache
        return (
            torch.empty(0, dtype=torch.int64, device="cpu")
            if cache is None
            else (cache.slots.cpu() >= 0).nonzero().view(-1)
        )

    def with_remote(self, remote: Source) -> DeviceTable:
        """The same rows, those that are not here read from `remote`: the table with another policy, or shared between
        batches."""
        return self._face(remote, self._choice)

    def narrowed(self, choice: ColumnChoice, remote: Source) -> DeviceTable:
        """The same rows, those of other parts by the chosen columns. `remote` has those that are not here: narrow, or
        whole where some of the own part are among them."""
        return self._face(remote, choice)

    def _face(self, remote: Source, choice: ColumnChoice | None) -> DeviceTable:
        other = DeviceTable(self.table, self._pieces, self.device, remote, choice)
        other._kept = self._kept
        return other

    def sharing(self, window: DeviceWindow, kind: Hashable, otherwise: Source | None = None) -> DeviceTable:
        """The same rows, those that are not here kept on the device for the batches of `window`. Tables of the same
        `kind` are read with the same ids. Rows that the device has no memory to keep come from `otherwise`."""
        other = self.with_remote(self.remote)
        other._window, other._kind = window, kind
        other._otherwise = self.remote if otherwise is None else otherwise
        return other

    def is_own(self, ids: Tensor) -> Tensor:
        """Whether the device reads each row by itself, without a cache; on the device of `ids`."""
        if ids.is_cuda:
            self._reads(ids.device, self._bounds)
        return torch.bucketize(ids, self._bounds.to(ids.device), right=True) % 2 == 1

    def fill_cache(self, ids: Tensor, name: Hashable = None) -> None:
        """Keeps copies of these rows (distinct ids) on the device from here on, instead of those it kept before.

        Reads that have begun go on with what was there. `name` is equal for tables that keep the rows of the same ids,
        and unlike any other. Torch's OutOfMemoryError leaves the table without a cache.
        """
        ids = ids.cpu().long()
        self._kept.cache = None  # and goes first, as soon as nobody reads it
        slots = torch.full((self._shape[0],), -1, dtype=torch.int32, device="cpu")
        slots[ids] = torch.arange(ids.numel(), dtype=torch.int32, device="cpu")
        rows = torch.empty((ids.numel(), *self._shape[1:]), dtype=self._dtype, device=self.device)
        step = max(_FILL_BYTES // max(self.row_bytes, 1), 1)
        with use_context(RequestContext(priority=BACKGROUND)):
            for first in range(0, ids.numel(), step):
                rows[first : first + step] = read_rows([(self.table, ids[first : first + step])])[0]
        hits = torch.zeros(1, dtype=torch.int64, device=self.device)
        cache = RowCache(rows, slots.to(self.device), hits, name or object(), DeviceReads())
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)  # reads may come from any stream
        self._kept.cache, self._kept.num_rows = cache, 0

    def count_visits(self, visits: VisitCounts | None) -> None:
        """From here on what is read is added to `visits`."""
        self._kept.visits = visits

    @property
    def visits(self) -> VisitCounts | None:
        return self._kept.visits

    def counters(self) -> CacheCounters:
        """What was read through the cache so far. Waits for the reads under way."""
        cache = self._cache
        if cache is None:
            return CacheCounters(0, 0, 0)
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        with self._kept.lock:
            num_rows = self._kept.num_rows
        hits = int(cache.hits)
        return CacheCounters(hits, num_rows - hits, (num_rows - hits) * self.row_bytes)

    # -- reading -----------------------------------------------------------------------------------------------------

    def begin(self, ids: Tensor, out: Tensor | None, context: ReadContext, at: Tensor | None = None) -> PendingRead:
        if at is not None:
            return begin_scattered(self, ids, out, context, at)
        where = context.on(ids, self.device)
        self._kept.count(ids.numel())
        visits = self._kept.visits
        if visits is not None:
            visits.add(where)
        cache = self._cache  # of the whole read: another may be filled before its end
        missing = self._begin_remote(where, cache, context) if self.is_remote else None
        num_local = ids.numel() - (0 if missing is None else missing.at.numel())
        context.count(bytes_local=num_local * self.row_bytes)
        return _TableReading(self, where, out, missing, cache)

    def read(self, ids: Tensor, out: Tensor | None = None) -> Tensor:
        """The rows of `ids`, on the device."""
        return self.begin_read(ids, out).result()

    def begin_read(self, ids: Tensor, out: Tensor | None = None) -> PendingRead:
        """Starts a read; `result` brings the rows in the order of the stream that is current where it is called."""
        context = ReadContext()
        read = self.begin(ids, out, context)
        context.send()
        return read

    def locate(self, ids: Tensor, policy: Policy | None = None) -> list[Located]:
        """The device for rows that it reads by itself or has cached, the table's candidates for the others."""
        ids, device = ids.cpu(), Candidate(DEVICE)
        is_here, cache = self.is_own(ids), self._cache
        if cache is not None:
            is_here |= gather_rows(cache.slots.cpu(), ids) >= 0
        here, away = is_here.nonzero().view(-1), (~is_here).nonzero().view(-1)
        found = [Located(0, here, ids[here], (device,), device)] if here.numel() else []
        for each in self.remote.locate(ids[away], policy) if away.numel() else []:
            found.append(replace(each, order=away if each.order is None else away[each.order]))
        return found

    def __len__(self) -> int:
        return self._shape[0]

    def __getitem__(self, ids: IdsLike | slice) -> Tensor:
        """Rows of ids on the device are there; of others, and of a slice, on the host."""
        return self.read(ids) if isinstance(ids, Tensor) and ids.is_cuda else self.table[ids]

    def __repr__(self) -> str:
        cached = f", {self.num_cached} rows cached" if self._cache is not None else ""
        return f"DeviceTable({self.name!r}, {list(self._shape)}, {self._dtype} on {self.device}{cached})"

    def _begin_remote(self, ids: Tensor, cache: RowCache | None, context: ReadContext) -> _Missing | None:
        """Asks for the rows that are not here. The host waits for their number, once for all tables cut alike."""
        cut = (tuple((piece.first, piece.end) for piece in self._pieces), None if cache is None else cache.name)
        # The ids and the cached rows are kept with what was found, so that none of these numbers is another's.
        alike = (id(ids), *cut)
        _, _, at, wanted = context.once(alike, lambda: (ids, cache, *self._missing(ids, cache)))
        if at.numel() == 0:
            return None
        if self._window is not None:
            flight = self._window.flight(context)
            return _Shared(flight, *flight.add((self._kind, *cut), wanted, self.remote, self._otherwise), at)
        rows = torch.empty(
            (at.numel(), *self.remote.shape[1:]), dtype=self._dtype, pin_memory=self.device.type == "cuda", device="cpu"
        )
        asked = context.once(("on the host", *alike), lambda: wanted.to("cpu"))
        return _Pulled(self.remote.begin(asked, rows, context), rows, at)

    def _missing(self, ids: Tensor, cache: RowCache | None) -> tuple[Tensor, Tensor]:
        """Where among the ids those stand that are not here, and what they are."""
        is_missing = ~self.is_own(ids)
        if cache is not None:
            cache.note_read()
            is_missing &= gather_rows(cache.slots, ids) < 0
        at = is_missing.nonzero().view(-1)
        return at, ids.index_select(0, at)

    def fill(self, ids: Tensor, out: Tensor, cache: RowCache | None) -> Tensor:
        """`out` with the rows that are here or in `cache`, those of others left as they are."""
        if self.device.type == "cuda":
            self._reads(self.device, *(piece.rows for piece in self._pieces if piece.rows.is_cuda))
        if cache is not None:
            cache.note_read()
        kept: dict[str, Any] = {} if cache is None else cache._asdict()
        if cache is None and not self.is_remote and len(self._pieces) == 1:
            return gather_rows(self._pieces[0].rows, ids, out)
        for first in range(0, len(self._pieces), _MAX_PIECES) or ([0] if kept else []):
            pieces = self._pieces[first : first + _MAX_PIECES]
            read_table(
                [piece.rows for piece in pieces], [piece.first for piece in pieces], ids, out,
                num_rows=self._shape[0], cache=kept.get("rows"), slots=kept.get("slots"), hits=kept.get("hits"),
            )  # fmt: skip
            kept = {}  # the other pieces are read as they are
        return out

    def _device_bytes(self) -> int:
        cache, visits = self._kept.cache, self._kept.visits
        rows = sum(piece.rows.nbytes for piece in self._pieces if piece.rows.device.type != "cpu")
        rows += 0 if visits is None else visits.nbytes
        return rows + (0 if cache is None else cache.rows.nbytes + cache.slots.nbytes)


class _Missing(Protocol):
    """Rows that are not here, and where among all they go."""

    @property
    def at(self) -> Tensor: ...

    def arrive(self, device: torch.device) -> Tensor:
        """Waits for them; on the device, in the order of the current stream."""
        ...


class _Pulled(NamedTuple):
    """Rows on their way to the host."""

    reading: PendingRead
    rows: Tensor
    at: Tensor

    def arrive(self, device: torch.device) -> Tensor:
        arrived = self.reading.result()
        if arrived is not self.rows:
            self.rows.copy_(arrived)
        return send(self.rows, device)


class _Shared(NamedTuple):
    """Rows of which the device has some already."""

    flight: DeviceFlight
    leg: DeviceLeg
    number: int  # of the table in the leg
    at: Tensor

    def arrive(self, device: torch.device) -> Tensor:
        self.flight.complete()
        rows = self.leg.rows[self.number]
        if device.type == "cuda":  # perhaps made in the order of another stream
            rows.record_stream(torch.cuda.current_stream(device))
        return rows


class _TableReading(NamedTuple):
    """A read of a table on a device."""

    table: DeviceTable
    ids: Tensor
    out: Tensor | None
    missing: _Missing | None
    cache: RowCache | None

    def result(self) -> Tensor:
        table, out = self.table, self.out
        if out is None or out.device != table.device:
            out = torch.empty((self.ids.numel(), *table.shape[1:]), dtype=table.dtype, device=table.device)
        table.fill(self.ids, out, self.cache)
        if self.missing is not None:
            arrived = self.missing.arrive(table.device)
            if arrived.is_cuda:  # what was found out in the order of another stream, perhaps
                for found in (self.ids, self.missing.at):
                    found.record_stream(torch.cuda.current_stream(table.device))
            if table.columns is not None and arrived.shape[1:] != out.shape[1:]:
                table.columns.put(arrived, out, self.missing.at)
            else:
                out.index_copy_(0, self.missing.at, arrived)  # each place once
        return out if table.columns is None else table.columns.narrow(out, self.ids)


def copied_pieces(rows: Sequence[tuple[int, Tensor]], device: torch.device) -> list[TablePiece]:
    """Copies of these rows, (first, rows) of each part, in the device's memory; neighbours become one piece."""
    pieces: list[TablePiece] = []
    for run in runs_of([(first, first + of_part.shape[0]) for first, of_part in rows]):
        parts = [rows[k][1] for k in run]
        size = sum(of_part.shape[0] for of_part in parts)
        joined = torch.empty((size, *parts[0].shape[1:]), dtype=parts[0].dtype, device=device)
        end = 0
        for of_part in parts:
            begin, end = end, end + of_part.shape[0]
            joined[begin:end] = of_part
        pieces.append(TablePiece(rows[run[0]][0], joined))
    return pieces


def runs_of(ranges: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Ranges (first, end) that follow each other without a gap, as lists of their numbers; empty ones are left out.

    >>> runs_of([(0, 3), (5, 9), (3, 4)])
    [[0, 2], [1]]
    """
    runs: list[list[int]] = []
    for number in sorted(range(len(ranges)), key=lambda k: ranges[k]):
        first, end = ranges[number]
        if first == end:
            continue
        if runs and ranges[runs[-1][-1]][1] == first:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs
