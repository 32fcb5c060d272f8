"""Layers that people have changed do what PyG's layer of the same name does with the same change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

import gnnsys.nn as ours
from gnnsys.nn.plain import runs_as
from gnnsys.nn.stack import Stack
from gnnsys.ops import CSC, spmm
from tests.nn.conftest import random_rows
from tests.support.customise import CHANGES, OF_THE_LAYER, linears
from tests.support.grid import every_value

NUM_RELATIONS = 3
Make = Callable[[Any], nn.Module]


def _mlp(num_in: int, num_out: int) -> nn.Module:
    return nn.Sequential(nn.Linear(num_in, 5), nn.ReLU(), nn.Linear(5, num_out))


# What makes the layer of a library, and what of {weights, features, types} of edges it is given. Both widths are there,
# so that each order of a layer's halves is taken.
LAYERS: dict[str, tuple[Make, str | None]] = {
    "sage, narrow": (lambda lib: lib.SAGEConv(9, 2), None),
    "sage, wide": (lambda lib: lib.SAGEConv(2, 9), None),
    "sage, sum, square": (lambda lib: lib.SAGEConv(4, 4, aggr="sum", normalize=True), None),
    "sage, max": (lambda lib: lib.SAGEConv(9, 2, aggr="max", project=True), None),
    "gcn, narrow": (lambda lib: lib.GCNConv(9, 2), "edge_weight"),
    "gcn, wide": (lambda lib: lib.GCNConv(2, 9), None),
    "gcn, not normalised": (lambda lib: lib.GCNConv(2, 9, normalize=False), "edge_weight"),
    "gat": (lambda lib: lib.GATConv(9, 2, heads=2, residual=True), None),
    "gat, features": (lambda lib: lib.GATConv(4, 2, heads=2, edge_dim=3), "edge_attr"),
    "gat, features, filled": (lambda lib: lib.GATConv(4, 2, heads=2, edge_dim=3, fill_value=0.5), "edge_attr"),
    "gin": (lambda lib: lib.GINConv(_mlp(9, 2), train_eps=True), None),
    "rgcn": (lambda lib: lib.RGCNConv(4, 3, NUM_RELATIONS), "edge_type"),
    "rgcn, bases": (lambda lib: lib.RGCNConv(4, 3, NUM_RELATIONS, num_bases=2), "edge_type"),
}


@pytest.fixture
def edges(edge_index: Tensor) -> Tensor:
    """Without a second self loop of a node: PyG gives a gradient to the weight of the first, which does not count."""
    loops = (edge_index[0] == edge_index[1]).nonzero().view(-1)
    again = loops[edge_index[0, loops] == 5][:-1]
    edge_index = edge_index.clone()
    edge_index[1, again] = 6
    return edge_index


def _told(kind: str | None, num_edges: int) -> dict[str, Tensor]:
    if kind == "edge_type":
        return {kind: torch.arange(num_edges) % NUM_RELATIONS}
    shape = (num_edges, 3) if kind == "edge_attr" else (num_edges,)
    return {} if kind is None else {kind: random_rows(*shape, seed=2).abs() + 0.1}


def _pair(make: Make) -> tuple[nn.Module, nn.Module]:
    layer, peer = make(ours).double(), make(pyg).double()
    layer.load_state_dict(peer.state_dict())
    if isinstance(layer, ours.RGCNConv):  # PyG reads its weight three times, and spectral_norm turns it at each reading
        layer.eval(), peer.eval()
    return layer, peer


def _num_in(layer: nn.Module) -> int:
    return layer.nn[0].in_features if hasattr(layer, "nn") else layer.in_channels


def passes(layer: nn.Module, x: Tensor, edges: Tensor, told: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """The output of a second pass, and gradients summed over both."""
    told = {name: rows.clone().requires_grad_(rows.is_floating_point()) for name, rows in told.items()}
    x = x.clone().requires_grad_()
    for parameter in layer.parameters():
        parameter.grad = None
    for number in range(2):
        out = layer(x, edges, **told)
        out.backward(random_rows(*out.shape, seed=9 + number))
    gradients = {"x": x.grad} | {name: rows.grad for name, rows in told.items()}
    gradients |= {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"output": out.detach()} | {f"gradient of {name}": grad for name, grad in gradients.items()}


def assert_same(got: dict[str, Tensor | None], expected: dict[str, Tensor | None], case: str) -> None:
    assert got.keys() == expected.keys(), case
    for name, value in expected.items():
        if value is None or got[name] is None:
            assert got[name] is value, f"{case}: {name} is {got[name]}, expected {value}"
        else:
            differs = f"{case}: {name} differs by up to {(got[name] - value).abs().max():g}"
            assert torch.allclose(got[name], value, rtol=1e-9, atol=1e-9), differs


@every_value(name=[*CHANGES, *OF_THE_LAYER], half={"some layers": 0, "the others": 1})
def test_a_changed_layer_is_pygs_changed_alike(name: str, half: int, edges: Tensor):
    change = (CHANGES | OF_THE_LAYER)[name]
    for case, (make, kind) in list(LAYERS.items())[half::2]:
        layer, peer = _pair(make)
        x, told = random_rows(40, _num_in(layer)), _told(kind, edges.shape[1])
        passes(layer, x, edges, told)  # what is remembered from before must not show
        layer, peer = change(layer), change(peer)
        assert_same(passes(layer, x, edges, told), passes(peer, x, edges, told), f"{case}, {name}")
    torch._dynamo.reset()


def test_a_layer_that_a_model_has_twice_is_pygs_that_it_has_twice(edges: Tensor):
    class Twice(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor, edges: Tensor, **told: Tensor) -> Tensor:
            return self.layer(self.layer(x, edges, **told).relu(), edges, **told)

    squares: dict[str, tuple[Make, str | None]] = {
        "sage": (lambda lib: lib.SAGEConv(4, 4), None),
        "gcn": (lambda lib: lib.GCNConv(4, 4), "edge_weight"),
        "gat": (lambda lib: lib.GATConv(4, 2, heads=2, edge_dim=3), "edge_attr"),
        "gin": (lambda lib: lib.GINConv(_mlp(4, 4), train_eps=True), None),
        "rgcn": (lambda lib: lib.RGCNConv(4, 4, NUM_RELATIONS), "edge_type"),
    }
    for name in ("plain", "spectral_norm", "LoRA around", "backward hook"):
        for case, (make, kind) in squares.items():
            layer, peer = _pair(make)
            both = [Twice(CHANGES[name](each)) for each in (layer, peer)]
            given = random_rows(40, 4), edges, _told(kind, edges.shape[1])
            assert_same(*(passes(each, *given) for each in both), f"{case}, {name}")


@pytest.mark.parametrize("kind", [nn.Linear, pyg.Linear])
def test_other_linear_layers_may_be_put_in_place(kind: type[nn.Module], edges: Tensor):
    """torch's with a bias where there was none, and PyG's own."""
    for case, (make, told) in LAYERS.items():
        layer, peer = _pair(make)
        x = random_rows(40, _num_in(layer))
        for (parent, name, linear), (of_peer, _, _) in zip(linears(layer), linears(peer), strict=True):
            num_out, num_in = linear.weight.shape
            other = kind(num_in, num_out, bias=True).double()
            setattr(parent, name, other)
            setattr(of_peer, name, copy.deepcopy(other))
        given = x, edges, _told(told, edges.shape[1])
        assert_same(*(passes(each, *given) for each in (layer, peer)), case)


def test_a_forward_that_is_replaced_in_the_class_of_linear_layers_is_called(edges: Tensor, monkeypatch):
    """As tools that quantise do it. PyG's own linear layer is another class, so torch's are put into both."""

    def signs(self: nn.Linear, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.sign() * self.weight.abs().mean(), self.bias).tanh()

    for case, (make, told) in LAYERS.items():
        layer, peer = _pair(make)
        x = random_rows(40, _num_in(layer))
        for (parent, name, linear), (of_peer, _, _) in zip(linears(layer), linears(peer), strict=True):
            num_out, num_in = linear.weight.shape
            other = nn.Linear(num_in, num_out, bias=linear.bias is not None).double()
            setattr(parent, name, other)
            setattr(of_peer, name, copy.deepcopy(other))
        given = x, edges, _told(told, edges.shape[1])
        with monkeypatch.context() as patches:
            patches.setattr(nn.Linear, "forward", signs)
            assert_same(*(passes(each, *given) for each in (layer, peer)), case)
        assert_same(*(passes(each, *given) for each in (layer, peer)), f"{case}, as it was")


def test_other_methods_in_a_class_are_seen(monkeypatch):
    modules = [nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.ReLU()), ours.SAGEConv(2, 2), ours.GIN(2, 2, 1)]
    for module, kind in zip(modules, (nn.Linear, nn.BatchNorm1d, nn.Sequential, ours.SAGEConv, Stack), strict=True):
        for name in ("forward", "__call__"):
            assert runs_as(module, kind)
            with monkeypatch.context() as patches:
                patches.setattr(kind, name, lambda self, *args, **kwargs: None)
                assert not runs_as(module, kind), (kind, name)


@pytest.mark.parametrize("widths", [(9, 2), (2, 9)])
def test_a_half_that_is_replaced_in_our_class_is_run_at_pygs_place(widths: tuple[int, int], edges: Tensor, monkeypatch):
    x, layer = random_rows(40, widths[0]), ours.SAGEConv(*widths).double()
    plain = ours.SAGEConv.aggregate
    monkeypatch.setattr(ours.SAGEConv, "aggregate", lambda self, csc, rows: plain(self, csc, rows).tanh())
    reduced = spmm(CSC.from_edge_index(edges, 40), x, reduce="mean").tanh()
    torch.testing.assert_close(layer(x, edges), layer.lin_l(reduced) + layer.lin_r(x), rtol=1e-10, atol=1e-10)


class LoudTransform(ours.SAGEConv):
    def transform(self, rows: Tensor) -> Tensor:
        return super().transform(rows).tanh()


class LoudAggregate(ours.SAGEConv):
    def aggregate(self, csc: CSC, rows: Tensor) -> Tensor:
        return super().aggregate(csc, rows).tanh()


class LoudGCN(ours.GCNConv):
    def transform(self, rows: Tensor) -> Tensor:
        return super().transform(rows).tanh()


class LoudSumGCN(ours.GCNConv):
    def aggregate(self, csc: CSC, rows: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        return super().aggregate(csc, rows, edge_weight).tanh()


@pytest.mark.parametrize("widths", [(9, 2), (2, 9)])
def test_a_half_that_a_subclass_overrides_is_run_at_pygs_place(widths: tuple[int, int], edges: Tensor):
    """SAGE aggregates and then transforms, GCN the other way round, whichever would be cheaper."""
    x = random_rows(40, widths[0])
    csc = CSC.from_edge_index(edges, 40)

    def of_sage(layer: ours.SAGEConv) -> Tensor:
        reduced = spmm(csc, x, reduce="mean")
        if isinstance(layer, LoudAggregate):
            out = layer.lin_l(reduced.tanh())
        else:
            out = (reduced @ layer.lin_l.weight.t()).tanh() + layer.lin_l.bias
        return out + layer.lin_r(x)

    def of_gcn(layer: ours.GCNConv) -> Tensor:
        plain = pyg.GCNConv(widths[1], widths[1], bias=False).double()
        plain.lin = nn.Identity()
        if isinstance(layer, LoudGCN):
            return plain(layer.lin(x).tanh(), edges) + layer.bias
        return plain(layer.lin(x), edges).tanh() + layer.bias

    for kind, expected in [(LoudTransform, of_sage), (LoudAggregate, of_sage), (LoudGCN, of_gcn), (LoudSumGCN, of_gcn)]:
        layer = kind(*widths).double()
        torch.testing.assert_close(layer(x, edges), expected(layer), rtol=1e-10, atol=1e-10)
