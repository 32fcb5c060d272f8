"""PyG's layers, unchanged, in bins and on ranks: what they give on the whole graph, or a refusal with a reason."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from gnnsys.fullgraph import BinSchedule, Dropout, HybridParallel, Packing, Residual, infer
from gnnsys.fullgraph.offload.copy_streams import HostStreams
from tests.fullgraph.dense import random_graph
from tests.fullgraph.thread_ranks import run_ranks
from tests.support.grid import every_value

pyg = pytest.importorskip("torch_geometric.nn")

TOLERANCE = 1e-10
N, WIDTH, OUT = 50, 6, 4
GRAPH = random_graph(N, 250, 1)


class OwnConv(pyg.MessagePassing):
    """As users write them: no word about pairs of rows."""

    def __init__(self) -> None:
        super().__init__(aggr="mean")
        self.lin = nn.Linear(WIDTH, OUT)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x)) + self.lin(x)

    def message(self, x_j):
        return x_j.tanh()


def mlp(width: int = WIDTH, *inner: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 5), *inner, nn.ReLU(), nn.Linear(5, OUT))


FIT = {
    "SAGEConv": lambda: pyg.SAGEConv(WIDTH, OUT),
    "SAGEConv of max, projected and normalized": lambda: pyg.SAGEConv(
        WIDTH, OUT, aggr="max", project=True, normalize=True
    ),
    "SAGEConv of two widths and aggregations": lambda: pyg.SAGEConv((WIDTH, WIDTH), OUT, aggr=["mean", "std"]),
    "GCNConv": lambda: pyg.GCNConv(WIDTH, OUT),
    "GCNConv improved": lambda: pyg.GCNConv(WIDTH, OUT, improved=True),
    "GCNConv without self loops": lambda: pyg.GCNConv(WIDTH, OUT, add_self_loops=False, bias=False),
    "GCNConv not normalized": lambda: pyg.GCNConv(WIDTH, OUT, normalize=False),
    "GCNConv cached": lambda: pyg.GCNConv(WIDTH, OUT, cached=True),
    "GATConv": lambda: pyg.GATConv(WIDTH, OUT, heads=2),
    "GATConv averaged with residual": lambda: pyg.GATConv(WIDTH, OUT, heads=2, concat=False, residual=True),
    "GATConv without self loops": lambda: pyg.GATConv((WIDTH, WIDTH), OUT, add_self_loops=False),
    "GATv2Conv": lambda: pyg.GATv2Conv(WIDTH, OUT, heads=2, share_weights=True),
    "GINConv": lambda: pyg.GINConv(mlp(), train_eps=True),
    "GraphConv": lambda: pyg.GraphConv(WIDTH, OUT),
    "TransformerConv": lambda: pyg.TransformerConv(WIDTH, OUT, heads=2, beta=True),
    "ResGatedGraphConv": lambda: pyg.ResGatedGraphConv(WIDTH, OUT),
    "MFConv": lambda: pyg.MFConv(WIDTH, OUT),
    "EdgeConv": lambda: pyg.EdgeConv(mlp(2 * WIDTH)),
    "FeaStConv": lambda: pyg.FeaStConv(WIDTH, OUT, heads=2),
    "LEConv": lambda: pyg.LEConv(WIDTH, OUT),
    "FiLMConv": lambda: pyg.FiLMConv(WIDTH, OUT),
    "GeneralConv": lambda: pyg.GeneralConv(WIDTH, OUT),
    "GENConv": lambda: pyg.GENConv(WIDTH, OUT, norm="layer", learn_t=True),
    # Those that take no pair of rows
    "PNAConv": lambda: pyg.PNAConv(WIDTH, OUT, ["mean", "max"], ["identity", "amplification"], torch.tensor([1, 9, 5])),
    "AGNNConv": lambda: pyg.AGNNConv(),
    "ClusterGCNConv": lambda: pyg.ClusterGCNConv(WIDTH, OUT),
    "a layer of one's own": OwnConv,
}

ELSEWHERE = "other rows on a piece of a graph than on the whole"
REFUSED = {
    "ChebConv": (lambda: pyg.ChebConv(WIDTH, OUT, 3), f"ChebConv gives {ELSEWHERE}"),
    "ARMAConv": (lambda: pyg.ARMAConv(WIDTH, OUT), f"ARMAConv gives {ELSEWHERE}"),
    "SGConv": (lambda: pyg.SGConv(WIDTH, OUT), f"SGConv gives {ELSEWHERE}"),
    "LGConv": (lambda: pyg.LGConv(), f"LGConv gives {ELSEWHERE}"),
    "APPNP": (lambda: pyg.APPNP(2, 0.1), f"APPNP gives {ELSEWHERE}"),
    "TAGConv": (lambda: pyg.TAGConv(WIDTH, OUT, 2), f"TAGConv gives {ELSEWHERE}"),
    "GatedGraphConv": (lambda: pyg.GatedGraphConv(WIDTH, 2), f"GatedGraphConv gives {ELSEWHERE}"),
    "DirGNNConv": (lambda: pyg.DirGNNConv(pyg.SAGEConv(WIDTH, OUT)), f"DirGNNConv gives {ELSEWHERE}"),
    "EGConv": (lambda: pyg.EGConv(WIDTH, OUT, num_heads=2), f"EGConv gives {ELSEWHERE}"),
    "edges read backwards": (lambda: pyg.SAGEConv(WIDTH, OUT, flow="target_to_source"), f"SAGEConv gives {ELSEWHERE}"),
    "LSTM aggregation": (lambda: pyg.SAGEConv(WIDTH, OUT, aggr="lstm"), f"SAGEConv gives {ELSEWHERE}"),
    "a model of two layers": (lambda: pyg.GraphSAGE(WIDTH, 8, 2, OUT), f"GraphSAGE gives {ELSEWHERE}"),
    "attention over all nodes": (lambda: pyg.GPSConv(WIDTH, None, heads=2, norm=None), f"GPSConv gives {ELSEWHERE}"),
    "dropout of attention": (lambda: pyg.GATConv(WIDTH, OUT, dropout=0.1), "GATConv gives other rows every time"),
    "batch norm inside": (lambda: pyg.GINConv(mlp(WIDTH, nn.BatchNorm1d(5))), "GINConv.nn.1 normalises over rows"),
    "dropout inside": (lambda: pyg.GINConv(mlp(WIDTH, nn.Dropout(0.5))), "use gnnsys.fullgraph.Dropout in its place"),
    "edges with types": (
        lambda: pyg.RGCNConv(WIDTH, OUT, 2),
        "RGCNConv cannot be applied to rows and a structure.*edge_data= gives layers their edge_type",
    ),
    "edges with features": (
        lambda: pyg.GINEConv(mlp()),
        "GINEConv cannot be applied to rows and a structure.*edge_data= gives layers their edge_attr",
    ),
    "first rows besides": (
        lambda: pyg.GCN2Conv(WIDTH, 0.1),
        "GCN2Conv.forward must take rows, or rows and a structure",
    ),
}

BY_ROWS = {  # behind a layer: whether they fit
    "LayerNorm of nodes": (lambda: pyg.LayerNorm(OUT, mode="node"), None),
    "LayerNorm of the graph": (lambda: pyg.LayerNorm(OUT), "LayerNorm makes a node's row depend on which others"),
    "GraphNorm": (lambda: pyg.GraphNorm(OUT), "GraphNorm makes a node's row depend on which others"),
    "PairNorm": (lambda: pyg.PairNorm(), "PairNorm makes a node's row depend on which others"),
    "InstanceNorm": (lambda: pyg.InstanceNorm(OUT), "InstanceNorm makes a node's row depend on which others"),
    "BatchNorm": (lambda: pyg.BatchNorm(OUT), None),
    "softmax over nodes": (lambda: nn.Softmax(0), "Softmax makes a node's row depend on which others"),
    "MLP with dropout": (lambda: pyg.MLP([OUT, 5, 3], norm=None, dropout=0.1), "MLP gives other rows every time"),
    "alpha dropout": (lambda: nn.AlphaDropout(0.1), "AlphaDropout gives other rows every time"),
}


def made(*makers) -> list[nn.Module]:
    torch.manual_seed(0)
    return [make().double() for make in makers]


def draws(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return (out - target[:, : out.shape[1]]).square().sum()


def on_ranks(
    layers: Sequence[nn.Module], world_size: int, num_bins: int | None, **options
) -> list[tuple[float, Tensor, Tensor, list]]:
    """Per rank the whole loss, its nodes, the gradient of their rows, and those of the parameters."""
    x, target = draws(N, WIDTH, seed=1), draws(N, 2 * WIDTH, seed=2)
    ranks = torch.randint(world_size, (N,), generator=torch.Generator().manual_seed(7))

    def work(rank, group):
        schedule = BinSchedule(packing=None if num_bins is None else Packing(num_bins=num_bins))
        mine = copy.deepcopy(list(layers))
        model = HybridParallel(mine, GRAPH, ranks=ranks, schedule=schedule, group=group, timeout=60, **options)
        own = x[model.nodes].requires_grad_()
        loss = loss_of(model(own), target[model.nodes])
        loss.backward()
        return model.total(loss.detach()), model.nodes, own.grad, [p.grad for p in model.parameters()]

    return run_ranks(world_size, work)


def check(layers: Sequence[nn.Module], world_size: int, num_bins: int | None, **options) -> None:
    """Losses and gradients are those of PyG on the whole graph."""
    alone = copy.deepcopy(list(layers))
    out = x = draws(N, WIDTH, seed=1).requires_grad_()
    for layer in alone:
        out = layer(out, GRAPH.edge_index()) if isinstance(layer, pyg.MessagePassing) else layer(out)
    loss = loss_of(out, draws(N, 2 * WIDTH, seed=2))
    loss.backward()
    grads = [p.grad for layer in alone for p in layer.parameters()]
    largest = max([float(grad.abs().max()) for grad in grads if grad is not None], default=0.0)
    for total, nodes, x_grad, found in on_ranks(layers, world_size, num_bins, **options):
        assert abs(total - loss.item()) <= TOLERANCE * loss.item()
        assert float((x_grad - x.grad[nodes]).abs().max()) <= TOLERANCE * float(x.grad.abs().max())
        assert len(found) == len(grads)
        for got, want in zip(found, grads, strict=True):
            assert want is not None or not got.any()
            assert want is None or float((got - want).abs().max()) <= TOLERANCE * largest


@pytest.mark.parametrize("name", FIT)
def test_a_layer_gives_what_it_gives_on_the_whole_graph(name):
    check(made(FIT[name]), 2, 4)


@every_value(name=["SAGEConv", "GCNConv", "GATConv", "PNAConv"], ranks_and_bins=[(1, 1), (1, 6), (3, 1), (3, 25)])
def test_two_layers_give_the_same_in_any_number_of_bins(name, ranks_and_bins):
    width = FIT[name]()(draws(N, WIDTH, seed=1).float(), GRAPH.edge_index()).shape[1]
    check(made(FIT[name], nn.ELU, lambda: pyg.SAGEConv(width, 3)), *ranks_and_bins)


BUDGETS = {"SAGEConv": 8_000, "GATv2Conv": 30_000, "PNAConv": 30_000, "a layer of one's own": 8_000}


@every_value(name=BUDGETS.keys(), moves=[False, True])
def test_a_layer_gives_the_same_within_a_budget(name, moves, monkeypatch):
    """Each in several bins, which a node's in-edges still fit into."""
    if moves:
        monkeypatch.setattr("gnnsys.fullgraph.plan.pass_planner.streams_between", lambda *_: HostStreams())
    check(made(FIT[name]), 2, None, memory_budget=BUDGETS[name])


