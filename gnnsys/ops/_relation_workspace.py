"""What relation_conv and its gradient take beside their outputs: tiles, unrounded sums, parts of long rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gnnsys.ops._features import sum_dtype
from gnnsys.ops._spmm_scratch import split_bytes
from gnnsys.ops._workspace import Expected, sort_bytes, tells_workspace

_TILE_BYTES, _LEAST_ROWS = 1 << 19, 64  # csrc/cpu/relation_conv.cpp
_DEVICE_SHARE, _DEVICE_TILE = 8, 32 << 20  # csrc/cuda/relation_conv.cu
_WEIGHT_ROWS = 1024  # csrc/cuda/grouped_products.cuh


def out_widths(
    relations: Sequence[int], num_dst: Sequence[int], weight: Sequence[Tensor], root: Sequence[Tensor]
) -> list[int]:
    """Columns of every output. `relations` are four numbers each: see `Relation`."""
    widths = [r.shape[1] for r in root] or [0] * len(num_dst)
    for at in range(0, len(relations), 4):
        w = weight[relations[at + 2]]
        widths[relations[at + 1]] = w.shape[2] if w.dim() == 3 else w.shape[1] * w.shape[3]
    return widths


def _tile_rows(expected: Expected, row_bytes: int, num_groups: int) -> int:
    return max(min(max(_TILE_BYTES * expected.num_threads // row_bytes, _LEAST_ROWS), num_groups), 1)


def _device_rows(row_bytes: int, num_groups: int, held: int) -> int:
    return max(min(max(held // _DEVICE_SHARE, _DEVICE_TILE) // row_bytes, num_groups), 1)


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.itemsize for t in tensors)


def _copies(x: Sequence[Tensor]) -> int:
    """torch's products of narrow types copy their factors."""
    return 1 if sum_dtype(x[0].dtype) == x[0].dtype else 2


def _sums_bytes(num_values: int, dtype: torch.dtype) -> int:
    """Results in the type of sums, until they are rounded."""
    return 0 if sum_dtype(dtype) == dtype else num_values * sum_dtype(dtype).itemsize


@tells_workspace("relation_conv", "cpu")
def _(
    expected: Expected, x: list[Tensor], weight: list[Tensor], root: list[Tensor], own: list[int],
    relations: list[int], num_dst: list[int], ends: list[int], *structure: Any,
) -> int:  # fmt: skip
    widths = out_widths(relations, num_dst, weight, root)
    row = (max(t.shape[1] for t in x) + max(widths)) * x[0].itemsize
    sums = _sums_bytes(sum(n * w for n, w in zip(num_dst, widths, strict=True)), x[0].dtype)
    return _tile_rows(expected, row, ends[-1]) * row * _copies(x) + sums


@tells_workspace("relation_conv", "cuda")
def _(
    expected: Expected, x: list[Tensor], weight: list[Tensor], root: list[Tensor], own: list[int],
    relations: list[int], num_dst: list[int], ends: list[int], dst: Tensor | None, indptr: Tensor | None,
    indices: Tensor, *structure: Any,
) -> int:  # fmt: skip
    widths = out_widths(relations, num_dst, weight, root)
    widest = max(t.shape[1] for t in x)
    row = (widest + max(widths)) * x[0].itemsize
    values = sum(n * w for n, w in zip(num_dst, widths, strict=True))
    held = _num_bytes(x) + values * sum_dtype(x[0].dtype).itemsize
    tiles = _device_rows(row, ends[-1], held) * row
    long_rows = split_bytes(indices.numel(), widest, sum_dtype(x[0].dtype).itemsize)
    return tiles + long_rows + _sums_bytes(values, x[0].dtype)


