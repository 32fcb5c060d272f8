"""Sums over in-edges, and the linear layers behind them, as one step of autograd, on the host.

Of a small batch what counts is how often torch and Python are asked. Values and gradients are those of the ops one
after the other, in the same order, to the bit. On a GPU the ops are called one by one: their own steps back need no
Python, which loading threads want meanwhile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnsys.ops._autograd import again
from gnnsys.ops._library import native
from gnnsys.ops.aggregate import mean_scale, spmm
from gnnsys.ops.csc import CSC

_spmm = native.spmm.default


def can_fuse(x: Tensor, *others: Tensor | None) -> bool:
    """Whether `spmm_linear` may be called and pays: on the host, and not under what looks at every op, or changes its
    arguments. That is torch.compile, autocast, torch.func and forward-mode gradients.
    """
    if torch.compiler.is_compiling() or type(x) is not Tensor or x.is_cuda or x.dim() != 2 or not x.is_contiguous():
        return False
    return (
        all(t is None or (t.dtype == x.dtype and t.device == x.device) for t in others)
        and not torch.is_autocast_enabled(x.device.type)
        and not torch._C._are_functorch_transforms_active()
        and torch.autograd.forward_ad._current_level < 0
    )


def spmm_linear(
    csc: CSC, x: Tensor, weight: Tensor, bias: Tensor | None, own_weight: Tensor | None, reduce: str = "sum"
) -> Tensor:
    """`F.linear(spmm(csc, x, reduce=reduce), weight, bias)`, plus `x[:num_dst] @ own_weight.t()` where that is given.

    `reduce` is "sum" or "mean". Destinations are the first of the sources, as in a block. Ask `can_fuse` before.
    """
    if x.shape[0] != csc.num_src or csc.num_dst > csc.num_src:
        raise ValueError(f"x must have {csc.num_src} rows, the first {csc.num_dst} of destinations, got {x.shape[0]}")
    structure = _Structure(csc, mean_scale(csc, x) if reduce == "mean" else None, reduce)
    if not torch.is_grad_enabled():
        return _forward(structure, x, weight, bias, own_weight)[0]
    if x.requires_grad:
        csc.transpose()
    out: Tensor = _SpmmLinear.apply(structure, x, weight, bias, own_weight)  # type: ignore[no-untyped-call]
    return out


class _Structure(NamedTuple):
    """Not written by anybody, so that autograd need not keep watch over it: each tensor that it does costs time."""

    csc: CSC
    scale: Tensor | None
    reduce: str


def _forward(
    structure: _Structure, x: Tensor, weight: Tensor, bias: Tensor | None, own_weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    csc, scale, _ = structure
    with torch._C._AutoDispatchBelowAutograd():
        sums = _spmm(csc.indptr, csc.indices, None, x, None, None, scale, None, None, None)
        out = F.linear(sums, weight, bias)
        return out if own_weight is None else torch.addmm(out, x[: out.shape[0]], own_weight.t()), sums


class _SpmmLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, structure: _Structure, x: Tensor, weight: Tensor, bias: Tensor | None, own_weight: Tensor | None
    ) -> Tensor:
        out, sums = _forward(structure, x, weight, bias, own_weight)
        ctx.save_for_backward(x, weight, bias, own_weight, sums)
        ctx.structure = structure
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, own_weight, sums = ctx.saved_tensors
        (csc, scale, reduce), (_, wants_x, wants_weight, wants_bias, wants_own) = ctx.structure, ctx.needs_input_grad
        if torch.is_grad_enabled():  # under create_graph: sums have no gradient of their own here

            def apart(x: Tensor, weight: Tensor, bias: Tensor | None, own_weight: Tensor | None) -> Tensor:
                out = F.linear(spmm(csc, x, reduce=reduce), weight, bias)
                return out if own_weight is None else torch.addmm(out, x[: out.shape[0]], own_weight.t())

            return None, *again(apart, [x, weight, bias, own_weight], grad)
        with torch._C._AutoDispatchBelowAutograd():
            turned, grad_x = grad.t(), None
            if wants_x:
                back, of_sums = csc.transpose(), grad.mm(weight)
                grad_x = _spmm(back.indptr, back.indices, back.edge_ids, of_sums, None, scale, None, None, None, None)
                if own_weight is not None:
                    grad_x[: grad.shape[0]] += grad.mm(own_weight)
            grad_own = turned.mm(x[: grad.shape[0]]) if wants_own else None
            grad_weight = turned.mm(sums) if wants_weight else None
            return None, grad_x, grad_weight, grad.sum(0) if wants_bias else None, grad_own
