"""What changes between a pass and its backward: gradients are those of the pass, or it is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from gnnsys.fullgraph import HybridParallel
from gnnsys.nn import GAT, SAGEConv
from tests.fullgraph.changed import GRAPH, between, hooked, narrowing, seeded, write, x
from tests.fullgraph.customised import WIDTH, bins


def test_parameters_that_change_between_a_pass_and_its_backward():
    layers = narrowing()
    model = HybridParallel(layers, GRAPH, **bins(3))
    before = list(model.parameters())
    out = model(x())
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()}, assign=True)
    out.sum().backward()  # goes to the parameters of the pass, as elsewhere
    assert all(p.grad is not None for p in before) and all(p.grad is None for p in model.parameters())
    again = HybridParallel(narrowing(), GRAPH, recompute=True)
    out = again(x())
    with torch.no_grad():
        again.layers[0].lin_l.weight.mul_(2)
    with pytest.raises(RuntimeError, match="parameters were changed between a pass and its backward"):
        out.sum().backward()


CHANGED_BETWEEN = {
    "a weight that trains": lambda layers: write(layers[0].lin_l.weight),
    "a frozen weight": lambda layers: write(layers[4].lin_l.weight),
    "a buffer": lambda layers: write(layers[2].eps),
    "another tensor for a buffer": lambda layers: setattr(layers[2], "eps", layers[2].eps + 1),
    "a hook": lambda layers: hooked(layers[4].lin_l),
    "a hook on all modules": lambda layers: torch_module.register_module_forward_hook(lambda *args: None),
    "a setting": lambda layers: setattr(layers[4], "aggr", "sum"),
    "a linear": lambda layers: setattr(layers[2], "nn", nn.Linear(4, 4).double()),
    "what trains": lambda layers: layers[0].lin_l.requires_grad_(False),
}


def test_where_bins_are_computed_again_what_changed_since_the_pass_is_refused():
    for name, change in CHANGED_BETWEEN.items():
        for options in ({"recompute": True}, {"memory_budget": 1 << 14}):
            model = HybridParallel(between(), GRAPH, **options)
            out = model(x())
            handle = change(model.layers)
            try:
                with pytest.raises(RuntimeError, match="were changed between a pass and its backward"):
                    out.square().sum().backward()
                    pytest.fail(f"{name}, {options}")
            finally:
                if "all modules" in name:
                    handle.remove()


PUT_BACK = {
    "evaluation": lambda model: model.eval(),
    "dropouts": lambda model: [setattr(m, "p", 0.1) for m in model.modules() if isinstance(m, nn.Dropout)],
    "the dropout of a model": lambda model: setattr(model.layers, "dropout", 0.1),
    "another pass": lambda model: model.eval()(x()),
}


def test_where_bins_are_computed_again_they_train_and_drop_as_they_did():
    def make(name):
        if name == "dropouts":
            return between()
        return seeded(lambda: GAT(WIDTH, 4, 3, 3, dropout=0.5))[0]

    for name, change in PUT_BACK.items():
        found = []
        for options, changes in (({}, False), ({"recompute": True}, True), ({"memory_budget": 1 << 14}, True)):
            model = HybridParallel(make(name), GRAPH, **options)
            out = model(x())
            if changes:
                change(model)
                now = [(m.training, getattr(m, "p", None)) for m in model.modules()]
            out.square().sum().backward()
            if changes:
                assert now == [(m.training, getattr(m, "p", None)) for m in model.modules()], name
            found.append([p.grad for p in model.parameters() if p.grad is not None])
        for other in found[1:]:
            for a, b in zip(found[0], other, strict=True):
                assert torch.allclose(a, b, rtol=1e-10), name


def test_a_weight_of_batch_normalisation_that_was_written_before_backward_is_refused():
    for options in ({}, bins(3), {"recompute": True}):
        layers = seeded(lambda: SAGEConv(WIDTH, 4), lambda: nn.BatchNorm1d(4), nn.Tanh, lambda: SAGEConv(4, 3))
        model = HybridParallel(layers, GRAPH, **options)
        out = model(x())
        write(layers[1].weight)
        with pytest.raises(RuntimeError, match=r"between a pass and its backward.*call optimizer.step\(\)"):
            out.square().sum().backward()
