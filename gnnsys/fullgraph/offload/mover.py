"""Bins that move: rows live in host memory, a bin's go to the device before it is due and what it made comes back.

While a bin computes, the next one's inputs are copied in on one side stream and the last one's results out on another.
What a bin lent (page-locked memory, a block on the device) it keeps until the host has seen its results: its copies in
and its kernels are over then, so all of it can be used again at once, and no stream has to be told. There are never
more than two bins on the device, one that computes and one that comes or goes.

Rows of layers live in page-locked memory (`CopyStreams.rows`), so a range of them is copied from and to where it
lies. What has to be picked, or lies elsewhere, goes through a buffer.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from gnnsys.fullgraph.offload.copy_streams import CopyStreams, Mark
from gnnsys.fullgraph.plan.bins import Bin
from gnnsys.ops import CSC, WholeDegrees, gather_rows

BINS_ON_DEVICE = 2
_ALIGN = 64  # bytes; where the tensors of one block begin


class StagingBuffers:
    """Streams, and host buffers that are lent and given back; there are as many as were ever lent at once."""

    def __init__(self, streams: CopyStreams) -> None:
        self.streams = streams
        self._free: list[Tensor] = []

    def borrow(self, num_bytes: int) -> Tensor:
        """The smallest that is large enough; where there is none, a new one takes the place of the largest."""
        self._free.sort(key=len)
        for index, buffer in enumerate(self._free):
            if len(buffer) >= num_bytes:
                return self._free.pop(index)
        if self._free:
            self._free.pop()
        with torch.inference_mode(False):  # or no pass outside of it could write to them
            return self.streams.buffer(1 << max(12, (num_bytes - 1).bit_length()))

    def give_back(self, buffer: Tensor) -> None:
        self._free.append(buffer)


@dataclass(frozen=True, eq=False)
class Pick:
    """Rows of a tensor in host memory: those at `index`, or from one to another."""

    rows: Tensor
    index: Tensor | slice | None = None  # None: all

    @property
    def shape(self) -> tuple[int, ...]:
        if isinstance(self.index, Tensor):
            return (self.index.numel(), *self.rows.shape[1:])
        return tuple(self.ranged().shape)

    def write(self, into: Tensor) -> None:
        if isinstance(self.index, Tensor):
            gather_rows(self.rows, self.index, out=into)
        else:
            into.copy_(self.ranged())

    def ranged(self) -> Tensor:
        return self.rows[self.index] if isinstance(self.index, slice) else self.rows


def picked(here: Bin, rows: Tensor) -> Pick:
    """The rows of a bin's sources, or of its nodes where it has no structure."""
    if here.csc is None:
        return Pick(rows, slice(here.first, here.end))
    return Pick(rows) if here.src is None else Pick(rows, here.src)


def csc_picks(csc: CSC) -> list[Pick]:
    """What a structure is made of; `csc_of` makes one of the same on the device."""
    data = [] if csc.edge_data is None else csc.edge_data.tensors()
    return [Pick(t) for t in (csc.indptr, csc.indices, *(csc.whole or ()), *data)]


def csc_of(csc: CSC, tensors: Sequence[Tensor]) -> CSC:
    indptr, indices, *rest = tensors
    count = 0 if csc.whole is None else len(csc.whole)
    whole = WholeDegrees(*rest[:count]) if count else None
    data = None if csc.edge_data is None else csc.edge_data.with_tensors(rest[count:])
    return CSC(indptr, indices, csc.num_src, whole=whole, edge_data=data)


@dataclass(eq=False)
class BroughtInputs:
    """What was brought for one bin, in a buffer and then in one block on the device."""

    tensors: list[Tensor]
    mark: Mark
    buffer: Tensor | None  # None where nothing went through one


@dataclass(eq=False)
class _Flight:
    """Results that are on their way back, and what must stay until they are here."""

    mark: Mark
    buffer: Tensor | None
    results: list[Tensor]  # in the buffer, or where they belong
    into: list[Tensor | None]  # where results in the buffer belong
    then: Callable[[list[Tensor]], None]
    loads: list[BroughtInputs]
    held: list[Any]


