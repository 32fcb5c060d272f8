"""Layers that are told of edges, weights, features or types, give what they give on the whole graph."""

from __future__ import annotations

import copy
import gc
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from gnnsys.fullgraph import (
    BinSchedule,
    BoundarySampling,
    EdgeArguments,
    HybridParallel,
    Packing,
    Residual,
    Staleness,
    infer,
)
from gnnsys.fullgraph.offload.copy_streams import HostStreams
from gnnsys.fullgraph.plan import pass_planner
from gnnsys.graph import Graph
from gnnsys.nn import GATConv, GCNConv, RGCNConv, SAGEConv
from gnnsys.ops.memo import STRUCTURES
from gnnsys.partition import partition_graph
from gnnsys.session.open_parts import open_alone
from tests.fullgraph.dense import random_graph
from tests.fullgraph.thread_ranks import run_ranks
from tests.support.grid import every_pair, every_value

TOLERANCE = 1e-10
N, WIDTH, OUT, FEATURES, TYPES = 50, 6, 4, 3, 3


def draws(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def make_graph() -> Graph:
    """Directed, with repeated edges, loops, several at some nodes, and isolated nodes; edges in no order."""
    edges = random_graph(N, 250, 1).edge_index()
    loops = torch.tensor([3, 3, 5, 9, 9, 9])
    edges = torch.cat([edges, torch.stack([loops, loops])], dim=1)
    edges = edges[:, torch.randperm(edges.shape[1], generator=torch.Generator().manual_seed(4))]
    count = edges.shape[1]
    data = {
        "w": draws(count, seed=5).abs() + 0.1,
        "e": draws(count, FEATURES, seed=6),
        "t": torch.randint(TYPES, (count,), generator=torch.Generator().manual_seed(7)),
    }
    rows = {"x": draws(N, WIDTH, seed=1), "y": draws(N, 2 * WIDTH, seed=2)}
    return Graph.from_edge_index(edges, N, rows, data)


GRAPH = make_graph()
DATA = GRAPH.edge_data[GRAPH.edge_types[0]]


class Weighted(nn.Module):
    """A graph layer of a user's own, with an argument that has no default."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, OUT)

    def forward(self, rows, csc, strength):
        out = torch.zeros(csc.num_dst, OUT, dtype=rows.dtype)
        return out.index_add(0, csc.dst(), strength[:, None] * self.lin(rows)[csc.indices.long()])


def whole(layer: nn.Module, x: Tensor, edges: dict[str, str]) -> Tensor:
    """A layer on the whole graph, by itself."""
    told = {name: DATA[array] for name, array in edges.items()}
    if isinstance(layer, Weighted):
        src, dst = GRAPH.edge_index()
        return torch.zeros(N, OUT, dtype=x.dtype).index_add(0, dst, DATA["w"][:, None] * layer.lin(x)[src])
    if isinstance(layer, Residual):
        return layer.conv(x, GRAPH.edge_index(), **told) + layer.project(x)
    names = layer.forward.__code__.co_varnames[: layer.forward.__code__.co_argcount]
    if "edges" in names or "edge_index" in names:
        return layer(x, GRAPH.edge_index(), **{name: rows for name, rows in told.items() if name in names})
    return layer(x)


def made(*makers) -> list[nn.Module]:
    torch.manual_seed(0)
    return [make().double() for make in makers]


def loss_of(out: Tensor, y: Tensor) -> Tensor:
    return (out - y[:, : out.shape[1]]).square().sum()


def step(model: HybridParallel) -> tuple[float, Tensor, Tensor, list[Tensor | None]]:
    """The whole loss, this rank's nodes, the gradient of their rows, and those of the parameters."""
    x = model.share.rows("x").clone().requires_grad_()
    loss = loss_of(model(x), model.share.rows("y"))
    loss.backward()
    return model.total(loss.detach()), model.nodes, x.grad, [p.grad for p in model.parameters()]


def check(layers: Sequence[nn.Module], world_size: int, edges, graph=GRAPH, **options) -> None:
    """Losses and gradients on ranks are those of the layers on the whole graph."""
    alone = copy.deepcopy(list(layers))
    rows = GRAPH.node_data["node"]
    out = x = rows["x"].clone().requires_grad_()
    named = {
        name: next(key for key, rows in DATA.items() if given is key or given is rows) for name, given in edges.items()
    }
    for layer in alone:
        out = whole(layer, out, named)
    loss = loss_of(out, rows["y"])
    loss.backward()
    grads = [p.grad for layer in alone for p in layer.parameters()]
    largest = max(float(grad.abs().max()) for grad in grads if grad is not None)
    ranks = torch.randint(world_size, (N,), generator=torch.Generator().manual_seed(7))
    shared = {"ranks": ranks} if isinstance(graph, Graph) else {}

    def work(rank, group):
        mine = copy.deepcopy(list(layers))
        return step(HybridParallel(mine, graph, edge_data=edges, group=group, timeout=60, **shared, **options))

    for total, nodes, x_grad, found in run_ranks(world_size, work):
        assert abs(total - loss.item()) <= TOLERANCE * loss.item()
        assert float((x_grad - x.grad[nodes]).abs().max()) <= TOLERANCE * float(x.grad.abs().max())
        for got, want in zip(found, grads, strict=True):
            assert want is not None or got is None or not got.any()
            assert want is None or float((got - want).abs().max()) <= TOLERANCE * largest


WEIGHT, ATTR, TYPE = {"edge_weight": "w"}, {"edge_attr": "e"}, {"edge_type": "t"}
OURS = {
    "GCNConv": (lambda: GCNConv(WIDTH, OUT), WEIGHT),
    "GCNConv that widens": (lambda: GCNConv(WIDTH, 2 * WIDTH), WEIGHT),
    "GCNConv improved": (lambda: GCNConv(WIDTH, OUT, improved=True), WEIGHT),
    "GCNConv without self loops": (lambda: GCNConv(WIDTH, OUT, add_self_loops=False, bias=False), WEIGHT),
    "GCNConv not normalized": (lambda: GCNConv(WIDTH, OUT, normalize=False), WEIGHT),
    "GATConv": (lambda: GATConv(WIDTH, OUT, heads=2, edge_dim=FEATURES), ATTR),
    "GATConv with loops of zeros": (lambda: GATConv(WIDTH, OUT, edge_dim=FEATURES, fill_value=0.0), ATTR),
    "RGCNConv": (lambda: RGCNConv(WIDTH, OUT, TYPES), TYPE),
    "a layer of one's own": (Weighted, {"strength": "w"}),
    "a residual": (lambda: Residual(GCNConv(WIDTH, OUT), project=nn.Linear(WIDTH, OUT)), WEIGHT),
}
SCHEDULES = {
    "one bin": BinSchedule(packing=Packing(num_bins=1)),
    "four bins": BinSchedule(packing=Packing(num_bins=4)),
    "bins of one node": BinSchedule(packing=Packing(bin_nodes=1)),
}


@every_value(name=OURS.keys(), world_size=[1, 3], schedule=SCHEDULES)
def test_our_layers_give_what_they_give_on_the_whole_graph(name, world_size, schedule):
    make, edges = OURS[name]
    check(made(make), world_size, edges, schedule=schedule)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_layers_that_take_weights_and_others_follow_one_another(world_size):
    layers = made(
        lambda: GCNConv(WIDTH, 9), nn.ELU, lambda: SAGEConv(9, 5), nn.ELU, lambda: GATConv(5, 7, edge_dim=FEATURES),
        lambda: GCNConv(7, OUT),
    )  # fmt: skip
    check(layers, world_size, WEIGHT | ATTR)


@every_pair(
    name=["GCNConv", "GCNConv that widens", "GATConv", "RGCNConv"], moves=[False, True], options=["budget", "four bins"]
)
def test_what_is_known_of_edges_moves_with_bins(name, moves, options, monkeypatch):
    if moves:
        monkeypatch.setattr("gnnsys.fullgraph.plan.pass_planner.streams_between", lambda *_: HostStreams())
    make, edges = OURS[name]
    budget = {"memory_budget": 20_000 if "GCN" in name else 60_000}  # in which not all fits
    packed = []
    make_steps = pass_planner.make_steps

    def noted(*args, **options):
        packed.append(args[5])
        return make_steps(*args, **options)

    monkeypatch.setattr(pass_planner, "make_steps", noted)
    check(made(make), 2, edges, **(budget if options == "budget" else {"schedule": SCHEDULES[options]}))
    assert packed == [budget["memory_budget"] if options == "budget" else None] * 2


def test_tensors_go_by_the_order_of_the_edges():
    check(made(OURS["GCNConv"][0]), 1, {"edge_weight": DATA["w"]})
    check(made(OURS["GCNConv"][0]), 3, {"edge_weight": DATA["w"]})


@every_value(shape=[(1, 1, 1), (3, 1, 1), (2, 2, 2), (3, 1, 3), (1, 4, 4)], hops=[1, 2])
def test_parts_bring_the_data_of_their_edges(shape, hops, tmp_path):
    num_parts, trainers, world_size = shape
    partition_graph(
        GRAPH, num_parts, tmp_path / "p", trainers_per_part=trainers, objective="communication", halo_hops=hops
    )
    graph = open_alone(tmp_path / "p", verify=True)
    check(
        made(OURS["GCNConv"][0], nn.ELU, lambda: GATConv(OUT, 3, edge_dim=FEATURES)), world_size, WEIGHT | ATTR, graph
    )


def test_dropout_of_attention_is_the_same_on_any_number_of_ranks():
    layers = made(lambda: GATConv(WIDTH, OUT, heads=2, dropout=0.4, edge_dim=FEATURES))
    ranks = torch.arange(N) % 3

    def work(rank, group):
        mine, by = copy.deepcopy(layers), ranks if group is not None else None
        return step(HybridParallel(mine, GRAPH, ranks=by, edge_data=ATTR, group=group, timeout=60, seed=3))

    total, _, x_grad, grads = work(0, None)
    plain = step(HybridParallel(copy.deepcopy(layers), GRAPH, seed=3))
    assert abs(plain[0] - total) > 1e-3, "features of edges count"
    for found, nodes, own, of_parameters in run_ranks(3, work):
        assert abs(found - total) <= TOLERANCE * total
        assert float((own - x_grad[nodes]).abs().max()) <= TOLERANCE * float(x_grad.abs().max())
        for got, want in zip(of_parameters, grads, strict=True):
            assert float((got - want).abs().max()) <= TOLERANCE * max(1.0, float(want.abs().max()))


OPTIONS = {
    "recompute": {"recompute": True},
    "no pipelines": {"schedule": BinSchedule(intra_layer=False, inter_layer=False, order="ids")},
    "the first stale pass is exact": {"approximate": Staleness()},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_change_nothing(options):
    layers = made(lambda: GCNConv(WIDTH, 9), nn.ELU, lambda: GATConv(9, 5, edge_dim=FEATURES), lambda: GCNConv(5, OUT))
    check(layers, 3, WEIGHT | ATTR, **options)


@pytest.mark.parametrize("make", [lambda: GCNConv(WIDTH, 9), lambda: GCNConv(WIDTH, OUT)], ids=["widens", "narrows"])
def test_a_halo_of_which_some_is_drawn_counts_by_its_weights(make):
    """Rows of the halo count 0 or 1 / rate times; that alone is told apart from the whole graph's."""
    (layer,), rate, ranks = made(make), 0.5, torch.arange(N) % 2
    x, (src, dst) = GRAPH.node_data["node"]["x"], GRAPH.edge_index()

    def work(rank, group):
        options = {"ranks": ranks, "group": group, "timeout": 60, "seed": 3}
        model = HybridParallel(
            [copy.deepcopy(layer)], GRAPH, edge_data=WEIGHT, approximate=BoundarySampling(rate), **options
        )
        exact = HybridParallel([copy.deepcopy(layer)], GRAPH, edge_data=WEIGHT, **options)
        return model.nodes, model(x[model.nodes]).detach(), exact(x[model.nodes]).detach()

    has_halo = torch.zeros(N, dtype=torch.bool).index_fill(0, dst[ranks[src] != ranks[dst]], True)
    for nodes, drawn, exact in run_ranks(2, work):
        same = (drawn - exact).abs().amax(1) <= TOLERANCE
        assert same[~has_halo[nodes]].all() and not same[has_halo[nodes]].all()
        away = (drawn - exact)[has_halo[nodes]].abs().max()
        assert float(away) <= 2 * float(exact.abs().max()), "a row counts twice or not at all"


@pytest.mark.parametrize(
    "options", [{}, {"memory_budget": 20_000}, {"recompute": True}], ids=["", "budget", "recompute"]
)
@pytest.mark.parametrize("moves", [False, True])
def test_ranks_without_nodes_or_edges(options, moves, monkeypatch):
    if moves:
        monkeypatch.setattr("gnnsys.fullgraph.plan.pass_planner.streams_between", lambda *_: HostStreams())
    (layer,) = made(OURS["GCNConv"][0])
    ranks = torch.zeros(N, dtype=torch.int64)
    ranks[-3:] = 2  # nodes without any edge; rank 1 has none at all
    x = GRAPH.node_data["node"]["x"]
    want = layer(x, GRAPH.edge_index(), DATA["w"]).detach()

    def work(rank, group):
        model = HybridParallel(
            [copy.deepcopy(layer)], GRAPH, ranks=ranks, edge_data=WEIGHT, group=group, timeout=60, **options
        )
        out = model(x[model.nodes])
        out.sum().backward()
        return model.nodes, out.detach()

    for nodes, found in run_ranks(3, work):
        assert torch.allclose(found, want[nodes], atol=1e-12)


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("width", [OUT, 2 * WIDTH], ids=["narrows", "widens"])
@pytest.mark.parametrize("improved", [False, True])
def test_half_precision_and_autocast_take_weights(improved, width, moves, monkeypatch):
    if moves:
        monkeypatch.setattr("gnnsys.fullgraph.plan.pass_planner.streams_between", lambda *_: HostStreams())
    torch.manual_seed(0)
    layer, x = GCNConv(WIDTH, width, improved=improved), GRAPH.node_data["node"]["x"].float()
    weight = DATA["w"].float()
    want = layer(x, GRAPH.edge_index(), weight)
    want.square().sum().backward()
    grads = [p.grad.clone() for p in layer.parameters()]

    def near(got: Tensor, right: Tensor) -> bool:
        return bool(((got.float() - right).abs().max() <= 0.05 * right.abs().max()).item())

    half = copy.deepcopy(layer).bfloat16()
    model = HybridParallel([half], GRAPH, edge_data={"edge_weight": weight.bfloat16()}, schedule=SCHEDULES["four bins"])
    out = model(x.bfloat16())
    half.zero_grad()
    out.float().square().sum().backward()
    assert out.dtype == torch.bfloat16 and near(out, want)
    assert all(near(p.grad, grad) for p, grad in zip(half.parameters(), grads, strict=True))
    for given in (weight, weight.double()):
        mixed = HybridParallel([layer], GRAPH, edge_data={"edge_weight": given}, schedule=SCHEDULES["four bins"])
        with torch.autocast("cpu", torch.bfloat16):
            out = mixed(x)
        layer.zero_grad()
        out.float().square().sum().backward()
        assert near(out, want) and all(near(p.grad, grad) for p, grad in zip(layer.parameters(), grads, strict=True))


def test_a_layer_can_be_told_something_else_or_nothing():
    layers = made(
        lambda: EdgeArguments(GATConv(WIDTH, 5, edge_dim=FEATURES), edge_attr="bond"), nn.ELU,
        lambda: EdgeArguments(GATConv(5, OUT, edge_dim=1), edge_attr="edge_weight"),
        lambda: EdgeArguments(GCNConv(OUT, OUT)),
        lambda: EdgeArguments(GCNConv(OUT, OUT), edge_weight="edge_weight"),
    )  # fmt: skip
    x, edges = GRAPH.node_data["node"]["x"], GRAPH.edge_index()
    want = nn.functional.elu(layers[0].conv(x, edges, DATA["e"]))
    want = layers[3].conv(layers[2].conv(want, edges, DATA["w"]), edges)
    want = layers[4].conv(want, edges, DATA["w"]).detach()
    told = {"bond": "e", "edge_weight": "w"}

    def work(rank, group):
        mine = copy.deepcopy(layers)
        model = HybridParallel(mine, GRAPH, ranks=torch.arange(N) % 2, edge_data=told, group=group, timeout=60)
        return model.nodes, model(x[model.nodes]).detach()

    for nodes, found in run_ranks(2, work):
        assert float((found - want[nodes]).abs().max()) <= TOLERANCE
    with pytest.raises(ValueError, match=r"EdgeArguments names 'bond', and edge_data has \['edge_weight'\]"):
        HybridParallel(copy.deepcopy(layers), GRAPH, edge_data=WEIGHT)


def test_layers_that_are_told_otherwise_hold_no_bin_that_has_moved(monkeypatch):
    """What is remembered of a structure goes with it, and a bin's is brought anew for every pass."""
    monkeypatch.setattr("gnnsys.fullgraph.plan.pass_planner.streams_between", lambda *_: HostStreams())
    layers = made(
        lambda: EdgeArguments(GATConv(WIDTH, 5, edge_dim=FEATURES), edge_attr="bond"),
        lambda: EdgeArguments(GATConv(5, OUT)),
    )
    model = HybridParallel(layers, GRAPH, edge_data={"bond": "e"}, memory_budget=60_000)
    sizes = []
    for _ in range(4):
        model(GRAPH.node_data["node"]["x"]).sum().backward()
        gc.collect()
        sizes.append(len(STRUCTURES))
    assert sizes[-1] <= sizes[1]
    assert all(plan.recompute for plan in model._planner.plans.values())


def test_a_layer_that_makes_nothing_of_what_it_is_given_is_named():
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = GCNConv(WIDTH, OUT)

        def forward(self, rows, csc):
            return self.conv(rows, csc)

    x = GRAPH.node_data["node"]["x"]
    for layers, edge_data, warning in (
        (made(Wrapped), WEIGHT, "Wrapped gives the same rows whatever edge_weight is"),
        (made(lambda: GATConv(WIDTH, OUT)), ATTR, "GATConv gives the same rows whatever edge_attr is: it may need"),
    ):
        with pytest.warns(UserWarning, match=warning):
            told = HybridParallel(copy.deepcopy(layers), GRAPH, edge_data=edge_data)(x)
        assert torch.equal(told, HybridParallel(copy.deepcopy(layers), GRAPH)(x))


def test_ranks_that_do_not_say_the_same_of_edges_are_refused_on_all():
    both = made(lambda: GCNConv(WIDTH, OUT))

    def work(rank, group):
        with pytest.raises(ValueError, match="edge_data is not the same on all ranks"):
            HybridParallel(
                copy.deepcopy(both), GRAPH, ranks=torch.arange(N) % 3, edge_data=WEIGHT if rank else None, group=group,
                timeout=60,
            )  # fmt: skip

    run_ranks(3, work)


def test_inference_is_told_of_edges_too():
    (layer,) = made(OURS["GCNConv"][0])
    nodes, found = infer([layer], GRAPH, edge_data=WEIGHT)
    want = layer(GRAPH.node_data["node"]["x"], GRAPH.edge_index(), DATA["w"])
    assert float((found - want[nodes]).detach().abs().max()) <= TOLERANCE


def test_what_does_not_fit_is_told(tmp_path):
    gcn = made(OURS["GCNConv"][0])
    with pytest.raises(ValueError, match="no graph layer takes an argument 'edge_wieght'"):
        HybridParallel(gcn, GRAPH, edge_data={"edge_wieght": "w"})
    with pytest.raises(ValueError, match=r"the edges have no 'v', they have \['w', 'e', 't'\]"):
        HybridParallel(gcn, GRAPH, edge_data={"edge_weight": "v"})
    with pytest.raises(ValueError, match=r"edge_weight must be one floating-point number per edge, got .* \[256, 3\]"):
        HybridParallel(gcn, GRAPH, edge_data={"edge_weight": "e"})
    with pytest.raises(ValueError, match=r"has shape \[3\], expected 256 rows"):
        HybridParallel(gcn, GRAPH, edge_data={"edge_weight": torch.ones(3)})
    with pytest.raises(ValueError, match="needs a gradient, and none goes to rows of edges"):
        HybridParallel(gcn, GRAPH, edge_data={"edge_weight": DATA["w"].clone().requires_grad_()})
    learnt = Graph.from_edge_index(GRAPH.edge_index(), N, edge_data={"w": DATA["w"].clone().requires_grad_()})
    with pytest.raises(ValueError, match="needs a gradient, and none goes to rows of edges"):
        HybridParallel(gcn, learnt, edge_data=WEIGHT)
    with pytest.raises(ValueError, match="edge_data must say what arguments are"):
        HybridParallel(gcn, GRAPH, edge_data=["w"])
    with pytest.raises(
        ValueError, match=r"GATConv cannot be .*expected 2 columns, edge_dim.*it was given edge_attr \[\d+, 3"
    ):
        HybridParallel(made(lambda: GATConv(WIDTH, OUT, edge_dim=2)), GRAPH, edge_data=ATTR)(
            GRAPH.node_data["node"]["x"]
        )
    with pytest.raises(ValueError, match="must be the name of an array or a tensor, got int"):
        HybridParallel(gcn, GRAPH, edge_data={"edge_weight": 3})
    partition_graph(GRAPH, 2, tmp_path / "p")
    with pytest.raises(ValueError, match="parts have edge data of their own"):
        HybridParallel(gcn, open_alone(tmp_path / "p", verify=True), edge_data={"edge_weight": DATA["w"]})
    with pytest.raises(ValueError, match=r"Weighted.forward must take rows.*'strength'"):
        HybridParallel(made(Weighted), GRAPH)


def test_other_weights_than_those_of_the_graph_are_refused_where_degrees_would_be_wrong():
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = GCNConv(WIDTH, OUT)

        def forward(self, rows, csc, edge_weight):
            return self.conv(rows, csc, 2 * edge_weight)

    with pytest.raises(ValueError, match="by its own edge_weight alone"):
        HybridParallel(made(Other), GRAPH, edge_data=WEIGHT)(GRAPH.node_data["node"]["x"])
