"""relation_conv: sums over the edges of many relations at once, each times its relation's weight, without messages.

    out[v] = own[v] @ root + sum over relations r of (scale * sum over u -r-> v of x[u]) @ W_r

Edges are grouped beforehand (`RelationGroups`). Beside its outputs the op holds tiles: neither relations x nodes x
features nor anything for the backward pass. It can be differentiated any number of times; a second derivative is made
of other ops and holds a row per group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnsys.ops._autograd import _without_gradient, again
from gnnsys.ops._features import sum_dtype
from gnnsys.ops._library import native
from gnnsys.ops._relation_workspace import out_widths
from gnnsys.ops.aggregate import spmm
from gnnsys.ops.csc import CSC
from gnnsys.ops.relation_groups import RelationGroups, SourceGroups


class Relation(NamedTuple):
    """Which of the rows a relation reads, which output it adds to, which weight it has, and at which row of that."""

    x: int
    out: int
    weight: int
    row: int


def relation_conv(
    groups: RelationGroups,
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    relations: Sequence[Relation],
    num_dst: Sequence[int],
    root: Sequence[Tensor] = (),
    own: Sequence[int] = (),
) -> list[Tensor]:
    """The outputs, [num_dst[d], out] each. `groups` has the edges of `relations`, in their order.

    `x` are rows [n, in]; a weight is [relations, in, out], or [relations, blocks, in / blocks, out / blocks] for
    block-diagonal ones. With `root`, one for every output, destinations add their own rows, the first of `x[own[d]]`,
    times it. Gradients flow to `x`, `weight` and `root`. Under autocast all are rounded as those of a product are.
    """
    x, weight, root = ([_as_product(t).contiguous() for t in each] for each in (x, weight, root))
    tensors = [*x, *weight, *root]
    wants = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    scale, t_weight = groups.scales(sum_dtype(x[0].dtype), wants)
    by = groups.by_source() if wants else SourceGroups([], groups.indices[:0], None, None, None)
    flat = [number for relation in relations for number in relation]
    structure = (groups.dst, groups.indptr, groups.indices, scale)
    turned = (by.src if wants else None, by.indptr, by.indices, t_weight)
    arguments = _Arguments(list(own), flat, list(num_dst), groups.ends, by.ends, len(x), len(weight))
    if torch.compiler.is_compiling():
        return list(native.relation_conv(*arguments.call(tensors, structure, turned)))
    if not wants:
        return list(_without_gradient(native.relation_conv, arguments.call(tensors, structure, turned)))
    return list(_Eager.apply(arguments, structure, turned, *tensors))  # type: ignore[no-untyped-call]


def _as_product(t: Tensor) -> Tensor:
    """As autocast gives it to a matrix product."""
    kind = t.device.type
    if torch.is_autocast_enabled(kind) and t.is_floating_point() and t.dtype != torch.float64:
        return t.to(torch.get_autocast_dtype(kind))
    return t


class _Arguments(NamedTuple):
    """What of a call is no tensor."""

    own: list[int]
    relations: list[int]
    num_dst: list[int]
    ends: list[int]
    t_ends: list[int]
    num_x: int
    num_weight: int

    def lists(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        at = self.num_x + self.num_weight
        return list(tensors[: self.num_x]), list(tensors[self.num_x : at]), list(tensors[at:])

    def call(self, tensors: Sequence[Tensor], structure: tuple[Any, ...], turned: tuple[Any, ...]) -> tuple[Any, ...]:
        sizes = (self.own, self.relations, self.num_dst, self.ends)
        return (*self.lists(tensors), *sizes, *structure, self.t_ends, *turned)


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arguments: _Arguments, structure: Any, turned: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.arguments, ctx.num_structure = arguments, len(structure)
        ctx.save_for_backward(*structure, *turned, *tensors)
        return tuple(_without_gradient(native.relation_conv, arguments.call(tensors, structure, turned)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        structure, turned, tensors = saved[:4], saved[4:8], saved[8:]
        found = _gradients(ctx.arguments, structure, turned, tensors, grads, ctx.needs_input_grad[3:])
        return None, None, None, *found


def _gradients(
    arguments: _Arguments,
    structure: Sequence[Any],
    turned: Sequence[Any],
    tensors: Sequence[Tensor],
    grads: Sequence[Tensor],
    needed: Sequence[bool],
) -> list[Tensor | None]:
    if torch.is_grad_enabled():  # under create_graph
        sizes = [grad.shape[0] for grad in grads]

        def work(*inputs: Tensor) -> Tensor:
            return torch.cat([o.reshape(-1) for o in unfused_relation_conv(arguments, structure, inputs, sizes)])

        return again(work, tensors, torch.cat([grad.reshape(-1) for grad in grads]))
    x, weight, root = arguments.lists(tensors)
    wants_x = [int(each) for each in needed[: len(x)]]
    grad_x, grad_weight, grad_root = native.relation_conv_grad(
        [grad.contiguous() for grad in grads],
        x,
        weight,
        root,
        arguments.own,
        arguments.relations,
        wants_x,
        arguments.t_ends,
        *turned,
    )
    return [g if wanted else None for g, wanted in zip([*grad_x, *grad_weight, *grad_root], needed, strict=True)]


def unfused_relation_conv(
    arguments: _Arguments, structure: Sequence[Any], tensors: Sequence[Tensor], num_dst: Sequence[int]
) -> list[Tensor]:
    """What relation_conv computes, of ops that have gradients of every order: relation by relation."""
    dst, indptr, indices, scale = structure
    x, weight, root = arguments.lists(tensors)
    outs = [x[own][:n] @ root[d] for d, (own, n) in enumerate(zip(arguments.own, num_dst, strict=False))]
    parts: list[list[Tensor]] = [[out] for out in outs] or [[] for _ in num_dst]
    for number in range(len(arguments.relations) // 4):
        relation = Relation(*arguments.relations[4 * number : 4 * number + 4])
        first, last = arguments.ends[number], arguments.ends[number + 1]
        if first == last:
            continue
        rows, w = x[relation.x], weight[relation.weight][relation.row]
        if indptr is None:
            sums = rows.index_select(0, indices[first:last])
        else:
            edges = indptr[first : last + 1]
            members = indices[int(edges[0]) : int(edges[-1])]
            sums = spmm(CSC(edges - edges[0], members, rows.shape[0]), rows)
            sums = sums if scale is None else sums * scale[first:last, None].to(sums.dtype)
        made = sums @ w if w.dim() == 2 else torch.einsum("nbi,bio->nbo", sums.unflatten(1, w.shape[:2]), w).flatten(1)
        if dst is None:
            parts[0].append(made)
            continue
        zeros = made.new_zeros(num_dst[relation.out], made.shape[1])
        parts[relation.out].append(zeros.index_add(0, dst[first:last], made))
    widths = out_widths(arguments.relations, arguments.num_dst, weight, root)
    if dst is None:
        return [torch.cat(parts[0]) if parts[0] else x[0].new_zeros(0, widths[0])]
    return [
        torch.stack(each).sum(0) if each else x[0].new_zeros(n, width)
        for each, n, width in zip(parts, num_dst, widths, strict=True)
    ]


@torch.library.register_fake("gnnsys::relation_conv")
def _(
    x: list[Tensor],
    weight: list[Tensor],
    root: list[Tensor],
    own: list[int],
    relations: list[int],
    num_dst: list[int],
    ends: list[int],
    *structure: Any,
) -> list[Tensor]:
    widths = out_widths(relations, num_dst, weight, root)
    return [x[0].new_empty((n, width)) for n, width in zip(num_dst, widths, strict=True)]


@torch.library.register_fake("gnnsys::relation_conv_grad")
def _(
    grad: list[Tensor],
    x: list[Tensor],
    weight: list[Tensor],
    root: list[Tensor],
    own: list[int],
    relations: list[int],
    wants_x: list[int],
    *structure: Any,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    grad_x = [rows.new_empty((rows.shape[0] if w else 0, rows.shape[1])) for rows, w in zip(x, wants_x, strict=True)]
    return grad_x, [torch.empty_like(w) for w in weight], [torch.empty_like(r) for r in root]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weight, root, own, relations, num_dst, ends, dst, indptr, indices, scale, t_ends, *turned = inputs
    ctx.arguments = _Arguments(own, relations, num_dst, ends, t_ends, len(x), len(weight))
    ctx.save_for_backward(dst, indptr, indices, scale, *turned, *x, *weight, *root)


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    arguments, tensors = ctx.arguments, saved[8:]
    found = _gradients(arguments, saved[:4], saved[4:8], tensors, grads, [t.requires_grad for t in tensors])
    return (*arguments.lists(found), *[None] * 13)


torch.library.register_autograd("gnnsys::relation_conv", _backward, setup_context=_save)
