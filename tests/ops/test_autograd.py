"""An op's gradient is the same, called as it is or by torch.library's registration, and not there if not wanted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gnnsys.ops import CSC, gather_rows, spmm
from gnnsys.ops._library import native
from gnnsys.ops.aggregate import spmm_and_own

EDGES = torch.tensor([[0, 1, 2, 2, 3, 0, 1], [0, 0, 1, 2, 2, 3, 3]])


def case() -> tuple[CSC, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    csc = CSC.from_edge_index(EDGES, 4)
    x, weight = (torch.rand(size, dtype=torch.float64, generator=generator) for size in ((4, 3), (7,)))
    return csc, x, weight


def registered(csc: CSC, x: Tensor, weight: Tensor) -> Tensor:
    turned = csc.transpose()
    structure = csc.indptr, csc.indices, None
    return native.spmm(*structure, x, weight, None, None, turned.indptr, turned.indices, turned.edge_ids)


def test_called_as_it_is_it_has_the_gradients_of_the_registered_op():
    csc, x, weight = case()
    inputs = x.requires_grad_(), weight.requires_grad_()
    first = [torch.autograd.grad(f(csc, *inputs).pow(2).sum(), inputs, create_graph=True) for f in (spmm, registered)]
    second = [torch.autograd.grad(sum(g.pow(3).sum() for g in grads), inputs) for grads in first]
    for ours, theirs in zip((*first[0], *second[0]), (*first[1], *second[1]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


def test_nothing_is_recorded_where_no_gradient_is_wanted():
    csc, x, weight = case()
    assert not spmm(csc, x, weight).requires_grad
    with torch.no_grad():
        assert not spmm(csc, x.requires_grad_(), weight).requires_grad
    with torch.inference_mode():
        assert spmm(csc, x, weight).is_inference()
    assert spmm(csc, x, weight).grad_fn is not None


@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_a_result_is_no_view_and_may_be_written(reduce: str):
    csc, x, _ = case()
    out = spmm(csc, x.requires_grad_(), reduce=reduce)
    out.mul_(2).sum().backward()
    once = x.grad.clone()
    x.grad = None
    spmm(csc, x, reduce=reduce).sum().backward()
    assert torch.equal(once, 2 * x.grad)


def test_rows_are_gathered_with_a_gradient_and_without():
    table, index = torch.rand(5, 2, requires_grad=True), torch.tensor([1, 1, 4])
    gather_rows(table, index).sum().backward()
    assert table.grad.sum(1).tolist() == [0, 4, 0, 0, 2]
    assert not gather_rows(table.detach(), index).requires_grad


def apart(csc: CSC, x: Tensor, reduce: str) -> tuple[Tensor, Tensor]:
    return spmm(csc, x, reduce=reduce), x[: csc.num_dst]


@pytest.mark.parametrize("num_dst", [0, 2, 4])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_reduced_and_own_rows_have_the_gradients_of_both(reduce: str, num_dst: int):
    edges = EDGES[:, EDGES[1] < num_dst]
    csc, x = CSC.from_edge_index(edges, 4, num_dst), case()[1].requires_grad_()
    found = []
    for both in (spmm_and_own, apart):
        reduced, own = both(csc, x, reduce)
        (first,) = torch.autograd.grad((reduced.pow(2) * own.pow(3)).sum() + own.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), x)
        found.append((reduced, own, first, second))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=0)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_of_reduced_and_own_rows_one_may_have_no_gradient(reduce: str, which: int):
    csc, x = CSC.from_edge_index(EDGES[:, :3], 4, 2), case()[1].requires_grad_()
    losses = (both(csc, x, reduce)[which].pow(2).sum() for both in (spmm_and_own, apart))
    ours, theirs = (torch.autograd.grad(loss, x)[0] for loss in losses)
    assert torch.equal(ours, theirs)
    assert not any(part.requires_grad for part in spmm_and_own(csc, x.detach()))


def test_reduced_and_own_rows_pass_torchs_check_of_gradients():
    """One of whose checks is that there need be none."""
    csc = CSC.from_edge_index(EDGES[:, EDGES[1] < 2], 4, 2)
    assert torch.autograd.gradcheck(lambda x: spmm_and_own(csc, x, "mean"), case()[1].requires_grad_())


def test_own_rows_must_be_the_first_sources():
    csc = CSC.from_edge_index(EDGES[:, EDGES[0] < 2], 2, 4)
    with pytest.raises(ValueError, match="the first of the sources, got 4 of 2"):
        spmm_and_own(csc, torch.rand(2, 3, requires_grad=True))