@pytest.mark.parametrize("name", [name for name, (_, reason) in BY_ROWS.items() if reason is None])
def test_what_works_row_by_row_or_is_batch_normalisation_may_follow(name):
    check(made(FIT["SAGEConv"], BY_ROWS[name][0], nn.ReLU), 3, 4)


@pytest.mark.parametrize("name", REFUSED)
def test_a_layer_that_bins_cannot_add_up_to_is_refused(name):
    make, reason = REFUSED[name]
    with pytest.raises(ValueError, match=reason):
        HybridParallel(made(make), GRAPH)(draws(N, WIDTH, seed=1))


@pytest.mark.parametrize("name", [name for name, (_, reason) in BY_ROWS.items() if reason is not None])
def test_what_mixes_rows_or_draws_is_refused(name):
    make, reason = BY_ROWS[name]
    with pytest.raises(ValueError, match=reason):
        HybridParallel(made(FIT["SAGEConv"], make), GRAPH)(draws(N, WIDTH, seed=1))


def test_all_ranks_refuse_a_layer_at_once():
    def work(rank, group):
        with pytest.raises(ValueError, match=ELSEWHERE):
            HybridParallel(copy.deepcopy(layers), GRAPH, ranks=ranks, group=group, timeout=60)(
                draws(int((ranks == rank).sum()), WIDTH, seed=1)
            )

    layers, ranks = made(REFUSED["ARMAConv"][0]), torch.arange(N) % 3
    run_ranks(3, work)