def _weight_bytes(weight: Sequence[Tensor]) -> int:
    """The product of a tile, and sums of them."""
    largest = max(w.numel() // max(w.shape[0], 1) for w in weight)
    return largest * weight[0].itemsize + _sums_bytes(sum(w.numel() for w in weight), weight[0].dtype)


def _grad_row(grad: Sequence[Tensor], x: Sequence[Tensor]) -> int:
    return (2 * max(t.shape[1] for t in x) + max(t.shape[1] for t in grad)) * x[0].itemsize


@tells_workspace("relation_conv_grad", "cpu")
def _(
    expected: Expected, grad: list[Tensor], x: list[Tensor], weight: list[Tensor], root: list[Tensor],
    own: list[int], relations: list[int], wants_x: list[int], t_ends: list[int], *structure: Any,
) -> int:  # fmt: skip
    row = _grad_row(grad, x)
    wanted = sum(t.numel() for t, wants in zip(x, wants_x, strict=True) if wants)
    tiles = _tile_rows(expected, row, t_ends[-1]) * row * _copies(x)
    return tiles + _sums_bytes(wanted, x[0].dtype) + _weight_bytes(weight)


@tells_workspace("relation_conv_grad", "cuda")
def _(
    expected: Expected, grad: list[Tensor], x: list[Tensor], weight: list[Tensor], root: list[Tensor],
    own: list[int], relations: list[int], wants_x: list[int], t_ends: list[int], t_src: Tensor,
    t_indptr: Tensor | None, t_indices: Tensor | None, t_weight: Tensor | None,
) -> int:  # fmt: skip
    row, wide = _grad_row(grad, x), sum_dtype(x[0].dtype)
    wanted = sum(t.numel() for t, wants in zip(x, wants_x, strict=True) if wants)
    num_edges = 0 if t_indices is None else t_indices.numel()
    weights = num_edges * x[0].itemsize if t_weight is not None and x[0].dtype != wide else 0
    tiles = _device_rows(row, t_ends[-1], _num_bytes(x) + _num_bytes(grad)) * row
    long_rows = split_bytes(num_edges, max(t.shape[1] for t in grad), wide.itemsize)
    return (
        tiles
        + weights
        + long_rows
        + _share_bytes(weight, relations, t_ends, wide)
        + _sums_bytes(wanted, x[0].dtype)
        + _weight_bytes(weight)
    )


def _share_bytes(weight: list[Tensor], relations: list[int], t_ends: list[int], wide: torch.dtype) -> int:
    """Shares in the gradient of weights: of small relations, those of one weight tensor after those of another."""
    most = 0
    for slot, w in enumerate(weight):
        sizes = [t_ends[r + 1] - t_ends[r] for r, of in enumerate(relations[2::4]) if of == slot]
        num_shares = sum(sizes) // _WEIGHT_ROWS + len(sizes)
        taken = num_shares * (w.numel() // max(w.shape[0], 1)) * wide.itemsize
        most = max(most, min(taken, _DEVICE_TILE))
    return most


_SCAN_TILE, _INT32_MOST = 2048, torch.iinfo(torch.int32).max  # csrc/cuda/scan.cuh


def _scan_bytes(size: int) -> int:
    return 8 * (size + 1) + 8 * (size // _SCAN_TILE + 2)


@tells_workspace("group_structures", "cuda")
def _(expected: Expected, indptr: list[Tensor], num_edges: list[int]) -> int:
    return 8 * (3 * len(indptr) + 2) + _scan_bytes(sum(t.numel() - 1 for t in indptr))


@tells_workspace("sorted_structures", "cuda")
def _(expected: Expected, edge_index: list[Tensor], num_dst: list[int]) -> int:
    return 0


@tells_workspace("group_by_source", "cuda")
def _(expected: Expected, indptr: Tensor, indices: Tensor, dst: Tensor, ends: list[int], num_src: list[int]) -> int:
    key = 4 if max(sum(num_src), indices.numel(), ends[-1]) <= _INT32_MOST else 8
    return 16 * len(ends) + 4 * key * indices.numel() + sort_bytes(indices.numel(), key) + _scan_bytes(indices.numel())
