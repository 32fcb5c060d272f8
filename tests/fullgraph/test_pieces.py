"""Sums in passes over a bin's inputs: budgets are kept where a node is connected to everything."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from gnnsys.fullgraph import BinSchedule, BoundarySampling, HybridParallel, Packing
from gnnsys.fullgraph.offload.copy_streams import HostStreams
from gnnsys.fullgraph.offload.mover import Mover
from gnnsys.fullgraph.offload.piecewise_sums import PieceCosts, make_pieces
from gnnsys.fullgraph.plan import pass_planner, step_plan, sweep_choice
from gnnsys.fullgraph.plan.bin_memory import Peak
from gnnsys.fullgraph.plan.step_plan import bytes_at_once
from gnnsys.fullgraph.run.backward import Backward
from gnnsys.fullgraph.run.pass_state import Pass
from gnnsys.graph import Graph
from gnnsys.nn import GCNConv, GINConv, SAGEConv
from tests.fullgraph.dense import adjacency, dense_forward, random_graph
from tests.fullgraph.test_exact import WIDTH, N, check, close, gcn, gin, random_ranks, unequal_sage
from tests.fullgraph.test_moves import LateStreams
from tests.fullgraph.thread_ranks import run_ranks
from tests.support.grid import every_value

CPU = torch.device("cpu")
NODES, EDGES, ROWS = 800, 3000, 24


def hub_graph(num_nodes: int, num_edges: int) -> Graph:
    """Node 3 is connected to everything, there and back; the rest at random."""
    generator = torch.Generator().manual_seed(4)
    hub = torch.full((num_nodes,), 3)
    edges = torch.randint(num_nodes, (2, num_edges), generator=generator)
    there = torch.stack([torch.arange(num_nodes), hub])
    edges = torch.cat([edges, there, there.flip(0)], dim=1)
    return Graph.from_edge_index(edges, num_nodes, edge_data={"w": torch.rand(edges.shape[1], generator=generator)})


def models() -> dict[str, list[nn.Module]]:
    torch.manual_seed(0)
    return {
        "sage": [SAGEConv(ROWS, 40), nn.ReLU(), SAGEConv(40, 40), nn.LayerNorm(40), nn.ReLU(), SAGEConv(40, 7)],
        "gcn": [GCNConv(ROWS, 48), nn.ReLU(), GCNConv(48, 7)],
        "weighted": [GCNConv(ROWS, 48), nn.ReLU(), GCNConv(48, 48), nn.ReLU(), GCNConv(48, 7)],
        "normed": [SAGEConv(ROWS, 40), nn.BatchNorm1d(40), nn.ReLU(), SAGEConv(40, 40), nn.BatchNorm1d(40), nn.Tanh()],
        "gin": [GINConv(nn.Linear(ROWS, 40)), nn.ReLU(), GINConv(nn.Linear(40, 40)), nn.ReLU(), SAGEConv(40, 7)],
    }


def bring(way: str, monkeypatch: pytest.MonkeyPatch, streams: type[HostStreams | LateStreams] = HostStreams) -> None:
    """Rows move as `way` says, whichever brings fewer bytes: by "bins" or in "sweeps" over sources."""
    monkeypatch.setattr(pass_planner, "streams_between", lambda *_: streams())
    if way == "bins":
        monkeypatch.setattr(step_plan, "choose_sweeps", lambda stages, *_: [None] * len(stages))
    else:
        monkeypatch.setattr(sweep_choice, "bytes_of_bins", lambda *_: 1 << 60)


class OnDevice:
    """The most bytes that bins have on the device at once: what is made as they load and compute.

    Of bins that move all that are there count, of others each by itself: what they leave is rows, which lie there.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, moves: bool) -> None:
        self.num_bytes, self.is_on, self._is_inside, self._moves = 0, False, False, moves
        self._peak = Peak(CPU)
        for owner, name in ((Pass, "compute"), (Pass, "load"), (Backward, "_compute"), (Mover, "load")):
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, method):
        def call(*args):
            if not self.is_on or self._is_inside:
                return method(*args)
            self._is_inside = True
            try:
                with self._peak:
                    return method(*args)
            finally:
                self._is_inside = False
                self.num_bytes = max(self.num_bytes, self._peak.num_bytes)
                self._peak = self._peak if self._moves else Peak(CPU)

        return call

    def begin(self) -> None:
        self.num_bytes, self._peak = 0, Peak(CPU)


