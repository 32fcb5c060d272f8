"""What a pull of few rows does to bytes, without torch's dispatcher: for a hundred rows it takes longer than the work.

Each function does all of its work or none. None says that the ordinary one (`bucket_ids`, `move_rows`) must be called,
which says what is wrong.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from torch import Tensor

from gnnsys.ops._library import plain as _native


class RawRows(NamedTuple):
    """Contiguous rows in memory, and the counters that guard them, as addresses. Whoever made it keeps them alive."""

    address: int
    num_rows: int
    row_bytes: int
    versions: int  # 0: none

    @classmethod
    def of(cls, rows: Tensor, versions: Tensor | None = None) -> RawRows:
        row_bytes = rows[:0].new_empty((1, *rows.shape[1:])).nbytes
        return cls(rows.data_ptr(), rows.shape[0], row_bytes, 0 if versions is None else versions.data_ptr())


class SplitIds(NamedTuple):
    """As `Buckets`: ids grouped by part. `order` (int64) is None where all are of one part and so stay in order."""

    counts: tuple[int, ...]
    order: bytearray | None
    local: bytearray


def split_ids(ids: Tensor, bounds: Tensor, local_bytes: int) -> SplitIds | None:
    """The contiguous `ids` (int32 or int64) grouped by part, with numbers inside it of `local_bytes` bytes."""
    return _native.split_ids(  # type: ignore[no-any-return]
        ids.data_ptr(), ids.element_size(), ids.numel(), bounds.data_ptr(), bounds.numel() - 1, local_bytes
    )


def gather_bytes(rows: RawRows, ids: int, id_bytes: int, count: int, room: int) -> bytearray | None:
    """The rows of the `count` ids at the address `ids`, behind `room` bytes that are left to the caller."""
    return _native.gather_bytes(*rows, ids, id_bytes, count, room)  # type: ignore[no-any-return]


def place_bytes(rows: int, count: int, row_bytes: int, order: int, out: Tensor) -> bool | None:
    """Puts the `count` rows at the address `rows` into `out`: row i at order[i], or at i where the address is 0."""
    if not out.is_contiguous() or out.nbytes != out.shape[0] * row_bytes:  # it was changed while rows were on their way
        return None
    return _native.place_bytes(rows, count, row_bytes, order, out.data_ptr(), out.shape[0])  # type: ignore[no-any-return]


def address_of(memory: Any) -> int:
    """Of a writable buffer: a received frame's, or a bytearray's. It must outlive the address."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
