"""Any number of ranks gives the losses and gradients of one dense computation in float64, whatever the schedule."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from gnnsys.fullgraph import BinSchedule, Dropout, HybridParallel, JoinKept, Keep, Packing, Residual
from gnnsys.fullgraph.plan import pass_planner
from gnnsys.graph import Graph
from gnnsys.nn import GAT, GATConv, GCNConv, GINConv, GraphSAGE, SAGEConv
from tests.fullgraph.dense import adjacency, dense_forward, random_graph
from tests.fullgraph.ranks import run_ranks as run_gloo_ranks
from tests.fullgraph.thread_ranks import run_ranks
from tests.support.grid import every_value

TOLERANCE = 1e-10
N, WIDTH = 60, 5
Layers = Callable[[], list[nn.Module]]


def unequal_sage() -> list[nn.Module]:
    return [SAGEConv(WIDTH, 7), nn.ReLU(), SAGEConv(7, 11), nn.LayerNorm(11), nn.Tanh(), SAGEConv(11, 3)]


def gcn() -> list[nn.Module]:
    return [nn.Linear(WIDTH, 6), GCNConv(6, 8), nn.ReLU(), GCNConv(8, 4)]


def gat() -> list[nn.Module]:
    return [GATConv(WIDTH, 3, heads=2), nn.ELU(), GATConv(6, 4, heads=2, concat=False)]


def gin() -> list[nn.Module]:
    return [
        GINConv(nn.Sequential(nn.Linear(WIDTH, 6), nn.ReLU(), nn.Linear(6, 7)), train_eps=True),
        GINConv(nn.Linear(7, 3)),
    ]


def normed() -> list[nn.Module]:
    return [
        SAGEConv(WIDTH, 6),
        nn.BatchNorm1d(6),
        nn.ReLU(),
        SAGEConv(6, 6),
        nn.BatchNorm1d(6),
        nn.ReLU(),
        SAGEConv(6, 3),
    ]


def skipping() -> list[nn.Module]:
    return [
        Keep("x"), SAGEConv(WIDTH, 6), nn.ReLU(), Keep("h"), Residual(SAGEConv(6, 6), nn.ReLU()), JoinKept("h"),
        Residual(GCNConv(6, 4), project=nn.Linear(6, 4)), JoinKept("h", "cat"), SAGEConv(10, 4), JoinKept("x", "cat"),
        nn.Linear(9, 3),
    ]  # fmt: skip


def seeded(make: Layers, seed: int = 0) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [layer.double() for layer in make()]


def random_ranks(world_size: int, num_nodes: int = N, empty: int | None = None) -> Tensor:
    ranks = torch.randint(world_size, (num_nodes,), generator=torch.Generator().manual_seed(7))
    return ranks if empty is None else ranks.masked_fill(ranks == empty, (empty + 1) % world_size)


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return ((out - target).square() * 0.5).sum()


def expected(
    layers: Sequence[nn.Module], graph: Graph, x: Tensor, target: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The loss, the gradient of x and those of the parameters."""
    layers = copy.deepcopy(list(layers))
    x = x.clone().requires_grad_()
    loss = loss_of(dense_forward(layers, x, adjacency(graph)), target)
    loss.backward()
    return loss.detach(), x.grad, [p.grad for layer in layers for p in layer.parameters()]


def distributed(layers, graph, ranks, x, target, world_size, schedule=None, x_grad=True, run=run_ranks, **options):
    def work(rank, group):
        mine = copy.deepcopy(list(layers))
        model = HybridParallel(mine, graph, ranks=ranks, schedule=schedule, group=group, timeout=60, **options)
        own = x[model.nodes].requires_grad_(x_grad)
        loss = loss_of(model(own), target[model.nodes])
        loss.backward()
        total = model.total(loss.detach())
        return total, model.nodes, own.grad, [p.grad for layer in mine for p in layer.parameters()]

    return run(world_size, work)