def train(model: HybridParallel, x: Tensor, measured: OnDevice) -> tuple[list[float], int]:
    """Losses of two epochs, and the peak of the second: buffers and structures that are made once are there then."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    for measured.is_on in (False, True):
        measured.begin()
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    measured.is_on = False
    return losses, measured.num_bytes


WAYS = {"rows move": "bins", "in sweeps": "sweeps", "rows lie": None}
KEPT = [
    ("sage", "rows lie"),
    ("gcn", "rows move"),
    ("weighted", "in sweeps"),
    ("normed", "rows lie"),
]
LONG = [  # every way by models with and without scales, weights and statistics
    ("sage", "rows move"), ("sage", "in sweeps"), ("gcn", "rows lie"), ("weighted", "rows move"),
    ("normed", "in sweeps"), ("gin", "in sweeps"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *(pytest.param(n, WAYS[way], id=f"{n}-{way}") for n, way in KEPT),
        *(pytest.param(n, WAYS[way], id=f"{n}-{way}", marks=pytest.mark.long) for n, way in LONG),
    ],
)
def test_a_budget_down_to_an_eighth_is_kept_where_a_node_is_connected_to_everything(name, way, monkeypatch):
    if way is not None:
        bring(way, monkeypatch)
    graph, layers = hub_graph(NODES, EDGES), models()[name]
    told = {"edge_data": {"edge_weight": "w"} if name == "weighted" else None}
    x = torch.randn(NODES, ROWS, generator=torch.Generator().manual_seed(1)).requires_grad_()
    measured = OnDevice(monkeypatch, way is not None)
    one_bin = BinSchedule(packing=Packing(num_bins=1))
    model = HybridParallel(copy.deepcopy(layers), graph, **told, recompute=True, schedule=one_bin)
    losses, largest = train(model, x, measured)
    for share in (1, 3, 8) if name == "sage" and way is None else (8,):  # the least is the hardest
        model = HybridParallel(copy.deepcopy(layers), graph, **told, memory_budget=largest // share)
        found, peak = train(model, x, measured)
        assert found == pytest.approx(losses, rel=1e-4)
        assert 0 < peak <= 1.05 * (largest // share)
        steps = [step for plan in model._planner.plans.values() for step in plan.steps]
        passes = [step.piecewise_sums for step in steps if step.piecewise_sums is not None]
        assert bool(passes) == (way == "bins")
        assert share < 8 or not passes or max(len(pieces) for each in passes for pieces in each.pieces) > 4
        sweeps = [step.source_sweeps for step in steps if step.source_sweeps is not None]
        assert bool(sweeps) == (way == "sweeps")
        assert share < 8 or not sweeps or max(len(each.groups) for each in sweeps) > 1


FITTING = [("weighted", False), ("normed", True)]
LONG_FITTING = [("sage", True), ("sage", False), ("gcn", True), ("gin", False)]


@pytest.mark.parametrize(
    ("name", "moves"),
    [
        *(pytest.param(n, m, id=f"{n}-{'rows move' if m else 'rows lie'}") for n, m in FITTING),
        *(
            pytest.param(n, m, id=f"{n}-{'rows move' if m else 'rows lie'}", marks=pytest.mark.long)
            for n, m in LONG_FITTING
        ),
    ],
)
def test_what_fits_into_a_budget_at_once_is_kept(name, moves, monkeypatch):
    if moves:
        monkeypatch.setattr(pass_planner, "streams_between", lambda *_: HostStreams())
    needed: list[int] = []

    def asked(*args) -> float:
        needed.append(int(bytes_at_once(*args)))
        return needed[-1]

    monkeypatch.setattr(pass_planner, "bytes_at_once", asked)
    graph, layers = hub_graph(NODES, EDGES), models()[name]
    told = {"edge_data": {"edge_weight": "w"} if name == "weighted" else None}
    x = torch.randn(NODES, ROWS, generator=torch.Generator().manual_seed(1)).requires_grad_()
    measured = OnDevice(monkeypatch, True)  # what bins leave counts too
    losses, _ = train(HybridParallel(copy.deepcopy(layers), graph, **told), x, measured)
    HybridParallel(copy.deepcopy(layers), graph, **told, memory_budget=1 << 40)(x)
    for budget, keeps in ((needed[-1], True), (needed[-1] - 1, False)):
        model = HybridParallel(copy.deepcopy(layers), graph, **told, memory_budget=budget)
        found, peak = train(model, x, measured)
        assert found == pytest.approx(losses, rel=1e-4)
        assert [plan.recompute for plan in model._planner.plans.values()] == [not keeps]
        assert 0 < peak <= budget or not (keeps or moves)


MAKES = [unequal_sage, gcn, gin]


@every_value(make=MAKES, world_size=[1, 2, 3])
def test_sums_in_passes_give_the_dense_answer(make, world_size, monkeypatch):
    bring("bins", monkeypatch, LateStreams)
    load, numbers = Mover.load, set()

    def noted(mover, key, picks):
        numbers.update(key[1:] if isinstance(key, tuple) else ())  # of a piece: its bin and number
        load(mover, key, picks)

    monkeypatch.setattr(Mover, "load", noted)
    ranks = torch.zeros(N, dtype=torch.int64) if world_size == 1 else random_ranks(world_size)
    check(make, hub_graph(N, 200), ranks, world_size, memory_budget=9_000)
    assert max(numbers) > 1  # more than two pieces of some bin


@pytest.mark.parametrize("way", ["bins", "sweeps"])
def test_sums_in_passes_see_the_halo_that_was_drawn(way, monkeypatch):
    """Features count as boundary sampling says: as where rows lie."""
    graph, x = hub_graph(N, 200), torch.randn(N, WIDTH, dtype=torch.float64)
    torch.manual_seed(0)
    layers = [layer.double() for layer in (SAGEConv(WIDTH, 6), nn.Dropout(0.4), nn.ReLU(), GCNConv(6, 5))]

    def run(rank, group, **options):
        model = HybridParallel(
            copy.deepcopy(layers), graph, ranks=random_ranks(2), group=group, timeout=60, seed=5,
            approximate=BoundarySampling(0.5), **options,
        )  # fmt: skip
        model(x[model.nodes]).square().sum().backward()
        return [p.grad for p in model.parameters()]

    want = run_ranks(2, run)
    bring(way, monkeypatch, LateStreams)
    for found, expected in zip(
        run_ranks(2, lambda rank, group: run(rank, group, memory_budget=12_000)), want, strict=True
    ):
        for got, grad in zip(found, expected, strict=True):
            torch.testing.assert_close(got, grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("way", ["bins", "sweeps"])
def test_sums_of_features_that_stay_are_brought_instead_of_the_features(way, monkeypatch):
    """From the second pass on the first layer asks for no pieces; a new tensor has sums of its own."""
    graph, asked = hub_graph(N, 200), []
    layers = [layer.double() for layer in (SAGEConv(WIDTH, 6), nn.ReLU(), SAGEConv(6, 6))]
    first, second = torch.randn(2, N, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    a, load = adjacency(graph), Mover.load

    def noted(mover, key, picks):
        is_piece = isinstance(key, tuple) and not isinstance(key[0], tuple)  # not of a structure that is pulled through
        asked.append(is_piece and picks[0].rows.shape == (N, WIDTH))
        load(mover, key, picks)

    monkeypatch.setattr(Mover, "load", noted)
    bring(way, monkeypatch, LateStreams)
    model = HybridParallel(layers, graph, memory_budget=9_000)
    num_pieces = []
    for x in (first, first, second, second):
        asked.clear()
        model.zero_grad()
        out = model(x)
        out.square().sum().backward()
        num_pieces.append(sum(asked))
        found = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        want = dense_forward(layers, x, a)
        want.square().sum().backward()
        close(out.detach(), want.detach())
        for got, p in zip(found, model.parameters(), strict=True):
            close(got, p.grad)
    assert num_pieces[1] == num_pieces[3] == 0 and num_pieces[0] == num_pieces[2] > 1


@pytest.mark.parametrize("limit", [None, 1000, 120, 60])
def test_pieces_hold_every_edge_once_in_order_and_none_costs_more_than_it_may(limit):
    csc = random_graph(N, 400, 2).csc()
    costs = PieceCosts(source=48, edge=4, limit=limit)
    pieces = make_pieces(csc, 5, 40, costs)
    found, dense = torch.zeros(N, N), adjacency(random_graph(N, 400, 2)).float()
    for piece in pieces:
        piece.csc.validate()
        assert piece.src.numel() == torch.unique(piece.src).numel() == piece.csc.num_src
        found.index_put_((piece.csc.dst() + 5, piece.src.long()[piece.csc.indices.long()]), torch.ones(()), True)
        assert limit is None or 48 * piece.csc.num_src + 4 * piece.csc.num_edges <= limit
    assert torch.equal(found[5:40], dense[5:40]) and not found[:5].any() and not found[40:].any()
    assert (len(pieces) == 1) == (limit is None)


def test_all_rows_in_one_piece_are_taken_as_they_are():
    csc = random_graph(N, 400, 2).csc()
    (piece,) = make_pieces(csc, 0, N, PieceCosts(source=48, edge=4))
    assert piece.src is None and piece.csc is csc
    no_edges = Graph.from_edge_index(torch.empty(2, 0, dtype=torch.int64), N).csc()
    assert make_pieces(no_edges, 5, 40, PieceCosts(source=48, edge=4, limit=100)) == []


def test_a_budget_in_which_no_row_fits_is_told():
    with pytest.raises(ValueError, match="one row of a neighbour takes 105 bytes, and memory_budget leaves 83"):
        PieceCosts(source=100, edge=5, limit=83).cuts(torch.arange(3))


def test_a_budget_in_which_no_node_fits_is_told():
    graph, x = random_graph(N, 300, 1), torch.randn(N, WIDTH)
    with pytest.raises(ValueError, match=r"one node takes .* memory_budget"):
        HybridParallel([SAGEConv(WIDTH, 4)], graph, memory_budget=10)(x)
