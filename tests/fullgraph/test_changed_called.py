"""Modules that were changed, by subclasses, hooks or methods of their own, are called or refused with the reason."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from gnnsys.fullgraph import HybridParallel, JoinKept, Keep, Residual, infer
from gnnsys.nn import GATConv, GINConv, GraphSAGE, SAGEConv
from tests.fullgraph.changed import GRAPH, N, hooked, narrowing, seeded, x
from tests.fullgraph.customised import OUT, WIDTH, Case, bins, check, check_infer


class Headed(GraphSAGE):
    """A reference model with a layer more."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(WIDTH, 5, num_layers, 5)
        self.head = nn.Linear(5, OUT)

    def forward(self, x, edges):
        return self.head(super().forward(x, edges))


class Louder(nn.Sequential):
    def forward(self, rows):
        return 2 * super().forward(rows) + 1


class Scaled(nn.BatchNorm1d):
    def forward(self, rows):
        return 2 * super().forward(rows)


class Half(nn.Dropout):
    def forward(self, rows):
        return super().forward(rows) / 2


class Fading(GATConv):
    def forward(self, x, edges, edge_attr=None, size=None, return_attention_weights=None):
        return super().forward(x, edges) / 2


def test_a_subclass_of_a_model_with_its_own_forward_is_called_or_refused():
    (one,) = seeded(lambda: Headed(1))
    assert check(Case([one], GRAPH, options=bins(3))) == check_infer(Case([one], GRAPH)) == ""
    (two,) = seeded(lambda: Headed(2))
    reason = r"Headed gives other rows on a piece.*Headed has a forward of its own, so it is called as a whole.*list"
    with pytest.raises(ValueError, match=reason):
        infer(two, GRAPH, x())
    with pytest.raises(ValueError, match=reason):
        HybridParallel(two, GRAPH)(x())


def test_a_model_with_hooks_is_not_taken_apart():
    model = seeded(lambda: GraphSAGE(WIDTH, 5, 2, OUT))[0]
    handle = model.register_forward_hook(lambda *args: None)
    with pytest.raises(ValueError, match="GraphSAGE has hooks, so it is called as a whole"):
        infer(model, GRAPH, x())
    handle.remove()
    model.eval()
    assert torch.allclose(infer(model, GRAPH, x())[1], model(x(), GRAPH.csc()))


ROW_BY_ROW = {
    "a subclass of Sequential": lambda: Louder(nn.Linear(OUT, 3), nn.ELU()),
    "hooks on a Sequential": lambda: hooked(nn.Sequential(nn.Linear(OUT, 3), nn.ELU())),
    "a Sequential inside a list": lambda: nn.ModuleList([nn.Sequential(nn.Linear(OUT, 3), hooked(nn.ELU()))]),
    "a Sequential inside a Sequential": lambda: nn.Sequential(Louder(nn.Linear(OUT, 3)), nn.ELU()),
    "hooks on a dropout": lambda: hooked(nn.Dropout(0.0)),
    "a module that writes its input": lambda: Writes(),
    "an old backward hook": lambda: backward_hooked(nn.Linear(OUT, 3)),
}


class Writes(nn.Module):
    """In place, without a word about it."""

    def forward(self, rows):
        return rows.mul_(2)


def backward_hooked(module: nn.Module) -> nn.Module:
    module.register_full_backward_hook(lambda _, grads, __: tuple(3 * g for g in grads))
    return module


def test_modules_that_work_row_by_row_are_called():
    for name, make in ROW_BY_ROW.items():
        first = seeded(lambda: SAGEConv(WIDTH, OUT, bias=False, root_weight=False))
        layers = nn.ModuleList([*first, *seeded(make)])
        model = HybridParallel(copy.deepcopy(layers), GRAPH, **bins(3))
        for number in range(2):
            model.zero_grad()
            rows, same = x(), x()
            out = model(rows)
            out.square().sum().backward()
            layers.zero_grad()
            want = layers[0](same, GRAPH.csc())
            for module in layers[1] if isinstance(layers[1], nn.ModuleList) else [layers[1]]:
                want = module(want)
            want.square().sum().backward()
            assert torch.allclose(out, want, rtol=1e-12), f"{name}, pass {number}"
            for got, p in zip(model.parameters(), layers.parameters(), strict=True):
                assert torch.allclose(got.grad, p.grad, rtol=1e-10), f"{name}, pass {number}"


