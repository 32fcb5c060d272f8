"""What a sum over rows holds on a CUDA device: torch's reductions leave partial results in global memory.

A reduction is parted among blocks of threads where each thread would have 256 values or more. Every block then writes
its results there. The sizes are those of aten/src/ATen/native/cuda/Reduce.cuh (`setReduceConfig`), in whose words:
values per thread, target grid size, blocks (CTAs) per output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_MOST_THREADS, _WARP, _VECTOR = 512, 32, 4
_MIN_VALUES, _MAX_VALUES = 16, 256  # per thread
COUNTERS = 512  # bytes: beside partial results, in a block of their own
REDUCTIONS = frozenset(f"aten::{name}" for name in ("sum", "mean", "amax", "amin", "max", "min"))
_KEEPS_DTYPE = frozenset(f"aten::{name}" for name in ("amax", "amin", "max", "min"))


def scratch_of_reduction(op: str, arguments: Sequence[Any], processors: int, threads_per_processor: int) -> int:
    """Bytes of partial results and of counters of a call, by its arguments."""
    rows = arguments[0] if arguments else None
    if not isinstance(rows, Tensor) or rows.numel() < _MAX_VALUES:
        return 0
    given = arguments[1] if len(arguments) > 1 else None
    if op in ("aten::max", "aten::min") and given is not None:
        return 0  # of two tensors, or with places: other kernels
    dims = [given] if isinstance(given, int) else list(given or range(rows.dim()))
    reduced = {dim % max(rows.dim(), 1) for dim in dims}
    partial = _bytes_of_partial(op, rows.dtype)
    return reduction_bytes(
        tuple(rows.shape), tuple(rows.stride()), reduced, partial, processors * threads_per_processor
    )


def reduction_bytes(
    shape: Sequence[int], strides: Sequence[int], reduced: set[int], partial_bytes: int, device_threads: int
) -> int:
    """Of partial results of `partial_bytes` each.

    >>> 4 * 64 * 64 * 155 + 512  # [19717, 64] over rows on an H200: 155 blocks, 64 threads by 64 outputs
    2540032
    >>> reduction_bytes([19717, 64], [64, 1], {0}, 4, 132 * 2048)
    2540032
    """
    sizes = [(strides[dim], shape[dim], dim in reduced) for dim in range(len(shape)) if shape[dim] > 1]
    num_inputs = _product(size for _, size, is_reduced in sizes if is_reduced)
    num_outputs = _product(size for _, size, is_reduced in sizes if not is_reduced)
    if num_inputs == 1:
        return 0
    nearest = min((stride for stride, _, is_reduced in sizes if is_reduced), default=0)
    kept = _innermost([(stride, size) for stride, size, is_reduced in sizes if not is_reduced])
    along_input, vector = kept is None or nearest < kept[0], 1
    across, down = (num_inputs, num_outputs) if along_input else (num_outputs, num_inputs)
    if along_input:
        if kept is None and across > 128 and nearest == 1:
            across //= _VECTOR
    elif kept is not None and kept[0] == 1:
        vector = next(size for size in (4, 2, 1) if kept[1] % size == 0)
        across //= vector
    most = _MOST_THREADS // vector
    wide, high = min(_power_below(across), most), min(_power_below(down), most)
    height = min(high, most // min(wide, _WARP))
    width = min(wide, most // height)
    step = width if along_input else 1
    values = -(-num_inputs // step)
    if values < min(height * _MIN_VALUES, _MAX_VALUES):
        return 0
    values = -(-num_inputs // (step * height))
    grid = -(-(num_outputs // vector) // (1 if along_input else width))
    target = device_threads // (width * height)
    if values < _MAX_VALUES or grid > target:
        return 0
    blocks = max(min(-(-target // grid), -(-values // _MIN_VALUES)), -(-values // _MAX_VALUES))
    if blocks <= 1:
        return 0
    num_bytes = partial_bytes * num_outputs * blocks * (1 if along_input else width * vector)
    return num_bytes + COUNTERS


def _innermost(dims: list[tuple[int, int]]) -> tuple[int, int] | None:
    """(stride, size) of the innermost of some dimensions; those that follow each other in memory are one."""
    if not dims:
        return None
    (stride, size), *others = sorted(dims)
    for next_stride, next_size in others:
        if next_stride != stride * size:
            break
        size *= next_size
    return stride, size


def _bytes_of_partial(op: str, dtype: torch.dtype) -> int:
    if op in _KEEPS_DTYPE:
        return dtype.itemsize
    if dtype.is_floating_point or dtype.is_complex:
        return max(dtype.itemsize, 4)
    return 8


def _product(sizes: Any) -> int:
    out = 1
    for size in sizes:
        out *= size
    return out


def _power_below(size: int) -> int:
    return 1 << (max(size, 1).bit_length() - 1)
