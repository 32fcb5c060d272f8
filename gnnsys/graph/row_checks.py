"""Checks of the arrays a graph is given: one row per node or edge, dense, in memory, and fit for their use."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnnsys.ops import planned_kind

_PIECE = 1 << 20  # rows that are looked at together
_LOOKED_AT = 1 << 25  # bytes of an array that are searched for NaN when a graph is made: 5 ms
_NUM_PIECES = 64  # that a larger array is searched in
_FIRST = 3  # rows that a warning names
_EXPONENT = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80}  # its bits, all set in what is not finite
_log = logging.getLogger(__name__)


def is_source(rows: Any) -> bool:
    """Whether `rows` reads rows by id (a table, or a user's own class) instead of being them."""
    can = {name for name in ("read", "begin_read", "begin", "locate") if callable(getattr(rows, name, None))}
    has_reads = can >= {"read", "begin_read"} or can >= {"begin", "locate"}
    return not isinstance(rows, Tensor) and has_reads and isinstance(getattr(rows, "dtype", None), torch.dtype)


def check_data(rows: Any, num_rows: int, where: str, per: str) -> None:
    """ValueError, naming `where`, unless `rows` is a tensor that `check_rows` passes, or a source of as many rows."""
    if not is_source(rows):
        check_rows(rows, num_rows, where, per)
        return
    shape = getattr(rows, "shape", None)
    if not shape or shape[0] != num_rows:
        got = None if shape is None else list(shape)
        raise ValueError(f"{where} has shape {got}, expected {num_rows} rows, one per {per}")


def check_rows(rows: Any, num_rows: int, where: str, per: str) -> None:
    """ValueError, naming `where`, unless `rows` is dense, on the host or a CUDA device, one row per node or edge."""
    if not isinstance(rows, Tensor):
        raise ValueError(
            f"{where} must be a torch.Tensor, got {type(rows).__name__}: pass torch.as_tensor(...), or a source of "
            "rows with shape, dtype, read and begin_read (gnnsys.store.FeatureSource)"
        )
    if rows.layout != torch.strided:
        raise ValueError(f"{where} must be dense, got {rows.layout}: pass .to_dense()")
    if rows.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{where} must be in memory of the host or of a CUDA device, got {rows.device}")
    if rows.dim() == 0 or rows.shape[0] != num_rows:
        raise ValueError(f"{where} has shape {list(rows.shape)}, expected {num_rows} rows, one per {per}")


def check_weight(weight: Tensor, where: str) -> None:
    """ValueError unless edges can be drawn by `weight`: one number per edge, finite, not negative."""
    if weight.dim() != 1 or weight.dtype == torch.bool or weight.is_complex():
        raise ValueError(f"{where} must be one real number per edge, got {list(weight.shape)} {weight.dtype}")
    for first in range(0, weight.numel(), _PIECE):  # weights may be a mapped file, larger than memory
        piece = weight[first : first + _PIECE]
        usable = torch.isfinite(piece) & (piece >= 0)
        if not bool(usable.all()):
            edge = int((~usable).nonzero()[0])
            raise ValueError(f"{where} must be finite and >= 0, got {piece[edge].item()} at edge {first + edge}")


@dataclass(frozen=True)
class UnfitRows:
    """Rows with NaN or an infinite value: how many, and the first of them."""

    count: int = 0
    first: tuple[int, ...] = ()

    def __add__(self, other: UnfitRows) -> UnfitRows:
        return UnfitRows(self.count + other.count, tuple(sorted({*self.first, *other.first})[:_FIRST]))

    def __str__(self) -> str:
        more = ", ..." if self.count > len(self.first) else ""
        have = "has" if self.count == 1 else "have"
        return f"{self.count:,} {have} NaN or infinite values ({', '.join(map(str, self.first))}{more})"


def unfit_rows(rows: Tensor, ids: Tensor | None = None) -> UnfitRows:
    """The rows of features, by their `ids` or positions, that have NaN or infinite values.

    Only rows of several floats count: single floats may be labels, where NaN means no label. A finite sum proves that
    all numbers are finite, and is faster than a check of each. We use numpy because it takes one thread: starting
    several costs more on a busy machine.
    """
    is_known = rows.dtype in _EXPONENT or rows.dtype in (torch.float32, torch.float64)
    if not is_known or rows.dim() < 2 or rows[:1].numel() < 2:
        return UnfitRows()
    if rows.dtype in _EXPONENT:
        ones = _EXPONENT[rows.dtype]
        is_unfit = rows.view(torch.int16).numpy() & ones == ones
        if not is_unfit.any():
            return UnfitRows()
    else:
        numbers = rows.numpy()
        with np.errstate(all="ignore"):
            if np.isfinite(numbers.sum()):
                return UnfitRows()
        is_unfit = ~np.isfinite(numbers)
    unfit = is_unfit.reshape(len(rows), -1).any(1).nonzero()[0]
    named = unfit if ids is None else np.sort(ids.numpy()[unfit])
    return UnfitRows(len(unfit), tuple(named[:_FIRST].tolist()))


def warn_of_unfit_rows(rows: Any, where: str) -> None:
    """Warns of features with NaN or infinite values. Of a large array some pieces are looked at, in about 5 ms."""
    if type(rows) is not Tensor or not rows.is_cpu or planned_kind() is not None or not rows.numel():
        return
    rows, found = rows.detach(), UnfitRows()
    num_rows = rows.shape[0]
    looks_at_all = rows.nbytes <= _LOOKED_AT
    step = num_rows if looks_at_all else -(-num_rows // _NUM_PIECES)
    size = num_rows if looks_at_all else max(1, num_rows * _LOOKED_AT // rows.nbytes // _NUM_PIECES)
    for first in range(0, num_rows, step):
        unfit = unfit_rows(rows[first : first + size])
        found += UnfitRows(unfit.count, tuple(first + row for row in unfit.first))
    if found.count:
        of = f"{num_rows:,}" if looks_at_all else f"the {len(range(0, num_rows, step)) * size:,} looked at"
        _log.warning("%s: of %s rows %s. A model that reads them computes NaN", where, of, found)
