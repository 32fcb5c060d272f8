"""relation_conv beside the same of torch's own ops, relation by relation; its structures beside a dictionary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gnnsys.ops import CSC, Relation, group_by_type, group_structures, native, owners_of, pairs_of, relation_conv

SIZES = (30, 20)  # rows of two slots
RELATIONS = [
    Relation(0, 0, 0, 0),
    Relation(0, 1, 0, 2),
    Relation(0, 0, 0, 1),
    Relation(1, 0, 1, 0),
    Relation(1, 1, 1, 1),
]


def structures() -> list[CSC]:
    """The third has no edges; the others parallel ones, a long row and nodes without any."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for number, r in enumerate(RELATIONS):
        num_src, num_dst = SIZES[r.x], SIZES[r.out] - 3
        count = 0 if number == 2 else 60 * (number + 1)
        src = torch.randint(num_src, (count,), generator=generator)
        dst = (torch.rand(count, generator=generator) ** 3 * num_dst).long()
        edges = torch.cat([torch.stack([src, dst]), torch.stack([src, torch.zeros_like(dst)])], 1)
        found.append(CSC.from_edge_index(edges, num_src, num_dst))
    return found


def tensors(blocks: bool, dtype: torch.dtype = torch.float64) -> list[list[Tensor]]:
    """x, weight, root: widths of 6 and 4 become 8."""
    generator = torch.Generator().manual_seed(1)

    def made(*shape: int) -> Tensor:
        rows = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return rows.to(dtype).requires_grad_()

    shapes = [(3, 2, 3, 4), (2, 2, 2, 4)] if blocks else [(3, 6, 8), (2, 4, 8)]
    x = [made(SIZES[0], 6), made(SIZES[1], 4)]
    return [x, [made(*shape) for shape in shapes], [made(6, 8), made(4, 8)]]


def by_hand(cscs: list[CSC], x: list[Tensor], weight: list[Tensor], root: list[Tensor], reduce: str) -> list[Tensor]:
    num_dst = [SIZES[0] - 3, SIZES[1] - 3]
    outs = [x[d][:n] @ root[d] if root else x[d].new_zeros(n, 8) for d, n in enumerate(num_dst)]
    for csc, r in zip(cscs, RELATIONS, strict=True):
        sums = x[r.x].new_zeros(csc.num_dst, x[r.x].shape[1]).index_add(0, csc.dst(), x[r.x][csc.indices.long()])
        if reduce == "mean":
            sums = sums / csc.in_degrees().clamp(min=1)[:, None].to(sums.dtype)
        w = weight[r.weight][r.row]
        w = w if w.dim() == 2 else torch.block_diag(*w)
        outs[r.out] = outs[r.out] + sums @ w
    return outs


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("with_root", [False, True])
def test_results_and_gradients_are_those_of_torch(reduce: str, blocks: bool, with_root: bool):
    cscs, (x, weight, root) = structures(), tensors(blocks)
    root = root if with_root else []
    groups = group_structures(cscs, reduce)
    outs = relation_conv(groups, x, weight, RELATIONS, [27, 17], root, [0, 1] if root else [])
    expected = by_hand(cscs, x, weight, root, reduce)
    inputs = [*x, *weight, *root]
    cotangent = [torch.randn_like(out) for out in outs]
    got = torch.autograd.grad(outs, inputs, cotangent)
    wanted = torch.autograd.grad(expected, inputs, cotangent)
    for a, b in zip([*outs, *got], [*expected, *wanted], strict=True):
        torch.testing.assert_close(a, b)