def check(make: Layers, graph: Graph, ranks: Tensor, world_size: int, schedule=None, **options) -> None:
    layers = seeded(make)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(graph.num_nodes(), WIDTH, dtype=torch.float64, generator=generator)
    width = dense_forward(copy.deepcopy(layers), x, adjacency(graph)).shape[1]
    target = torch.randn(graph.num_nodes(), width, dtype=torch.float64, generator=generator)
    loss, x_grad, grads = expected(layers, graph, x, target)
    found = distributed(layers, graph, ranks, x, target, world_size, schedule, **options)
    for total, nodes, own_grad, of_parameters in found:
        assert abs(total - float(loss)) <= TOLERANCE * abs(float(loss))
        if own_grad is not None:
            close(own_grad, x_grad[nodes])
        assert len(of_parameters) == len(grads)
        largest = max(float(grad.abs().max()) for grad in grads if grad is not None)
        for got, want in zip(of_parameters, grads, strict=True):
            close(got, want, at_least=1e-3 * largest)  # a bias before a normalisation has none but of rounding


def close(got: Tensor | None, want: Tensor | None, at_least: float = 1e-30) -> None:
    if got is None or want is None:
        assert (got is None or not got.any()) and (want is None or not want.any())
        return
    scale = max(at_least, float(want.abs().max()) if want.numel() else 0.0)
    assert not want.numel() or float((got - want).abs().max()) <= TOLERANCE * scale


MODELS: list[Layers] = [unequal_sage, gcn, gat, gin, normed, skipping]


# On two ranks and on three, with nodes on all of them or not, every model is below too.
@pytest.mark.parametrize(
    ("world_size", "make"),
    [
        *((1, make) for make in MODELS),
        *((4, make) for make in (unequal_sage, gat, normed)),
        *(pytest.param(4, make, marks=pytest.mark.long) for make in (gcn, gin, skipping)),
        (2, skipping),
        (3, skipping),
    ],
)
def test_losses_and_gradients_are_those_of_one_dense_computation(make, world_size):
    """Over gloo's connections."""
    check(make, random_graph(N, 300, 1), random_ranks(world_size), world_size, run=run_gloo_ranks)


PACKINGS = {
    "bins of one node": Packing(bin_nodes=1),
    "five bins": Packing(num_bins=5),
    "bins of 2000 bytes": Packing(bin_bytes=2000),
    "one bin": Packing(),
}


@every_value(packing=PACKINGS, intra=[True, False], inter=[True, False], order=["boundary", "ids"])
def test_every_schedule_and_size_of_bins_gives_the_same(intra, inter, order, packing):
    schedule = BinSchedule(intra_layer=intra, inter_layer=inter, order=order, packing=packing)
    check(skipping, random_graph(N, 300, 2), random_ranks(3), 3, schedule)


@pytest.mark.parametrize("make", MODELS)
def test_recomputing_bins_gives_the_same_as_keeping_them(make):
    schedule = BinSchedule(packing=Packing(num_bins=4))
    check(make, random_graph(N, 300, 2), random_ranks(2), 2, schedule, recompute=True)


@pytest.mark.parametrize("make", MODELS)
def test_bins_within_a_budget_give_the_same(make):
    check(make, random_graph(N, 300, 2), random_ranks(2), 2, memory_budget=20_000)


@pytest.mark.parametrize("make", MODELS)
def test_layers_taken_as_they_are_give_the_same_as_in_their_halves(make, monkeypatch):
    monkeypatch.setattr(pass_planner, "with_halves", lambda stages, *_, **__: list(stages))
    check(make, random_graph(N, 300, 2), random_ranks(2), 2, memory_budget=60_000)


@pytest.mark.parametrize("make", MODELS)
def test_a_rank_without_nodes_takes_part(make):
    check(make, random_graph(N, 300, 3), random_ranks(3, empty=1), 3)


def test_a_rank_without_boundary_needs_nobody():
    """Three components; ranks 0 and 1 share two of them, rank 2 has the third alone."""
    edges = [random_graph(20, 80, seed).edge_index() + 20 * seed for seed in range(3)]
    graph = Graph.from_edge_index(torch.cat(edges, dim=1), 60)
    ranks = torch.cat([random_ranks(2, 40), torch.full((20,), 2)])
    check(unequal_sage, graph, ranks, 3)


