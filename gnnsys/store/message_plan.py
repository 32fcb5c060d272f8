"""How pulls and pushes are written into messages: one small int64 plan, then the arrays it names by position.

No JSON on these paths. A table is its number, a dtype its place in WIRE_DTYPES; -1 is "none".

    PULL   plan [items, 5]: table, part, array of row numbers, array of columns (a list, or a bit for each), dtype
           reply, in chunks: pieces [k, 3]: item, first row, number of rows; then k arrays of rows
    PUSH   plan [items, 5]: table, part, array of row numbers, array of rows, mode
    STEP   plan [items, 3]: part, array of row numbers, array of gradients; options: table, step, world_size, optimizer
           with the option memory, plan [items, 4]: part, number of rows, bytes at which row numbers and gradients begin
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gnnsys.comm import CODE_OF, HEADER_BYTES, INLINE_BELOW, Header
from gnnsys.ops import MessageFront, place_bytes
from gnnsys.store.spec import TableSpec

WIRE_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
PUSH_MODES = ("write", "add")
NONE = -1
CHUNK_BYTES = 4 << 20  # every chunk costs a few hundred microseconds of Python, and the first one waits for its rows
MAX_PIECES = 256
REQUEST_BYTES = 2 * CHUNK_BYTES  # of rows, below which a pull is not cut into more requests
MAX_ITEMS = 1 << 16  # of a plan

# A pull of no more rows in memory takes about as long as handing it to another thread does. Rows of files may have to
# come from a disk first, and who reads them keeps others waiting: of these fewer are read at once.
SMALL_ROWS, SMALL_FILE_ROWS = 1 << 10, 1 << 8
SMALL_BYTES = 1 << 20

# A message that asks for whole rows of one part: dtypes and dimensions of plan and row numbers, their sizes, the plan;
# then the row numbers.
ASK_ROWS = struct.Struct("<4B3q5q")
COUNT_AT = HEADER_BYTES + 4 + 2 * 8  # of row numbers
IDS_AT = HEADER_BYTES + ASK_ROWS.size
assert IDS_AT % 8 == 0  # as arrays lie in a first frame
_COUNT = struct.Struct("<q")


class ArrayList:
    """The arrays of one message; an array that is added twice travels once."""

    def __init__(self) -> None:
        self.arrays: list[Tensor] = []
        self._places: dict[int, int] = {}

    def add(self, array: Tensor | None) -> int:
        """Where `array` stands behind the plan; `NONE` for none."""
        if array is None:
            return NONE
        place = self._places.get(id(array))
        if place is None:
            place = self._places[id(array)] = len(self.arrays) + 1
            self.arrays.append(array)
        return place

    def with_plan(self, rows: Sequence[Sequence[int]], width: int) -> list[Tensor]:
        plan = (
            torch.tensor(rows, dtype=torch.int64, device="cpu")
            if rows
            else torch.empty(0, width, dtype=torch.int64, device="cpu")
        )
        return [plan, *self.arrays]


class RowFormat:
    """How a reply of one message has whole rows of one table.

    Between the header and the rows: dtypes and dimensions of pieces and rows, their sizes, and the pieces.
    """

    def __init__(self, spec: TableSpec) -> None:
        kinds = CODE_OF[torch.int64], 2, CODE_OF[spec.dtype], 1 + len(spec.row_shape)
        described = struct.pack(f"<4B{6 + len(spec.row_shape)}q", *kinds, 1, 3, 0, *spec.row_shape, 0, 0, 0)
        self.row_bytes = spec.row_size * spec.dtype.itemsize
        self.max_inline = (INLINE_BELOW - 1) // self.row_bytes if self.row_bytes else 0  # rows in the first frame
        self.front = MessageFront(HEADER_BYTES + 4 + 2 * 8, bytes(HEADER_BYTES) + described)

    def describe(self, count: int) -> bytearray:
        """The first frame of a reply whose rows, `count` of them, are not in it; the header is left out."""
        front = bytearray(self.front.front)
        for at in (self.front.count_at, len(front) - _COUNT.size):
            _COUNT.pack_into(front, at, count)
        return front

    def place(
        self, header: Header, frames: Sequence[Any], count: int, order: bytearray | None, first: int, out: Tensor
    ) -> bool:
        """Puts the rows of a reply that has exactly `count` of them into `out`, see `place_bytes`.

        False, and nothing is put, where it is any other reply.
        """
        is_inline = count <= self.max_inline
        if len(frames) != (1 if is_inline else 2) or header.num_arrays != 2 or header.num_option_bytes:
            return False
        rows = None if is_inline else frames[1].buffer
        return bool(
            place_bytes(frames[0].buffer, rows, count, self.row_bytes, order, first, out, HEADER_BYTES, self.front)
        )


def read_plan(arrays: Sequence[Tensor], width: int) -> list[list[int]]:
    """The plan of a message; ValueError unless it is one and names only arrays that came along."""
    if not arrays or arrays[0].dtype != torch.int64 or arrays[0].dim() != 2 or arrays[0].shape[1] != width:
        raise ValueError(f"malformed request: its first array must be int64 [items, {width}]")
    if arrays[0].shape[0] > MAX_ITEMS:
        raise ValueError(f"malformed request: a plan of {arrays[0].shape[0]} items, at most {MAX_ITEMS} are taken")
    return arrays[0].tolist()


def named_array(arrays: Sequence[Tensor], place: int) -> Tensor:
    """The array a plan names."""
    if not 1 <= place < len(arrays):
        raise ValueError(f"malformed request: it names array {place} of {len(arrays)}")
    return arrays[place]


def columns_to_wire(columns: Tensor | None, row_size: int) -> Tensor | None:
    """A bit for each column of a row, uint8, lowest first, where that is smaller than the list and says the same."""
    if columns is None or columns.numel() * columns.itemsize <= -(-row_size // 8):
        return columns
    listed = columns.to(device="cpu", dtype=torch.int64)
    if bool((listed[1:] <= listed[:-1]).any()) or int(listed[0]) < 0 or int(listed[-1]) >= row_size:
        return columns  # who serves them refuses what is out of range
    is_chosen = torch.zeros(-(-row_size // 8) * 8, dtype=torch.uint8, device="cpu")
    is_chosen[listed] = 1
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device="cpu")
    return (is_chosen.view(-1, 8) * weights).sum(1, dtype=torch.uint8)


def columns_from_wire(array: Tensor, row_size: int) -> Tensor:
    """The list of columns, int32 or int64; ValueError where there is none in it."""
    if array.dim() == 1 and array.dtype in (torch.int32, torch.int64):
        return array
    if array.dim() != 1 or array.dtype != torch.uint8 or array.numel() != -(-row_size // 8):
        raise ValueError(
            "malformed request: columns must be one-dimensional int32 or int64, or a bit for each of "
            f"{row_size}, got {array.dtype} {list(array.shape)}"
        )
    bits = array[:, None] >> torch.arange(8, dtype=torch.uint8, device="cpu") & 1
    columns = bits.view(-1).nonzero().view(-1)
    if columns.numel() and int(columns[-1]) >= row_size:
        raise ValueError(f"malformed request: column {int(columns[-1])} of a row that has {row_size}")
    return columns


def unknown_table(number: int) -> str:
    """What is said of a table that is not there; who asked knows its name."""
    return f"table number {number} does not exist: it was dropped, or never created"