def test_rows_of_pairs_and_of_owners_are_products():
    cscs, (x, weight, _) = structures(), tensors(False)
    groups = group_structures(cscs, "sum")
    pairs = pairs_of(groups)
    made = relation_conv(pairs, x, weight, [r._replace(out=0) for r in RELATIONS], [pairs.num_groups])[0]
    expected = []
    for csc, r in zip(cscs, RELATIONS, strict=True):
        expected.append(x[r.x][csc.indices.unique().long()] @ weight[r.weight][r.row])
    torch.testing.assert_close(made, torch.cat(expected))
    cotangent = torch.randn_like(made)
    for a, b in zip(
        *(torch.autograd.grad(o, [*x, *weight], cotangent) for o in (made, torch.cat(expected))), strict=True
    ):
        torch.testing.assert_close(a, b)
    joint = groups.by_destination([0 if r.out == 0 else 27 for r in RELATIONS], 44)
    edges = {(int(d), int(p)) for p, d in zip(joint.csc.indices, joint.csc.dst(), strict=True)}
    first, wanted = 0, set()
    for csc, r in zip(cscs, RELATIONS, strict=True):
        there = csc.indices.unique()
        place = torch.searchsorted(there, csc.indices)
        wanted |= {(int(d) + 27 * r.out, first + int(p)) for d, p in zip(csc.dst(), place, strict=True)}
        first += there.numel()
    assert edges == wanted
    owners = owners_of(groups, [27 if r.out == 0 else 17 for r in RELATIONS])
    assert owners.num_groups == sum(int((csc.in_degrees() > 0).sum()) for csc in cscs)


@pytest.mark.parametrize("num_relations", [4, 4000])  # few are counted, many are sorted
def test_edges_with_types_are_grouped_as_structures_of_each_type(num_relations: int):
    generator = torch.Generator().manual_seed(2)
    csc = CSC.from_edge_index(torch.randint(25, (2, 300), generator=generator), 25)
    types = torch.randint(num_relations, (300,), generator=generator)
    found = group_by_type(csc, types, num_relations, "mean")
    expected: dict[tuple[int, int], list[int]] = {}
    for source, dst, kind in zip(csc.indices.tolist(), csc.dst().tolist(), types.tolist(), strict=True):
        expected.setdefault((kind, dst), []).append(source)
    kinds = torch.arange(num_relations).repeat_interleave(torch.tensor(found.ends).diff())
    groups = list(zip(kinds.tolist(), found.dst.tolist(), strict=True))
    assert groups == sorted(expected)
    members = found.indices.split(found.indptr.diff().tolist())
    assert [m.tolist() for m in members] == [expected[group] for group in groups]


