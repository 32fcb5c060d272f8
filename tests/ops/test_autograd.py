"""An op's gradient is the same, called as it is or by torch.library's registration, and not there if not wanted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gnnsys.ops import CSC, gather_rows, spmm
from gnnsys.ops._library import native

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
    for ours, theirs in zip((*first[0], *second[0]), (*first[1], *second[1])):
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
