"""Aggregation over in-edges: spmm (sum, mean, max, min) and sddmm, without a message per edge.

spmm and sddmm are each other's gradients: the gradient of a sum with respect to the features is spmm over the
transposed structure, with respect to the edge weights it is sddmm, and the other way round. So both can be
differentiated any number of times, and a CSC's transpose is made once and kept by the CSC.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnsys.ops._autograd import differentiable
from gnnsys.ops._features import check_rows, need_transpose, sum_dtype, transposed_if_needed
from gnnsys.ops._library import native
from gnnsys.ops._spmm_scratch import padded_size, row_scratch, split_bytes
from gnnsys.ops._workspace import Expected, takes_outputs_only, tells_workspace
from gnnsys.ops.csc import CSC
from gnnsys.ops.device_kind import device_kind

REDUCTIONS = ("sum", "mean", "max", "min")


def spmm(csc: CSC, x: Tensor, weight: Tensor | None = None, reduce: str = "sum") -> Tensor:
    """Reduces `weight[e] * x[u]` over the in-edges e = (u, v) of every v; 0 where there are none.

    `x` is [num_src, d] or [num_src, heads, d]; `weight`, by position in `csc`, is [num_edges], or [num_edges, heads]
    beside an `x` with heads. The result is [num_dst, ...]. "mean" divides by the number of in-edges, weighted or
    not. Gradients flow to `x` and `weight`; those of "max" and "min" to the first edge that attains it. Sums are
    made in float32 for half-precision inputs, in the order of the edges.

    >>> csc = CSC(torch.tensor([0, 2, 2]), torch.tensor([0, 1]), num_src=2)
    >>> spmm(csc, torch.tensor([[1.0], [2.0]]), reduce="mean")
    tensor([[1.5000],
            [0.0000]])
    """
    if reduce not in REDUCTIONS:
        raise ValueError(f"reduce must be one of {', '.join(REDUCTIONS)}, got {reduce!r}")
    check_rows(x, csc.num_src, "x")
    if x.dim() == 3 and (weight is None or weight.dim() == 1):  # every head alike: one wide row
        return spmm(csc, x.flatten(1), weight, reduce).unflatten(1, x.shape[1:])
    x = x.contiguous()
    weight = None if weight is None else weight.contiguous()
    if reduce in ("max", "min"):
        # The gradient scatters on the CPU; on a GPU it gathers over the transpose, to be the same on every run.
        transposed = transposed_if_needed(csc, x if device_kind(x) == "cuda" else None)
        return _spmm_extreme(csc.indptr, csc.indices, x, weight, reduce == "min", *transposed)[0]
    dst_scale = _mean_scale(csc, x) if reduce == "mean" else None
    return _spmm(csc.indptr, csc.indices, None, x, weight, None, dst_scale, *transposed_if_needed(csc, x))


def scaled_spmm(
    csc: CSC, x: Tensor, weight: Tensor | None, src_scale: Tensor | None, dst_scale: Tensor | None
) -> Tensor:
    """`dst_scale[v] * sum of weight[e] * src_scale[u] * x[u]` over the in-edges e = (u, v) of v, `x` [num_src, d].

    Scales have the dtype that sums are made in, and take effect before a sum is rounded to the dtype of x. Gradients
    flow to `x` and `weight`, not to scales.
    """
    check_rows(x, csc.num_src, "x")
    if any(scale is not None and scale.requires_grad for scale in (src_scale, dst_scale)) and torch.is_grad_enabled():
        raise ValueError("scales have no gradient: multiply rows by them")
    x, weight = x.contiguous(), None if weight is None else weight.contiguous()
    return _spmm(csc.indptr, csc.indices, None, x, weight, src_scale, dst_scale, *transposed_if_needed(csc, x))


def narrow_weights(csc: CSC, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of edges that float16 can say, and what sums of them are to be divided by: [num_edges] and [num_dst].

    float16 ends at 65504 and at 6e-8, and weights may be any: each destination's are multiplied by a power of two such
    that together they are 8192 to 16384. Both results are in the dtype that sums are made in, where that is exact.
    """
    weight = weight.detach().to(sum_dtype(weight.dtype))
    totals = spmm(csc, weight.new_ones(csc.num_src, 1), weight=weight.abs()).view(-1)
    totals = torch.where(totals == 0, 1.0, totals.clamp(1e-30, 1e30))
    factors = torch.frexp(totals).mantissa / totals * 2.0**14
    return weight * factors.index_select(0, csc.dst()), factors


