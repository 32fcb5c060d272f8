"""Passes as autograd sees them: several before one backward, frozen and shared parameters, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from gnnsys.fullgraph import HybridParallel
from gnnsys.nn import GATConv, SAGEConv
from tests.fullgraph.dense import adjacency, dense_forward, random_graph
from tests.fullgraph.thread_ranks import run_ranks

TOLERANCE = 1e-10
N, WIDTH = 50, 5
GRAPH = random_graph(N, 250, 1)


def rows(seed: int) -> Tensor:
    return torch.randn(N, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def doubled(*layers: nn.Module) -> list[nn.Module]:
    return [layer.double() for layer in layers]


@pytest.fixture(params=["sage", "gat"])
def layers(request):
    torch.manual_seed(0)
    if request.param == "sage":
        return doubled(SAGEConv(WIDTH, 6), nn.ReLU(), SAGEConv(6, 3))
    return doubled(GATConv(WIDTH, 6), nn.ReLU(), GATConv(6, 3))


def check(layers: list[nn.Module], loss_of) -> None:
    """`loss_of(forward, pick)` gives the same gradients on three ranks as densely on one."""
    whole = nn.ModuleList(copy.deepcopy(layers))
    loss_of(lambda x: dense_forward(whole, x, adjacency(GRAPH)), lambda x: x).backward()

    def work(rank, group):
        mine = nn.ModuleList(copy.deepcopy(layers))
        model = HybridParallel(mine, GRAPH, ranks=torch.arange(N) % 3, group=group, timeout=60)
        loss_of(model, lambda x: x[model.nodes]).backward()
        return [p.grad for p in mine.parameters()]

    for found in run_ranks(3, work):
        for got, p in zip(found, whole.parameters(), strict=True):
            assert (got is None) == (p.grad is None)
            assert p.grad is None or float((got - p.grad).abs().max()) <= TOLERANCE * float(p.grad.abs().max())


def test_several_passes_may_come_before_one_backward(layers):
    def loss_of(forward, pick):
        first, second = pick(rows(1)), pick(rows(2))
        return forward(first).square().sum() + forward(second).pow(3).sum() + forward(first).sum()

    check(layers, loss_of)


def test_layers_that_do_not_train_have_no_gradient_and_pass_it_on(layers):
    layers[2].requires_grad_(False)
    check(layers, lambda forward, pick: forward(pick(rows(1))).square().sum())
    layers[2].requires_grad_(True)
    layers[0].requires_grad_(False)
    check(layers, lambda forward, pick: forward(pick(rows(1))).square().sum())


def test_a_layer_that_is_used_twice_has_the_sum_of_both_gradients():
    torch.manual_seed(0)
    shared = SAGEConv(WIDTH, WIDTH).double()
    check([shared, nn.Tanh(), shared], lambda forward, pick: forward(pick(rows(1))).square().sum())


def test_a_pass_is_differentiated_once(layers):
    model = HybridParallel(layers, GRAPH)
    loss = model(rows(1)).square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once, and nothing of it is kept: run it again"):
        loss.backward()


def test_second_derivatives_are_refused_instead_of_left_out(layers):
    x = rows(1).requires_grad_()
    (grad,) = torch.autograd.grad(HybridParallel(layers, GRAPH)(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.square().sum().backward()


def test_rows_that_are_not_those_of_the_nodes_are_refused(layers):
    model = HybridParallel(layers, GRAPH)
    for x in (rows(1)[:-1], rows(1).long(), rows(1)[0]):
        with pytest.raises(ValueError, match=rf"x must be float \[{N}, width\], a row for each of this rank's nodes"):
            model(x)
    with pytest.raises(ValueError, match=r"Conv cannot be applied to rows and a structure, \[60, 4\]"):
        model(rows(1)[:, :4])


@pytest.mark.parametrize("kind", [SAGEConv, GATConv])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_autocast_reaches_the_bins(kind, given):
    torch.manual_seed(0)
    layers = [kind(WIDTH, 6), nn.ReLU(), nn.Linear(6, 3)]
    want = HybridParallel(copy.deepcopy(layers), GRAPH)(rows(1).float()).detach()
    model = HybridParallel(layers, GRAPH)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(rows(1).to(given))
    found.float().sum().backward()
    assert found.dtype == torch.bfloat16 and all(p.grad is not None for p in layers[2].parameters())
    assert float((found.float() - want).detach().abs().max()) <= 0.03 * float(want.abs().max())
