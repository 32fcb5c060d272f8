"""Batch normalisation over the whole graph, bin by bin: torch's numbers, whatever the bins and wherever rows live."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gnnsys.fullgraph import BinSchedule, HybridParallel, Packing
from gnnsys.fullgraph.plan import pass_planner
from gnnsys.nn import SAGEConv
from tests.fullgraph.dense import adjacency, dense_forward, random_graph
from tests.fullgraph.test_exact import WIDTH, N, check, close, normed, random_ranks, seeded
from tests.fullgraph.test_moves import LateStreams
from tests.fullgraph.thread_ranks import run_ranks
from tests.support.grid import every_value


def everywhere() -> list[nn.Module]:
    """First and last, twice in a row, with and without parameters, and before a module that writes what it is given."""
    return [
        nn.BatchNorm1d(WIDTH), SAGEConv(WIDTH, 6), nn.BatchNorm1d(6, affine=False), nn.BatchNorm1d(6, momentum=None),
        nn.ReLU(inplace=True), SAGEConv(6, 4), nn.BatchNorm1d(4),
    ]  # fmt: skip


def fixed() -> list[nn.Module]:
    """One that uses what it has learnt before."""
    norm = nn.BatchNorm1d(6).eval()
    norm.running_mean.fill_(0.3)
    norm.running_var.fill_(1.7)
    return [SAGEConv(WIDTH, 6), norm, nn.ReLU(), SAGEConv(6, 3), nn.BatchNorm1d(3, track_running_stats=False)]


OPTIONS = {
    "one bin": {"schedule": BinSchedule(packing=Packing(num_bins=1))},
    "four bins": {"schedule": BinSchedule(packing=Packing(num_bins=4))},
    "bins of one node, no pipelines": {
        "schedule": BinSchedule(intra_layer=False, inter_layer=False, packing=Packing(bin_nodes=1))
    },
    "budget": {"memory_budget": 9_000},
}


@every_value(
    make=[everywhere, fixed], world_size=[1, 2, 3], options=OPTIONS, moves={"rows lie": False, "rows move": True}
)
def test_normalising_in_bins_gives_the_dense_answer(make, world_size, options, moves, monkeypatch):
    if moves:
        monkeypatch.setattr(pass_planner, "streams_between", lambda *_: LateStreams())
    ranks = torch.zeros(N, dtype=torch.int64) if world_size == 1 else random_ranks(world_size)
    check(make, random_graph(N, 300, 1), ranks, world_size, **options)


@pytest.mark.parametrize("options", [OPTIONS["four bins"], OPTIONS["budget"]], ids=["four bins", "budget"])
def test_a_rank_without_nodes_takes_part_in_the_statistics(options, monkeypatch):
    monkeypatch.setattr(pass_planner, "streams_between", lambda *_: LateStreams())
    check(normed, random_graph(N, 300, 3), random_ranks(3, empty=1), 3, **options)


@pytest.mark.parametrize("moves", [False, True], ids=["rows lie", "rows move"])
def test_running_statistics_in_bins_are_torchs(moves, monkeypatch):
    if moves:
        monkeypatch.setattr(pass_planner, "streams_between", lambda *_: LateStreams())
    graph, layers = random_graph(N, 300, 6), seeded(everywhere)
    x = torch.randn(N, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole = copy.deepcopy(layers)
    for _ in range(3):
        dense_forward(whole, x, adjacency(graph))

    def work(rank, group):
        mine = copy.deepcopy(layers)
        model = HybridParallel(mine, graph, ranks=random_ranks(2), group=group, timeout=60, memory_budget=9_000)
        for _ in range(3):
            model(x[model.nodes])
        norms = [step.bins for step in next(iter(model._planner.plans.values())).steps if step.stage.norm is not None]
        assert len(norms) == 4 and all(len(bins) > 1 for bins in norms)
        return [buffer for layer in mine for buffer in layer.buffers()]

    for found in run_ranks(2, work):
        for got, want in zip(found, [buffer for layer in whole for buffer in layer.buffers()], strict=True):
            close(got.double(), want.double(), at_least=1.0)  # means of normal rows are rounding alone
