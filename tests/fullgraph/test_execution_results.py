"""`execution="auto"` and every way of a plan: the losses and gradients of the default, on one rank and on several."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gnnsys.fullgraph import FullGraphPlan, HybridParallel
from gnnsys.fullgraph.plan import full_graph_plan, pass_planner, propose_ways
from gnnsys.graph import Graph
from gnnsys.nn import GCNConv
from tests.fullgraph import ranks, thread_ranks
from tests.fullgraph.dense import adjacency, dense_forward
from tests.fullgraph.planned_models import (
    FEW,
    GRAPH,
    IN_FLOAT32,
    MODELS,
    WAYS,
    WEIGHT,
    WIDTH,
    N,
    layers_of,
    pyg,
    rows,
    same,
    train,
)
from tests.support.grid import every_pair, grid

pytestmark = pytest.mark.usefixtures("one_core")


@grid(case=[(name, torch.float64) for name in MODELS] + [(name, torch.float32) for name in IN_FLOAT32])
def test_every_way_gives_the_losses_and_gradients_of_the_default(case):
    name, dtype = case
    told = {"edge_data": {"edge_weight": WEIGHT.to(dtype)}} if name.endswith("gcn") else {}
    x = rows(dtype)
    want = train(HybridParallel(layers_of(name, dtype), GRAPH, **told), x)
    few = dtype == torch.float32 or name.endswith("gat")  # which is called in all of them
    for way in [WAYS["narrow"]] if few else WAYS.values():
        model = HybridParallel(layers_of(name, dtype), GRAPH, **told, execution=FullGraphPlan(way))
        same(train(model, x), want, 1e-12 if dtype == torch.float64 else 1e-5)
        assert model.execution is not None and model.execution.way == way and model.execution.contests == []


@every_pair(name=["gcn", "sage", "gin", "PyG's sage"], way={key: WAYS[key] for key in ("narrow", "kept", "bins")})
def test_every_way_of_several_ranks_gives_the_dense_answer(name, way):
    layers, x = layers_of(name), rows()
    layers = [layer for layer in layers if not isinstance(layer, nn.Dropout)]
    if name.startswith("PyG"):
        alone = HybridParallel(copy.deepcopy(layers), GRAPH)
        alone(x).square().sum().backward()
        want = [p.grad for p in alone.parameters()]
    else:
        whole = nn.ModuleList(copy.deepcopy(layers))
        dense_forward(whole, x, adjacency(GRAPH)).square().sum().backward()
        want = [p.grad for p in whole.parameters()]

    def work(rank, group):
        model = HybridParallel(
            copy.deepcopy(layers), GRAPH, ranks=torch.arange(N) % 3, group=group, timeout=60,
            execution=FullGraphPlan(way),
        )  # fmt: skip
        own = x[model.nodes]
        for _ in range(2):  # the second reads what the first has kept
            model.zero_grad()
            model(own).square().sum().backward()
        return [p.grad for p in model.parameters()]

    for found in thread_ranks.run_ranks(3, work):
        for got, value in zip(found, want, strict=True):
            assert float((got - value).abs().max()) <= 1e-10 * float(value.abs().max())


def test_a_trial_trains_as_the_default_does_and_all_ranks_choose_alike(monkeypatch):
    """Over real connections, through contests of bins, of PyG's layers and of sums that pay late."""
    monkeypatch.setattr(pass_planner, "_BIN_NODES", 3)
    monkeypatch.setattr(full_graph_plan, "ROUNDS", 1)
    monkeypatch.setattr(propose_ways, "_SOON", 8)
    x = rows()
    torch.manual_seed(0)
    layers = [pyg.GCNConv(WIDTH, 1).double(), nn.ReLU(), pyg.GCNConv(1, 3).double()]  # sums pay after 12 epochs
    steps = 4 * FEW

    def work(rank, group):
        found = []
        for execution in (None, "auto"):
            model = HybridParallel(
                copy.deepcopy(layers), GRAPH, ranks=torch.arange(N) % 2, group=group, timeout=60, execution=execution
            )
            own = x[model.nodes]
            losses = train(model, own, steps)
            model.eval()
            losses.append([model(own).detach()])
            found.append(losses)
        assert model.execution is not None
        return found, model.execution.to_json(), len(model._planner.plans)

    told = ranks.run_ranks(2, work)
    (_, plan, _), (_, other_plan, _) = told
    assert plan == other_plan
    assert plan["contests"] == [] and len(plan["results"]) >= 2
    for (want, found), _, num_plans in told:
        same(found, want, 1e-12)
        assert num_plans == 1  # those of ways that were left are given back


def test_a_graph_without_edges_is_planned_too():
    graph = Graph.from_edge_index(torch.zeros(2, 0, dtype=torch.int64), 5)
    model = HybridParallel([GCNConv(3, 2)], graph, execution="auto")
    model(torch.ones(5, 3)).sum().backward()
    assert model.execution.report().endswith(
        "(the first layer's sums of rows that never change are made once and kept)"
    )
