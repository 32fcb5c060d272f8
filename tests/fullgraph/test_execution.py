"""`execution="auto"`: every way gives the losses and gradients of the default, ranks choose alike, plans are kept."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import Tensor, nn

from gnnsys.fullgraph import (
    BinSchedule,
    BoundarySampling,
    Dropout,
    FullGraphPlan,
    FullGraphWay,
    HybridParallel,
    Packing,
)
from gnnsys.fullgraph.offload.copy_streams import HostStreams
from gnnsys.fullgraph.plan import full_graph_plan, pass_planner, propose_ways
from gnnsys.fullgraph.plan.full_graph_plan import MEASURED, ROUNDS, WARM, WayContest
from gnnsys.fullgraph.plan.full_graph_way import ANEW, AS_GIVEN, KEPT, NARROW
from gnnsys.graph import Graph, typed_graph
from gnnsys.nn import RGCN, GATConv, GCNConv, GINConv, SAGEConv
from gnnsys.store import limited
from tests.fullgraph import ranks, thread_ranks
from tests.fullgraph.dense import adjacency, dense_forward, random_graph
from tests.support.grid import every_pair, grid

pyg = pytest.importorskip("torch_geometric.nn")

N, WIDTH, STEPS = 60, 24, 10
GRAPH = random_graph(N, 300, 1)  # with nodes that have no in-edges, self loops and repeated edges
WEIGHT = torch.rand(300, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
PASSES = 2 * ROUNDS * (WARM + MEASURED) + 1  # of a contest, and one until all know of the last
FEW = 2 * (WARM + MEASURED) + 1  # the same of a contest of one round


def gin_of(kind) -> list[nn.Module]:
    return [kind(nn.Sequential(nn.Linear(WIDTH, 6), nn.ReLU(), nn.Linear(6, 7)), train_eps=True), kind(nn.Linear(7, 3))]


MODELS = {
    "gcn": lambda: [GCNConv(WIDTH, 5), nn.ReLU(), nn.Dropout(0.3), GCNConv(5, 3)],
    "sage": lambda: [SAGEConv(WIDTH, 5), nn.ReLU(), SAGEConv(5, 3)],
    "sage that widens": lambda: [SAGEConv(WIDTH, 30, aggr="sum"), nn.ReLU(), SAGEConv(30, 3)],
    "gin": lambda: gin_of(GINConv),
    "gat": lambda: [GATConv(WIDTH, 5), nn.ReLU(), GATConv(5, 3)],
    "PyG's gcn": lambda: [pyg.GCNConv(WIDTH, 5), nn.ReLU(), nn.Dropout(0.3), pyg.GCNConv(5, 3)],
    "PyG's sage": lambda: [pyg.SAGEConv(WIDTH, 5, normalize=True), nn.ReLU(), pyg.SAGEConv(5, 3, aggr="sum")],
    "PyG's gin": lambda: gin_of(pyg.GINConv),
    "PyG's gat": lambda: [pyg.GATConv(WIDTH, 5), nn.ReLU(), pyg.GATConv(5, 3)],
}
IN_FLOAT32 = ("gcn", "sage", "gin", "PyG's gcn", "PyG's sage")
WAYS = {
    "made anew": FullGraphWay(first=ANEW, takes_apart=True),
    "kept": FullGraphWay(first=KEPT, takes_apart=True),
    "narrow": FullGraphWay(first=NARROW, takes_apart=True),
    "bins": FullGraphWay(num_bins=3, takes_apart=True),
}


def layers_of(name: str, dtype: torch.dtype = torch.float64) -> list[nn.Module]:
    torch.manual_seed(0)
    return [layer.to(dtype) for layer in MODELS[name]()]


def rows(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(N, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)


def loss_of(out: Tensor) -> Tensor:
    return out.tanh().square().sum() / N


def train(model: HybridParallel, x: Tensor, steps: int = STEPS) -> list[list[Tensor]]:
    """Losses and all gradients of some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model(x))
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
        optimizer.step()
    return found


def same(found: list[list[Tensor]], want: list[list[Tensor]], tolerance: float) -> None:
    for step, expected in zip(found, want, strict=True):
        for got, value in zip(step, expected, strict=True):
            assert float((got - value).abs().max()) <= tolerance * max(1.0, float(value.abs().max()))


@pytest.fixture(autouse=True)
def one_core(monkeypatch) -> None:
    """Whatever the machine has."""
    monkeypatch.setattr(propose_ways, "num_usable_cores", lambda: 1)


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