def spmm_and_own(csc: CSC, x: Tensor, reduce: str = "sum") -> tuple[Tensor, Tensor]:
    """`spmm(csc, x, reduce=reduce)`, and `x[:num_dst]`: what layers take of a block, whose destinations come first.

    Values and gradients are those of the two. But on the way back their gradients meet where the first is made: the
    second is added to it in place, instead of to as many rows of zeros as there are sources, and those to the first.
    The second is not to be written, nor read after `x` was.
    """
    wants_gradient = torch.is_grad_enabled() and x.requires_grad
    if not wants_gradient or reduce not in ("sum", "mean") or x.dim() != 2 or torch.compiler.is_compiling():
        return spmm(csc, x, reduce=reduce), x[: csc.num_dst]
    check_rows(x, csc.num_src, "x")
    if csc.num_dst > csc.num_src:
        raise ValueError(f"destinations must be the first of the sources, got {csc.num_dst} of {csc.num_src}")
    dst_scale = _mean_scale(csc, x) if reduce == "mean" else None
    turned = csc.transpose()
    out: tuple[Tensor, Tensor] = _AndOwn.apply(  # type: ignore[no-untyped-call]
        csc.indptr, csc.indices, x.contiguous(), dst_scale, turned.indptr, turned.indices, turned.edge_ids
    )
    return out


def spmm_add(csc: CSC, x: Tensor, out: Tensor, weight: Tensor | None = None, dst_scale: Tensor | None = None) -> Tensor:
    """Adds `dst_scale[v] * sum of weight[e] * x[u]` over the in-edges e = (u, v) to `out[v]`; returns `out`.

    For a sum whose sources arrive piece by piece, as those of a halo do: one CSC per piece over the same destinations.
    Each row is summed as in `spmm`, then added to what `out` holds. `dst_scale`, [num_dst] in the dtype that sums are
    made in, is what all pieces together ask for (a mean's 1 / degree over all of them). Not differentiable.

    >>> csc = CSC(torch.tensor([0, 2, 2]), torch.tensor([0, 1]), num_src=2)
    >>> spmm_add(csc, torch.tensor([[1.0], [2.0]]), torch.full((2, 1), 10.0))
    tensor([[13.],
            [10.]])
    """
    check_rows(x, csc.num_src, "x")
    check_rows(out, csc.num_dst, "out")
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, out, weight)):
        raise RuntimeError("spmm_add has no gradient: call it under torch.no_grad(), or spmm and add its result")
    if x.shape[1:] != out.shape[1:] or not out.is_contiguous():
        raise ValueError(
            f"out must be contiguous, with rows of x's shape {list(x.shape[1:])}, got {list(out.shape[1:])}"
        )
    if x.dim() == 3 and (weight is None or weight.dim() == 1):  # every head alike: one wide row
        spmm_add(csc, x.flatten(1), out.flatten(1), weight, dst_scale)
        return out
    weight = None if weight is None else weight.contiguous()
    native.spmm_add(csc.indptr, csc.indices, None, x.contiguous(), weight, None, dst_scale, out)
    return out


def spmm_out(csc: CSC, x: Tensor, out: Tensor, dst_scale: Tensor | None = None) -> Tensor:
    """`dst_scale[v] * sum of x[u]` over the in-edges (u, v) of v into `out`, which may be pinned; returns it.

    `dst_scale` is in the dtype that sums are made in (`inverse_degrees` for a mean). Not differentiable.

    >>> csc = CSC(torch.tensor([0, 2, 2]), torch.tensor([0, 1]), num_src=2)
    >>> spmm_out(csc, torch.tensor([[1.0], [2.0]]), torch.empty(2, 1), inverse_degrees(csc, torch.float32))
    tensor([[1.5000],
            [0.0000]])
    """
    check_rows(x, csc.num_src, "x")
    check_rows(out, csc.num_dst, "out")
    if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
        raise RuntimeError("spmm_out has no gradient: call it under torch.no_grad(), or spmm")
    native.spmm_out(csc.indptr, csc.indices, None, x.contiguous(), None, None, dst_scale, out)
    return out


