"""Boundary sampling against a dense computation with the same draw; what both policies owe the exact path."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gnnsys.fullgraph import BinSchedule, BoundarySampling, HybridParallel, Packing, Staleness
from gnnsys.graph import Graph
from gnnsys.nn import GCNConv, SAGEConv
from tests.fullgraph.dense import adjacency, random_graph
from tests.fullgraph.mixed import LR, agree, dense_sampled, drawn, inputs, train
from tests.fullgraph.ranks import run_ranks as run_gloo_ranks
from tests.fullgraph.test_exact import WIDTH, N, gcn, gin, loss_of, normed, random_ranks, seeded, unequal_sage
from tests.fullgraph.thread_ranks import run_ranks
from tests.support.grid import every_value

RATE = 0.4
POLICIES = [BoundarySampling(RATE), Staleness(), Staleness(gamma=0.5)]


def counts_of(policy, ranks, step, seed=11):
    ids = torch.arange(len(ranks))
    return drawn(ranks, policy.rate, lambda rank: policy.draw(ids, seed, step, rank))


def expected(layers, graph, ranks, x, target, policy, passes, x_grad):
    """Losses and gradients of gradient descent with the halo drawn for each pass."""
    layers, a = copy.deepcopy(list(layers)), adjacency(graph)
    parameters = [p for layer in layers for p in layer.parameters()]
    optimizer = torch.optim.SGD(parameters, LR)
    x = x.clone().requires_grad_(x_grad)
    losses, grads, x_grads = [], [], []
    for step in range(1, passes + 1):
        optimizer.zero_grad()
        x.grad = None
        loss = loss_of(dense_sampled(layers, x, a, counts_of(policy, ranks, step)), target)
        loss.backward()
        losses.append(loss.item())
        grads.append([None if p.grad is None else p.grad.clone() for p in parameters])
        x_grads.append(x.grad)
        optimizer.step()
    return losses, grads, x_grads


def check(make, world_size, policy, *, empty=None, x_grad=False, tolerance=None, passes=3, **options):
    graph, ranks, layers = random_graph(N, 300, 1), random_ranks(world_size, empty=empty), seeded(make)
    x, target = inputs(graph, 4 if make is gcn else 3)
    want = expected(layers, graph, ranks, x, target, policy, passes, x_grad)
    found = train(layers, graph, ranks, world_size, x, target, policy, passes=passes, x_grad=x_grad, **options)
    agree(found, want[0], want[1], want[2] if x_grad else None, tolerance)
    return found


@every_value(make=[unequal_sage, gcn, gin, normed], world_size=[1, 2, 3], x_grad=[False, True])
def test_losses_and_gradients_are_those_of_a_dense_computation_with_the_drawn_halo(make, world_size, x_grad):
    check(make, world_size, BoundarySampling(RATE), x_grad=x_grad)


@every_value(
    packing={"bins of one node": Packing(bin_nodes=1), "four bins": Packing(num_bins=4), "one bin": Packing()},
    intra=[True, False],
    inter=[False, True],
)
def test_every_schedule_and_size_of_bins_gives_the_drawn_halo(intra, inter, packing):
    schedule = BinSchedule(intra_layer=intra, inter_layer=inter, packing=packing)
    check(unequal_sage, 3, BoundarySampling(RATE), schedule=schedule)


@pytest.mark.parametrize("x_grad", [False, True])
def test_recomputed_bins_see_the_halo_that_was_drawn_on_the_way_there(x_grad):
    check(
        gcn, 2, BoundarySampling(RATE), recompute=True, x_grad=x_grad, schedule=BinSchedule(packing=Packing(num_bins=4))
    )
    check(unequal_sage, 2, BoundarySampling(RATE), recompute=True, x_grad=x_grad)


def test_bins_within_a_budget_of_memory_see_the_drawn_halo():
    check(unequal_sage, 2, BoundarySampling(RATE), memory_budget=20_000)


def test_a_rank_without_nodes_takes_part_in_sampled_passes():
    """Over gloo's connections."""
    check(unequal_sage, 3, BoundarySampling(RATE), empty=1, run=run_gloo_ranks)


def test_sampled_rows_may_travel_as_bfloat16():
    """Eight bits of a row survive: losses and gradients stay within two hundredths of the largest."""
    found = check(unequal_sage, 3, BoundarySampling(RATE), wire_dtype=torch.bfloat16, tolerance=2e-2)
    wide = check(unequal_sage, 3, BoundarySampling(RATE))
    for narrow, other in zip(found, wide, strict=True):
        assert narrow.losses != other.losses
        assert [4 * num_bytes for num_bytes in narrow.num_bytes] == other.num_bytes


