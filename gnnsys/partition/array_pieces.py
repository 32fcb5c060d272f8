"""Large arrays in pieces: no step of writing, reading or proving parts holds more than a piece beside its files."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from gnnsys.graph import chunk_rows
from gnnsys.ops import gather_rows

PIECE_EDGES = 1 << 21
PIECE_COLUMNS = 1 << 18

Progress = Callable[[int, int, str], None]
"""Called as progress(done, total, what is being done); done never exceeds total."""


class Meter:
    """Counts work done towards a total and tells `progress`, if there is one."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, max(total, 1), 0

    def advance(self, amount: int, what: str) -> None:
        self._done = min(self._done + amount, self._total)
        if self._progress is not None:
            self._progress(self._done, self._total, what)


def column_pieces(indptr: Tensor) -> Iterator[tuple[int, int]]:
    """Ranges of neighbouring columns that cover all: PIECE_EDGES edges at most, or a single column."""
    first, num_columns = 0, indptr.numel() - 1
    while first < num_columns:
        last = min(first + PIECE_COLUMNS, num_columns)
        bound = int(indptr[first]) + PIECE_EDGES
        fitting = int(torch.searchsorted(indptr[first + 1 : last + 1], bound, right=True))
        end = first + max(1, fitting)
        yield first, end
        first = end


def row_pieces(rows: Tensor, num_rows: int) -> Iterator[tuple[int, int]]:
    """Ranges that cover num_rows, each about 16 MiB of rows like these."""
    step = chunk_rows(rows)
    for first in range(0, num_rows, step):
        yield first, min(first + step, num_rows)


def take(rows: Tensor, index: Tensor) -> Tensor:
    """`rows[index]` at the price of what is taken, contiguous, whatever the layout of `rows`."""
    rows = rows.detach()
    return gather_rows(rows, index) if rows.is_contiguous() else rows[index.long()].contiguous()


def ramps(indptr: Tensor, starts: Tensor) -> Tensor:
    """Column i's entries count up from starts[i], int64: ids of edges that are consecutive inside each column."""
    num_entries = int(indptr[-1] - indptr[0])
    shift = starts.long() - (indptr[:-1] - indptr[0])
    return torch.arange(num_entries, device="cpu") + torch.repeat_interleave(
        shift, indptr.diff(), output_size=num_entries
    )
