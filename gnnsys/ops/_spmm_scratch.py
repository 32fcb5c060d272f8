"""What sums over in-edges take beside their outputs, by the sizes in csrc/cpu/spmm.cpp and csrc/cuda/spmm_split.cu.

On the CPU a thread sums a row where it is written, or in the type of sums; rows of more than 256 edges also in float64.
On a device rows of many edges are summed in parts, which leave results of their own.
"""

from __future__ import annotations

from torch import Tensor

from gnnsys.ops._features import sum_dtype
from gnnsys.ops._workspace import Expected

_HEAVY_ROW, _PART_EDGES, _MOST_PARTS = 256, 512, 32768
_PAD_BYTES = 64 << 20


def row_scratch(expected: Expected, indptr: Tensor, indices: Tensor, x: Tensor, adds: bool) -> int:
    """Rows that threads sum, on the CPU; `adds`: to what is there."""
    size, wide = x[0].numel() if x.shape[0] else 0, sum_dtype(x.dtype)
    values = (x.dtype != wide) + adds
    return expected.row_threads(indptr.numel() - 1, indices.numel()) * size * (values * wide.itemsize + 8)


def split_bytes(num_edges: int, size: int, element_bytes: int) -> int:
    """Lists of the parts of long rows, and a result for each."""
    part = max(_PART_EDGES, -(-num_edges // _MOST_PARTS))
    if num_edges <= _HEAVY_ROW:
        return 0
    parts, slots = num_edges // part + num_edges // (_HEAVY_ROW + 1) + 1, 2 * (num_edges // part) + 2
    return 24 * parts + 16 * (num_edges // (part + 1) + 1) + slots * size * element_bytes + 3 * 256


def padded_size(size: int, value_bytes: int, num_rows: int, num_edges: int) -> int:
    """Values of a row as csrc/cuda/padding.cuh makes it longer; `size` where it does not."""
    num_bytes = size * value_bytes
    if num_bytes % 16 == 0 or value_bytes > 4 or num_edges * num_bytes < _PAD_BYTES:
        return size
    if num_edges < (32 if num_bytes % 8 == 0 else 8) * num_rows:
        return size
    vectors, lines = -(-num_bytes // 16) * 16, -(-num_bytes // 128) * 128
    return (lines if 10 * lines <= 13 * num_bytes else vectors) // value_bytes