def test_a_rate_of_one_is_the_exact_path_bit_for_bit():
    graph, ranks, layers = random_graph(N, 300, 2), random_ranks(3), seeded(unequal_sage)
    x, target = inputs(graph, 3)
    exact = train(layers, graph, ranks, 3, x, target, None)
    for one, other in zip(train(layers, graph, ranks, 3, x, target, BoundarySampling(1)), exact, strict=True):
        assert one.losses == other.losses and one.num_bytes == other.num_bytes
        for got, want in zip(one.grads, other.grads, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_rate_of_zero_trains_on_isolated_shares():
    for each in check(unequal_sage, 3, BoundarySampling(0)):
        assert each.num_bytes[1:] == [0, 0]  # features came once, for evaluation


def test_what_a_linear_layer_gives_is_right_in_the_mean():
    """Rows of neighbours are drawn independently, so the variance of a sum is known; the mean of K passes must lie
    within five of its standard deviations everywhere (of 3 * 60 values one is outside once in ten thousand runs)."""
    num_passes, policy = 60, BoundarySampling(RATE)
    graph, ranks = random_graph(N, 300, 1), random_ranks(2)
    layers = seeded(lambda: [nn.Linear(WIDTH, 4), SAGEConv(4, 3)])
    x, _ = inputs(graph, 3)
    a = adjacency(graph)
    with torch.no_grad():
        exact = dense_sampled(layers, x, a, torch.ones_like(a))
        mean = a / a.sum(1, keepdim=True).clamp(min=1) * (ranks[:, None] != ranks)
        spread = mean.square() @ layers[0](x).matmul(layers[1].lin_l.weight.t()).square() * (1 - RATE) / RATE

    def work(rank, group):
        model = HybridParallel(
            copy.deepcopy(layers), graph, ranks=ranks, group=group, timeout=60, approximate=policy, seed=3,
            schedule=BinSchedule(packing=Packing(num_bins=2)),
        )  # fmt: skip
        total = torch.zeros(len(model.nodes), 3, dtype=torch.float64)
        for _ in range(num_passes):
            total += model(x[model.nodes]).detach()
        return model.nodes, total / num_passes

    for nodes, found in run_ranks(2, work):
        away = (found - exact[nodes]).abs()
        assert bool((away <= 5 * (spread[nodes] / num_passes).sqrt() + 1e-12).all())
        assert float(away.max()) > 0


def test_bytes_of_a_pass_are_those_of_the_drawn_nodes_and_about_the_rate_times_the_exact_ones():
    graph, ranks, policy = random_graph(200, 2000, 1), random_ranks(3, 200), BoundarySampling(0.2)
    layers = seeded(unequal_sage)
    x, target = inputs(graph, 3)
    found = train(layers, graph, ranks, 3, x, target, policy)
    exact = train(layers, graph, ranks, 3, x, target, None)
    edges, each = graph.edge_index(), 8 * (7 + 3)  # the last layer's rows travel as wide as its result
    crossing = edges[:, ranks[edges[0]] != ranks[edges[1]]]
    pairs = torch.unique(torch.stack([crossing[0], ranks[crossing[1]]]), dim=1)  # (node, rank that needs it)
    for n in (1, 2):
        counts = counts_of(policy, ranks, n + 1)
        taken = sum(
            int((counts[ranks == rank][0][nodes] > 0).sum())
            for rank in range(3)
            for nodes in [pairs[0][pairs[1] == rank]]
        )
        assert sum(run.num_bytes[n] for run in found) == taken * 2 * each
        assert sum(run.num_bytes[n] for run in exact) == pairs.shape[1] * 2 * each
        noise = (pairs.shape[1] * 0.2 * 0.8) ** 0.5
        assert abs(taken - 0.2 * pairs.shape[1]) <= 4 * noise


def test_a_draw_depends_on_seed_step_receiving_rank_and_node_alone():
    ids, policy = torch.arange(20000), BoundarySampling(0.3)
    first = policy.draw(ids, 1, 2, 0)
    assert abs(int(first.sum()) - 6000) <= 4 * (20000 * 0.3 * 0.7) ** 0.5
    some = torch.randperm(20000, generator=torch.Generator().manual_seed(0))[:100]
    assert torch.equal(policy.draw(ids[some], 1, 2, 0), first[some])
    for other in (policy.draw(ids, 2, 2, 0), policy.draw(ids, 1, 3, 0), policy.draw(ids, 1, 2, 1)):
        both = int((first & other).sum())  # independent of the first
        assert abs(both - 1800) <= 4 * (20000 * 0.09 * 0.91) ** 0.5


@pytest.mark.parametrize("policy", POLICIES)
def test_runs_give_the_same_bits_and_evaluation_in_between_changes_none(policy):
    graph, ranks, layers = random_graph(N, 300, 5), random_ranks(2), seeded(unequal_sage)
    x, target = inputs(graph, 3)
    few = {"passes": 3, "schedule": BinSchedule(packing=Packing(num_bins=3))}
    runs = [train(layers, graph, ranks, 2, x, target, policy, evaluate=e, **few) for e in (False, True)]
    for one, two in zip(*runs, strict=True):
        assert one.losses == two.losses
        for got, want in zip(one.grads, two.grads, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert runs[0][0].losses != train(layers, graph, ranks, 2, x, target, None, **few)[0].losses


@pytest.mark.parametrize("wrong", [-0.1, 1.5, float("nan"), 1e-12])
def test_a_rate_or_gamma_out_of_range_and_what_is_no_policy_are_refused(wrong):
    with pytest.raises(ValueError, match="rate must be in"):
        BoundarySampling(wrong)
    if wrong != 1e-12:
        with pytest.raises(ValueError, match="gamma must be in"):
            Staleness(gamma=wrong)
    with pytest.raises(ValueError, match="approximate must be a policy"):
        HybridParallel(seeded(gcn), random_graph(N, 300, 1), approximate=wrong)


def planted(num_nodes: int = 400, num_classes: int = 4) -> tuple[Graph, torch.Tensor, torch.Tensor]:
    """Four groups with ten in-edges per node, seven of them from the own group; features say little."""
    generator = torch.Generator().manual_seed(5)
    y = torch.randint(num_classes, (num_nodes,), generator=generator)
    dst = torch.arange(num_nodes).repeat_interleave(10)
    src = torch.randint(num_nodes, (len(dst),), generator=generator)
    by_class = [(y == c).nonzero()[:, 0] for c in range(num_classes)]
    for at in (torch.rand(len(dst), generator=generator) < 0.6).nonzero()[:, 0].tolist():
        group = by_class[int(y[dst[at]])]
        src[at] = group[int(torch.randint(len(group), (1,), generator=generator))]
    x = torch.randn(num_nodes, 8, generator=generator) + 0.8 * F.one_hot(y, 8)
    return Graph.from_edge_index(torch.stack([src, dst]), num_nodes), x, y


@pytest.mark.long  # gradients are those of dense computations: the first tests here and of test_staleness.py
def test_training_ends_about_as_well_as_exact_training_does():
    """On a planted graph and a random partition, by accuracy on the 200 nodes without labels, where exact training gets
    above nine tenths: within three points of it, and six where but a fifth of the halo is drawn, which two thirds of
    all neighbours are in."""
    graph, x, y = planted()
    ranks = random_ranks(3, 400)
    is_train = torch.arange(400) % 2 == 0
    torch.manual_seed(0)
    layers = [GCNConv(8, 16), nn.ReLU(), GCNConv(16, 4)]

    def accuracy(policy):
        def work(rank, group):
            model = HybridParallel(
                copy.deepcopy(layers), graph, ranks=ranks, group=group, timeout=60, approximate=policy,
                schedule=BinSchedule(packing=Packing()),
            )  # fmt: skip
            optimizer = torch.optim.Adam(model.parameters(), 0.03)
            own, labels, mine = x[model.nodes], y[model.nodes], is_train[model.nodes]
            for _ in range(30):
                optimizer.zero_grad()
                (F.cross_entropy(model(own)[mine], labels[mine], reduction="sum") / 200).backward()
                optimizer.step()
            model.eval()
            with torch.no_grad():
                right = (model(own).argmax(1) == labels)[~mine]
            return model.total(right.sum()) / 200

        return run_ranks(3, work)[0]

    exact = accuracy(None)
    assert exact > 0.9
    bounds = {BoundarySampling(0.2): 0.06, Staleness(): 0.03}
    for policy, bound in bounds.items():
        assert accuracy(policy) >= exact - bound, policy
