"""The rows of one part of one table that a process reads by itself: a map of a file, or memory it shares."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from gnnsys.ops import RawRows, fill_uniform, gather_rows, move_rows, update_rows
from gnnsys.store.message_plan import SMALL_BYTES, SMALL_FILE_ROWS, SMALL_ROWS, RowFormat
from gnnsys.store.shared_rows import SharedRows
from gnnsys.store.spec import TableSpec

FILE, SHARED, SHARD = "file", "shared", "shard"
_PIECE = 1 << 22  # values that are written together


class Outdated(ValueError):
    """The shard does not have the table that was asked for; perhaps it has another of the same name."""


class PartRows:
    """`kind` says where the rows are: `file` (a map of the part's files, never written) or `shared` (memory)."""

    def __init__(self, spec: TableSpec, part: int, rows: Tensor, shared: SharedRows | None = None) -> None:
        if not 0 <= part < spec.num_parts:
            raise ValueError(f"table {spec.name!r} has parts 0 to {spec.num_parts - 1}, got {part}")
        if rows.dtype != spec.dtype or tuple(rows.shape) != spec.part_shape(part):
            raise ValueError(
                f"table {spec.name!r}, part {part}: rows are {rows.dtype} {list(rows.shape)}, "
                f"expected {spec.dtype} {list(spec.part_shape(part))}"
            )
        if not rows.is_contiguous():
            raise ValueError(f"table {spec.name!r}, part {part}: rows must be contiguous, pass rows.contiguous()")
        self.spec, self.part = spec, part
        self.rows = rows
        self.shared = shared
        self.versions = shared.versions if shared is not None and shared.versions.numel() else None
        self.kind = FILE if shared is None else SHARED

    @classmethod
    def create(cls, spec: TableSpec, part: int) -> PartRows:
        """Rows of zeros in shared memory."""
        shared = SharedRows.create(spec.part_shape(part), spec.dtype)
        return cls(spec, part, shared.rows, shared)

    @cached_property
    def raw(self) -> RawRows:
        """The rows as addresses, for as long as this object lives."""
        return RawRows.of(self.rows, self.versions)

    @cached_property
    def reply_format(self) -> RowFormat:
        return RowFormat(self.spec)

    @cached_property
    def max_small(self) -> int:
        """The most rows of a message that whoever reads it answers at once."""
        row_bytes = self.reply_format.row_bytes
        most = SMALL_FILE_ROWS if self.kind == FILE else SMALL_ROWS
        return min(most, SMALL_BYTES // row_bytes) if row_bytes else 0

    @property
    def dropped(self) -> bool:
        return self.shared is not None and self.shared.dropped

    @property
    def outdated(self) -> bool:
        """Whether these rows must not be read any more: they were dropped, or their owner has ended."""
        return self.shared is not None and (self.shared.dropped or self.shared.orphaned)

    @property
    def writable(self) -> bool:
        return self.shared is not None

    def read(self, index: Tensor, out: Tensor, order: Tensor | None = None, columns: Tensor | None = None) -> None:
        """`out[order[j]] = rows[index[j]]`; each row is whole, even while another is written."""
        if order is None and columns is None and self.versions is None:
            gather_rows(self.rows, index, out)
            return
        try:
            move_rows(self.rows, out, index=index, order=order, columns=columns, versions=self.versions)
        except RuntimeError as error:  # a row stayed half written
            if not self.outdated:
                raise
            raise Outdated(f"table {self.spec.name!r}: {error}") from error

    def update(self, index: Tensor, rows: Tensor, *, add: bool = False) -> None:
        """`rows[index] = ...` or `+=`, in order. One caller at a time: the shard's lock on the table sees to it."""
        update_rows(self.rows, index, rows, add=add, versions=self.versions)

    def fill(self, rows: Tensor) -> None:
        """Replaces all rows, piece by piece."""
        per_piece = max(1, _PIECE // max(1, self.spec.row_size))
        for first in range(0, self.rows.shape[0], per_piece):
            piece = rows[first : first + per_piece]
            self.update(torch.arange(first, first + piece.shape[0], device="cpu"), piece)

    def fill_uniform(self, low: float, high: float, key: int) -> None:
        """First values by row number, before anybody can read them."""
        fill_uniform(self.rows, self.spec.bounds[self.part], low, high, key)
