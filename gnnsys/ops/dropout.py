"""Dropout keyed by node: which values of a row are dropped depends on (key, node id, column) alone.

So a node's mask is the same on any number of ranks, bins and threads, for every dtype, on CPU and GPU, and wherever its
row lies in `x`: full-graph training with dropout has one answer, however the graph is split. No mask is kept for the
backward pass, which computes it again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnsys.ops._autograd import differentiable
from gnnsys.ops._workspace import takes_outputs_only

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def dropout_rows(x: Tensor, ids: Tensor, p: float, key: int) -> Tensor:
    """`x` with each value dropped with probability `p` in [0, 1), the others scaled by 1 / (1 - p).

    `x` is [n, ...] and `ids` [n], int32 or int64, the node of each row: any number >= 0, the same on all ranks, so
    original or global ids and not local ones. Columns are counted through all dimensions behind the first. `key` is a
    signed 64-bit number, as `stream_key(seed, step, layer)` gives one: pass another with every step and layer.

    The scale is rounded to float64 first, then to float32 unless `x` is float64, and multiplied there. What is dropped
    is 0 even where it was infinite or not a number. With `p` = 0 the result is `x` itself. Differentiable as often as
    asked. A negative id is a ValueError; on a GPU it ends the kernel.

    >>> dropout_rows(torch.ones(3, 6), torch.tensor([7, 8, 7]), p=0.5, key=1)
    tensor([[0., 2., 2., 0., 0., 0.],
            [2., 2., 0., 2., 0., 0.],
            [0., 2., 2., 0., 0., 0.]])
    """
    if x.dtype not in _FLOATS:
        raise ValueError(f"x must be float32, float64, bfloat16 or float16, got {x.dtype}")
    if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"ids must be [n], int32 or int64, got {ids.dtype} of shape {tuple(ids.shape)}")
    if x.dim() == 0 or x.shape[0] != ids.shape[0]:
        raise ValueError(f"x must have a row per id, {ids.shape[0]}, got shape {tuple(x.shape)}")
    if x.device != ids.device:
        raise ValueError(f"x and ids must be on one device, got {x.device} and {ids.device}")
    if not 0 <= p < 1:
        raise ValueError(f"p must be in [0, 1), got {p}")
    if not -(2**63) <= key < 2**63:
        raise ValueError(f"key must be a signed 64-bit number, as stream_key gives one, got {key}")
    if p == 0:
        return x
    return _dropout_rows(x.contiguous(), ids.contiguous(), p, key)


@torch.library.register_fake("gnnsys::dropout_rows")
def _(x: Tensor, ids: Tensor, p: float, key: int) -> Tensor:
    return x.new_empty(x.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, Tensor, float, int], output: Tensor) -> None:
    _, ids, ctx.p, ctx.key = inputs
    ctx.save_for_backward(ids)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    (ids,) = ctx.saved_tensors
    return _dropout_rows(grad.contiguous(), ids, ctx.p, ctx.key), None, None, None


_dropout_rows = differentiable("dropout_rows", _backward, _save_for_backward)


takes_outputs_only("dropout_rows")
