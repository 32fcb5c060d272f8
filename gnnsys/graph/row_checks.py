"""Checks of the arrays a graph is given: one row per node or edge, dense, in memory, and fit for their use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_PIECE = 1 << 20  # rows that are looked at together


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
