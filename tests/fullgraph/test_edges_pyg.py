"""PyG's layers that are told of edges give what they give on the whole graph, and what ours give."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gnnsys.fullgraph import EdgeArguments, HybridParallel
from gnnsys.fullgraph.offload.copy_streams import HostStreams
from gnnsys.graph import Graph
from gnnsys.nn import GATConv, GCNConv
from tests.fullgraph.test_edges import (
    ATTR,
    FEATURES,
    GRAPH,
    OUT,
    SCHEDULES,
    TOLERANCE,
    TYPE,
    TYPES,
    WEIGHT,
    WIDTH,
    check,
    made,
)  # fmt: skip

pyg = pytest.importorskip("torch_geometric.nn")


def mlp(width: int, out: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 5), nn.ReLU(), nn.Linear(5, out))


PYG = {
    "GCNConv": (lambda: pyg.GCNConv(WIDTH, OUT), WEIGHT),
    "GCNConv improved": (lambda: pyg.GCNConv(WIDTH, OUT, improved=True), WEIGHT),
    "GCNConv without self loops": (lambda: pyg.GCNConv(WIDTH, OUT, add_self_loops=False), WEIGHT),
    "GCNConv not normalized": (lambda: pyg.GCNConv(WIDTH, OUT, normalize=False), WEIGHT),
    "GraphConv": (lambda: pyg.GraphConv(WIDTH, OUT), WEIGHT),
    "LEConv": (lambda: pyg.LEConv(WIDTH, OUT), WEIGHT),
    "GATConv": (lambda: pyg.GATConv(WIDTH, OUT, heads=2, edge_dim=FEATURES), ATTR),
    "GATv2Conv": (lambda: pyg.GATv2Conv(WIDTH, OUT, heads=2, edge_dim=FEATURES), ATTR),
    "TransformerConv": (lambda: pyg.TransformerConv(WIDTH, OUT, heads=2, edge_dim=FEATURES), ATTR),
    "GINEConv": (lambda: pyg.GINEConv(mlp(WIDTH, OUT), edge_dim=FEATURES), ATTR),
    "NNConv": (lambda: pyg.NNConv(WIDTH, OUT, mlp(FEATURES, WIDTH * OUT)), ATTR),
    "CGConv": (lambda: pyg.CGConv(WIDTH, FEATURES), ATTR),
    "GENConv": (lambda: pyg.GENConv(WIDTH, OUT, norm="layer", edge_dim=FEATURES), ATTR),
    "GeneralConv": (lambda: pyg.GeneralConv(WIDTH, OUT, in_edge_channels=FEATURES), ATTR),
    "ResGatedGraphConv": (lambda: pyg.ResGatedGraphConv(WIDTH, OUT, edge_dim=FEATURES), ATTR),
    "PNAConv": (
        lambda: pyg.PNAConv(WIDTH, OUT, ["mean", "max"], ["identity"], torch.tensor([1, 9, 5]), edge_dim=FEATURES),
        ATTR,
    ),
    "RGCNConv": (lambda: pyg.RGCNConv(WIDTH, OUT, TYPES), TYPE),
    "FastRGCNConv": (lambda: pyg.FastRGCNConv(WIDTH, OUT, TYPES), TYPE),
    "FiLMConv": (lambda: pyg.FiLMConv(WIDTH, OUT, num_relations=TYPES), TYPE),
}


@pytest.mark.parametrize("name", PYG)
def test_pygs_layers_give_what_they_give_on_the_whole_graph(name):
    make, edges = PYG[name]
    layers = made(make)
    check(layers, 2, edges, schedule=SCHEDULES["four bins"])


def test_ours_are_pygs():
    for ours, theirs, edges in [
        (GCNConv(WIDTH, OUT), pyg.GCNConv(WIDTH, OUT), WEIGHT),
        (GATConv(WIDTH, OUT, edge_dim=FEATURES), pyg.GATConv(WIDTH, OUT, edge_dim=FEATURES), ATTR),
    ]:
        ours.load_state_dict(theirs.state_dict())
        x = GRAPH.node_data["node"]["x"]
        found = [
            HybridParallel([layer.double()], GRAPH, edge_data=edges, schedule=SCHEDULES["four bins"])(x)
            for layer in (ours, theirs)
        ]
        assert float((found[0] - found[1]).detach().abs().max()) <= TOLERANCE


@pytest.mark.parametrize("make", [lambda: GCNConv(WIDTH, OUT), lambda: pyg.GCNConv(WIDTH, OUT)], ids=["ours", "pyg"])
def test_degrees_by_weights_of_another_name_are_refused_with_the_reason(make):
    layers = made(lambda: EdgeArguments(make(), edge_weight="strength"))
    with pytest.raises(ValueError, match="knows degrees by its own edge_weight alone"):
        HybridParallel(layers, GRAPH, edge_data={"strength": "w"})(GRAPH.node_data["node"]["x"])


def test_a_layer_that_divides_by_weights_of_what_it_sees_is_refused():
    with pytest.raises(ValueError, match="SGConv gives other rows on a piece"):
        HybridParallel(made(lambda: pyg.SGConv(WIDTH, OUT)), GRAPH, edge_data=WEIGHT)(GRAPH.node_data["node"]["x"])


def test_half_precision_counts_more_in_edges_than_it_can_say():
    """A node of 70,000 in-edges, where float16 ends at 65,504; one of its neighbours is not zero."""
    num_nodes = 70_001
    src = torch.arange(1, num_nodes)
    graph = Graph.from_edge_index(torch.stack([src, torch.zeros_like(src)]), num_nodes)
    x = torch.zeros(num_nodes, WIDTH)
    x[5] = 100.0
    torch.manual_seed(0)
    conv = pyg.GCNConv(WIDTH, OUT)
    want = HybridParallel([copy.deepcopy(conv)], graph, schedule=SCHEDULES["four bins"])(x)[0].detach()
    found = HybridParallel([conv.half()], graph, schedule=SCHEDULES["four bins"])(x.half())[0].detach().float()
    assert want.abs().max() > 0.1 and torch.allclose(found, want, rtol=0.01, atol=1e-3)


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("size", [1e5, 1e-8])
def test_half_precision_takes_weights_that_it_cannot_say(size, moves, monkeypatch):
    if moves:
        monkeypatch.setattr("gnnsys.fullgraph.plan.pass_planner.streams_between", lambda *_: HostStreams())
    torch.manual_seed(0)
    x, weight = GRAPH.node_data["node"]["x"].float(), size * (0.5 + GRAPH.edge_data[GRAPH.edge_types[0]]["w"].float())
    for width in (OUT, 2 * WIDTH):
        conv = GCNConv(WIDTH, width)
        want = conv(x, GRAPH.edge_index(), weight)
        of_weight = torch.autograd.grad(want.sum(), conv.lin.weight)[0]
        half = copy.deepcopy(conv).half()
        model = HybridParallel([half], GRAPH, edge_data={"edge_weight": weight}, schedule=SCHEDULES["four bins"])
        found = model(x.half())
        found.float().sum().backward()
        assert torch.allclose(found.float(), want, rtol=0.01, atol=5e-3)
        assert torch.allclose(
            half.lin.weight.grad.float(), of_weight, rtol=0.02, atol=0.02 * float(of_weight.abs().max())
        )
