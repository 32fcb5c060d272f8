"""What people do to modules: full-graph training and inference give what the plain modules give, or refuse.

Every layer of ours and every layer of PyG's that is taken, with every change of `tests.support.customise`, before the
model is made or after a first pass.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gnnsys.nn import GATConv, GCNConv, GINConv, RGCNConv, SAGEConv
from tests.fullgraph.customised import (
    FEATURES,
    OUT,
    TYPES,
    VOID,
    WIDTH,
    Case,
    bins,
    check,
    check_infer,
    compare,
    expected,
    make_graph,
    wanted,
)
from tests.support.customise import CHANGES, OF_THE_LAYER

GRAPH = make_graph()
RANKS = torch.randint(2, (GRAPH.num_nodes(),), generator=torch.Generator().manual_seed(7))
ALL = CHANGES | OF_THE_LAYER
WEIGHT, ATTR, TYPE = {"edge_weight": "w"}, {"edge_attr": "e"}, {"edge_type": "t"}


def mlp(width: int, out: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 5), nn.ReLU(), nn.Linear(5, out))


OURS = {
    "SAGEConv": (lambda: SAGEConv(WIDTH, OUT), {}),
    "SAGEConv that widens": (lambda: SAGEConv(WIDTH, 2 * WIDTH, normalize=True), {}),
    "SAGEConv of max": (lambda: SAGEConv(WIDTH, OUT, aggr="max", project=True), {}),
    "GCNConv": (lambda: GCNConv(WIDTH, OUT), {}),
    "GCNConv that widens": (lambda: GCNConv(WIDTH, 2 * WIDTH), WEIGHT),
    "GCNConv improved": (lambda: GCNConv(WIDTH, OUT, improved=True), WEIGHT),
    "GATConv": (lambda: GATConv(WIDTH, OUT, heads=2, edge_dim=FEATURES, residual=True), ATTR),
    "GINConv": (lambda: GINConv(mlp(WIDTH, OUT), train_eps=True), {}),
    "RGCNConv": (lambda: RGCNConv(WIDTH, OUT, TYPES), TYPE),
}


def pyg_layers() -> dict:
    """By name what makes a layer of PyG's, and what it is told."""
    from tests.fullgraph.test_edges_pyg import PYG
    from tests.fullgraph.test_pyg import FIT

    return {name: (make, {}) for name, make in FIT.items()} | {f"{name}, told": pair for name, pair in PYG.items()}


def made(make, *then) -> list[nn.Module]:
    torch.manual_seed(0)
    return [layer.double() for layer in (nn.Linear(WIDTH, WIDTH), make(), *(each() for each in then))]


def on_layer(change):
    return lambda layers: change(layers[1])


def cases(layers: dict):
    for name, (make, edges) in layers.items():
        for what, change in ALL.items():
            yield f"{name}: {what}", make, edges, change


def judged(label: str, case: Case) -> str:
    try:
        return check(case)
    except Exception as error:
        raise AssertionError(f"{label}: {type(error).__name__}: {error}") from error


def test_our_layers_are_what_they_are_on_the_whole_graph_whatever_was_changed_before_or_after_a_pass():
    """A ninth of all pairs, every layer and every change among them; `tests.fuzz.fullgraph` draws from the rest."""
    refused = set()
    for number, (label, make, edges, change) in enumerate(list(cases(OURS))[::9]):
        if reason := judged(label, in_turn(number, made(make, nn.ELU), edges, change)):
            refused |= set() if reason.startswith(VOID) else {label.partition(": ")[2]}
    assert refused == {"spectral_norm", "spectral_norm, old"}  # in training they change with every call


