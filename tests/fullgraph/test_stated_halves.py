"""Halves are used only where they say what the layer does now, and nothing that trains is lost in them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gnnsys.fullgraph import BinSchedule, HybridParallel, Packing
from gnnsys.nn import Dense, GCNConv, GINConv, GraphLayer, Halves, NarrowFirst, SAGEConv
from gnnsys.ops import CSC, spmm
from tests.fullgraph.dense import random_graph

N = 60
GRAPH = random_graph(N, 300, 11)
X = torch.randn(N, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def parallel(*layers: nn.Module) -> HybridParallel:
    return HybridParallel(
        [layer.double() for layer in layers], GRAPH, schedule=BinSchedule(packing=Packing(num_bins=3))
    )


def plain(layers: list[nn.Module], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x, GRAPH.csc()) if isinstance(layer, GraphLayer) else layer(x)
    return x


class SumConv(GraphLayer):
    """A user's layer: sums times a weight, which narrows."""

    def __init__(self, names_its_use: bool = True) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 3, bias=False)
        self.uses = (lambda: [self.lin.weight]) if names_its_use else list

    def transform(self, rows: Tensor) -> Tensor:
        return self.lin(rows)

    def aggregate(self, csc: CSC, rows: Tensor, edge_rows: object = None) -> Tensor:
        return spmm(csc, rows)

    def halves(self) -> Halves:
        dense = Dense(self.transform, self.uses)
        narrow = NarrowFirst(transform=dense, combine=Dense(lambda sums: sums))
        return Halves(reduce="sum", combine=lambda sums, own: self.transform(sums), narrow_first=narrow)

    def forward(self, x: Tensor, edges: CSC) -> Tensor:
        return self.aggregate(edges, self.transform(x))


@pytest.mark.parametrize("conv", [SAGEConv, GCNConv])
def test_tensors_in_the_place_of_parameters_get_their_gradients_after_a_pass_with_parameters(conv):
    model = parallel(conv(6, 5), nn.ReLU(), conv(5, 3))
    model(X).sum().backward()
    given = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    out = torch.func.functional_call(model, given, (X,))
    got = torch.autograd.grad(out.square().sum(), list(given.values()), allow_unused=True)
    want = torch.autograd.grad(plain(list(model.layers), X).square().sum(), list(model.parameters()))
    for name, mine, theirs in zip(given, got, want, strict=True):
        assert mine is not None, name
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_a_hook_or_a_forward_of_its_own_has_a_layer_called_whatever_its_halves_say():
    class Doubled(SumConv):
        def forward(self, x: Tensor, edges: CSC) -> Tensor:
            return 2 * super().forward(x, edges)

    doubled, hooked = Doubled().double(), SumConv().double()
    hooked.register_forward_hook(lambda module, given, out: 3 * out)
    for layer in (doubled, hooked):
        torch.testing.assert_close(parallel(layer)(X), layer(X, GRAPH.csc()), rtol=1e-10, atol=1e-12)


def test_a_method_that_is_put_into_the_class_after_a_pass_is_the_one_that_runs(monkeypatch):
    layer = GINConv(nn.Linear(6, 4))
    model = parallel(layer)
    before = model(X).detach()
    aggregate = GINConv.aggregate
    monkeypatch.setattr(GINConv, "aggregate", lambda self, *given, **named: 2 * aggregate(self, *given, **named))
    torch.testing.assert_close(model(X), plain([layer], X), rtol=1e-10, atol=1e-12)
    assert not torch.allclose(model(X), before)


def test_halves_that_lose_a_gradient_or_sum_in_an_unknown_way_are_refused():
    lost = parallel(nn.Linear(6, 6), SumConv(names_its_use=False))
    with pytest.raises(ValueError, match=r"SumConv.halves\(\): no Dense of narrow_first says that it uses lin.weight"):
        lost(X)
    with pytest.raises(ValueError, match="reduce must be one of sum, mean, gcn, got 'max'"):
        Halves(reduce="max", combine=lambda sums, own: sums)
