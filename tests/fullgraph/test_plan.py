"""The plan: who sends what, in which order nodes are computed, and what a bin has to wait for."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch

from gnnsys.comm.rank_exchange import RankExchange
from gnnsys.fullgraph import BinSchedule, Packing, make_plan, share_of
from gnnsys.fullgraph.parallel import HybridParallel
from gnnsys.fullgraph.plan.bins import Costs, bin_bounds
from gnnsys.graph import Graph
from gnnsys.nn import SAGEConv
from tests.fullgraph.dense import random_graph
from tests.fullgraph.test_exact import random_ranks
from tests.fullgraph.thread_ranks import run_ranks

N = 120


def plans(graph, ranks, world_size, order="boundary"):
    def work(rank, group):
        share = share_of(graph, rank, world_size, ranks)
        return share, make_plan(share, RankExchange(group, timeout=60), order)

    return run_ranks(world_size, work)


def test_what_one_rank_sends_is_what_the_other_needs_in_that_order():
    graph, ranks = random_graph(N, 700, 1), random_ranks(3, N)
    found = plans(graph, ranks, 3)
    src, dst = graph.edge_index()
    for here, (share, plan) in enumerate(found):
        assert torch.equal(plan.order[plan.places], torch.arange(plan.num_core))
        for there, (other_share, other) in enumerate(found):
            sent = other_share.original_ids[other.order[other.send_places[here]]]
            crosses = (ranks[src] == there) & (ranks[dst] == here)
            needed = torch.unique(src[crosses]) if there != here else torch.empty(0, dtype=torch.int64)
            assert torch.equal(sent.sort().values, needed)
            first, end = plan.halo_bounds[there], plan.halo_bounds[there + 1]
            assert torch.equal(plan.halo[first:end] - other_share.first, other.order[other.send_places[here]])
            assert torch.equal(plan.owner_places[first:end], other.send_places[here])
        assert share.num_core == plan.num_core


def test_the_structure_by_places_is_the_graph():
    graph, ranks = random_graph(N, 700, 2), random_ranks(3, N)
    edges = []
    for share, plan in plans(graph, ranks, 3):
        names = torch.cat([share.original_ids[plan.order], torch.full((plan.num_halo,), -1)])
        ids_of = torch.sort(ranks, stable=True).indices  # by global id
        names[plan.num_core :] = ids_of[plan.halo]
        edges.append(torch.stack([names[plan.csc.indices.long()], names[plan.csc.dst()]]))
    found = torch.cat(edges, dim=1)
    assert sorted(map(tuple, found.t().tolist())) == sorted(map(tuple, graph.edge_index().t().tolist()))


def test_nodes_that_others_need_come_first_and_are_no_others():
    graph, ranks = random_graph(N, 200, 3), random_ranks(3, N)
    for share, plan in plans(graph, ranks, 3):
        wanted = torch.cat(plan.send_places).unique()
        assert torch.equal(wanted, torch.arange(plan.num_boundary))
        assert 0 < plan.num_boundary < plan.num_core
        assert plans(graph, ranks, 3, "ids")[share.rank][1].order.equal(torch.arange(plan.num_core))


def test_boundary_bins_of_a_sparse_cut_wait_for_few_of_the_peers_bins():
    """Two rings of 400 nodes, joined node by node, one ring each: bin k needs the other's bin k, in some order."""
    n = 400
    ring = torch.arange(n)
    within = torch.stack([ring, (ring + 1) % n])
    across = torch.stack([ring, ring + n])
    edges = torch.cat([within, within + n, across, across.flip(0)], dim=1)
    graph, ranks = Graph.from_edge_index(edges, 2 * n), (torch.arange(2 * n) >= n).long()

    layers = [SAGEConv(3, 3), SAGEConv(3, 3)]

    def work(rank, group):
        schedule = BinSchedule(packing=Packing(bin_nodes=50))
        mine = copy.deepcopy(layers)
        model = HybridParallel(mine, graph, ranks=ranks, schedule=schedule, group=group, timeout=60)
        steps = model._planner.plan_for(torch.zeros(n, 3)).steps
        return [[len(chunks) for _, chunks in step.needs] for step in steps], model.plan.num_boundary

    for (of_features, of_rows), num_boundary in run_ranks(2, work):
        assert num_boundary == n and len(of_rows) == 8
        assert max(of_features) == 1  # they come in one message
        assert max(of_rows) == 1


@pytest.mark.parametrize(("least", "most_bins"), [(1, 6), (12, 4), (50, 2), (10_000, 2)])
def test_bins_have_a_least_size_but_what_others_need_is_apart(least, most_bins):
    graph, ranks = random_graph(N, 200, 3), random_ranks(2, N)
    for _, plan in plans(graph, ranks, 2):
        bounds = bin_bounds(plan, Packing(num_bins=6, least_nodes=least), Costs(1, 1), True)
        assert bounds[0] == 0 and bounds[-1] == plan.num_core and plan.num_boundary in bounds
        assert len(bounds) - 1 <= most_bins
        for first, end in pairwise([0, plan.num_boundary, plan.num_core]):
            inside = [bound for bound in bounds if first <= bound <= end]
            assert len(inside) - 1 <= max(1, (end - first) // least)


@pytest.mark.parametrize(("each", "expected"), [(3, 6), (20, 3), (100, 2)])
def test_ranks_make_fewer_bins_of_few_nodes(monkeypatch, each, expected):
    """60 nodes on each; what others need is apart, so there are two at least."""
    monkeypatch.setattr("gnnsys.fullgraph.plan.pass_planner._BIN_NODES", each)
    graph, ranks, conv = random_graph(N, 200, 3), torch.arange(N) % 2, SAGEConv(3, 3)

    def work(rank, group):
        model = HybridParallel([copy.deepcopy(conv)], graph, ranks=ranks, group=group, timeout=60)
        (step,) = model._planner.plan_for(torch.zeros(N // 2, 3)).steps
        return len(step.bins)

    assert run_ranks(2, work) == [expected, expected]


def test_a_least_size_is_a_number_of_nodes():
    with pytest.raises(ValueError, match="least_nodes must be at least 1, got 0"):
        Packing(num_bins=2, least_nodes=0)