def test_features_that_need_no_gradient_give_the_same_and_travel_once():
    graph, ranks = random_graph(N, 300, 4), random_ranks(3)
    check(unequal_sage, graph, ranks, 3, x_grad=False)

    layers = seeded(unequal_sage)

    def work(rank, group):
        model = HybridParallel(copy.deepcopy(layers), graph, ranks=ranks, group=group, timeout=60)
        x = torch.ones(len(model.nodes), WIDTH, dtype=torch.float64)
        sent = []
        for _ in range(3):
            model(x).sum().backward()
            sent.append(model.times.num_bytes)
        rows, halo = sum(model.plan.rows_to()), model.plan.num_halo
        each = 8 * (7 + 3) * (rows + halo)  # the last layer's rows travel as wide as its result: 3 is less than 11
        assert model.least_bytes(x) == (rows * 8 * WIDTH, each)  # rows one way, gradients of what came the other
        return sent, rows * 8 * WIDTH, each

    for sent, first, each in run_ranks(3, work):
        assert sent == [first + each, each, each]


def test_a_first_layer_that_narrows_sends_its_wide_features_once_and_nothing_later():
    graph, ranks = random_graph(N, 300, 4), random_ranks(2)
    layers = seeded(lambda: [GCNConv(40, 3), nn.ReLU(), GCNConv(3, 4)])

    def work(rank, group):
        model = HybridParallel(copy.deepcopy(layers), graph, ranks=ranks, group=group, timeout=60)
        x = torch.ones(len(model.nodes), 40, dtype=torch.float64)
        sent = []
        for _ in range(2):
            model(x).sum().backward()
            sent.append(model.times.num_bytes)
        rows, halo = sum(model.plan.rows_to()), model.plan.num_halo
        return sent, [8 * (40 * rows + 3 * (rows + halo)), 8 * 3 * (rows + halo)]

    for sent, expected_bytes in run_ranks(2, work):
        assert sent == expected_bytes


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_dropout_is_the_same_on_any_number_of_ranks(world_size):
    graph = random_graph(N, 300, 5)
    x = torch.randn(N, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    layers = seeded(lambda: [SAGEConv(WIDTH, 8), nn.ReLU(), nn.Dropout(0.4), SAGEConv(8, 3), Dropout(0.2)])

    def work(ranks):
        def inner(rank, group):
            model = HybridParallel(copy.deepcopy(layers), graph, ranks=ranks, group=group, timeout=60, seed=5)
            outs = []
            for _ in range(2):
                outs.append(model(x[model.nodes]))
            outs[1].sum().backward()
            return model.nodes, [o.detach() for o in outs], [p.grad for p in model.parameters()]

        return inner

    alone = run_ranks(1, work(random_ranks(1)))[0]
    assert not torch.equal(*alone[1])  # a new mask every step
    assert 0 < int((alone[1][0] == 0).sum()) < alone[1][0].numel()
    for nodes, outs, grads in run_ranks(world_size, work(random_ranks(world_size))):
        for got, want in zip(outs, alone[1], strict=True):
            close(got, want[nodes])
        for got, want in zip(grads, alone[2], strict=True):
            close(got, want)


def test_running_statistics_are_those_of_the_whole_graph():
    graph, layers = random_graph(N, 300, 6), seeded(normed)
    x = torch.randn(N, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    alone = copy.deepcopy(layers)
    for _ in range(2):
        dense_forward(alone, x, adjacency(graph))

    def work(rank, group):
        mine = copy.deepcopy(layers)
        model = HybridParallel(mine, graph, ranks=random_ranks(3), group=group, timeout=60)
        for _ in range(2):
            model(x[model.nodes])
        model.eval()
        return mine, model.nodes, model(x[model.nodes]).detach()

    for layer in alone:
        layer.eval()
    want = dense_forward(alone, x, adjacency(graph)).detach()
    for mine, nodes, out in run_ranks(3, work):
        for got, ours in zip(alone, mine, strict=True):
            for name, buffer in got.named_buffers():
                close(dict(ours.named_buffers())[name].double(), buffer.double())
        close(out, want[nodes])


def test_a_reference_model_is_taken_as_it_is():
    graph, ranks = random_graph(N, 300, 8), random_ranks(2)
    x = torch.randn(N, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for make in (
        lambda: GraphSAGE(WIDTH, 8, 3, 4, norm="layer"),
        lambda: GAT(WIDTH, 8, 2, 4, heads=2),
    ):
        torch.manual_seed(0)
        model = make().double()
        want = model(x, graph.csc())
        want.sum().backward()

        def work(rank, group, model=model):
            mine = copy.deepcopy(model)
            mine.zero_grad()
            whole = HybridParallel(mine, graph, ranks=ranks, group=group, timeout=60)
            out = whole(x[whole.nodes])
            out.sum().backward()
            return whole.nodes, out.detach(), [p.grad for p in mine.parameters()]

        for nodes, out, grads in run_ranks(2, work):
            close(out, want.detach()[nodes])
            for got, p in zip(grads, model.parameters(), strict=True):
                close(got, p.grad)


def test_runs_give_the_same_bits():
    graph, layers = random_graph(90, 1200, 9), seeded(skipping)
    layers = [layer.float() for layer in layers]
    x = torch.randn(90, WIDTH, generator=torch.Generator().manual_seed(2))

    def work(rank, group):
        model = HybridParallel(copy.deepcopy(layers), graph, ranks=random_ranks(3, 90), group=group, timeout=60)
        model(x[model.nodes]).square().sum().backward()
        return [p.grad for p in model.parameters()]

    first, second = run_ranks(3, work), run_ranks(3, work)
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class Turned(nn.Module):
    """Rows as they are, column by column in memory."""

    def forward(self, rows: Tensor) -> Tensor:
        return rows.t().contiguous().t()


@pytest.mark.parametrize("packing", [Packing(), Packing(num_bins=3)])
@pytest.mark.parametrize("conv", [SAGEConv, GATConv])
def test_rows_of_a_module_may_lie_in_memory_as_they_like(conv, packing):
    def make() -> list[nn.Module]:
        return [nn.Linear(WIDTH, 6), Turned(), conv(6, 4), Turned(), GINConv(nn.Linear(4, 3))]

    for world_size in (1, 2):
        check(make, random_graph(N, 300, 1), random_ranks(world_size), world_size, BinSchedule(packing=packing))


def test_a_model_tells_what_its_rank_does_and_what_ranks_send_each_other():
    graph, ranks, layers = random_graph(N, 300, 9), random_ranks(2), seeded(unequal_sage)

    def work(rank, group):
        model = HybridParallel(copy.deepcopy(layers), graph, ranks=ranks, group=group, timeout=60)
        x = torch.zeros(len(model.nodes), WIDTH, dtype=torch.float64)
        return model.describe(x), model.byte_matrix(7, 8), model.plan

    for rank, (text, matrix, plan) in enumerate(run_ranks(2, work)):
        assert f"rank {rank} of 2: {plan.num_core} nodes" in text
        assert f"step 0: SAGEConv + ReLU, {WIDTH} -> 7, " in text and "gathers nothing" in text
        rows = plan.rows_to()[1 - rank]
        assert int(matrix[rank, 1 - rank]) == 7 * 8 * rows == 56 * plan.send_places[1 - rank].numel()
        assert int(matrix[1 - rank, rank]) == 56 * plan.num_halo


def test_rows_and_gradients_may_travel_as_bfloat16():
    """A quarter of the bytes of float64, and of its loss and gradients what so few bits leave."""
    graph, ranks, layers = random_graph(N, 700, 1), random_ranks(3), seeded(unequal_sage)
    x = torch.randn(N, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    target = torch.zeros_like(dense_forward(copy.deepcopy(layers), x, adjacency(graph)))
    loss, x_grad, grads = expected(layers, graph, x, target)

    def work(rank, group, wire_dtype):
        mine = copy.deepcopy(layers)
        model = HybridParallel(mine, graph, ranks=ranks, group=group, timeout=60, wire_dtype=wire_dtype)
        own = x[model.nodes].requires_grad_()
        here = loss_of(model(own), target[model.nodes])
        here.backward()
        of_parameters = [p.grad for layer in mine for p in layer.parameters()]
        return model.total(here.detach()), model.nodes, own.grad, of_parameters, model.times.num_bytes

    narrow = run_ranks(3, lambda rank, group: work(rank, group, torch.bfloat16))
    wide = run_ranks(3, lambda rank, group: work(rank, group, None))
    for (total, nodes, own_grad, of_parameters, num_bytes), (*_, all_bytes) in zip(narrow, wide, strict=True):
        assert 0 < abs(total - float(loss)) <= 2e-2 * float(loss)
        assert num_bytes * 4 == all_bytes > 0
        for ours, exact in [(own_grad, x_grad[nodes]), *zip(of_parameters, grads, strict=True)]:
            assert float((ours - exact).norm()) <= 2e-2 * float(exact.norm())
