"""Sums and the linear layers behind them as one step: to the bit what the ops one after the other give."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gnnsys.nn import SAGEConv
from gnnsys.ops import CSC, can_fuse, spmm, spmm_linear
from tests.ops.graphs import random_csc
from tests.support.grid import grid

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def apart(
    csc: CSC, x: Tensor, weight: Tensor, bias: Tensor | None, own_weight: Tensor | None, reduce: str = "sum"
) -> Tensor:
    out = F.linear(spmm(csc, x, reduce=reduce), weight, bias)
    return out if own_weight is None else torch.addmm(out, x[: csc.num_dst], own_weight.t())


def inputs(dtype: torch.dtype, bias: bool, own: bool, rows: bool, num_src: int = 40) -> list[Tensor | None]:
    g = torch.Generator().manual_seed(0)
    made = [torch.randn(*shape, generator=g).to(dtype) for shape in ((num_src, 12), (7, 12), (7,), (7, 12))]
    wanted = [True, True, bias, own]
    found = [t.requires_grad_() if keep else None for t, keep in zip(made, wanted, strict=True)]
    return found if rows else [made[0].detach(), *found[1:]]


@grid(
    reduce=["sum", "mean"],
    dtype=list(DTYPES),
    bias=[False, True],
    own=[False, True],
    rows=[False, True],
    num_dst=[0, 25, 40],
)
def test_values_and_gradients_are_those_of_the_ops_one_by_one(reduce, dtype, bias, own, rows, num_dst):
    ids = torch.int32 if bias else torch.int64
    csc = random_csc(40, num_dst, 150, ids) if num_dst else CSC(torch.tensor([0]), torch.empty(0, dtype=ids), 40)
    found = []
    for work in (spmm_linear, apart):
        given = inputs(DTYPES[dtype], bias, own, rows)
        out = work(csc, *given, reduce)
        learnt = [t for t in given if t is not None and t.requires_grad]
        grads = torch.autograd.grad(out.float().square().sum(), learnt)
        found.append([out, *grads])
    assert len(found[0]) == 2 + bias + own + rows
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_no_transpose_is_made_for_rows_without_a_gradient():
    csc = random_csc(40, 25, 150)
    x, weight, *_ = inputs(torch.float32, False, False, rows=False)
    spmm_linear(csc, x, weight, None, None).sum().backward()
    assert csc._transposed is None and weight.grad is not None


def test_it_can_be_differentiated_twice():
    csc = random_csc(9, 5, 30)
    g = torch.Generator().manual_seed(0)
    given = [torch.randn(*s, generator=g, dtype=torch.float64) for s in ((9, 3), (2, 3), (2,), (2, 3))]
    given = [t.requires_grad_() for t in given]
    assert torch.autograd.gradcheck(lambda *each: spmm_linear(csc, *each, "mean"), given)
    assert torch.autograd.gradgradcheck(lambda *each: spmm_linear(csc, *each, "mean"), given)


def test_rows_and_structure_must_fit():
    x, weight, *_ = inputs(torch.float32, False, False, False)
    with pytest.raises(ValueError, match="x must have 41 rows, the first 25 of destinations, got 40"):
        spmm_linear(random_csc(41, 25, 60), x, weight, None, None)


def layer_and_rows() -> tuple[SAGEConv, CSC, Tensor]:
    torch.manual_seed(0)
    return SAGEConv(12, 7), random_csc(40, 25, 150, torch.int32), torch.randn(40, 12)


def by_hand(layer: SAGEConv, csc: CSC, x: Tensor) -> Tensor:
    return layer.lin_l(spmm(csc, x, reduce="mean")) + layer.lin_r(x[: csc.num_dst])


def test_a_layer_under_autocast_rounds_as_products_do():
    layer, csc, x = layer_and_rows()
    with torch.autocast("cpu", torch.bfloat16):
        assert not can_fuse(x, layer.lin_l.weight)
        assert layer(x, csc).dtype == torch.bfloat16
    assert can_fuse(x, layer.lin_l.weight) and not can_fuse(x, layer.lin_l.weight.double())
    assert not can_fuse(x.t(), layer.lin_l.weight)


def test_a_layer_has_forward_mode_gradients_of_its_weights():
    layer, csc, x = layer_and_rows()
    weight = layer.lin_r.weight.detach().clone()
    tangent = torch.randn_like(weight)

    def call(weight: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"lin_r.weight": weight}, (x, csc))

    _, found = torch.func.jvp(call, (weight,), (tangent,))
    torch.testing.assert_close(found, x[:25] @ tangent.t())
    whole = torch.func.vmap(call)(torch.stack([weight, 2 * weight]))
    torch.testing.assert_close(whole[1] - whole[0], x[:25] @ weight.t())


def test_a_layer_without_gradients_and_in_inference_gives_the_same():
    layer, csc, x = layer_and_rows()
    trained = layer(x, csc)
    assert trained.requires_grad
    torch.testing.assert_close(trained, by_hand(layer, csc, x))
    with torch.no_grad():  # where the other half may come first
        torch.testing.assert_close(layer(x, csc), trained.detach())
    with torch.inference_mode():
        torch.testing.assert_close(layer(x, csc), trained.detach())
    weights = layer.lin_l.weight.detach(), None, layer.lin_r.weight.detach()
    with torch.no_grad():
        assert torch.equal(spmm_linear(csc, x, *weights), apart(csc, x, *weights))
