"""`execution="auto"`: what is tried, when, and what is passed over with which reason."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gnnsys.fullgraph import BinSchedule, BoundarySampling, Dropout, FullGraphWay, HybridParallel, Packing
from gnnsys.fullgraph.offload.copy_streams import HostStreams
from gnnsys.fullgraph.plan import full_graph_plan, pass_planner, propose_ways
from gnnsys.fullgraph.plan.full_graph_plan import MEASURED, WARM
from gnnsys.fullgraph.plan.full_graph_way import ANEW, AS_GIVEN, KEPT, NARROW
from gnnsys.graph import typed_graph
from gnnsys.nn import RGCN, GATConv, GCNConv, SAGEConv
from gnnsys.store import limited
from tests.fullgraph import thread_ranks
from tests.fullgraph.planned_models import FEW, GRAPH, PASSES, WIDTH, N, layers_of, loss_of, pyg, rows, same, train
from tests.support.grid import grid

pytestmark = pytest.mark.usefixtures("one_core")


def test_sums_that_pay_late_and_cost_little_are_tried_at_once(monkeypatch):
    monkeypatch.setattr(propose_ways, "_SOON", 8)
    monkeypatch.setattr(propose_ways, "_sums_seconds", lambda x, halo: 1e-9)
    x = rows()
    model = HybridParallel([GCNConv(WIDTH, 1).double()], GRAPH, execution="auto")  # pay after 12 epochs
    for epoch in range(1, 2 * (WARM + MEASURED)):
        model(x).sum().backward()
        kept = model._runner.known.placed[x.device].sums
        assert (kept._rows is None) == (epoch <= WARM + MEASURED + 1)  # the way at work has the first turn
    assert "as given, sums kept: being tried" in model.execution.report()


def test_sums_that_pay_late_and_cost_much_are_made_when_not_having_them_has_cost_as_much(monkeypatch):
    """On several ranks rows travel for them once, and it is not known what that costs."""
    monkeypatch.setattr(propose_ways, "_SOON", 8)
    x = rows()

    def work(rank, group):
        layers = [layer.double() for layer in (GCNConv(WIDTH, 1), nn.ReLU(), GCNConv(1, 3))]
        with torch.no_grad():
            for p in [p for layer in layers for p in layer.parameters()]:
                p.fill_(0.1)
        model = HybridParallel(
            layers, GRAPH, ranks=torch.arange(N) % 2, group=group, timeout=60, execution="auto",
            schedule=BinSchedule(packing=Packing()),
        )  # fmt: skip
        own = x[model.nodes]
        for epoch in range(1, 12 + WARM + MEASURED + 1):
            model(own).sum().backward()
            kept = model._runner.known.placed[x.device].sums
            assert (kept._rows is None) == (epoch < 12 + WARM + MEASURED)
            if epoch < 12:
                assert model.execution.chosen == FullGraphWay(first=NARROW)
                assert "as given, sums kept: tried from epoch 12 on" in model.execution.report()

    thread_ranks.run_ranks(2, work)


@pytest.mark.parametrize("dims", [(WIDTH, 6), (6, WIDTH)], ids=["narrower", "wider"])
def test_sums_that_pay_soon_are_kept_from_the_first_epoch_on(dims):
    x = torch.randn(N, dims[0])
    model = HybridParallel([SAGEConv(*dims)], GRAPH, execution="auto")
    model(x).sum().backward()
    assert model.execution.way == AS_GIVEN and model._runner.known.placed[x.device].sums._rows is not None
    assert "sums kept (the first layer's sums of rows that never change are made once" in model.execution.report()


REFUSED = {
    "attention": (lambda: [GATConv(WIDTH, 5)], {}, "GATConv is not linear in sums over neighbours"),
    "PyG's attention": (lambda: [pyg.GATConv(WIDTH, 5)], {}, "GATConv is not linear in sums over neighbours"),
    "maximum": (lambda: [SAGEConv(WIDTH, 5, aggr="max")], {}, "SAGEConv is not linear"),
    "PyG's maximum": (lambda: [pyg.SAGEConv(WIDTH, 5, aggr="max")], {}, "SAGEConv is not linear"),
    "dropout": (lambda: [nn.Dropout(0.5), GCNConv(WIDTH, 5)], {}, "Dropout comes before GCNConv: its rows are scaled"),
    "our dropout": (lambda: [Dropout(0.5), GCNConv(WIDTH, 5)], {}, "Dropout comes before GCNConv: its rows are scaled"),
    "a linear layer": (lambda: [nn.Linear(WIDTH, 9), GCNConv(9, 5)], {}, "Linear comes before GCNConv"),
    "approximate": (lambda: [GCNConv(WIDTH, 5)], {"approximate": BoundarySampling(0.5)}, "training is approximate"),
}


@grid(given=REFUSED)
def test_what_cannot_be_kept_is_named_with_the_reason(given):
    make, options, reason = given
    model = HybridParallel(make(), GRAPH, **options, execution="auto")
    model(rows(torch.float32)).sum().backward()
    assert reason in model.execution.passed_over[KEPT] and f"{KEPT}: not tried, {reason}" in model.execution.report()


def test_rows_that_train_are_named_as_the_reason():
    model = HybridParallel([GCNConv(WIDTH, 5)], GRAPH, execution="auto")
    x = rows(torch.float32).requires_grad_()
    model(x).sum().backward()
    assert model.execution.passed_over[KEPT].startswith("rows train") and x.grad is not None


def test_typed_graphs_go_as_given():
    papers = typed_graph(60)
    layers = RGCN(64, 8, 2, 4, metadata=papers, targets=["paper"])
    model = HybridParallel(layers, papers, execution="auto")
    model(model.share.rows("x"))["paper"].sum().backward()
    assert model.execution.way == AS_GIVEN and "typed" in model.execution.passed_over[KEPT]


@pytest.mark.parametrize("name", ["gcn", "sage that widens"])
def test_without_room_for_sums_none_are_kept(name):
    x, layers = rows(), layers_of(name)
    want = train(HybridParallel(copy.deepcopy(layers), GRAPH), x, 2)
    with limited("cpu", 2 * x.nbytes - 2):
        model = HybridParallel(layers, GRAPH, execution="auto")
        same(train(model, x, 2), want, 1e-12)
    first = NARROW if name == "gcn" else ANEW
    assert model.execution.way == FullGraphWay(first=first) and model._runner.known.placed[x.device].sums._rows is None
    assert model.execution.passed_over[KEPT].startswith(f"they take {x.nbytes:,} bytes, and half of what cpu has left")


def test_cores_that_nobody_uses_are_tried_and_given_back(monkeypatch):
    monkeypatch.setattr(propose_ways, "num_usable_cores", lambda: 2)
    x, layers = rows(), layers_of("gat")
    want = train(HybridParallel(copy.deepcopy(layers), GRAPH), x, PASSES)
    model, used = HybridParallel(layers, GRAPH, execution="auto"), []
    for _ in range(PASSES):
        model.zero_grad()
        used.append(model._way(x).all_cores)
        loss = loss_of(model(x))
        assert torch.get_num_threads() == (2 if used[-1] else 1)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.05 * p.grad
    same([[loss.detach()]], [want[-1][:1]], 1e-12)
    assert True in used and False in used
    model._planned.release()
    assert torch.get_num_threads() == 1


def test_where_bins_move_rows_may_go_to_the_device_and_bins_be_others(monkeypatch):
    """On a CPU in the place of a GPU: the device has its own copy of x."""
    monkeypatch.setattr(pass_planner, "streams_between", lambda *_: HostStreams())
    monkeypatch.setattr(full_graph_plan, "ROUNDS", 1)
    layers, x, steps = layers_of("sage"), rows(), 3 * FEW
    want = train(HybridParallel(copy.deepcopy(layers), GRAPH), x, steps)
    model = HybridParallel(layers, GRAPH, execution="auto")
    model(x)
    changes = [contest.change for contest in model.execution.contests]
    assert changes == [{"place": "device"}, {"num_bins": 3}, {"num_bins": 12}]
    model.step.zero_()
    same(train(model, x, steps), want, 1e-12)
    assert len(model.execution.results) == 3 and model.execution.chosen is not None


def test_bins_that_were_said_stay():
    schedule = BinSchedule(packing=Packing(num_bins=3))
    model = HybridParallel(layers_of("sage"), GRAPH, schedule=schedule, execution="auto")
    model(rows())
    assert model.execution.passed_over["other numbers of bins"] == "bins are as you say"
