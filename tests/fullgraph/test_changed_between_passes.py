"""What was changed after a pass counts in the next: layers, settings, hooks, marks, features."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gnnsys.fullgraph import EdgeArguments, HybridParallel, JoinKept, Keep
from gnnsys.fullgraph.plan.module_layout import ModuleLayout
from gnnsys.nn import GAT, GATConv, GCNConv, SAGEConv
from tests.fullgraph.changed import GRAPH, RANKS, narrowing, seeded, x
from tests.fullgraph.customised import WIDTH, Case, bins, check


def test_a_hook_that_comes_and_goes_between_passes_is_called_while_it_is_there():
    layers = seeded(lambda: SAGEConv(WIDTH, 3), nn.ELU, lambda: GCNConv(3, 2))
    model = HybridParallel(layers, GRAPH, **bins(3)).eval()
    plain = model(x())
    for module in (layers[0], layers[1], layers[2].lin):
        handle = module.register_forward_hook(lambda _, __, out: 3 * out)
        changed = model(x())
        assert not torch.allclose(changed, plain)
        assert torch.allclose(changed, layers[2](layers[1](layers[0](x(), GRAPH.csc())), GRAPH.csc()))
        handle.remove()
        assert torch.equal(model(x()), plain)


REPLACED = {
    "a layer": lambda layers: layers.__setitem__(2, seeded(lambda: SAGEConv(4, 3))[0]),
    "a layer of another kind and width": lambda layers: layers.__setitem__(2, seeded(lambda: GATConv(4, 7))[0]),
    "one more layer": lambda layers: layers.append(seeded(lambda: GCNConv(3, 2))[0]),
    "one layer less": lambda layers: layers.__delitem__(3),
    "the order of two": lambda layers: _swapped(layers),
    "a module that is there twice": lambda layers: layers.__setitem__(1, layers[3]),
    "the linear of a layer": lambda layers: setattr(layers[2], "lin_l", seeded(lambda: nn.Linear(4, 3))[0]),
    "a setting": lambda layers: setattr(layers[2], "aggr", "sum"),
    "the bias": lambda layers: setattr(layers[2].lin_l, "bias", None),
    "parameters": lambda layers: layers.load_state_dict(
        {name: 2 * value for name, value in layers.state_dict().items()}, assign=True
    ),
    "what trains": lambda layers: layers[2].requires_grad_(False) and layers[0].lin_l.requires_grad_(False),
    "in place": lambda layers: setattr(layers[3], "inplace", True),
}


def _swapped(layers) -> None:
    first, second = layers[1], layers[3]
    layers[1], layers[3] = second, first


def test_what_was_replaced_after_a_pass_counts_in_the_next():
    """In bins or not, with features that train or do not, in turn; on ranks the others are below."""
    for number, (name, change) in enumerate(REPLACED.items()):
        options = bins(3) if number % 2 else {}
        assert check(Case(narrowing(), GRAPH, change=change, options=options, x_grad=number % 4 < 2)) == "", name


def test_what_was_replaced_counts_on_all_ranks_and_where_bins_are_computed_again():
    for number, (name, change) in enumerate(REPLACED.items()):
        options = {} if number % 2 else {"recompute": True}
        assert check(Case(narrowing(), GRAPH, {}, 2, RANKS, change, bins(2) | options)) == "", name


def test_a_pass_that_finds_the_layers_unchanged_plans_nothing(monkeypatch):
    model = HybridParallel(seeded(lambda: GAT(WIDTH, 4, 3, 3, dropout=0.5, norm="batch"))[0], GRAPH, **bins(3))
    model(x())
    monkeypatch.setattr("gnnsys.fullgraph.plan.pass_planner.make_stages", None)
    monkeypatch.setattr("gnnsys.fullgraph.plan.pass_planner.make_steps", None)
    monkeypatch.setattr("gnnsys.fullgraph.plan.pass_planner.check_layers", None)
    model(x()).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    model.zero_grad()
    model.load_state_dict(model.state_dict())
    model(x())
    assert ModuleLayout.of(model.layers).what == model._planner.reader.layout.what


def test_marks_and_joins_that_change_after_a_pass_count_in_the_next():
    first, second = seeded(lambda: SAGEConv(WIDTH, 4), lambda: SAGEConv(4, 4))
    keeps, join = [Keep("a"), Keep("b")], JoinKept("a")
    model = HybridParallel([first, keeps[0], nn.Tanh(), keeps[1], second, join], GRAPH, **bins(3))
    for how, name, kept in (("add", "a", 0), ("cat", "a", 0), ("cat", "b", 1), ("add", "b", 1)):
        join.how, join.name = how, name
        early = first(x(), GRAPH.csc())
        late = early.tanh()
        assert torch.allclose(model(x()), join(second(late, GRAPH.csc()), (early, late)[kept])), (how, name)
    keeps[0].name, keeps[1].name = "b", "a"
    assert torch.allclose(model(x()), second(late, GRAPH.csc()) + early)


def test_what_a_layer_is_told_of_edges_may_change_after_a_pass():
    data = GRAPH.edge_data[GRAPH.edge_types[0]]["w"]
    told = EdgeArguments(seeded(lambda: GCNConv(WIDTH, 3))[0], edge_weight="edge_weight")
    model = HybridParallel([told], GRAPH, edge_data={"edge_weight": "w"})
    assert torch.allclose(model(x()), told.conv(x(), GRAPH.edge_index(), data))
    del told.names["edge_weight"]
    with pytest.raises(ValueError, match="no graph layer takes an argument 'edge_weight'"):
        model(x())


def test_lazy_layers_are_drawn_as_in_a_first_call():
    for kind in (SAGEConv, GATConv, GCNConv):
        for options in ({}, bins(3), {"memory_budget": 1 << 15}):
            layers, plain = (seeded(*[lambda kind=kind: kind(-1, 8)] * 3) for _ in range(2))
            torch.manual_seed(5)
            rows = x()
            for conv in plain:
                rows = conv(rows, GRAPH.csc())
            drawn = torch.rand(1)
            torch.manual_seed(5)
            out = HybridParallel(layers, GRAPH, **options)(x())
            assert torch.equal(torch.rand(1), drawn) and torch.allclose(out, rows), (kind, options)
            weights = [next(p for p in conv.parameters() if p.dim() == 2 and p.shape == (8, 8)) for conv in layers[1:]]
            assert not torch.equal(*weights)


def test_writes_that_torch_does_not_count_are_seen_in_another_tensor_of_the_same_memory():
    """Features are read once per tensor and version; through numpy and `.data` neither changes."""
    model = HybridParallel(seeded(lambda: SAGEConv(WIDTH, 3)), GRAPH).eval()
    for write in (lambda rows: rows.data.mul_(2), lambda rows: rows.numpy().__imul__(2)):
        rows = x()
        before = model(rows)
        write(rows)
        assert torch.equal(model(rows), before)
        assert torch.allclose(model(rows.detach()), model.layers[0](rows, GRAPH.csc()))
        rows.mul_(2)
        assert torch.allclose(model(rows), model.layers[0](rows, GRAPH.csc()))
