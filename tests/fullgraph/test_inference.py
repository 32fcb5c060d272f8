"""Inference over the whole graph gives what a model gives in one piece, and leaves the model as it was."""

from __future__ import annotations

import copy

import pytest
import torch

from gnnsys.fullgraph import BinSchedule, Packing, infer
from gnnsys.fullgraph.run.pass_state import Pass
from gnnsys.nn import GAT, GCN, GIN, GraphSAGE
from tests.fullgraph.dense import random_graph
from tests.fullgraph.test_exact import close, random_ranks
from tests.fullgraph.thread_ranks import run_ranks

N = 80
MODELS = {
    "sage": lambda: GraphSAGE(6, 8, 3, 4, dropout=0.5, norm="batch"),
    "gcn": lambda: GCN(6, 8, 2, 4, dropout=0.5),
    "gat": lambda: GAT(6, 8, 2, 4, heads=2, attention_dropout=0.3),
    "gin": lambda: GIN(6, 8, 2, 4),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_trained_model_gives_the_same_rows_as_on_the_whole_graph(name, world_size):
    graph = random_graph(N, 500, 3)
    graph.set_node_data("x", torch.randn(N, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    torch.manual_seed(2)
    model = MODELS[name]().double()
    x = graph.node_data["node"]["x"]
    model(x, graph.csc())  # running statistics that are not those of a new model
    want = copy.deepcopy(model).eval()(x, graph.csc()).detach()

    def work(rank, group):
        mine = copy.deepcopy(model)
        found = infer(mine, graph, ranks=random_ranks(world_size, N), group=group, timeout=60)
        return *found, [module.training for module in mine.modules()], mine.state_dict()

    seen = []
    for nodes, rows, training, state in run_ranks(world_size, work):
        close(rows, want[nodes])
        assert not rows.requires_grad and all(training)
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
        seen.append(nodes)
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(N))


def test_rows_of_layers_behind_are_forgotten(monkeypatch):
    graph, live = random_graph(N, 500, 3), []
    original = Pass.compute

    def compute(state, here, done):
        original(state, here, done)
        live.append(sum(len(rows) > 0 for rows in state.rows[: here.step + 2]))

    monkeypatch.setattr(Pass, "compute", compute)
    model = GraphSAGE(6, 8, 5, 8)
    nodes, rows = infer(
        model, graph, torch.zeros(N, 6), schedule=BinSchedule(packing=Packing(num_bins=4), inter_layer=False)
    )
    assert rows.shape == (N, 8) and len(live) == 5 * 4
    assert max(live) == 2 and len(nodes) == N