def inverse_degrees(csc: CSC, dtype: torch.dtype) -> Tensor:
    """1 / in-degree of every destination, 1 where it has no in-edge, in the dtype that sums of `dtype` are made in."""
    return native.inverse_degrees.default(csc.indptr, sum_dtype(dtype))


def sddmm(csc: CSC, dst_rows: Tensor, src_rows: Tensor) -> Tensor:
    """`<dst_rows[v], src_rows[u]>` for every edge (u, v), by position in `csc`.

    Rows [n, d] give [num_edges]; rows [n, heads, d] give [num_edges, heads]. Differentiable in both.
    """
    check_rows(dst_rows, csc.num_dst, "dst_rows")
    check_rows(src_rows, csc.num_src, "src_rows")
    return _sddmm(
        csc.indptr,
        csc.indices,
        None,
        dst_rows.contiguous(),
        src_rows.contiguous(),
        None,
        None,
        *transposed_if_needed(csc, src_rows),
    )


def _mean_scale(csc: CSC, x: Tensor) -> Tensor:
    """1 / degree, where x is: a structure may be in pinned memory."""
    scale = native.inverse_degrees.default(csc.indptr, sum_dtype(x.dtype))
    return scale if scale.device == x.device else scale.to(x.device)


# The ops take (indptr, indices, positions) of the structure and of its transpose; positions say where in an edge
# tensor an edge's value is, None that it is at the edge's own place. A gradient exchanges the two.


@torch.library.register_fake("gnnsys::spmm")
def _(
    indptr: Tensor,
    indices: Tensor,
    positions: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    src_scale: Tensor | None,
    dst_scale: Tensor | None,
    t_indptr: Tensor | None,
    t_indices: Tensor | None,
    t_positions: Tensor | None,
) -> Tensor:
    return x.new_empty((indptr.shape[0] - 1, *x.shape[1:]))


@torch.library.register_fake("gnnsys::spmm_add")
@torch.library.register_fake("gnnsys::spmm_out")
def _(
    indptr: Tensor,
    indices: Tensor,
    positions: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    src_scale: Tensor | None,
    dst_scale: Tensor | None,
    out: Tensor,
) -> None:
    return None


@torch.library.register_fake("gnnsys::inverse_degrees")
def _(indptr: Tensor, dtype: torch.dtype) -> Tensor:
    return indptr.new_empty((indptr.shape[0] - 1,), dtype=dtype)


@torch.library.register_fake("gnnsys::sddmm")
def _(
    indptr: Tensor,
    indices: Tensor,
    positions: Tensor | None,
    dst_rows: Tensor,
    src_rows: Tensor,
    src_scale: Tensor | None,
    dst_scale: Tensor | None,
    t_indptr: Tensor | None,
    t_indices: Tensor | None,
    t_positions: Tensor | None,
) -> Tensor:
    return dst_rows.new_empty((indices.shape[0], *dst_rows.shape[1:-1]))


def _save_spmm(ctx: Any, inputs: tuple[Tensor | None, ...], output: Tensor) -> None:
    *structure, x, weight, src_scale, dst_scale, t_indptr, t_indices, t_positions = inputs
    x = x if ctx.needs_input_grad[4] else None  # only the gradient of weight looks at the features again
    ctx.save_for_backward(*structure, x, weight, src_scale, dst_scale, t_indptr, t_indices, t_positions)