def test_pygs_layers_are_what_they_are_on_the_whole_graph_or_refused():
    """Some of all pairs, every layer and every change among them; `tests.fuzz.fullgraph` draws from the rest."""
    pytest.importorskip("torch_geometric")
    refused, count = [], 0
    for number, (label, make, edges, change) in enumerate(cases(pyg_layers())):
        if number % 23 == 0:
            count += 1
            refused += [label] if judged(label, in_turn(number // 23, made(make), edges, change)) else []
    assert len(refused) < 0.25 * count


def in_turn(number: int, layers: list[nn.Module], edges: dict, change, **options) -> Case:
    """A change before the model is made, or after a first pass."""
    if number % 2:
        return Case(layers, GRAPH, edges, change=on_layer(change), options=bins(2) | options)
    change(layers[1])
    return Case(layers, GRAPH, edges, options=bins(2) | options)


SOME = ("LoRA around", "weight_norm", "parametrised", "prune", "assign=True", "frozen", "backward hook", "subclass")


@pytest.mark.parametrize("budget", [False, True], ids=["bins", "budget"])
def test_two_ranks_give_the_same(budget):
    """With a memory budget bins are computed again on the way back."""
    options = {"memory_budget": 40_000} if budget else bins(2)
    names = ("SAGEConv that widens", "SAGEConv", "GCNConv", "GATConv")
    for number, what in enumerate(SOME):
        name = names[(number + 2 * budget) % 4]  # every layer, and every change on two of them
        make, edges = OURS[name]
        case = Case(made(make, nn.ELU), GRAPH, edges, 2, RANKS, on_layer(ALL[what]) if number % 3 else None, options)
        if number % 3 == 0:
            ALL[what](case.layers[1])
        assert judged(f"{name}: {what}", case) == ""


def test_inference_gives_the_same():
    for label, make, edges, change in list(cases(OURS))[::9]:
        layers = made(make, nn.ELU)
        change(layers[1])
        reason = check_infer(Case(layers, GRAPH, edges, options=bins(2)))
        assert reason == "", f"{label}: {reason}"


def test_a_module_that_is_in_the_list_twice_gets_the_gradients_of_both_places():
    for make, edges in ((lambda: SAGEConv(WIDTH, WIDTH), {}), (lambda: GCNConv(WIDTH, WIDTH), WEIGHT)):
        for what in ("plain", "LoRA around", "prune"):
            layers = made(make, nn.ELU)
            ALL[what](layers[1])
            layers += [layers[1], layers[0], layers[2]]
            assert judged(what, Case(layers, GRAPH, edges, options=bins(3))) == ""
            assert judged(what, Case(layers, GRAPH, edges, 2, RANKS)) == ""


def equal_rows_at_a_kink() -> Case:
    """Normalised equal rows are zeros, or what rounding leaves of their mean: there the slope of a ReLU jumps."""
    torch.manual_seed(0)
    conv = SAGEConv(WIDTH, WIDTH, aggr="sum", root_weight=False)
    layers = [layer.double() for layer in (conv, nn.BatchNorm1d(WIDTH), nn.LeakyReLU(0.1))]
    return Case(layers, make_graph(num_nodes=60, num_edges=0))


def test_a_sign_that_rounding_decides_is_no_wrong_gradient():
    case = equal_rows_at_a_kink()
    for options in ({}, bins(5)):
        case.options = options
        assert check(case) == ""


@pytest.mark.parametrize("name", ["1.bias", "rows", "x"])
def test_the_comparison_notices_a_small_error_where_rounding_decides_nothing(name):
    at_kink = name == "rows"  # rows are as sure there as elsewhere
    case = equal_rows_at_a_kink() if at_kink else Case(made(lambda: GCNConv(WIDTH, OUT), nn.LeakyReLU), GRAPH)
    got, nodes = expected(case, change=False), torch.arange(case.graph.num_nodes())
    compare(got, wanted(case, change=False), nodes, "unchanged")
    changed = {"rows": got.rows, "x": got.x_grad}.get(name, got.grads.get(name))
    changed[-1] += 1e-7 * (1 if at_kink else changed.abs().max())
    with pytest.raises(AssertionError, match="off by"):
        compare(got, wanted(case, change=False), nodes, "changed")
