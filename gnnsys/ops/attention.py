"""Attention over in-edges: edge_softmax, and gat_aggregate, which fuses GAT's scores, softmax, dropout and sum.

gat_aggregate keeps two numbers per destination and head for its backward pass and computes the rest again, so neither
pass holds anything of the size of edges times features. Dropout is addressed by (key, edge position, head): the same
key gives the same mask on any number of threads. Both can be differentiated any number of times; a second derivative of
gat_aggregate is made of the unfused ops, and holds numbers per edge.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnsys.ops._autograd import again, differentiable
from gnnsys.ops._features import check_rows, need_transpose, sum_dtype, transposed_if_needed
from gnnsys.ops._library import native
from gnnsys.ops._workspace import Expected, tells_workspace
from gnnsys.ops.aggregate import spmm
from gnnsys.ops.csc import CSC


def edge_softmax(csc: CSC, scores: Tensor) -> Tensor:
    """Softmax of `scores`, [num_edges] or [num_edges, heads] by position in `csc`, over the in-edges of each node.

    >>> edge_softmax(CSC(torch.tensor([0, 2, 3]), torch.tensor([0, 1, 1]), num_src=2), torch.zeros(3))
    tensor([0.5000, 0.5000, 1.0000])
    """
    if scores.dim() and scores.shape[0] != csc.num_edges:
        raise ValueError(f"scores must have a row per edge of indptr, {csc.num_edges}, got {scores.shape[0]}")
    return _edge_softmax(csc.indptr, scores.contiguous())


def gat_aggregate(
    csc: CSC,
    x: Tensor,
    score_src: Tensor,
    score_dst: Tensor,
    edge_score: Tensor | None = None,
    negative_slope: float = 0.2,
    dropout: float = 0.0,
    key: int = 0,
) -> Tensor:
    """GAT's aggregation: in-neighbours weighted by the softmax of their scores, [num_dst, heads, d].

    The score of e = (u, v) is `leaky_relu(score_src[u] + score_dst[v] + edge_score[e])`; softmax runs over the
    in-edges of v, and with `dropout` each weight is zeroed with that probability, the others scaled to make up for
    it. `x` is [num_src, heads, d], `score_src` [num_src, heads], `score_dst` [num_dst, heads] and `edge_score`
    [num_edges, heads], by position in `csc`. Gradients flow to all four. Pass a new `key` with every step.
    """
    check_rows(x, csc.num_src, "x")
    out, _ = _gat_aggregate(
        csc.indptr,
        csc.indices,
        x.contiguous(),
        score_src.contiguous(),
        score_dst.contiguous(),
        None if edge_score is None else edge_score.contiguous(),
        negative_slope,
        dropout,
        key,
        *transposed_if_needed(csc, x, score_src, score_dst, edge_score),
    )
    return out


@torch.library.register_fake("gnnsys::edge_softmax")
def _(indptr: Tensor, scores: Tensor) -> Tensor:
    return torch.empty_like(scores)


@torch.library.register_fake("gnnsys::edge_softmax_grad")
def _(indptr: Tensor, alpha: Tensor, grad: Tensor) -> Tensor:
    return torch.empty_like(alpha)


def _save_softmax(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _softmax_backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
    indptr, alpha = ctx.saved_tensors
    return None, _edge_softmax_grad(indptr, alpha, grad.contiguous())


def _save_softmax_grad(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _softmax_grad_backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
    """Of alpha * (g - S(alpha * g)), where S sums over the in-edges of a node and gives each of them the sum."""
    indptr, alpha, g = ctx.saved_tensors
    grad = grad.contiguous()
    grad_alpha = grad_g = None
    if ctx.needs_input_grad[1]:
        grad_alpha = grad * (g - _shared_sum(indptr, alpha * g)) - g * _shared_sum(indptr, alpha * grad)
    if ctx.needs_input_grad[2]:
        grad_g = _edge_softmax_grad(indptr, alpha, grad)
    return None, grad_alpha, grad_g


def _shared_sum(indptr: Tensor, rows: Tensor) -> Tensor:
    dst = CSC(indptr, indptr.new_empty(rows.shape[0]), 0).dst()
    wide = rows.to(sum_dtype(rows.dtype))
    sums = wide.new_zeros((indptr.shape[0] - 1, *rows.shape[1:])).index_add(0, dst, wide)
    return sums.index_select(0, dst).to(rows.dtype)


_edge_softmax_grad = differentiable("edge_softmax_grad", _softmax_grad_backward, _save_softmax_grad)
_edge_softmax = differentiable("edge_softmax", _softmax_backward, _save_softmax)


@torch.library.register_fake("gnnsys::gat_aggregate")
def _(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    score_src: Tensor,
    score_dst: Tensor,
    edge_score: Tensor | None,
    negative_slope: float,
    dropout: float,
    key: int,
    t_indptr: Tensor | None,
    t_indices: Tensor | None,
    t_positions: Tensor | None,
) -> tuple[Tensor, Tensor]:
    num_dst = indptr.shape[0] - 1
    return x.new_empty((num_dst, *x.shape[1:])), x.new_empty((num_dst, x.shape[1]), dtype=sum_dtype(x.dtype))


@torch.library.register_fake("gnnsys::gat_aggregate_grad")
def _(
    indptr: Tensor,
    t_indptr: Tensor,
    t_indices: Tensor,
    t_positions: Tensor,
    x: Tensor,
    score_src: Tensor,
    score_dst: Tensor,
    edge_score: Tensor | None,
    negative_slope: float,
    dropout: float,
    key: int,
    out: Tensor,
    log_total: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def by_head(num_rows: int) -> Tensor:
        return x.new_empty((num_rows, x.shape[1]), dtype=sum_dtype(x.dtype))

    return torch.empty_like(x), by_head(x.shape[0]), by_head(indptr.shape[0] - 1), by_head(t_indices.shape[0])


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    indptr, indices, x, score_src, score_dst, edge_score, *options, t_indptr, t_indices, t_positions = inputs
    structure = indptr, indices, t_indptr, t_indices, t_positions
    ctx.save_for_backward(*structure, x, score_src, score_dst, edge_score, *output)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _attention_backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    indptr, indices, *transposed, x, score_src, score_dst, edge_score, out, log_total = ctx.saved_tensors
    if grad is None:
        return (None,) * 12
    need_transpose(transposed[0])
    scores = (score_src, score_dst, edge_score)
    if torch.is_grad_enabled():  # under create_graph
        turned = CSC(transposed[0], transposed[1], indptr.shape[0] - 1, transposed[2])
        csc = CSC(indptr, indices, x.shape[0], None, turned)
        grads = again(lambda *inputs: _unfused(csc, *ctx.options, *inputs), (x, *scores), grad)
        return None, None, *grads, None, None, None, None, None, None
    grad_x, *grad_scores = native.gat_aggregate_grad(
        indptr, *transposed, x, *scores, *ctx.options, out, log_total, grad.contiguous()
    )
    needed = ctx.needs_input_grad[3:6]
    grads = [g.to(x.dtype) if wanted else None for g, wanted in zip(grad_scores, needed, strict=True)]
    return None, None, grad_x, *grads, None, None, None, None, None, None


def _unfused(
    csc: CSC,
    negative_slope: float,
    dropout: float,
    key: int,
    x: Tensor,
    score_src: Tensor,
    score_dst: Tensor,
    edge_score: Tensor | None,
) -> Tensor:
    """What gat_aggregate computes, of ops that have gradients of every order."""
    score = score_src.index_select(0, csc.indices) + score_dst.index_select(0, csc.dst())
    score = score if edge_score is None else score + edge_score
    alpha = edge_softmax(csc, torch.nn.functional.leaky_relu(score, negative_slope))
    if dropout > 0:
        alpha = alpha * _mask(csc, alpha, dropout, key)
    return spmm(csc, x, weight=alpha)


def _mask(csc: CSC, alpha: Tensor, dropout: float, key: int) -> Tensor:
    """What each edge's weight is multiplied by, [num_edges, heads].

    As the op itself draws it: over edges that each lead to a node of their own, the softmax is 1 everywhere.
    """
    num_edges, heads = alpha.shape
    alone = torch.arange(num_edges + 1, device=alpha.device)
    ones, zeros = alpha.new_ones(num_edges, heads, 1), alpha.new_zeros(num_edges, heads)
    with torch.no_grad():
        return gat_aggregate(CSC(alone, alone[:-1], num_edges), ones, zeros, zeros, None, 1.0, dropout, key).squeeze(2)


_gat_aggregate = differentiable("gat_aggregate", _attention_backward, _save_attention)


_CHUNK = 128  # out-edges of a node whose scores' gradients are made together on the CPU
_SEGMENT = 1024  # edges of a stretch on a device: those of long rows leave up to two results each


def _scores(
    expected: Expected, indptr: Tensor, num_edges: int, heads: int, dtype: torch.dtype, growth: int
) -> int:  # fmt: skip
    """On the CPU, of every thread: a row's scores, `growth` times where the array must grow, and numbers by head."""
    wide = sum_dtype(dtype).itemsize
    row = growth * wide * expected.degree(num_edges) + 2 * wide + 8
    return expected.row_threads(indptr.numel() - 1, num_edges) * heads * row


