"""What a sum and its like hold inside: a copy in another dtype, and on a CUDA device partial results.

A reduction on a CUDA device is parted among blocks of threads where each thread would have 256 values or more. Every
block then writes its results to global memory. The sizes are those of aten/src/ATen/native/cuda/Reduce.cuh
(`setReduceConfig`), in whose words: values per thread, target grid size, blocks (CTAs) per output, output vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_MOST_THREADS, _WARP, _VECTOR = 512, 32, 4
_MIN_VALUES, _MAX_VALUES = 16, 256  # per thread
_COUNTER = 4  # bytes: one for each block of threads that has outputs of its own
_CONVERTS = frozenset(f"aten::{name}" for name in ("sum", "mean", "prod"))
_KEEPS_DTYPE = frozenset(f"aten::{name}" for name in ("amax", "amin", "max", "min"))
_WITH_PLACES = frozenset(("aten::argmax", "aten::argmin"))
_WITH_MOMENTS = frozenset(f"aten::{name}" for name in ("var", "std", "var_mean", "std_mean"))
_OF_TRUTH = frozenset(("aten::any", "aten::all"))
_NORMS = frozenset(("aten::linalg_vector_norm", "aten::norm"))
REDUCTIONS = _CONVERTS | _KEEPS_DTYPE | _WITH_PLACES | _WITH_MOMENTS | _OF_TRUTH | _NORMS


class ReducedRows(NamedTuple):
    """What is reduced, as it lies in memory: places are counted in values."""

    shape: Sequence[int]
    strides: Sequence[int]
    offset: int
    dtype: torch.dtype


def bytes_inside_reduction(op: str, arguments: Sequence[Any], processors: int, threads_per_processor: int) -> list[int]:
    """Of each block that a call on a device holds, in their order: a copy, partial results, counters."""
    rows = arguments[0] if arguments else None
    given = arguments[2 if op in _NORMS else 1 :][:1]
    if not isinstance(rows, Tensor) or any(isinstance(each, Tensor) for each in given):  # the larger of two tensors
        return []
    copied = bytes_of_converted(op, arguments, is_on_device=True)
    reduced = ReducedRows(rows.shape, rows.stride(), int(rows.storage_offset()), rows.dtype)
    if copied:
        strides = torch.empty(rows.shape, dtype=torch.bool, device="meta").stride()
        reduced = ReducedRows(reduced.shape, strides, 0, _reduced_dtype(op, arguments))
    dims = _dims(given, rows.dim())
    partial = _bytes_of_partial(op, reduced.dtype, has_places=given != [] and isinstance(given[0], int))
    blocks = partial_results(reduced, dims, partial, processors * threads_per_processor)
    return [*([copied] if copied else []), *blocks]


def bytes_of_converted(op: str, arguments: Sequence[Any], is_on_device: bool) -> int:
    """Rows of another dtype than the result are copied first. A device reads short floats as they are."""
    rows = arguments[0] if arguments else None
    if op not in _CONVERTS or not isinstance(rows, Tensor):
        return 0
    wanted = _reduced_dtype(op, arguments)
    is_read = is_on_device and wanted == torch.float32 and rows.dtype in (torch.float16, torch.bfloat16)
    return 0 if wanted == rows.dtype or is_read else rows.numel() * wanted.itemsize


def _reduced_dtype(op: str, arguments: Sequence[Any]) -> torch.dtype:
    rows: Tensor = arguments[0]
    asked = next((each for each in arguments[1:] if isinstance(each, torch.dtype)), None)
    if asked is not None or op not in _CONVERTS:
        return asked or rows.dtype
    is_real = rows.dtype.is_floating_point or rows.dtype.is_complex
    return rows.dtype if is_real else torch.int64


def _dims(given: Sequence[Any], num_dims: int) -> set[int]:
    """Those that are asked for; all of them by default."""
    asked = given[0] if given else None
    dims = [asked] if isinstance(asked, int) else list(asked) if isinstance(asked, list | tuple) else []
    return {dim % max(num_dims, 1) for dim in dims or range(num_dims)}


def partial_results(rows: ReducedRows, reduced: set[int], partial_bytes: int, device_threads: int) -> list[int]:
    """Bytes of partial results of `partial_bytes` each, and of their counters; nothing where there are none.

    >>> 4 * 64 * 64 * 155, 4 * 1  # [19717, 64] over rows on an H200: 155 blocks, 64 threads by 64 outputs
    (2539520, 4)
    >>> partial_results(ReducedRows((19717, 64), (64, 1), 0, torch.float32), {0}, 4, 132 * 2048)
    [2539520, 4]
    """
    sizes = [(rows.strides[dim], size, dim in reduced) for dim, size in enumerate(rows.shape) if size > 1]
    num_inputs = _product(size for _, size, is_reduced in sizes if is_reduced)
    num_outputs = _product(size for _, size, is_reduced in sizes if not is_reduced)
    if num_inputs == 1 or num_inputs * num_outputs == 0:
        return []
    inner = _merged([(stride, size) for stride, size, is_reduced in sizes if is_reduced])
    kept = _merged([(stride, size) for stride, size, is_reduced in sizes if not is_reduced])
    along_input, vector = not kept or inner[0][0] < kept[0][0], 1
    across, down = (num_inputs, num_outputs) if along_input else (num_outputs, num_inputs)
    if along_input:
        if not kept and across > 128 and inner[0][0] == 1:
            across //= _VECTOR
    elif kept[0][0] == 1:
        even = (kept[0][1], rows.offset, *(stride for stride, _ in (*inner, *kept[1:])))
        vector = next(size for size in (4, 2, 1) if all(each % size == 0 for each in even))
        across //= vector
    most = _MOST_THREADS // vector
    wide, high = min(_power_below(across), most), min(_power_below(down), most)
    height = min(high, most // min(wide, _WARP))
    width = min(wide, most // height)
    step = width if along_input else 1
    values = -(-num_inputs // step)
    if values < min(height * _MIN_VALUES, _MAX_VALUES):
        return []
    values = -(-num_inputs // (step * height))
    grid = -(-(num_outputs // vector) // (1 if along_input else width))
    target = device_threads // (width * height)
    if values < _MAX_VALUES or grid > target:
        return []
    blocks = max(min(-(-target // grid), -(-values // _MIN_VALUES)), -(-values // _MAX_VALUES))
    if blocks <= 1:
        return []
    num_bytes = partial_bytes * num_outputs * blocks * (1 if along_input else width * vector)
    return [num_bytes, _COUNTER * grid]


def _merged(dims: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(stride, size) of some dimensions from the innermost; those that follow each other in memory are one."""
    merged: list[tuple[int, int]] = []
    for stride, size in sorted(dims):
        if merged and stride == merged[-1][0] * merged[-1][1]:
            merged[-1] = merged[-1][0], merged[-1][1] * size
        else:
            merged.append((stride, size))
    return merged


def _bytes_of_partial(op: str, dtype: torch.dtype, has_places: bool) -> int:
    if op in _WITH_PLACES or (op in ("aten::max", "aten::min") and has_places):
        return 16  # a value, and its place
    if op in _OF_TRUTH:
        return 1
    if op in _WITH_MOMENTS:
        return 4 * max(dtype.itemsize, 4)  # mean, squares, and their number twice
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