@dataclass(eq=False)
class Mover:
    """The bins of one pass that are under way. `load`, `take`, `send_back` for each, in this order; then `finish`."""

    buffers: StagingBuffers
    seconds: float = 0.0  # waited for results
    bytes_up: int = 0
    bytes_down: int = 0
    _loads: dict[Hashable, BroughtInputs] = field(default_factory=dict)
    _flights: deque[_Flight] = field(default_factory=deque)

    def __enter__(self) -> Mover:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Where a pass ends in the middle, what it lent is given up only when nothing uses it any more."""
        if kind is not None:
            self.buffers.streams.drain()
        self._loads.clear()
        self._flights.clear()

    @property
    def num_flying(self) -> int:
        return len(self._flights)

    def load(self, key: Hashable, picks: Sequence[Pick]) -> None:
        """Begins to bring a bin's inputs, in one block: ranges from where they lie, the rest through a buffer."""
        streams = self.buffers.streams
        is_direct = [not isinstance(pick.index, Tensor) and streams.is_direct(pick.ranged()) for pick in picks]
        # What is picked comes first, and is copied as one
        order = sorted(range(len(picks)), key=lambda number: is_direct[number])
        found, num_bytes = _layout([(picks[number].shape, picks[number].rows.dtype) for number in order])
        places = dict(zip(order, found, strict=True))
        num_direct = sum(is_direct)
        num_staged = num_bytes if num_direct == 0 else places[order[-num_direct]][0]
        buffer = self.buffers.borrow(num_staged) if num_staged else None
        sources, starts = ([], []) if buffer is None else ([buffer[:num_staged]], [0])
        for number in order:
            pick, place = picks[number], places[number]
            if is_direct[number]:
                sources.append(pick.ranged().detach())
                starts.append(place[0])
            elif buffer is not None:
                pick.write(_piece(buffer, place))
        block, mark = streams.bring(sources, starts, num_bytes)
        self.bytes_up += num_bytes
        self._loads[key] = BroughtInputs([_piece(block, places[n]) for n in range(len(picks))], mark, buffer)

    def take(self, key: Hashable) -> BroughtInputs:
        """A bin's inputs, on the device for what is computed from now on; `send_back` is to be given it."""
        load = self._loads.pop(key)
        self.buffers.streams.follow(load.mark)
        return load

    def send_back(
        self,
        results: Sequence[Tensor],
        then: Callable[[list[Tensor]], None],
        loads: Sequence[BroughtInputs],
        *held: Any,
        into: Sequence[Tensor | None] = (),
    ) -> None:
        """Begins to copy what a bin made; `then` gets it in host memory, to read from while it runs.

        `loads` brought what its kernels read, and stay until then, with what else is to be `held`. `into` says of each
        result where it belongs, if that is known: it is there before `then` is called.
        """
        streams = self.buffers.streams
        results = [result.detach().contiguous() for result in results]
        wanted = list(into) or [None] * len(results)
        is_direct = [
            place is not None and place.dtype == result.dtype and streams.is_direct(place)
            for result, place in zip(results, wanted, strict=True)
        ]
        staged = [result for result, direct in zip(results, is_direct, strict=True) if not direct]
        places, num_bytes = _layout([(tuple(result.shape), result.dtype) for result in staged])
        buffer = self.buffers.borrow(num_bytes) if num_bytes else None
        left = iter(places)
        targets: list[Tensor] = []
        for result, place, direct in zip(results, wanted, is_direct, strict=True):
            at = None if direct else next(left)
            if direct and place is not None:
                targets.append(place.detach())
            else:
                assert at is not None
                targets.append(result.new_empty(result.shape, device="cpu") if buffer is None else _piece(buffer, at))
        mark = streams.fetch(results, targets)
        self.bytes_down += sum(result.nbytes for result in results)
        copied = [None if direct else place for place, direct in zip(wanted, is_direct, strict=True)]
        self._flights.append(_Flight(mark, buffer, targets, copied, then, list(loads), [results, *held]))

    def finish(self, keep: int = 0) -> None:
        """Waits for results, the earliest first, until those of `keep` bins are under way."""
        while len(self._flights) > keep:
            flight = self._flights.popleft()
            began = time.perf_counter()
            flight.mark.synchronize()
            self.seconds += time.perf_counter() - began
            for load in flight.loads:
                if load.buffer is not None:
                    self.buffers.give_back(load.buffer)
            flight.loads, flight.held = [], []
            for result, place in zip(flight.results, flight.into, strict=True):
                if place is not None:
                    place.copy_(result)
            flight.then(flight.results)
            if flight.buffer is not None:
                self.buffers.give_back(flight.buffer)


Place = tuple[int, int, tuple[int, ...], torch.dtype]  # first byte, end, shape, dtype


def _layout(tensors: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> tuple[list[Place], int]:
    """Where tensors lie in a block, and how many bytes that is."""
    places, at = [], 0
    for shape, dtype in tensors:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        places.append((at, at + num_bytes, shape, dtype))
        at += -(-num_bytes // _ALIGN) * _ALIGN
    return places, at


def _piece(block: Tensor, place: Place) -> Tensor:
    """With a version of its own: autograd shall not take a write to one piece for one to another."""
    first, end, shape, dtype = place
    return block[first:end].view(dtype).view(shape).data
