"""What the differentiable aggregations share: the shape and dtype of rows, and the transposed structure."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnsys.ops.csc import CSC


def check_rows(rows: Tensor, num_rows: int, name: str) -> None:
    if rows.dim() not in (2, 3):
        raise ValueError(f"{name} must be [num_rows, d] or [num_rows, heads, d], got shape {tuple(rows.shape)}")
    if rows.shape[0] != num_rows:
        raise ValueError(f"{name} must have {num_rows} rows, as many as the CSC has nodes there, got {rows.shape[0]}")


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def transposed_if_needed(csc: CSC, *rows: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The transposed structure, where the gradient of one of `rows` will ask for it."""
    if not (torch.is_grad_enabled() and any(r is not None and r.requires_grad for r in rows)):
        return None, None, None
    t = csc.transpose()
    return t.indptr, t.indices, t.edge_ids


def need_transpose(t_indptr: Tensor | None) -> None:
    """In a backward pass: the forward pass must have been given the transposed structure."""
    if t_indptr is None:
        raise RuntimeError("this gradient needs the transposed structure: call through gnnsys.ops, which passes it")
