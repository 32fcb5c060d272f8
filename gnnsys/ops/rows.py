"""Moving rows: gather from a table, scatter into a table, any dtype and row shape, cast on the way where asked.

A row is everything behind the first dimension. Gathering into a buffer that is used again is several times faster
than into a fresh one, because a fresh one has to be mapped page by page first.

The device of `index` does the work. On a GPU, rows may come from pinned host memory as well as from the device: the
kernel reads them where they are. Work is queued, as everywhere on a GPU, and torch does not know that the host's memory
is being read: keep a pinned tensor, unchanged, until the stream has passed. An id out of range ends the kernel there
(torch's own indexing does the same), where the CPU raises a ValueError.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnsys.ops._autograd import differentiable
from gnnsys.ops._library import native
from gnnsys.ops._workspace import Expected, sort_bytes, takes_outputs_only, tells_workspace


def gather_rows(src: Tensor, index: Tensor, out: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """`src[index]`, into `out` if one is given (it may be pinned), as `dtype` if one is given.

    Casts are between float64, float32, bfloat16 and float16. Differentiable with respect to `src` when there is no
    `out`; on a GPU the gradient is summed by torch's `index_add`, whose order of summation is fixed only under
    `torch.use_deterministic_algorithms(True)`. An index out of range is a ValueError.

    >>> gather_rows(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1, 1, 0]))
    tensor([[3., 4.],
            [3., 4.],
            [1., 2.]])
    """
    if out is None:
        return _gather_rows(src, index.contiguous(), dtype)
    if dtype is not None and dtype != out.dtype:
        raise ValueError(f"dtype is {dtype} but out is {out.dtype}: leave dtype away or make them equal")
    _refuse_gradient("out cannot be filled by a gather that needs a gradient: leave out away", src, out)
    native.gather_rows_out(src, index.contiguous(), out)
    return out


def read_rows(src: Tensor, index: Tensor) -> int:
    """Exclusive or of a word of every 64 bytes of `src[index]`: what bringing rows from memory takes. CPU only."""
    return native.read_rows(src, index.contiguous())


def scatter_rows(dst: Tensor, index: Tensor, src: Tensor) -> Tensor:
    """`dst[index] = src` in place, cast to dst's dtype; returns `dst`. Not differentiable.

    Where `index` names a row more than once, the last one wins, for any number of threads and on every device.
    """
    _refuse_gradient("scatter_rows moves data and has no gradient: pass tensors that need none", dst, src)
    native.scatter_rows(dst, index.contiguous(), src)
    return dst


def _refuse_gradient(message: str, *tensors: Tensor) -> None:
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise ValueError(message)


@torch.library.register_fake("gnnsys::gather_rows")
def _(src: Tensor, index: Tensor, dtype: torch.dtype | None) -> Tensor:
    return index.new_empty((index.shape[0], *src.shape[1:]), dtype=src.dtype if dtype is None else dtype)


@torch.library.register_fake("gnnsys::gather_rows_out")
def _(src: Tensor, index: Tensor, out: Tensor) -> None:
    return None


@torch.library.register_fake("gnnsys::read_rows")
def _(src: Tensor, index: Tensor) -> int:
    return 0


@torch.library.register_fake("gnnsys::scatter_rows")
def _(dst: Tensor, index: Tensor, src: Tensor) -> None:
    return None


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, Tensor, torch.dtype | None], output: Tensor) -> None:
    src, index, _ = inputs
    ctx.save_for_backward(index)
    ctx.src_shape, ctx.src_dtype, ctx.src_device = src.shape, src.dtype, src.device


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (index,) = ctx.saved_tensors
    total = grad.new_zeros(ctx.src_shape, dtype=ctx.src_dtype).index_add(0, index, grad.to(ctx.src_dtype))
    return total.to(ctx.src_device), None, None  # rows of host memory may have been read from a device


_ORDER_BYTES = 8 << 20  # rows of the host's memory are read in order by a device where they are so many
_SECTOR = 32


def ordering_bytes(src: Tensor, index: Tensor) -> int:
    """Ids of rows in the host's memory, sorted by a device that reads them."""
    row = max(src[0].numel() * src.itemsize if src.shape[0] else 0, _SECTOR)
    if src.is_cuda or index.numel() * row < _ORDER_BYTES:
        return 0
    return 16 * index.numel() + 4 + sort_bytes(index.numel(), 4)


@tells_workspace("gather_rows", "cuda")
def _(expected: Expected, src: Tensor, index: Tensor, dtype: torch.dtype | None) -> int:
    return ordering_bytes(src, index)


@tells_workspace("gather_rows_out", "cuda")
def _(expected: Expected, src: Tensor, index: Tensor, out: Tensor) -> int:
    return ordering_bytes(src, index)


@tells_workspace("scatter_rows", "cuda")
def _(expected: Expected, dst: Tensor, index: Tensor, src: Tensor) -> int:
    return 8 * dst.shape[0]  # of every row who writes it last


takes_outputs_only("gather_rows", "gather_rows_out", "read_rows", "scatter_rows", "simd_bytes", device_types=["cpu"])


_gather_rows = differentiable("gather_rows", _backward, _save_for_backward)
