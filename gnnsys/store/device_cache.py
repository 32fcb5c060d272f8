"""DeviceCache: the rows that batches ask for most, kept on the device in front of any source of rows.

Which rows is decided once, from expected visits (`gnnsys.sampling.expected_visits`), and they are read whole when the
cache is made. Reads never fill it, so a pull of some columns cannot leave half a row behind, and nothing is evicted.
A cache is a source itself: caches stand in front of tensors, tables and other caches alike.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from gnnsys.ops import DeviceReads, gather_cached, gather_rows, scatter_rows
from gnnsys.store.candidates import DEVICE, Candidate, Located, Policy
from gnnsys.store.memory_budget import MemoryBudget
from gnnsys.store.source import (
    HOST,
    FeatureSource,
    PendingRead,
    ReadContext,
    Source,
    as_source,
    begin_scattered,
    put_rows,
    read_rows,
    send,
)

_FILL_BYTES = 1 << 26  # rows that are read together while the cache is filled
_SLOT_BYTES = 4  # where a row is looked up


class CacheCounters(NamedTuple):
    """What was read since the cache was made: rows it had, rows it had not, and the bytes these cost its source."""

    hits: int
    misses: int
    bytes: int

    @property
    def hit_rate(self) -> float:
        """Of all rows that were read; 0 before the first."""
        return self.hits / max(self.hits + self.misses, 1)


class DeviceCache:
    """Reads rows of `source`, those of `rows` (distinct ids) from a copy on `device`; a source itself.

    `source` is a tensor, whose rows must not change, or a source whose rows never do. A tensor that the device can read
    (its own memory, or pinned host memory) is read by one kernel together with the cache, and no read waits for the
    device. Any other source is asked on the host, for the rows that the cache has not: ids that are given on the CPU
    then save a wait for the device.

    >>> cache = DeviceCache(torch.arange(6.0).view(3, 2), torch.tensor([1]), "cpu")
    >>> cache.read(torch.tensor([1, 2])), cache.counters().hit_rate
    (tensor([[2., 3.],
            [4., 5.]]), 0.5)
    """

    mutable = False

    def __init__(self, source: Tensor | FeatureSource | Source, rows: Tensor, device: torch.device | str) -> None:
        self._source = as_source(source, "cache")
        if self._source.mutable is True or (isinstance(source, Tensor) and source.requires_grad):
            raise ValueError("rows that change while they are read cannot be cached: leave this source uncached")
        self.device = _with_index(torch.device(device))
        self._shape, self._dtype = tuple(source.shape), source.dtype
        self._row_bytes = prod(self._shape[1:]) * self._dtype.itemsize
        rows = _check_rows(rows, self._shape[0])
        slots = torch.full((self._shape[0],), -1, dtype=torch.int32, device="cpu")
        slots[rows] = torch.arange(rows.numel(), dtype=torch.int32, device="cpu")
        self._table = source if isinstance(source, Tensor) and _is_readable(source, self.device) else None
        self._host_slots = None if self._table is not None else slots
        self._cache = torch.empty((rows.numel(), *self._shape[1:]), dtype=self._dtype, device=self.device)
        self._fill(rows)
        self._slots = slots.to(self.device)
        self._lock = threading.Lock()
        self._reads = DeviceReads()
        self._num_rows = self._num_hits = 0
        # Kernels count where they run: looking at it is the only thing that waits for them.
        self._hits = None if self.device.type == "cpu" else torch.zeros(1, dtype=torch.int64, device=self.device)
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)  # reads may come from any stream
        MemoryBudget.of(self.device).watch(self, "device cache", lambda cache: cache.nbytes)

    @classmethod
    def from_scores(
        cls,
        source: Tensor | FeatureSource | Source,
        scores: Tensor,
        *,
        bytes: int | None = None,
        device: torch.device | str,
    ) -> DeviceCache:
        """A cache of the rows with the highest `scores` [num_rows], of equal ones those with the lowest ids.

        As many as fit into `bytes` of the device's memory, together with the 4 bytes that every row of `source` takes
        to be looked up. None: half of what the `MemoryBudget` of the device has left, so make the model before; torch's
        limit of a process (`torch.cuda.set_per_process_memory_fraction`) is kept.
        """
        if scores.dim() != 1 or scores.numel() != source.shape[0]:
            raise ValueError(f"scores must have one entry per row, {source.shape[0]}, got {list(scores.shape)}")
        row_bytes = prod(source.shape[1:]) * source.dtype.itemsize
        if bytes is None:
            bytes = MemoryBudget.of(device).left() // 2
        left = bytes - _SLOT_BYTES * source.shape[0]
        if left < row_bytes:
            raise ValueError(
                f"bytes must leave room for a row of {row_bytes} bytes beside {_SLOT_BYTES} for each of the "
                f"{source.shape[0]} rows, got {bytes}: give it more, or leave the cache away"
            )
        return cls(source, highest(scores, left // max(row_bytes, 1)), device)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def is_remote(self) -> bool:
        """Whether some rows can only be had from another process."""
        return self._table is None and self._source.is_remote

    @property
    def placement(self) -> Hashable:
        return id(self)

    @property
    def num_cached(self) -> int:
        """Rows on the device."""
        return self._cache.shape[0]

    @property
    def nbytes(self) -> int:
        """What the cache takes of the device's memory."""
        return self._cache.nbytes + self._slots.nbytes

    @property
    def table(self) -> Tensor | None:
        """The tensor that is cached, where the device reads it by itself; None of other sources."""
        return self._table

    def on_device(self) -> tuple[Tensor, Tensor]:
        """The cached rows, and where among them each row of the source is (int32, -1: nowhere), for the current stream.

        These reads are not counted."""
        self._is_read(self._slots)
        return self._cache, self._slots

    def read(self, ids: Tensor, out: Tensor | None = None) -> Tensor:
        """The rows of `ids` on the device: `out`, where it is there (cast to its dtype), else a tensor of its own."""
        return self.begin_read(ids, out).result()

    def begin_read(self, ids: Tensor, out: Tensor | None = None) -> PendingRead:
        """Starts a read; `result` brings the rows in the order of the stream that is current where it is called."""
        context = ReadContext()
        read = self.begin(ids, out, context)
        context.send()
        return read

    def begin(self, ids: Tensor, out: Tensor | None, context: ReadContext, at: Tensor | None = None) -> PendingRead:
        """The same, with the rows that the cache has not read along with the others of the context."""
        if at is not None:
            return begin_scattered(self, ids, out, context, at)
        if out is None or out.device != self.device:
            shape = (ids.numel(), *self._shape[1:])
            is_here = self.device.type == "cpu"
            out = (
                context.empty(shape, self._dtype)
                if is_here
                else torch.empty(shape, dtype=self._dtype, device=self.device)
            )
        if self._table is not None:
            context.count(bytes_local=ids.numel() * self._row_bytes)
            return _Read(self._gather(self._table, ids, out))
        return self._begin_misses(ids, out, context)

    def locate(self, ids: Tensor, policy: Policy | None = None) -> list[Located]:
        """The device for rows that the cache has, the source's candidates for the others."""
        ids, device = ids.cpu(), Candidate(DEVICE)
        slots = gather_rows(self._slots.cpu() if self._host_slots is None else self._host_slots, ids)
        hits, missed = (slots >= 0).nonzero().view(-1), (slots < 0).nonzero().view(-1)
        found = [Located(0, hits, slots[hits], (device,), device)] if hits.numel() else []
        for each in self._source.locate(ids[missed], policy) if missed.numel() else []:
            found.append(replace(each, order=missed if each.order is None else missed[each.order]))
        return found

    def counters(self) -> CacheCounters:
        """What was read so far. Waits for the reads under way, on whichever stream."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        with self._lock:
            num_rows, hits = self._num_rows, self._num_hits
        if self._hits is not None:
            hits += int(self._hits)
        return CacheCounters(hits, num_rows - hits, (num_rows - hits) * self._row_bytes)

    def __repr__(self) -> str:
        return f"DeviceCache({list(self._shape)}, {self._dtype}, {self.num_cached} rows on {self.device})"

    def _gather(self, table: Tensor, ids: Tensor, out: Tensor) -> Tensor:
        here = torch.zeros(1, dtype=torch.int64, device="cpu") if self._hits is None else self._hits
        self._is_read(self._slots, table, here)
        gather_cached(self._cache, self._slots, table, send(ids, self.device), out, here)
        self._count(ids.numel(), int(here) if self._hits is None else 0)
        return out

    def _begin_misses(self, ids: Tensor, out: Tensor, context: ReadContext) -> PendingRead:
        assert self._host_slots is not None
        on_host = context.on(ids, HOST)
        slots = gather_rows(self._host_slots, on_host)
        missed = (slots < 0).nonzero().view(-1)
        self._count(ids.numel(), ids.numel() - missed.numel())
        context.count(bytes_local=(ids.numel() - missed.numel()) * self._row_bytes)
        pinned = self.device.type == "cuda"
        rows = torch.empty((missed.numel(), *self._shape[1:]), dtype=self._dtype, pin_memory=pinned, device="cpu")
        reading = self._source.begin(on_host[missed], rows, context) if missed.numel() else _Read(rows)
        return _Merging(reading, rows, missed, slots, self._cache, out, self._is_read)

    def _is_read(self, *tensors: Tensor) -> None:
        """By the current stream: a cache that is let go of keeps its memory until that is done with it."""
        if self.device.type == "cuda":
            self._reads(self.device, self._cache, *tensors)

    def _fill(self, rows: Tensor) -> None:
        """Reads the rows piece by piece, as any source lets them be read."""
        step = max(_FILL_BYTES // max(self._row_bytes, 1), 1)
        for first in range(0, rows.numel(), step):
            ids = rows[first : first + step]
            self._cache[first : first + step] = read_rows([(self._source, ids)])[0]

    def _count(self, num_rows: int, num_hits: int) -> None:
        with self._lock:
            self._num_rows += num_rows
            self._num_hits += num_hits


class _Read(NamedTuple):
    """A read that is done, or that the device has been told to do."""

    rows: Tensor

    def result(self) -> Tensor:
        return self.rows


class _Merging(NamedTuple):
    """A read whose misses are on their way to the host."""

    reading: PendingRead
    rows: Tensor  # where they arrive, in the order of `missed`
    missed: Tensor  # positions
    slots: Tensor  # of every id
    cache: Tensor
    out: Tensor
    is_read: Callable[[], None]  # tells who reads the cache

    def result(self) -> Tensor:
        arrived = put_rows(self.reading.result(), self.rows, "cache")
        device = self.out.device
        self.is_read()
        if self.missed.numel() < self.slots.numel():  # what was missed gets some row first, and its own below
            gather_rows(self.cache, send(self.slots.clamp(min=0), device), out=self.out)
        if self.missed.numel():
            scatter_rows(self.out, send(self.missed, device), send(arrived, device))
        return self.out


def highest(scores: Tensor, count: int) -> Tensor:
    """Ids of the `count` highest scores, ascending; of equal scores the lowest ids. Linear time.

    >>> highest(torch.tensor([1.0, 3.0, 1.0, 2.0]), 3)
    tensor([0, 1, 3])
    """
    if scores.isnan().any():
        raise ValueError("scores must be numbers, got NaN")
    if count >= scores.numel():
        return torch.arange(scores.numel(), device="cpu")
    if count <= 0:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    scores = scores.cpu()
    threshold = scores.kthvalue(scores.numel() - count + 1).values
    chosen = scores > threshold
    ties = (scores == threshold).nonzero().view(-1)
    chosen[ties[: count - int(chosen.sum())]] = True
    return chosen.nonzero().view(-1)


def _check_rows(rows: Tensor, num_rows: int) -> Tensor:
    if rows.dim() != 1 or rows.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"rows must be ids, int32 or int64 [num_cached], got {list(rows.shape)} {rows.dtype}")
    rows = rows.cpu().long()
    if rows.numel():
        if not 0 <= int(rows.min()) <= int(rows.max()) < num_rows:
            raise ValueError(f"rows must be in [0, {num_rows}), got {int(rows.min())} to {int(rows.max())}")
        if rows.numel() >= 1 << 31:
            raise ValueError(f"a cache holds less than 2^31 rows, got {rows.numel()}")
        if rows.unique().numel() != rows.numel():
            raise ValueError("rows must name each row once: pass rows.unique()")
    return rows


def _is_readable(rows: Tensor, device: torch.device) -> bool:
    """Whether kernels of the device read the tensor where it is."""
    is_there = rows.device == device or (device.type == "cuda" and rows.is_cpu and rows.is_pinned())
    return is_there and rows.is_contiguous()


def _with_index(device: torch.device) -> torch.device:
    """Tensors say cuda:0, so a cache does."""
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())