def test_long_and_short_rows_are_summed_in_many_tiles():
    """More groups than a tile has rows, and relations that begin and end in one."""
    generator = torch.Generator().manual_seed(3)
    edges = torch.randint(3000, (2, 20_000), generator=generator)
    edges[1, :700] = 5
    csc = CSC.from_edge_index(edges, 3000)
    types = torch.randint(7, (20_000,), generator=generator)
    x = torch.randn(3000, 200, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 200, 120, generator=generator, dtype=torch.float64, requires_grad=True)
    out = relation_conv(
        group_by_type(csc, types, 7, "mean"), [x], [weight], [Relation(0, 0, 0, r) for r in range(7)], [3000]
    )[0]
    expected = 0
    for kind in range(7):
        mine = types == kind
        sums = x.new_zeros(3000, 200).index_add(0, csc.dst()[mine], x[csc.indices[mine].long()])
        degree = torch.bincount(csc.dst()[mine], minlength=3000).clamp(min=1)
        expected = expected + (sums / degree[:, None]) @ weight[kind]
    torch.testing.assert_close(out, expected)
    for a, b in zip(*(torch.autograd.grad(o.square().sum(), [x, weight]) for o in (out, expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_it_can_be_differentiated_twice():
    cscs, (x, weight, root) = structures(), tensors(False)
    groups = group_structures(cscs, "mean")

    def work(*inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(relation_conv(groups, inputs[:2], inputs[2:4], RELATIONS, [27, 17], inputs[4:], [0, 1]))

    torch.manual_seed(0)
    assert torch.autograd.gradgradcheck(work, [*x, *weight, *root], fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_rows_are_summed_in_float32(dtype: torch.dtype):
    cscs, lists = structures(), tensors(False, dtype)
    wide = [[t.detach().double().requires_grad_() for t in each] for each in lists]
    groups = group_structures(cscs, "mean")
    outs = [relation_conv(groups, *each[:2], RELATIONS, [27, 17], each[2], [0, 1]) for each in (lists, wide)]
    tolerance = {torch.bfloat16: 6e-2, torch.float16: 1e-2, torch.float32: 1e-4}[dtype]
    for a, b in zip(*outs, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)
    grads = [
        torch.autograd.grad([o.sum() for o in out], [t for part in each for t in part])
        for out, each in zip(outs, (lists, wide), strict=True)
    ]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=20 * tolerance)


def arguments() -> tuple[Any, ...]:
    cscs, (x, weight, root) = structures(), tensors(False, torch.float32)
    groups = group_structures(cscs, "mean")
    by, (scale, t_weight) = groups.by_source(), groups.scales(torch.float32, True)
    flat = [number for r in RELATIONS for number in r]
    turned = (by.ends, by.src, by.indptr, by.indices, t_weight)
    return (
        x,
        weight,
        root,
        [0, 1],
        flat,
        [27, 17],
        groups.ends,
        groups.dst,
        groups.indptr,
        groups.indices,
        scale,
        *turned,
    )


def test_opcheck():
    torch.library.opcheck(native.relation_conv.default, arguments())
    x, weight, root, own, flat, *_, t_ends, t_src, t_indptr, t_indices, t_weight = arguments()
    grads = [torch.randn(27, 8), torch.randn(17, 8)]
    detached = [[t.detach() for t in each] for each in (x, weight, root)]
    torch.library.opcheck(
        native.relation_conv_grad.default,
        (grads, *detached, own, flat, [1, 1], t_ends, t_src, t_indptr, t_indices, t_weight),
    )


def test_gradients_go_only_where_they_are_wanted():
    cscs, (x, weight, root) = structures(), tensors(False)
    groups = group_structures(cscs, "sum")
    whole = relation_conv(groups, x, weight, RELATIONS, [27, 17], root, [0, 1])
    wanted = torch.autograd.grad([o.sum() for o in whole], [*weight, x[1]])
    given = [x[0].detach(), x[1]]
    part = relation_conv(groups, given, weight, RELATIONS, [27, 17], root, [0, 1])
    for a, b in zip(torch.autograd.grad([o.sum() for o in part], [*weight, x[1]]), wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_what_does_not_fit_is_refused():
    call = [
        [t.detach() for t in a] if isinstance(a, list) and a and isinstance(a[0], Tensor) else a for a in arguments()
    ]
    names = ("x", "weight", "root", "own", "relations", "num_dst", "ends", "dst", "indptr", "indices", "scale")
    at = {name: number for number, name in enumerate(names)}
    ends = call[at["ends"]]
    cases = [
        ("weight", [call[1][0][:, :5].contiguous(), call[1][1]], "weight must have 6 inputs"),
        ("root", [call[2][0], call[2][1][:, :7].contiguous()], "one width"),
        ("relations", [9, *call[4][1:]], r"relations: x must be in \[0, 2\)"),
        ("num_dst", [3, 17], r"dst must be in \[0, 3\)"),
        ("ends", [*ends[:-1], ends[-1] + 1], "indptr must have"),
        ("ends", [1, *ends[1:]], "rise from 0"),
        ("indices", call[9] + 25, r"indices must be in \[0, 30\)"),
        ("scale", call[10][:-1], "scale must have"),
        ("x", [call[0][0].double(), call[0][1]], "must have the dtype of x"),
    ]
    for name, value, message in cases:
        changed = [*call]
        changed[at[name]] = value
        with pytest.raises(ValueError, match=message):
            native.relation_conv(*changed)


def test_it_runs_under_torch_compile():
    cscs, (x, weight, root) = structures(), tensors(False, torch.float32)
    groups = group_structures(cscs, "mean")
    groups.by_source(), groups.scales(torch.float32, True)

    def work(*inputs: Tensor) -> Tensor:
        return torch.cat(relation_conv(groups, inputs[:2], inputs[2:4], RELATIONS, [27, 17], inputs[4:], [0, 1]))

    inputs = [*x, *weight, *root]
    expected, out = work(*inputs), torch.compile(work, backend="aot_eager", fullgraph=True)(*inputs)
    torch.testing.assert_close(out, expected)
    for a, b in zip(*(torch.autograd.grad(o.square().sum(), inputs) for o in (out, expected)), strict=True):
        torch.testing.assert_close(a, b)