def test_a_refused_layer_is_as_it_was_before():
    layers = made(lambda: pyg.SGConv(WIDTH, OUT, cached=True))
    before, drawn = copy.deepcopy(layers[0].state_dict()), torch.get_rng_state()
    with pytest.raises(ValueError, match=ELSEWHERE):
        HybridParallel(layers, GRAPH)(draws(N, WIDTH, seed=1))
    assert all(torch.equal(now, before[name]) for name, now in layers[0].state_dict().items())
    assert layers[0]._cached_x is None and torch.equal(torch.get_rng_state(), drawn)


def test_what_only_training_makes_random_is_refused_only_then():
    layers = made(lambda: pyg.GATConv(WIDTH, OUT, dropout=0.5), lambda: pyg.MLP([OUT, 5, 3], dropout=0.5))
    x = draws(N, WIDTH, seed=1)
    for layer in layers:
        layer.eval()
    model = HybridParallel(layers, GRAPH).eval()
    want = layers[1](layers[0](x, GRAPH.edge_index()))
    assert float((model(x) - want).detach().abs().max()) <= TOLERANCE
    with pytest.raises(ValueError, match="GATConv gives other rows every time"):
        model.train()(x)


def test_a_layer_whose_weights_begin_at_zero_hides_nothing():
    layers = made(REFUSED["ChebConv"][0])
    with torch.no_grad():
        for p in layers[0].parameters():
            p.zero_()
    with pytest.raises(ValueError, match=ELSEWHERE):
        HybridParallel(layers, GRAPH)(draws(N, WIDTH, seed=1))