def test_sums_that_pay_late_and_cost_little_are_tried_at_once(monkeypatch):
    monkeypatch.setattr(propose_ways, "_SOON", 8)
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


class Tight(nn.Module):
    """Rows as they are; without room for them once, where `fails` says so."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            self.fails = False
            raise MemoryError("no room for it")
        return x


def test_a_way_without_memory_is_left_and_the_pass_goes_the_other():
    x, layers = rows(), layers_of("PyG's sage")
    want = train(HybridParallel(copy.deepcopy(layers), GRAPH), x)
    tight = Tight()
    model, found = HybridParallel([*layers, tight], GRAPH, execution="auto"), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        optimizer.zero_grad()
        tight.fails = model.execution is not None and model._way(x) != model.execution.way
        loss = loss_of(model(x))
        loss.backward()
        found.append([loss.detach()])
        optimizer.step()
    same(found, [step[:1] for step in want], 1e-12)
    assert model.execution.chosen == AS_GIVEN and not tight.fails
    assert "PyG's layers in halves, sums kept: is not possible: no room for it" in model.execution.report()


def test_who_resumes_keeps_the_choice_and_a_contest_under_way_begins_anew():
    x = rows()
    first = HybridParallel(layers_of("PyG's sage"), GRAPH, execution="auto")
    train(first, x, WARM + MEASURED + 2)
    saved = copy.deepcopy(first.state_dict())
    again = HybridParallel(layers_of("PyG's sage"), GRAPH, execution="auto")
    again.load_state_dict(saved)
    again.eval()(x)
    assert again.execution.to_json() == first.execution.to_json() and again.execution.contests[0].passes == 0
    train(first, x, PASSES)
    assert len(first.execution.results) == 1
    again.load_state_dict(first.state_dict())
    again.eval()(x)
    assert again.execution.way == first.execution.way and again.execution.results == first.execution.results
    plain = HybridParallel(layers_of("PyG's sage"), GRAPH)
    plain.load_state_dict(saved)  # takes no notice of the plan
    assert "execution" not in plain.state_dict()


def test_a_saved_plan_goes_its_way_from_the_first_pass_on_and_is_refused_elsewhere(tmp_path):
    x, path = rows(), str(tmp_path / "plan.json")
    model = HybridParallel(layers_of("gcn"), GRAPH, execution="auto")
    train(model, x, 1)
    model.execution.way = FullGraphWay(first=NARROW)
    model.execution.save(path)
    plan = FullGraphPlan.load(path)
    again = HybridParallel(layers_of("gcn"), GRAPH, execution=plan)
    twice = HybridParallel(layers_of("gcn"), GRAPH, execution=FullGraphPlan.load(path))
    for got, want in zip(train(again, x), train(twice, x), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert again.execution.way.first == NARROW
    for layers, graph, given, what in (
        (layers_of("sage"), GRAPH, x, "layers"),
        (layers_of("gcn"), random_graph(N, 299, 1), x, "graph"),
        (layers_of("gcn", torch.float32), GRAPH, x.float(), "layers"),
    ):
        other = HybridParallel(layers, graph, execution=FullGraphPlan.load(path))
        with pytest.raises(ValueError, match=f'made for other {what}: .*execution="auto" makes one'):
            other(given)
    for wrong in ({"version": 9}, {**plan.to_json(), "way": {"speed": 3}}, {**plan.to_json(), "contests": [{}]}):
        with pytest.raises(ValueError, match=r"no plan of full-graph training|has no speed"):
            FullGraphPlan.from_json(json.loads(json.dumps(wrong)))
    with pytest.raises(ValueError, match='execution must be "auto", a FullGraphPlan or None'):
        HybridParallel(layers_of("gcn"), GRAPH, execution="fast")


@pytest.mark.parametrize("name", ["gcn", "sage that widens"])
def test_rows_that_are_another_tensor_in_every_epoch_are_not_summed_to_be_kept(name):
    x, layers = rows(), layers_of(name)
    want = train(HybridParallel(copy.deepcopy(layers), GRAPH), x, 5)
    model, found = HybridParallel(layers, GRAPH, execution="auto"), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(5):
        optimizer.zero_grad()
        given = x.clone()
        loss = loss_of(model(given))
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
        optimizer.step()
    same(found, want, 1e-12)
    assert model.execution.way.first == NARROW and model._runner.known.placed[x.device].sums._rows is None
    assert f"{KEPT}: not tried, x is another tensor in every epoch" in model.execution.report()


def test_other_layers_are_planned_for_anew_and_other_rows_go_as_without_a_plan():
    x = rows()
    model = HybridParallel(layers_of("gcn"), GRAPH, execution="auto")
    train(model, x, 1)
    before = model.execution
    trained = x.clone().requires_grad_()
    model(trained).sum().backward()
    assert model.execution is before and model._way(trained) == AS_GIVEN
    model.layers[1] = nn.Tanh()
    train(model, x, 1)
    assert model.execution is not before


def test_passes_without_a_backward_end_a_contest_in_vain():
    x, model = rows(), HybridParallel(layers_of("PyG's sage"), GRAPH, execution="auto")
    for _ in range(4 * PASSES):
        model(x)
    assert model.execution.way == AS_GIVEN and "passes have no backward" in model.execution.report()


def one_contest(**change) -> FullGraphPlan:
    return FullGraphPlan(contests=[WayContest(change or {"num_bins": 2})])


def run_plan(plan: FullGraphPlan, seconds: dict[FullGraphWay, float], epochs: int) -> list[FullGraphWay]:
    """As ranks do: what a pass took is known when the next one has begun."""
    gone, last = [], None
    for epoch in range(1, epochs + 1):
        turn = plan.turn(epoch)
        gone.append(plan.way_of(turn))
        if turn is not None:
            plan.began(turn)
        if last is not None:
            plan.add(*last)
        last = None if turn is None else (turn, seconds[gone[-1]])
    return gone


def test_the_faster_way_stays_and_ties_are_what_was_done_before():
    other = FullGraphWay(num_bins=2)
    for seconds, want in ((0.5, other), (0.99, AS_GIVEN), (1.1, AS_GIVEN)):
        plan = one_contest()
        gone = run_plan(plan, {AS_GIVEN: 1.0, other: seconds}, PASSES + 3)
        turn = WARM + MEASURED
        assert gone[: 2 * ROUNDS * turn] == ([AS_GIVEN] * turn + [other] * turn) * ROUNDS
        assert plan.way == plan.chosen == want and set(gone[-2:]) == {want}


def test_a_way_that_is_much_slower_has_one_turn():
    other, plan = FullGraphWay(num_bins=2), one_contest()
    gone = run_plan(plan, {AS_GIVEN: 1.0, other: 2.0}, PASSES)
    assert gone.count(other) == WARM + MEASURED and plan.way == AS_GIVEN and "not faster" in plan.report()


def test_a_contest_whose_cost_is_much_waits_until_it_has_paid():
    other = FullGraphWay(num_bins=2)
    turn = WARM + MEASURED
    for cost, pays, first in ((1.0, 50, turn + 1), (100.0, 50, 49 + turn + 1), (100.0, 2, turn + 1)):
        plan = FullGraphPlan(contests=[WayContest({"num_bins": 2}, cost=cost, pays=pays)])
        gone = run_plan(plan, {AS_GIVEN: 1.0, other: 0.5}, 60 + PASSES)
        assert gone.index(other) == first and plan.way == other
        again = FullGraphPlan.from_json(plan.to_json())
        assert again.to_json() == plan.to_json()


def test_contests_add_up_and_one_that_is_settled_already_is_left_out():
    contests = [
        WayContest({"takes_apart": True}),
        WayContest({"num_bins": 2}),
        WayContest({"first": KEPT}, cost=None, pays=500),
    ]
    plan = FullGraphPlan(contests=contests)
    apart = FullGraphWay(takes_apart=True)
    both = FullGraphWay(takes_apart=True, num_bins=2)
    run_plan(plan, {AS_GIVEN: 1.0, apart: 0.5, both: 0.4}, 3 * PASSES)
    assert plan.way == both and plan.chosen == both and len(plan.results) == 2
    assert plan.turn(600) is None and plan.contests == []  # sums are kept: nothing to try


def test_a_graph_without_edges_is_planned_too():
    graph = Graph.from_edge_index(torch.zeros(2, 0, dtype=torch.int64), 5)
    model = HybridParallel([GCNConv(3, 2)], graph, execution="auto")
    model(torch.ones(5, 3)).sum().backward()
    assert model.execution.report().endswith(
        "(the first layer's sums of rows that never change are made once and kept)"
    )
