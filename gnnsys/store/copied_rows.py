"""Short rows of pinned memory, read by a device from a copy of its own.

The bus carries 32 bytes for any row that is shorter: 640,000 labels of 8 bytes take it as long as 50,000 rows of 400.
A table of such rows is small, so it is copied whole, once for as long as a loader runs, and the bus is left to rows
that need it. Rows may be written while no loader reads them: a copy is dropped when its loader stops, and made anew by
the first read after that.
"""

from __future__ import annotations

import logging
import threading
from math import prod

import torch
from torch import Tensor

from gnnsys.ops import DeviceReads, gather_rows
from gnnsys.store.memory_budget import MemoryBudget
from gnnsys.store.source import ReadContext, TensorSource

_log = logging.getLogger(__name__)
SHORT_ROW = 32  # bytes that the bus carries for the shortest row
_LEAST_BYTES = 1 << 18  # of a table: all of a smaller one crosses the bus in 5 us
_MOST_BYTES = 1 << 28  # and in 5 ms, whenever a loader starts
_SHARE = 1 / 16  # of what the device has left


def is_short(rows: Tensor, device: torch.device) -> bool:
    """Whether a table's rows are so short, and so few, that a device should rather have a copy of it."""
    return has_short_rows(rows) and rows.nbytes <= _SHARE * MemoryBudget.of(device).left()


def has_short_rows(rows: Tensor) -> bool:
    """The same of a device that has room."""
    row_bytes = prod(rows.shape[1:]) * rows.element_size()
    return 0 < row_bytes <= SHORT_ROW and _LEAST_BYTES <= rows.nbytes <= _MOST_BYTES


def short_rows_on(source: TensorSource, device: torch.device) -> TensorSource:
    """The source with a copy on `device`, where its rows are short, pinned and nobody's parameters; else itself."""
    rows = source.rows
    is_read = device.type == "cuda" and rows.is_cpu and rows.is_contiguous() and rows.is_pinned()
    if not is_read or rows.requires_grad or rows.is_inference() or not is_short(rows, device):
        return source
    return CopiedRows(rows, device)


class CopiedRows(TensorSource):
    """A tensor as a source. Batches that are read by ids on `device` come from a copy there, until `forget`.

    What is read for no batch comes from the tensor itself, and so does all that is read after a write of torch's: only
    what others write to the same memory (numpy) is not seen before `forget`. Where the device has no memory for a copy,
    rows come from the tensor, too.
    """

    def __init__(self, rows: Tensor, device: torch.device) -> None:
        super().__init__(rows)
        self._on = device
        self._lock = threading.Lock()
        self._copy: _Copy | None = None
        self._is_refused = False
        MemoryBudget.of(device).watch(self, "short rows of pinned memory", CopiedRows._device_bytes)

    def gather(self, ids: Tensor, out: Tensor | None, context: ReadContext) -> Tensor:
        """The rows of `ids`, from the copy where they may be."""
        if context.batch < 0 or ids.device != self._on:
            return super().gather(ids, out, context)
        with self._lock:
            copy = self._copied()
            if copy is not None:
                copy.note_read()
        return super().gather(ids, out, context) if copy is None else gather_rows(copy.rows, ids)

    def forget(self) -> None:
        """Rows may be written from here on: the next batch's are read anew. No batch is under way."""
        with self._lock:
            self._copy, self._is_refused = None, False

    def _copied(self) -> _Copy | None:
        """The copy of the rows as they are; None where the device has no memory for it, until `forget`."""
        if not self._is_refused and (self._copy is None or self._copy.version != self.rows._version):
            self._copy = None  # and goes first
            try:
                self._copy = _Copy(self.rows, self._on)
            except torch.OutOfMemoryError:
                self._is_refused = True
                _log.warning("%s has no memory left for a copy of %d bytes", self._on, self.rows.nbytes)
        return self._copy

    def _device_bytes(self) -> int:
        copy = self._copy
        return 0 if copy is None else copy.rows.nbytes


class _Copy:
    """A copy that is made on the current stream, and read on any."""

    def __init__(self, rows: Tensor, device: torch.device) -> None:
        self.version = rows._version
        self.rows = torch.empty_like(rows, device=device, pin_memory=False)
        self.rows.copy_(rows, non_blocking=True)
        self._reads = DeviceReads()
        self._event = None if device.type != "cuda" else torch.cuda.current_stream(device).record_event()

    def note_read(self) -> None:
        """The current stream reads it: behind the copy, and before its memory is given to others."""
        if self._event is not None:
            torch.cuda.current_stream(self.rows.device).wait_event(self._event)
            self._reads(self.rows.device, self.rows)