def test_a_layer_finds_its_width_at_the_first_pass():
    model = HybridParallel(made(lambda: pyg.SAGEConv(-1, OUT), nn.ReLU, lambda: pyg.SAGEConv(-1, 2)), GRAPH)
    assert model(draws(N, WIDTH, seed=1)).shape == (N, 2)


def test_parameters_that_are_not_the_same_on_all_ranks_are_refused_on_all():
    layers = [made(FIT["SAGEConv"]) for _ in range(3)]
    with torch.no_grad():
        layers[1][0].lin_r.weight[0, 0] += 1e-6

    def work(rank, group):
        model = HybridParallel(layers[rank], GRAPH, ranks=torch.arange(N) % 3, group=group, timeout=60)
        with pytest.raises(ValueError, match=r"1 of 3 parameters .*lin_r.weight is the first: call torch.manual_seed"):
            model(draws(len(model.nodes), WIDTH, seed=1))

    run_ranks(3, work)


def test_a_residual_around_a_layer_of_pyg_is_checked_too():
    x = draws(N, WIDTH, seed=1)
    layers = made(lambda: Residual(pyg.GCNConv(WIDTH, WIDTH), Dropout(0.5)))
    HybridParallel(layers, GRAPH)(x)
    with pytest.raises(ValueError, match=f"Residual gives {ELSEWHERE}"):
        HybridParallel(made(lambda: Residual(pyg.ARMAConv(WIDTH, WIDTH))), GRAPH)(x)


def test_inference_takes_what_only_training_would_make_others_of():
    layers = made(lambda: pyg.GINConv(mlp(WIDTH, nn.BatchNorm1d(5), nn.Dropout(0.5))), nn.ReLU)
    x = draws(N, WIDTH, seed=1)
    nodes, found = infer(layers, GRAPH, x)
    assert all(layer.training for layer in layers) and torch.equal(nodes, torch.arange(N))
    want = layers[0].eval()(x, GRAPH.edge_index()).relu()
    assert float((found - want.detach()).abs().max()) <= TOLERANCE
