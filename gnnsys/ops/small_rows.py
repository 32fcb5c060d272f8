"""What a pull of few rows does to bytes, without torch's dispatcher: for a hundred rows it takes longer than the work.

Each function does all of its work or none. None says that the ordinary one (`bucket_ids`, `move_rows`) must be called,
which says what is wrong.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from torch import Tensor

from gnnsys.ops._library import plain as _native

_address, _of_memory = ctypes.addressof, ctypes.c_char.from_buffer


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


class Bounds(NamedTuple):
    """Where parts begin and end (int64), as an address. Whoever made it keeps the tensor alive."""

    address: int
    num_parts: int

    @classmethod
    def of(cls, bounds: Tensor) -> Bounds:
        return cls(bounds.data_ptr(), bounds.numel() - 1)


class MessageFront(NamedTuple):
    """How a message begins that is about a number of rows, which stands at `count_at`: the rows follow `front`.

    In replies the number is also in the last eight bytes of `front`.
    """

    count_at: int
    front: bytes


Run = tuple[int, int, int, bytearray]  # part, first, count, message


def split_ids(
    ids: Tensor, bounds: Bounds, local_bytes: int, count_at: int, fronts: tuple[bytes, ...]
) -> tuple[list[Run], bytearray | None] | None:
    """The contiguous `ids` (int32 or int64) grouped by part, with numbers inside it of `local_bytes` bytes.

    For each part that has some: (part, first, count, message). They are the next `count` from `first` on. The message
    is the part's entry of `fronts`, with the count at `count_at`, and the ids behind it; of b"" the ids alone. The
    second result is their order (int64), or None where all are of one part and so stay in order.
    """
    return _native.split_ids(  # type: ignore[no-any-return]
        ids.data_ptr(), ids.element_size(), ids.numel(), *bounds, local_bytes, count_at, fronts
    )


def gather_bytes(rows: RawRows, ids: int, id_bytes: int, count: int, front: MessageFront) -> bytearray | None:
    """The rows of the `count` ids at the address `ids`, behind the front of a reply; b"" is none."""
    return _native.gather_bytes(*rows, ids, id_bytes, count, *front)  # type: ignore[no-any-return]


def place_bytes(
    message: Any, rows: Any, count: int, row_bytes: int, order: bytearray | None, first: int, out: Tensor,
    skipped: int, front: MessageFront,
) -> bool | None:  # fmt: skip
    """Puts the `count` rows of a reply into `out`: row i at order[first + i], or at i where there is no order.

    They are behind the front of `message`, or in `rows` where that is not None. Of the front the first `skipped` bytes
    may be any. None where the message has another front, or not so many rows.
    """
    num_out = out.shape[0]
    if rows is not None and (not rows or len(rows) != count * row_bytes):
        return None
    if not out.is_contiguous() or out.nbytes != num_out * row_bytes:  # it was changed while rows were on their way
        return None
    return _native.place_bytes(  # type: ignore[no-any-return]
        _address(_of_memory(message)), len(message), 0 if rows is None else _address(_of_memory(rows)),
        0 if rows is None else len(rows), count, row_bytes, 0 if order is None else _address(_of_memory(order)), first,
        out.data_ptr(), num_out, skipped, *front,
    )  # fmt: skip


def address_of(memory: Any) -> int:
    """Of a writable buffer: a received frame's, or a bytearray's. It must outlive the address."""
    return _address(_of_memory(memory))