def _save_sddmm(ctx: Any, inputs: tuple[Tensor | None, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _spmm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    indptr, indices, positions, x, weight, src_scale, dst_scale, t_indptr, t_indices, t_positions = ctx.saved_tensors
    structure, transposed = (indptr, indices, positions), (t_indptr, t_indices, t_positions)
    grad = grad.contiguous()
    grad_x = grad_weight = None
    if ctx.needs_input_grad[3]:
        need_transpose(t_indptr)
        grad_x = _spmm(*transposed, grad, weight, dst_scale, src_scale, *structure)
    if ctx.needs_input_grad[4]:
        grad_weight = _sddmm(*structure, grad, x, src_scale, dst_scale, *transposed)
    return None, None, None, grad_x, grad_weight, None, None, None, None, None


def _sddmm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    indptr, indices, positions, dst, src, src_scale, dst_scale, t_indptr, t_indices, t_positions = ctx.saved_tensors
    structure, transposed = (indptr, indices, positions), (t_indptr, t_indices, t_positions)
    grad = grad.contiguous()
    grad_dst = grad_src = None
    if ctx.needs_input_grad[3]:
        grad_dst = _spmm(*structure, src, grad, src_scale, dst_scale, *transposed)
    if ctx.needs_input_grad[4]:
        need_transpose(t_indptr)
        grad_src = _spmm(*transposed, dst, grad, dst_scale, src_scale, *structure)
    return None, None, None, grad_dst, grad_src, None, None, None, None, None


_spmm = differentiable("spmm", _spmm_backward, _save_spmm)
_sddmm = differentiable("sddmm", _sddmm_backward, _save_sddmm)


class _AndOwn(torch.autograd.Function):
    """The op of `spmm_and_own`; the second result is a view of x."""

    @staticmethod
    def forward(
        ctx: Any, indptr: Tensor, indices: Tensor, x: Tensor, dst_scale: Tensor | None, *transposed: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(indptr, indices, dst_scale, *transposed)
        return _spmm(indptr, indices, None, x, None, None, dst_scale, *transposed), x[: indptr.shape[0] - 1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, own_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        indptr, indices, dst_scale, *transposed = ctx.saved_tensors
        if grad is None and own_grad is None:
            return (None,) * 7
        if grad is None:
            assert own_grad is not None
            grad_x = own_grad.new_zeros((transposed[0].shape[0] - 1, own_grad.shape[1]))
        else:
            grad_x = _spmm(*transposed, grad.contiguous(), None, dst_scale, None, indptr, indices, None)
        if own_grad is not None:
            grad_x[: own_grad.shape[0]] += own_grad
        return None, None, grad_x, None, None, None, None


@torch.library.register_fake("gnnsys::spmm_extreme")
def _(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    weight: Tensor | None,
    minimum: bool,
    t_indptr: Tensor | None = None,
    t_indices: Tensor | None = None,
    t_positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    num_dst = indptr.shape[0] - 1
    return x.new_empty((num_dst, *x.shape[1:])), x.new_empty((num_dst, x[0].numel()), dtype=torch.int32)


@torch.library.register_fake("gnnsys::spmm_extreme_grad_x")
def _(
    indptr: Tensor,
    indices: Tensor,
    arg: Tensor,
    grad: Tensor,
    weight: Tensor | None,
    num_src: int,
    t_indptr: Tensor | None = None,
    t_indices: Tensor | None = None,
    t_positions: Tensor | None = None,
) -> Tensor:
    return grad.new_empty((num_src, arg.shape[1]), dtype=sum_dtype(grad.dtype))


@torch.library.register_fake("gnnsys::spmm_extreme_grad_weight")
def _(indptr: Tensor, indices: Tensor, arg: Tensor, grad: Tensor, x: Tensor) -> Tensor:
    heads = grad.shape[1] if grad.dim() == 3 else 1
    return grad.new_empty((indices.shape[0], heads), dtype=sum_dtype(grad.dtype))


def _save_extreme(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    indptr, indices, x, weight, _, *transposed = inputs
    ctx.save_for_backward(indptr, indices, x if ctx.needs_input_grad[3] else None, weight, output[1], *transposed)
    ctx.x_shape = x.shape


def _extreme_backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    indptr, indices, x, weight, arg, *transposed = ctx.saved_tensors
    grad = grad.contiguous()
    grad_x = grad_weight = None
    if torch.is_grad_enabled():  # under create_graph: what follows has no gradient of its own
        return None, None, *_extreme_grads(ctx, indptr, indices, arg, grad, x, weight), None, None, None, None
    if ctx.needs_input_grad[2]:
        grad_x = native.spmm_extreme_grad_x(indptr, indices, arg, grad, weight, ctx.x_shape[0], *transposed)
        grad_x = grad_x.to(grad.dtype).view(ctx.x_shape)
    if ctx.needs_input_grad[3]:
        grad_weight = native.spmm_extreme_grad_weight(indptr, indices, arg, grad, x).to(grad.dtype).view_as(weight)
    return None, None, grad_x, grad_weight, None, None, None, None


def _extreme_grads(
    ctx: Any, indptr: Tensor, indices: Tensor, arg: Tensor, grad: Tensor, x: Tensor | None, weight: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of `_extreme_backward` by torch's indexing, to be differentiated again."""
    dtype, wide, has_edge = grad.dtype, sum_dtype(grad.dtype), arg >= 0
    if indices.numel() == 0:
        return grad.new_zeros(ctx.x_shape), None if weight is None else torch.zeros_like(weight)
    # The edge that each value came by, [num_dst, columns]; `arg` counts from a row's first.
    edge = torch.where(has_edge, indptr[:-1].unsqueeze(1) + arg, 0)
    heads = weight.shape[1] if weight is not None and weight.dim() == 2 else 1
    head = torch.arange(arg.shape[1], device=arg.device) // max(arg.shape[1] // heads, 1)
    place = edge * heads + head  # in the flat weight
    grad = grad.reshape(arg.shape).to(wide).masked_fill(~has_edge, 0)
    source = indices[edge].long()
    grad_x = grad_weight = None
    if ctx.needs_input_grad[2]:
        sent = grad if weight is None else grad * weight.reshape(-1)[place].to(wide)
        grad_x = sent.new_zeros(ctx.x_shape[0], arg.shape[1]).scatter_add(0, source, sent)
        grad_x = grad_x.to(dtype).view(ctx.x_shape)
    if ctx.needs_input_grad[3]:
        assert x is not None and weight is not None
        sent = grad * x.reshape(x.shape[0], -1).gather(0, source).to(wide)
        grad_weight = sent.new_zeros(weight.numel()).index_add(0, place.reshape(-1), sent.reshape(-1))
        grad_weight = grad_weight.to(dtype).view_as(weight)
    return grad_x, grad_weight


_spmm_extreme = differentiable("spmm_extreme", _extreme_backward, _save_extreme)


@tells_workspace("spmm", "cpu")
@tells_workspace("spmm_out", "cpu")
def _(expected: Expected, indptr: Tensor, indices: Tensor, positions: Tensor | None, x: Tensor, *others: Any) -> int:
    return row_scratch(expected, indptr, indices, x, False)


@tells_workspace("spmm", "cuda")
@tells_workspace("spmm_out", "cuda")
def _(expected: Expected, indptr: Tensor, indices: Tensor, positions: Tensor | None, x: Tensor, *others: Any) -> int:
    size, num_dst, num_edges = x[0].numel() if x.shape[0] else 0, indptr.numel() - 1, indices.numel()
    num_src = x.shape[0]
    padded = size if x.dim() == 3 else padded_size(size, x.itemsize, max(num_src, num_dst), num_edges)
    copies = (num_src + num_dst) * padded * x.itemsize if padded != size else 0
    return copies + split_bytes(num_edges, padded, sum_dtype(x.dtype).itemsize)


@tells_workspace("spmm_add", "cpu")
def _(expected: Expected, indptr: Tensor, indices: Tensor, positions: Tensor | None, x: Tensor, *others: Any) -> int:
    return row_scratch(expected, indptr, indices, x, True)


@tells_workspace("spmm_add", "cuda")
def _(expected: Expected, indptr: Tensor, indices: Tensor, positions: Tensor | None, x: Tensor, *others: Any) -> int:
    return split_bytes(indices.numel(), x[0].numel() if x.shape[0] else 0, sum_dtype(x.dtype).itemsize)


@tells_workspace("spmm_extreme", "cpu")
def _(expected: Expected, indptr: Tensor, indices: Tensor, x: Tensor, *others: Any) -> int:
    """A row's best values and their edges."""
    size = x[0].numel() if x.shape[0] else 0
    return expected.row_threads(indptr.numel() - 1, indices.numel()) * size * 2 * sum_dtype(x.dtype).itemsize


@tells_workspace("spmm_extreme", "cuda")
def _(expected: Expected, indptr: Tensor, indices: Tensor, x: Tensor, *others: Any) -> int:
    return split_bytes(indices.numel(), x[0].numel() if x.shape[0] else 0, 2 * sum_dtype(x.dtype).itemsize)


@tells_workspace("spmm_extreme_grad_x", "cuda")
def _(expected: Expected, indptr: Tensor, indices: Tensor, arg: Tensor, grad: Tensor, *others: Any) -> int:
    return split_bytes(indices.numel(), arg.shape[1], sum_dtype(grad.dtype).itemsize)


takes_outputs_only("spmm_extreme_grad_x", device_types=["cpu"])
takes_outputs_only("inverse_degrees", "sddmm", "spmm_extreme_grad_weight")