def _slots(num_edges: int) -> int:
    return 0 if num_edges <= _SEGMENT else 2 * -(-num_edges // _SEGMENT)


def _heads(scores: Tensor) -> int:
    return 1 if scores.dim() == 1 else scores.shape[1]


@tells_workspace("edge_softmax", "cpu")
def _(expected: Expected, indptr: Tensor, scores: Tensor) -> int:
    return _scores(expected, indptr, scores.shape[0], _heads(scores), scores.dtype, growth=2)


@tells_workspace("edge_softmax", "cuda")
def _(expected: Expected, indptr: Tensor, scores: Tensor) -> int:
    total = 2 * sum_dtype(scores.dtype).itemsize
    return total * _heads(scores) * (indptr.numel() - 1 + _slots(scores.shape[0]))


@tells_workspace("edge_softmax_grad", "cpu")
def _(expected: Expected, indptr: Tensor, alpha: Tensor, grad: Tensor) -> int:
    threads = expected.row_threads(indptr.numel() - 1, alpha.shape[0])
    return threads * _heads(alpha) * (sum_dtype(alpha.dtype).itemsize + 8)


@tells_workspace("edge_softmax_grad", "cuda")
def _(expected: Expected, indptr: Tensor, alpha: Tensor, grad: Tensor) -> int:
    wide = sum_dtype(alpha.dtype).itemsize
    return wide * _heads(alpha) * (indptr.numel() - 1 + _slots(alpha.shape[0]))


@tells_workspace("gat_aggregate", "cpu")
def _(expected: Expected, indptr: Tensor, indices: Tensor, x: Tensor, *others: Any) -> int:
    scores = _scores(expected, indptr, indices.numel(), x.shape[1], x.dtype, growth=3)
    threads, size = expected.row_threads(indptr.numel() - 1, indices.numel()), x.shape[1] * x.shape[2]
    return scores + threads * size * (sum_dtype(x.dtype).itemsize + 8)


@tells_workspace("gat_aggregate", "cuda")
def _(expected: Expected, indptr: Tensor, indices: Tensor, x: Tensor, *others: Any) -> int:
    """Totals per row and head; and results of long rows' stretches, one after the other."""
    wide, heads, slots = sum_dtype(x.dtype).itemsize, x.shape[1], _slots(indices.numel())
    return wide * (2 * heads * (indptr.numel() - 1) + slots * max(2 * heads, heads * x.shape[2]))


@tells_workspace("gat_aggregate_grad", "cpu")
def _(
    expected: Expected, indptr: Tensor, t_indptr: Tensor, t_indices: Tensor, t_positions: Tensor, x: Tensor,
    *others: Any,
) -> int:  # fmt: skip
    """<grad, out> per destination and head; of every thread the scores of a chunk, and a row."""
    wide, heads, size = sum_dtype(x.dtype).itemsize, x.shape[1], x.shape[1] * x.shape[2]
    threads = expected.row_threads(t_indptr.numel() - 1, t_indices.numel())
    return wide * heads * (indptr.numel() - 1) + threads * (
        wide * heads * (2 * _CHUNK + 1) + 8 * heads + size * (wide + 8)
    )


@tells_workspace("gat_aggregate_grad", "cuda")
def _(
    expected: Expected, indptr: Tensor, t_indptr: Tensor, t_indices: Tensor, t_positions: Tensor, x: Tensor,
    *others: Any,
) -> int:  # fmt: skip
    wide, heads = sum_dtype(x.dtype).itemsize, x.shape[1]
    return wide * heads * (indptr.numel() - 1 + _slots(t_indices.numel()) * max(x.shape[2], 1))
