"""The shard's side of a pull: rows gathered natively into pooled memory, sent in chunks while the next are gathered."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from gnnsys.comm import CODE_OF, HEADER_BYTES, Header, Reply, ShortReply
from gnnsys.ops import BufferPool, MessageFront, address_of, gather_bytes
from gnnsys.store.message_plan import (
    ASK_ROWS,
    CHUNK_BYTES,
    IDS_AT,
    MAX_PIECES,
    NONE,
    WIRE_DTYPES,
    columns_from_wire,
    named_array,
    read_plan,
)
from gnnsys.store.part_rows import PartRows
from gnnsys.store.table import Table

_ASKED = struct.Struct("<20sqqq24s")  # as ASK_ROWS, with what is always the same left as bytes
_ID_BYTES = {
    ASK_ROWS.pack(CODE_OF[torch.int64], 2, CODE_OF[dtype], 1, 1, 5, *bytes(6))[:20]: dtype.itemsize
    for dtype in (torch.int32, torch.int64)
}
_WHOLE_ROWS = struct.pack("<3q", 1, NONE, NONE)  # of array 1, all columns, as they are
_NO_FRONT = MessageFront(0, b"")


class _Item:
    """One pull of one part: which rows, which columns, as which dtype."""

    def __init__(self, rows: PartRows, ids: Tensor, columns: Tensor | None, dtype: torch.dtype) -> None:
        self._rows, self._ids, self._columns, self._dtype = rows, ids, columns, dtype
        self._row_shape = rows.spec.row_shape if columns is None else (columns.numel(),)
        self.row_bytes = torch.Size(self._row_shape).numel() * dtype.itemsize
        self.num_rows = ids.numel()

    def gather(self, first: int, count: int, buffers: BufferPool) -> Tensor:
        out = buffers.empty((count, *self._row_shape), self._dtype)
        self._rows.read(self._ids[first : first + count], out, columns=self._columns)
        return out


def pull_chunks(
    arrays: Sequence[Tensor], find: Callable[[int], Table], buffers: BufferPool, chunk_bytes: Callable[[int], int] = int
) -> Iterator[Reply]:
    """The rows a message asks for, piece by piece. What is wrong with the message is found before the first one.

    `chunk_bytes(CHUNK_BYTES)`: how large the next piece should be.
    """
    items = [_read_item(item, arrays, find) for item in read_plan(arrays, 5)]
    return _chunks(items, buffers, chunk_bytes)


def _chunks(items: Sequence[_Item], buffers: BufferPool, chunk_bytes: Callable[[int], int]) -> Iterator[Reply]:
    pieces: list[tuple[int, int, int]] = []
    rows: list[Tensor] = []
    room = chunk_bytes(CHUNK_BYTES)
    for number, item in enumerate(items):
        first = 0
        while first < item.num_rows:
            if (room < item.row_bytes and pieces) or len(pieces) == MAX_PIECES:
                yield _reply(pieces, rows)
                pieces, rows, room = [], [], chunk_bytes(CHUNK_BYTES)
            count = min(item.num_rows - first, max(1, room // max(1, item.row_bytes)))
            pieces.append((number, first, count))
            rows.append(item.gather(first, count, buffers))
            room -= count * item.row_bytes
            first += count
    yield _reply(pieces, rows, last=True)


def _reply(pieces: Sequence[tuple[int, int, int]], rows: Sequence[Tensor], *, last: bool = False) -> Reply:
    table = (
        torch.tensor(pieces, dtype=torch.int64, device="cpu")
        if pieces
        else torch.empty(0, 3, dtype=torch.int64, device="cpu")
    )
    return Reply([table, *rows], last=last)


def _read_item(item: Sequence[int], arrays: Sequence[Tensor], find: Callable[[int], Table]) -> _Item:
    number, part, ids_at, columns_at, dtype_at = item
    rows = find(number).part(part)
    if rows.dropped:
        raise ValueError(f"table {rows.spec.name!r} was dropped")
    ids = named_array(arrays, ids_at)
    if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"malformed request: row numbers must be one-dimensional int32 or int64, got {ids.dtype}")
    columns = None if columns_at == NONE else columns_from_wire(named_array(arrays, columns_at), rows.spec.row_size)
    if not NONE <= dtype_at < len(WIRE_DTYPES):
        raise ValueError(f"malformed request: unknown dtype {dtype_at}")
    dtype = rows.spec.dtype if dtype_at == NONE else WIRE_DTYPES[dtype_at]
    read = _Item(rows, ids, columns, dtype)
    if read.row_bytes > max(CHUNK_BYTES, 8 * rows.spec.row_size):
        raise ValueError(f"a row of {read.row_bytes} bytes is asked for: {columns_at=} names columns again and again")
    return read


def answer_small(header: Header, front: memoryview, tables: Mapping[int, Table]) -> ShortReply | None:
    """The reply to a message that asks for few whole rows of one table; None for every other message."""
    if header.num_arrays != 2 or header.num_option_bytes or len(front) <= IDS_AT:
        return None
    described, count, number, part, whole = _ASKED.unpack_from(front, HEADER_BYTES)
    id_bytes, table = _ID_BYTES.get(described), tables.get(number)
    if id_bytes is None or table is None or whole != _WHOLE_ROWS or len(front) != IDS_AT + count * id_bytes:
        return None
    rows = table.parts.get(part)
    if rows is None or not 0 < count <= rows.max_small or rows.dropped:
        return None
    form, ids = rows.reply_format, address_of(front) + IDS_AT
    if count <= form.max_inline:
        gathered = gather_bytes(rows.raw, ids, id_bytes, count, form.front)
        return None if gathered is None else ([gathered], 2)
    gathered = gather_bytes(rows.raw, ids, id_bytes, count, _NO_FRONT)
    return None if gathered is None else ([form.describe(count), np.frombuffer(gathered, np.uint8)], 2)
