"""Every op that has a gradient has the right second one, called as it is or by torch.library's registration."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gnnsys.nn import GATConv, GCNConv, RGCNConv, SAGEConv
from gnnsys.ops import CSC, dropout_rows, edge_softmax, gat_aggregate, gather_rows, sddmm, spmm
from gnnsys.ops._library import native
from gnnsys.ops.aggregate import spmm_and_own
from tests.support.grid import grid

# Parallel edges, a self loop, a node without in-edges, one more source than destinations.
CSC_ = CSC.from_edge_index(torch.tensor([[0, 1, 2, 2, 3, 4, 1, 0, 0], [0, 0, 1, 1, 2, 2, 2, 2, 0]]), 5, 4)


def rand(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def attention(x: Tensor, score_src: Tensor, score_dst: Tensor, edge_score: Tensor) -> Tensor:
    return gat_aggregate(CSC_, x, score_src, score_dst, edge_score, negative_slope=0.3)


def dropped(x: Tensor, score_src: Tensor, score_dst: Tensor, edge_score: Tensor) -> Tensor:
    return gat_aggregate(CSC_, x, score_src, score_dst, edge_score, dropout=0.4, key=5)


def registered(x: Tensor, score_src: Tensor, score_dst: Tensor, edge_score: Tensor) -> Tensor:
    turned = CSC_.transpose()
    transposed = turned.indptr, turned.indices, turned.edge_ids
    structure = CSC_.indptr, CSC_.indices
    return native.gat_aggregate(*structure, x, score_src, score_dst, edge_score, 0.2, 0.0, 0, *transposed)[0]


ATTENTION = [rand(5, 2, 2), rand(5, 2, seed=1), rand(4, 2, seed=2), rand(9, 2, seed=3)]
OPS: dict[str, tuple[Callable[..., object], list[Tensor]]] = {
    "spmm": (lambda x, w: spmm(CSC_, x, w), [rand(5, 3), rand(9, seed=1)]),
    "spmm, heads": (lambda x, w: spmm(CSC_, x, w, "mean"), [rand(5, 2, 3), rand(9, 2, seed=1)]),
    "spmm and own": (lambda x: spmm_and_own(CSC_, x, "mean"), [rand(5, 3)]),
    "max": (lambda x: spmm(CSC_, x, reduce="max"), [rand(5, 3)]),
    "max, weighted": (lambda x, w: spmm(CSC_, x, w, "max"), [rand(5, 3), rand(9, seed=1)]),
    "min, heads": (lambda x, w: spmm(CSC_, x, w, "min"), [rand(5, 2, 3), rand(9, 2, seed=1)]),
    "sddmm": (lambda a, b: sddmm(CSC_, a, b), [rand(4, 2, 3), rand(5, 2, 3, seed=1)]),
    "edge_softmax": (lambda s: edge_softmax(CSC_, s), [rand(9, 2)]),
    "gat_aggregate": (attention, ATTENTION),
    "gat_aggregate, dropout": (dropped, ATTENTION),
    "gat_aggregate, registered": (registered, ATTENTION),
    "gat_aggregate, one score": (lambda x, s: gat_aggregate(CSC_, x, s, s[:4]), [rand(5, 1, 2), rand(5, 1, seed=1)]),
    "dropout_rows": (lambda x: dropout_rows(x.sin(), torch.arange(5), 0.5, 3), [rand(5, 3)]),
    "gather_rows": (lambda x: gather_rows(x.sin(), torch.tensor([1, 1, 4])), [rand(5, 3)]),
}


@pytest.mark.filterwarnings("error")
@grid(name=list(OPS))
def test_the_second_derivative_is_the_derivative_of_the_first(name: str):
    op, inputs = OPS[name]
    assert torch.autograd.gradcheck(op, inputs)
    assert torch.autograd.gradgradcheck(op, inputs)


def test_third_derivatives_of_softmax_are_right():
    scores = rand(9)
    (first,) = torch.autograd.grad(edge_softmax(CSC_, scores).pow(2).sum(), scores, create_graph=True)
    assert torch.autograd.gradgradcheck(
        lambda s: torch.autograd.grad(edge_softmax(CSC_, s).pow(2).sum(), s, create_graph=True)[0], [scores]
    )
    assert first.requires_grad


def test_one_tensor_given_twice_gets_each_share_once():
    """Scores of sources and destinations that are the very same tensor."""
    square = CSC.from_edge_index(torch.tensor([[0, 1, 2, 2], [0, 0, 1, 2]]), 3)
    x, score = rand(3, 1, 2), rand(3, 1, seed=1)
    assert torch.autograd.gradgradcheck(lambda x, s: gat_aggregate(square, x, s, s), [x, score])


@pytest.mark.filterwarnings("error")
def test_layers_have_the_second_derivatives_of_dense_ones():
    """A gradient penalty: the derivative of the norm of the gradient with respect to the features."""
    edge_index = torch.tensor([[0, 1, 2, 2, 3, 0, 1, 4], [0, 0, 1, 2, 2, 3, 3, 4]])
    layers = {
        "sage": (SAGEConv(3, 2), {}),
        "max": (SAGEConv(3, 2, aggr="max"), {}),
        "gcn": (GCNConv(3, 2), {"edge_weight": rand(8, seed=4).abs().detach()}),
        "gat": (GATConv(3, 2, heads=2, edge_dim=2), {"edge_attr": rand(8, 2, seed=4).detach()}),
        "rgcn": (RGCNConv(3, 2, 2), {"edge_type": torch.arange(8) % 2}),
    }
    for name, (layer, told) in layers.items():
        layer.double()
        assert torch.autograd.gradgradcheck(functools.partial(layer, edges=edge_index, **told), [rand(5, 3)]), name
