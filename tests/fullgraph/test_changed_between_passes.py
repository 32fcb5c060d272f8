"""Modules that were changed are called or refused, whenever that was; a pass reads of them what it needs."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from gnnsys.fullgraph import HybridParallel, Join, Keep, Residual, Told, infer
from gnnsys.fullgraph.plan.layer_trial import _sample
from gnnsys.fullgraph.plan.module_layout import Layout
from gnnsys.nn import GAT, GATConv, GCNConv, GINConv, GraphSAGE, SAGEConv
from tests.fullgraph.customised import OUT, WIDTH, Case, bins, check, check_infer, draws, make_graph
from tests.fullgraph.ranks import run_ranks

GRAPH = make_graph()
N = GRAPH.num_nodes()
RANKS = torch.randint(2, (N,), generator=torch.Generator().manual_seed(7))


SEEDING = threading.Lock()  # ranks are threads, and torch has one generator


def seeded(*makers) -> list[nn.Module]:
    with SEEDING:
        torch.manual_seed(0)
        return [make().double() for make in makers]


def x() -> Tensor:
    return draws(N, WIDTH, seed=3)


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


def hooked(module: nn.Module, work=lambda _, __, out: 2 * out + 1) -> nn.Module:
    module.register_forward_hook(work)
    return module


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


def narrowing() -> list[nn.Module]:
    return seeded(lambda: SAGEConv(WIDTH, 4), nn.Tanh, lambda: SAGEConv(4, 3), nn.ELU)


def test_what_was_replaced_after_a_pass_counts_in_the_next():
    for name, change in REPLACED.items():
        assert check(Case(narrowing(), GRAPH, change=change, options=bins(3))) == "", name
        assert check(Case(narrowing(), GRAPH, change=change, x_grad=False)) == "", name


def test_what_was_replaced_counts_on_all_ranks_and_where_bins_are_computed_again():
    for number, (name, change) in enumerate(REPLACED.items()):
        options = {"recompute": True} if number % 2 else {}
        assert check(Case(narrowing(), GRAPH, {}, 2, RANKS, change, bins(2) | options)) == "", name


def test_layers_that_one_rank_alone_changed_are_refused_on_all():
    def work(rank, group):
        model = HybridParallel(copy.deepcopy(layers), GRAPH, ranks=RANKS, group=group, timeout=60)
        own = x()[model.nodes]
        model(own)
        if rank:
            model.layers[2] = seeded(lambda: SAGEConv(4, 5))[0]
        with pytest.raises(ValueError, match=r"not the same on all ranks.*change layers on every rank alike"):
            model(own)
        model.layers[2] = seeded(lambda: SAGEConv(4, 5))[0]
        return model(own).shape[1]

    layers = narrowing()
    assert run_ranks(2, work) == [5, 5]


def test_what_one_rank_refuses_all_refuse():
    def work(rank, group):
        model = HybridParallel(copy.deepcopy(layers), GRAPH, ranks=RANKS, group=group, timeout=60)
        own = x()[model.nodes]
        with pytest.raises(ValueError, match="x must be float" if rank else "another rank refused"):
            model(own[:-1] if rank else own)
        return model(own).shape[1]

    layers = narrowing()
    assert run_ranks(2, work) == [3, 3]


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
    assert Layout.of(model.layers).what == model._planner.reader.layout.what


def test_joins_of_ones_own_are_tried_and_called():
    class Weighted(Join):
        def forward(self, rows, kept):
            return rows + 2 * kept

    class Centred(Join):
        def forward(self, rows, kept):
            return rows + kept - kept.mean(0)

    def layers(join):
        return [Keep("x"), *seeded(lambda: SAGEConv(WIDTH, WIDTH)), join("x"), *seeded(lambda: SAGEConv(WIDTH, OUT))]

    assert check(Case(layers(Weighted), GRAPH, options=bins(3))) == ""
    with pytest.raises(ValueError, match="Centred makes a node's row depend on which others"):
        HybridParallel(layers(Centred), GRAPH)(x())


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


def test_a_default_device_of_torchs_is_not_where_plans_are_made():
    """On the meta device nothing has values: whatever is made there by default fails."""

    def work(rank, group):
        mine = copy.deepcopy(layers)
        with torch.device("meta"):
            model = HybridParallel(mine, GRAPH, ranks=RANKS, group=group, timeout=60, **bins(2))
            own = rows[model.nodes].requires_grad_()
            out = model(own)
            (out * out).sum().backward()
            assert model.total(1.0) == 2.0 and len(model.describe(own)) > 0 and model.byte_matrix(3).sum() > 0
        return out.detach(), model.nodes, own.grad

    layers = seeded(lambda: SAGEConv(WIDTH, 4), lambda: nn.BatchNorm1d(4), nn.ELU, lambda: SAGEConv(4, 3))
    rows = x()
    whole = rows.clone().requires_grad_()
    want = layers[3](layers[2](layers[1](layers[0](whole, GRAPH.csc()))), GRAPH.csc())
    (want * want).sum().backward()
    for out, nodes, grad in run_ranks(2, work):
        assert torch.allclose(out, want[nodes]) and torch.allclose(grad, whole.grad[nodes])


def test_layers_are_tried_on_loops_of_which_no_node_has_several():
    """Of several loops PyG keeps the weight of one, on a device of any of them."""
    csc, _ = _sample(torch.device("cpu"), torch.Generator().manual_seed(0), None)
    edges = torch.stack([csc.indices.long(), csc.dst()])
    loops, counts = edges[0, edges[0] == edges[1]].unique(return_counts=True)
    assert len(loops) > 0 and int(counts.max()) == 1
    assert edges.unique(dim=1).shape[1] < edges.shape[1] and int(csc.in_degrees().min()) == 0


HOOKS_OF_PARAMETERS = {
    "doubles": lambda grad: 2 * grad,
    "clamps": lambda grad: grad.clamp(-0.5, 0.5),
    "normalises": lambda grad: grad / grad.norm(),
}


def test_hooks_on_parameters_see_the_whole_gradient_once():
    for name, hook in HOOKS_OF_PARAMETERS.items():
        for options in ({}, bins(3), {"recompute": True}, {"memory_budget": 1 << 15}):
            seen: list[Tensor] = []
            layers, plain = nn.ModuleList(narrowing()), nn.ModuleList(narrowing())
            for p in (*layers.parameters(), *plain.parameters()):
                p.register_hook(hook)
            model = HybridParallel(layers, GRAPH, **options)
            for p in layers.parameters():
                p.register_hook(lambda grad, seen=seen: seen.append(grad))
                p.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(p.grad))
            model(x()).square().sum().backward()
            plain[3](plain[2](plain[1](plain[0](x(), GRAPH.csc())), GRAPH.csc())).square().sum().backward()
            assert len(seen) == 2 * len(list(layers.parameters())), (name, options)
            for p, q in zip(layers.parameters(), plain.parameters(), strict=True):
                assert torch.allclose(p.grad, q.grad, rtol=1e-10), (name, options)


def test_hooks_on_parameters_see_the_sum_of_all_ranks():
    def work(rank, group):
        model = HybridParallel(copy.deepcopy(layers), GRAPH, ranks=RANKS, group=group, timeout=60, **bins(2))
        for p in model.parameters():
            p.register_hook(lambda grad: grad / grad.norm())
        model(x()[model.nodes]).square().sum().backward()
        return [p.grad for p in model.parameters()]

    layers = nn.ModuleList(narrowing())
    found = run_ranks(2, work)
    layers[3](layers[2](layers[1](layers[0](x(), GRAPH.csc())), GRAPH.csc())).square().sum().backward()
    for grads in found:
        for grad, p in zip(grads, layers.parameters(), strict=True):
            assert torch.allclose(grad, p.grad / p.grad.norm(), rtol=1e-10)


def between() -> list[nn.Module]:
    inner = lambda: GINConv(nn.Linear(4, 4))  # noqa: E731
    layers = seeded(lambda: SAGEConv(WIDTH, 4), lambda: nn.Dropout(0.5), inner, nn.Tanh, lambda: SAGEConv(4, 3))
    layers[4].requires_grad_(False)
    return layers


@torch.no_grad()
def _write(tensor: Tensor) -> None:
    tensor.mul_(3).add_(1)


CHANGED_BETWEEN = {
    "a weight that trains": lambda layers: _write(layers[0].lin_l.weight),
    "a frozen weight": lambda layers: _write(layers[4].lin_l.weight),
    "a buffer": lambda layers: _write(layers[2].eps),
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
        _write(layers[1].weight)
        with pytest.raises(RuntimeError, match=r"between a pass and its backward.*call optimizer.step\(\)"):
            out.square().sum().backward()


def test_marks_and_joins_that_change_after_a_pass_count_in_the_next():
    first, second = seeded(lambda: SAGEConv(WIDTH, 4), lambda: SAGEConv(4, 4))
    keeps, join = [Keep("a"), Keep("b")], Join("a")
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
    told = Told(seeded(lambda: GCNConv(WIDTH, 3))[0], edge_weight="edge_weight")
    model = HybridParallel([told], GRAPH, edge_data={"edge_weight": "w"})
    assert torch.allclose(model(x()), told.conv(x(), GRAPH.edge_index(), data))
    del told.names["edge_weight"]
    with pytest.raises(ValueError, match="no graph layer takes an argument 'edge_weight'"):
        model(x())


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


DIFFERENT = {
    "evaluation": lambda model, rows: model.eval() and None,
    "a module in evaluation": lambda model, rows: model.layers[1].eval() and None,
    "frozen": lambda model, rows: model.layers[0].requires_grad_(False) and None,
    "x trains": lambda model, rows: rows.clone().requires_grad_(),
    "x is no tensor": lambda model, rows: rows.numpy(),
    "how much is dropped": lambda model, rows: setattr(model.layers[2], "p", 0.1),
    "how fast statistics move": lambda model, rows: setattr(model.layers[1], "momentum", 0.5),
}


def test_ranks_that_differ_in_what_they_would_send_hear_of_it_at_once_and_go_on_when_they_agree():
    def work(rank, group):
        found = []
        for name, change in DIFFERENT.items():
            model = HybridParallel(copy.deepcopy(layers), GRAPH, ranks=RANKS, group=group, timeout=10)
            rows = x()[model.nodes]
            model(rows).sum().backward()
            given = change(model, rows) if rank else None
            with pytest.raises((ValueError, AttributeError, TypeError), match=r"on all ranks|numpy") as error:
                model(rows if given is None else given)
                pytest.fail(name)
            if not rank:
                assert "not the same on all ranks" in str(error.value)
            else:
                model.train().requires_grad_()
                model.layers[2].p, model.layers[1].momentum = 0.5, 0.1
            model(rows).sum().backward()
            found.append(name)
        autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=rank == 0)
        for make in (lambda: autocast, lambda: torch.set_grad_enabled(rank == 0)):
            with make(), pytest.raises(ValueError, match="not the same on all ranks"):
                model(rows)
        return found

    layers = seeded(lambda: SAGEConv(WIDTH, 4), lambda: nn.BatchNorm1d(4), nn.Dropout, lambda: SAGEConv(4, 3))
    assert run_ranks(2, work) == [list(DIFFERENT)] * 2


def test_a_layer_that_one_rank_changed_and_changed_back_runs_on_all():
    def work(rank, group):
        model = HybridParallel(copy.deepcopy(layers), GRAPH, ranks=RANKS, group=group, timeout=10)
        own = x()[model.nodes]
        want = model(own)
        handle = model.layers[0].register_forward_hook(lambda *args: None) if rank else None
        with pytest.raises(ValueError, match="not the same on all ranks"):
            model(own)
        if handle is not None:
            handle.remove()
        return torch.equal(model(own), want)

    layers = narrowing()
    assert run_ranks(2, work) == [True, True]
