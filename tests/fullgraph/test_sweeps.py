"""Rows that come once for all nodes, in sweeps over sources: the same numbers, each row once, chosen by bytes."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from gnnsys.fullgraph import BinSchedule, HybridParallel, Packing, Staleness
from gnnsys.fullgraph.offload.copy_streams import HostStreams
from gnnsys.fullgraph.offload.mover import Mover, Pick, StagingBuffers
from gnnsys.fullgraph.offload.source_sweeps import DeviceSums, SourceSweeps, SweepCosts, make_groups, piece_cuts
from gnnsys.fullgraph.plan import pass_planner, sweep_choice
from gnnsys.fullgraph.plan.neighbor_sums import NeighborSums
from gnnsys.fullgraph.plan.pass_planner import PassPlan
from gnnsys.fullgraph.plan.sweep_choice import bytes_of_bins
from gnnsys.fullgraph.run.pass_state import Pass
from gnnsys.graph import Graph
from gnnsys.nn import GCNConv, SAGEConv
from gnnsys.ops import WholeDegrees
from tests.fullgraph.dense import adjacency, random_graph
from tests.fullgraph.test_exact import WIDTH, N, check, close, gcn, gin, normed, random_ranks, skipping, unequal_sage
from tests.fullgraph.test_moves import LateStreams
from tests.fullgraph.test_pieces import bring, hub_graph
from tests.fullgraph.thread_ranks import run_ranks
from tests.support.grid import every_value

CPU = torch.device("cpu")
OPTIONS = {
    "kept": {},
    "bins of one node": {"schedule": BinSchedule(packing=Packing(bin_nodes=1))},
    "recompute": {"schedule": BinSchedule(packing=Packing(num_bins=4)), "recompute": True},
    "no pipelines": {"schedule": BinSchedule(intra_layer=False, inter_layer=False, packing=Packing(num_bins=4))},
    "budget": {"memory_budget": 60_000},
}


@pytest.fixture
def swept(monkeypatch) -> list[SourceSweeps]:
    """Whatever brings fewer bytes, sums are made in sweeps; those that were."""
    bring("sweeps", monkeypatch, LateStreams)
    found: list[SourceSweeps] = []
    sums = SourceSweeps.sums

    def noted(sweeps, *args):
        found.append(sweeps)
        return sums(sweeps, *args)

    monkeypatch.setattr(SourceSweeps, "sums", noted)
    return found


@every_value(make=[unequal_sage, gcn, gin, skipping, normed], options=OPTIONS, world_size=[1, 2])
def test_sweeps_give_the_dense_answer_however_late_copies_are(make, options, world_size, swept):
    ranks = torch.zeros(N, dtype=torch.int64) if world_size == 1 else random_ranks(world_size)
    check(make, hub_graph(N, 200), ranks, world_size, **options)
    assert swept


@every_value(make=[unequal_sage, gcn, gin, skipping, normed], world_size=[1, 2])
def test_nodes_in_groups_give_the_dense_answer(make, world_size, swept, monkeypatch):
    """Each with a sweep of its own."""
    monkeypatch.setattr(sweep_choice, "_SUMS_SHARE", 0.02)
    ranks = torch.zeros(N, dtype=torch.int64) if world_size == 1 else random_ranks(world_size)
    check(make, hub_graph(N, 200), ranks, world_size, memory_budget=34_000)
    assert max(len(each.groups) for each in swept) > 2


@pytest.mark.parametrize("x_grad", [True, False], ids=["x trains", "features"])
@pytest.mark.parametrize("empty", [None, 1], ids=["three ranks", "one without nodes"])
def test_sweeps_of_three_ranks_give_the_dense_answer(x_grad, empty, swept):
    check(unequal_sage, random_graph(N, 300, 1), random_ranks(3, empty=empty), 3, x_grad=x_grad, memory_budget=40_000)
    assert swept


def test_late_halos_are_swept_as_they_are_read_elsewhere(monkeypatch):
    """Rows and gradients of the pass before, on two ranks, as where rows lie."""
    graph, x = random_graph(N, 300, 1), torch.randn(N, WIDTH, dtype=torch.float64)
    torch.manual_seed(0)
    layers = [layer.double() for layer in (SAGEConv(WIDTH, 6), nn.ReLU(), GCNConv(6, 6), nn.ReLU(), SAGEConv(6, 3))]

    def train(rank, group):
        model = HybridParallel(
            copy.deepcopy(layers), graph, ranks=random_ranks(2), group=group, timeout=60, approximate=Staleness()
        )
        for _ in range(3):
            model.zero_grad()
            model(x[model.nodes]).square().sum().backward()
        return [p.grad for p in model.parameters()]

    want = run_ranks(2, train)
    bring("sweeps", monkeypatch, LateStreams)
    for found, expected in zip(run_ranks(2, train), want, strict=True):
        for got, grad in zip(found, expected, strict=True):
            torch.testing.assert_close(got, grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"memory_budget": 100_000}], ids=["kept", "budget"])
def test_weights_of_edges_count_in_sweeps_as_where_rows_lie(options, swept, monkeypatch):
    graph = hub_graph(200, 1000)
    torch.manual_seed(0)
    layers = [layer.double() for layer in (GCNConv(WIDTH, 9), nn.ReLU(), GCNConv(9, 9), nn.ReLU(), GCNConv(9, 3))]
    x = torch.randn(200, WIDTH, dtype=torch.float64, requires_grad=True)

    def grads(**options) -> list[Tensor]:
        x.grad = None
        model = HybridParallel(copy.deepcopy(layers), graph, edge_data={"edge_weight": "w"}, **options)
        model(x).square().sum().backward()
        return [x.grad, *(p.grad for p in model.parameters())]

    found = grads(**options)
    assert swept
    monkeypatch.setattr(pass_planner, "streams_between", lambda *_: None)
    for got, want in zip(found, grads(), strict=True):
        close(got, want)


def layers_of(width: int = 32) -> list[nn.Module]:
    torch.manual_seed(0)
    return [SAGEConv(WIDTH, width), nn.ReLU(), SAGEConv(width, width), nn.ReLU(), SAGEConv(width, 8)]


def plan_of(model: HybridParallel) -> PassPlan:
    (plan,) = model._planner.plans.values()
    return plan


@pytest.mark.parametrize("budget", [None, 150_000], ids=["kept", "budget"])
def test_a_sweep_brings_every_row_once_and_nothing_is_picked(budget, monkeypatch):
    monkeypatch.setattr(pass_planner, "streams_between", lambda *_: HostStreams())
    graph, x = random_graph(400, 8000, 1), torch.randn(400, WIDTH)
    model = HybridParallel(layers_of(), graph, memory_budget=budget)
    model(x).square().sum().backward()  # sums of features are made
    states: list[Pass] = []
    brought: list[Pick] = []
    begin, load = Pass.begin, Mover.load

    def begun(state, rows):
        begin(state, rows)
        states.append(state)

    def noted(mover, key, picks):
        assert not any(isinstance(pick.index, Tensor) for pick in picks)
        brought.extend(picks if isinstance(key, tuple) else ())  # of pieces
        load(mover, key, picks)

    monkeypatch.setattr(Pass, "begin", begun)
    monkeypatch.setattr(Mover, "load", noted)
    out = model(x)
    rows = {state.data_ptr(): s for s, state in enumerate(states[0].rows)}
    counts = [torch.zeros(400, dtype=torch.int64) for _ in states[0].rows]
    for pick in brought:
        if pick.rows.data_ptr() in rows and isinstance(pick.index, slice):
            counts[rows[pick.rows.data_ptr()]][pick.index] += 1
    sums = [s for s, step in enumerate(plan_of(model).steps) if step.source_sweeps is not None]
    assert sums == [0, 1, 3] and all(len(plan_of(model).steps[s].source_sweeps.groups) == 1 for s in sums)
    assert [counts[s].unique().tolist() for s in (0, 1, 3)] == [[0], [1], [1]]  # those of features are there
    out.square().sum().backward()


def test_sweeps_bring_a_fraction_of_what_bins_do_of_a_graph_without_locality(monkeypatch):
    graph, x, losses, moved = random_graph(1500, 30_000, 1), torch.randn(1500, WIDTH), [], []
    for way in ("bins", None):
        with monkeypatch.context() as patch:
            if way is None:
                patch.setattr(pass_planner, "streams_between", lambda *_: HostStreams())
            else:
                bring(way, patch)
            model = HybridParallel(layers_of(), graph, memory_budget=400_000)
            for _ in range(2):
                loss = model(x).square().mean()
                loss.backward()
            losses.append(float(loss.detach()))
            moved.append(model.times.bytes_up + model.times.bytes_down)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and 2 * moved[1] < moved[0]
    assert "once for each of 1 groups" in model.describe(x)


def test_bins_stay_where_they_bring_fewer_bytes(monkeypatch):
    """Nodes of a ring read their neighbours; of most rows nobody reads anything."""
    monkeypatch.setattr(pass_planner, "streams_between", lambda *_: HostStreams())
    read = torch.arange(300)
    graph = Graph.from_edge_index(torch.stack([read, (read + 1) % 300]), 3000)
    x = torch.randn(3000, WIDTH, generator=torch.Generator().manual_seed(1))
    model = HybridParallel(layers_of(), graph)
    model(x).square().sum().backward()
    steps = plan_of(model).steps
    assert all(step.source_sweeps is None for step in steps) and steps[0].piecewise_sums is not None
    assert "pieces at most" in model.describe(x) and "groups" not in model.describe(x)


def test_two_runs_give_the_same_bits(monkeypatch):
    monkeypatch.setattr(pass_planner, "streams_between", lambda *_: LateStreams())
    graph, x = hub_graph(300, 4000), torch.randn(300, WIDTH, generator=torch.Generator().manual_seed(2))

    def grads() -> list[Tensor]:
        model = HybridParallel(layers_of(), graph, memory_budget=60_000)
        model(x).square().sum().backward()
        assert any(step.source_sweeps is not None for step in plan_of(model).steps)
        return [p.grad for p in model.parameters()]

    for got, want in zip(grads(), grads(), strict=True):
        assert torch.equal(got, want)


def test_bytes_of_bins_are_those_of_the_rows_that_each_reads():
    graph = random_graph(N, 200, 3)
    bounds, dense = [0, 7, 20, N], adjacency(graph)
    want = sum(int((dense[a:b] > 0).any(0).sum()) for a, b in pairwise(bounds))
    assert bytes_of_bins(graph.csc(), bounds, 16, 1 << 40) == 16 * want
    assert bytes_of_bins(graph.csc(), bounds, 16, 100) >= 100


def view_of(graph: Graph, kind: str) -> NeighborSums:
    csc = graph.csc()
    degrees, loops = csc.in_degrees(), torch.bincount(csc.dst()[csc.indices == csc.dst()], minlength=csc.num_dst)
    return NeighborSums(kind, csc, WholeDegrees(degrees, loops))


@pytest.mark.parametrize("limit", [None, 4000, 2000])
@pytest.mark.parametrize("bounds", [[0, N], [0, 25, N]], ids=["one group", "two"])
def test_pieces_hold_every_edge_once_in_order_and_none_costs_more_than_it_may(limit, bounds):
    graph = random_graph(N, 400, 2)
    view = view_of(graph, "sum")
    costs = SweepCosts(row=48, edge=4, node=8, limit=limit)
    cuts = piece_cuts(view.csc, max(b - a for a, b in pairwise(bounds)), costs, 5, N)
    assert cuts[0] == 0 and cuts[-1] == N and cuts == sorted(set(cuts)) and (limit is None) == (len(cuts) == 6)
    for group in make_groups(view, bounds, cuts):
        found = torch.zeros(len(group), N, dtype=torch.float64)
        of_node: dict[int, list[int]] = {}
        for piece in group.pieces:
            indptr, indices = piece.structure
            num_rows = piece.end - piece.first
            assert limit is None or 48 * num_rows + 4 * indices.numel() + 8 * indptr.numel() <= limit
            assert not indices.numel() or int(indices.max()) < num_rows
            for node in range(len(group)):
                read = (indices[indptr[node] : indptr[node + 1]] + piece.first).tolist()
                of_node.setdefault(node, []).extend(read)
                found[node].index_add_(0, torch.tensor(read, dtype=torch.int64), torch.ones(len(read)).double())
        assert torch.equal(found, adjacency(graph)[group.first : group.end])
        for node, read in of_node.items():  # in the order of pieces, and inside one as stored
            csc = view.csc
            stored = csc.indices[csc.indptr[group.first + node] : csc.indptr[group.first + node + 1]]
            numbers = torch.bucketize(stored, torch.tensor(cuts), right=True)
            assert read == stored[torch.sort(numbers, stable=True).indices].tolist()


def test_rows_that_fit_nowhere_have_no_pieces():
    view = view_of(random_graph(N, 400, 2), "sum")
    assert piece_cuts(view.csc, N, SweepCosts(row=48, edge=4, node=8, limit=500), 5, N) is None


@pytest.mark.parametrize("pull_limit", [None, 1000, 100, 1])
@pytest.mark.parametrize("kind", ["sum", "mean", "gcn"])
def test_gradients_are_pulled_through_pieces_of_any_size(kind, pull_limit):
    """A hub's edges are in several."""
    view = view_of(hub_graph(N, 200), kind)
    costs = SweepCosts(row=48, edge=4, node=8, pull_limit=pull_limit)
    groups = make_groups(view, [0, 25, N], [0, 30, N])
    sweeps = SourceSweeps(view, groups, [0, 1], costs, brings_structure=True, stays=False)
    mover = Mover(StagingBuffers(HostStreams()))
    grads = torch.randn(N, 3, dtype=torch.float64)
    want, found = view.pull(grads, 11, 52), torch.zeros(41, 3, dtype=torch.float64)
    scale = view.scales(torch.float64)[1]
    for group in groups:
        here = None if scale is None else scale[group.first : group.end].clone()
        sums = DeviceSums(group, grads[group.first : group.end].clone(), here, 1)
        sweeps.pull(mover, sums, 11, 52, found)
    mover.finish()
    close(found, want)