REFUSED = {
    "a subclass of batch normalisation": (lambda: Scaled(OUT), "Scaled has a forward of its own, and the statistics"),
    "hooks on batch normalisation": (lambda: hooked(nn.BatchNorm1d(OUT)), "BatchNorm1d has hooks, and the statistics"),
    "a subclass of dropout": (lambda: Half(0.5), "Half gives other rows every time"),
    "a hook that looks at all rows": (
        lambda: hooked(nn.Linear(OUT, 3), lambda _, __, out: out - out.mean(0)),
        "Linear makes a node's row depend on which others.*Linear has hooks",
    ),
    "a backward hook that looks at all rows": (
        lambda: _clipped(nn.Linear(OUT, 3)),
        "Linear gives other gradients on pieces of a graph than on the whole",
    ),
    "graph layers in a Sequential with hooks": (
        lambda: hooked(nn.Sequential(SAGEConv(OUT, OUT))),
        "Sequential cannot be applied to rows.*Sequential has hooks, so it is called as a whole",
    ),
    "attention of a subclass that drops": (lambda: Fading(OUT, 3, dropout=0.5), "Fading gives other rows every time"),
    "attention with hooks that drops": (lambda: hooked(GATConv(OUT, 3, dropout=0.5)), "gives other rows every time"),
    "hooks on a mark": (lambda: hooked(Keep("here")), "Keep has hooks, and a Keep is never called"),
    "a residual that writes": (
        lambda: Residual(SAGEConv(OUT, OUT), project=nn.ReLU(inplace=True)),
        "Residual writes the rows it is given",
    ),
}


def _clipped(module: nn.Module) -> nn.Module:
    module.register_full_backward_pre_hook(lambda _, grads: tuple(g / g.norm() for g in grads))
    return module


def test_what_cannot_be_right_in_bins_is_refused_with_the_reason():
    for name, (make, reason) in REFUSED.items():
        layers = seeded(lambda: SAGEConv(WIDTH, OUT), make)
        with pytest.raises(ValueError, match=reason):
            HybridParallel(layers, GRAPH)(x())
            pytest.fail(name)


def test_batch_normalisation_of_a_subclass_is_called_in_evaluation():
    layers = seeded(lambda: SAGEConv(WIDTH, OUT), lambda: Scaled(OUT), lambda: hooked(nn.BatchNorm1d(OUT)))
    assert check_infer(Case(layers, GRAPH, options=bins(3))) == ""


def test_hooks_for_all_modules_are_called():
    layers = seeded(lambda: SAGEConv(WIDTH, OUT), nn.ELU)
    handle = torch_module.register_module_forward_hook(
        lambda module, _, out: 3 * out if isinstance(module, nn.ELU) else None
    )
    try:
        assert check(Case(layers, GRAPH, options=bins(3))) == ""
        with pytest.raises(ValueError, match="Sequential has hooks, so it is called as a whole"):
            HybridParallel(nn.Sequential(*layers), GRAPH)(x())
    finally:
        handle.remove()


def test_another_call_of_all_modules_sees_the_layers(monkeypatch):
    call, scaled = nn.Module.__call__, (GINConv, SAGEConv)

    def double(self, *args, **kwargs):
        return call(self, *args, **kwargs) * (2 if isinstance(self, scaled) else 1)

    layers = seeded(lambda: GINConv(nn.Linear(WIDTH, 5)), nn.ELU, lambda: SAGEConv(5, OUT))
    assert check(Case(layers, GRAPH, options=bins(3))) == ""
    monkeypatch.setattr(nn.Module, "__call__", double)
    assert check(Case(layers, GRAPH, options=bins(3))) == ""


def test_joins_of_ones_own_are_tried_and_called():
    class Weighted(JoinKept):
        def forward(self, rows, kept):
            return rows + 2 * kept

    class Centred(JoinKept):
        def forward(self, rows, kept):
            return rows + kept - kept.mean(0)

    def layers(join):
        return [Keep("x"), *seeded(lambda: SAGEConv(WIDTH, WIDTH)), join("x"), *seeded(lambda: SAGEConv(WIDTH, OUT))]

    assert check(Case(layers(Weighted), GRAPH, options=bins(3))) == ""
    with pytest.raises(ValueError, match="Centred makes a node's row depend on which others"):
        HybridParallel(layers(Centred), GRAPH)(x())


def test_layers_with_methods_of_their_own_are_called_whenever_they_got_them():
    def louder(layers) -> None:
        for conv in (layers[0], layers[2]):
            reduced = conv._reduced
            conv._reduced = lambda *args, reduced=reduced: (lambda out, *rest: (3 * out, *rest))(*reduced(*args))

    layers = narrowing()
    louder(layers)
    assert HybridParallel(layers, GRAPH).eval()(x()).shape == (N, 3)
    for options in ({}, bins(3)):
        model = HybridParallel(narrowing(), GRAPH, **options)
        model(x())
        louder(model.layers)
        first, tanh, second, elu = model.layers
        want = elu(second(tanh(first(x(), GRAPH.csc())), GRAPH.csc()))
        assert torch.allclose(model(x()), want, rtol=1e-10)
