"""Full-graph training on a device gives what it gives on the CPU: rows on the device, or on the host and bins moved."""

from __future__ import annotations

import copy
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gnnsys.fullgraph import BinSchedule, HybridParallel, Packing
from gnnsys.fullgraph.offload.copy_streams import CudaStreams
from gnnsys.graph import Graph
from gnnsys.nn import GATConv, GCNConv, SAGEConv
from tests.fullgraph.dense import random_graph
from tests.fullgraph.ranks import DEADLINE, run_ranks
from tests.fullgraph.test_exact import close, random_ranks
from tests.fullgraph.test_pieces import hub_graph
from tests.support.customise import CHANGES, OF_THE_LAYER

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

N, WIDTH = 200, 12


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        SAGEConv(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), GCNConv(16, 8), nn.ReLU(),
        GATConv(8, 4, heads=2),
    ]  # fmt: skip


def train(rank, group, world_size, device, rows_on, **options):
    graph = random_graph(N, 1500, 1)
    x = torch.randn(N, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    mine = [layer.double().to(device) for layer in copy.deepcopy(MODEL)]
    model = HybridParallel(mine, graph, ranks=random_ranks(world_size, N), group=group, timeout=60, seed=3, **options)
    own = x[model.nodes].to(rows_on).requires_grad_()
    out = model(own)
    out.square().sum().backward()
    return model.nodes, out.detach().cpu(), own.grad.cpu(), [p.grad.cpu() for layer in mine for p in layer.parameters()]


MODEL = layers() if torch.cuda.is_available() else []
OPTIONS = [
    {"schedule": BinSchedule(packing=Packing(num_bins=1))}, {"recompute": True},
    {"schedule": BinSchedule(packing=Packing(num_bins=4))}, {"memory_budget": 200_000},
]  # fmt: skip


def process(rank, world_size, folder, number):
    """A rank as a process: autograd has one thread per device and process, and backward passes wait for each other."""
    store = dist.FileStore(str(folder / "store"), world_size)
    group = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=DEADLINE))
    torch.save(train(rank, group, world_size, "cuda", "cuda", **OPTIONS[number]), folder / f"{rank}.pt")
    group.barrier().wait()


def in_processes(world_size, folder, number):
    context = torch.multiprocessing.get_context("spawn")
    ranks = [context.Process(target=process, args=(r, world_size, folder, number)) for r in range(world_size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(DEADLINE)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    assert codes == [0] * world_size
    return [torch.load(folder / f"{rank}.pt") for rank in range(world_size)]


@pytest.mark.parametrize("number", range(len(OPTIONS)), ids=["one bin", "recompute", "four bins", "budget"])
@pytest.mark.parametrize("rows_on", ["cpu", "cuda"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_device_gives_what_the_cpu_gives(number, rows_on, world_size, tmp_path):
    want = run_ranks(world_size, lambda rank, group: train(rank, group, world_size, "cpu", "cpu"))
    if world_size > 1 and rows_on == "cuda":
        found = in_processes(world_size, tmp_path, number)
    else:
        options = OPTIONS[number]
        found = run_ranks(world_size, lambda rank, group: train(rank, group, world_size, "cuda", rows_on, **options))
    for (nodes, out, x_grad, grads), expected in zip(found, want, strict=True):
        assert torch.equal(nodes, expected[0])
        close(out, expected[1])
        close(x_grad, expected[2])
        largest = max(float(grad.abs().max()) for grad in expected[3])
        for got, grad in zip(grads, expected[3], strict=True):
            close(got, grad, at_least=1e-3 * largest)


@pytest.mark.parametrize("number", range(len(OPTIONS)), ids=["one bin", "recompute", "four bins", "budget"])
@pytest.mark.parametrize("rows_on", ["cpu", "cuda"])
def test_results_may_be_on_another_device_than_rows(number, rows_on):
    there = "cuda" if rows_on == "cpu" else "cpu"
    found = []
    for options in ({}, {"output_device": there}):
        mine = [layer.double().cuda() for layer in copy.deepcopy(MODEL)]
        model = HybridParallel(mine, random_graph(N, 1500, 1), seed=3, **options, **OPTIONS[number])
        x = torch.randn(N, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        x = x.to(rows_on).requires_grad_()
        out = model(x)
        assert out.device.type == (there if options else rows_on)
        out.to(there).square().sum().backward()
        found.append([out.detach().cpu(), x.grad, *(p.grad for p in model.parameters())])
    largest = max(float(grad.abs().max()) for grad in found[0][1:])
    for first, second in zip(*found, strict=True):
        close(first, second, at_least=1e-3 * largest)


@pytest.mark.parametrize("number", range(len(OPTIONS)), ids=["one bin", "recompute", "four bins", "budget"])
@pytest.mark.parametrize("rows_on", ["cpu", "cuda"])
def test_two_runs_have_the_same_bits(number, rows_on):
    """float32, whose rounding would show another order of any sum. A budget's bins are measured, and may be others:
    runs with the same bins are compared."""
    graph, found = random_graph(3000, 40_000, 1), {}
    is_measured = "memory_budget" in OPTIONS[number]
    for _ in range(3):
        mine = [layer.cuda() for layer in copy.deepcopy(MODEL)]
        options = {"memory_budget": 3_000_000} if is_measured else OPTIONS[number]
        model = HybridParallel(mine, graph, seed=3, **options)
        x = torch.randn(3000, WIDTH, generator=torch.Generator().manual_seed(2)).to(rows_on).requires_grad_()
        out = model(x)
        out.square().sum().backward()
        plan = model._planner.plan_for(x)  # the one that was run: rows without a gradient have one of their own
        bins = [(each.first, each.end) for step in plan.steps for each in step.bins]
        same = found.setdefault(tuple(bins), [])
        same.append([out.detach(), x.grad, *(p.grad for p in model.parameters())])
    assert is_measured or len(found) == 1
    for runs in found.values():
        for first, *others in zip(*runs, strict=True):
            assert all(torch.equal(first, other) for other in others)


CONVS = {"sage": SAGEConv, "gcn": GCNConv, "gat": lambda width, out: GATConv(width, out, heads=1)}


@pytest.mark.parametrize("kind, hub", [("sage", False), ("gat", False), ("sage", True), ("gcn", True)])
def test_a_budget_of_device_memory_is_kept_within_five_percent(kind, hub):
    """With `hub` there is a node that is connected to everything: its sources come in passes."""
    torch.manual_seed(1)
    conv = CONVS[kind]
    graph = hub_graph(20_000, 200_000) if hub else random_graph(20_000, 200_000, 5)
    x = torch.randn(20_000, 64)

    def peak(**options) -> tuple[int, float]:
        torch.manual_seed(0)
        mine = [conv(64, 64), nn.ReLU(), conv(64, 64), nn.ReLU(), conv(64, 8)]
        model = HybridParallel([layer.cuda() for layer in mine], graph, recompute=True, **options)
        for _ in range(2):
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            loss = model(x).square().mean()
            loss.backward()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before, float(loss.detach())

    whole, loss = peak(schedule=BinSchedule(packing=Packing(num_bins=1)))
    for share in (2, 8):
        used, same = peak(memory_budget=whole // share)
        assert used <= 1.05 * (whole // share) and same == pytest.approx(loss, rel=1e-4)


def epochs(rows_on: str, **options) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and gradients of a few steps on one rank, in float64."""
    torch.manual_seed(0)
    graph = random_graph(3000, 30_000, 5)
    x = torch.randn(3000, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).to(rows_on)
    mine = [layer.double().cuda() for layer in copy.deepcopy(MODEL)]
    model = HybridParallel(mine, graph, seed=3, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, [p.grad.cpu() for p in model.parameters()]


def test_a_graph_on_the_device_is_planned_as_one_on_the_host():
    torch.manual_seed(0)
    graph, x = random_graph(N, 1500, 1), torch.randn(N, WIDTH).cuda()
    layers = [SAGEConv(WIDTH, 8).cuda(), nn.ReLU(), SAGEConv(8, 4).cuda()]
    with torch.no_grad():
        assert torch.equal(HybridParallel(layers, graph.to("cuda"))(x), HybridParallel(layers, graph)(x))


def agree(found: tuple[list[float], list[torch.Tensor]], want: tuple[list[float], list[torch.Tensor]]) -> None:
    assert found[0] == pytest.approx(want[0], rel=1e-10)
    largest = max(float(grad.abs().max()) for grad in want[1])
    for got, grad in zip(found[1], want[1], strict=True):
        close(got, grad, at_least=1e-3 * largest)


MOVING = {
    "many bins": {"schedule": BinSchedule(packing=Packing(num_bins=20))},
    "recompute": {"schedule": BinSchedule(packing=Packing(num_bins=20)), "recompute": True},
    "budget": {"memory_budget": 500_000},
}


@pytest.mark.parametrize("options", MOVING.values(), ids=MOVING)
def test_rows_on_the_host_give_the_losses_of_rows_on_the_device(options):
    agree(epochs("cpu", **options), epochs("cuda"))


SUMS = {"kept": {}, "recompute": {"recompute": True}, "budget": {"memory_budget": 3_000_000}}


@pytest.mark.parametrize("options", SUMS.values(), ids=SUMS)
def test_rows_swept_from_the_host_give_the_losses_of_rows_on_the_device(options):
    """Each layer's rows come once for all nodes, and two runs give the same bits."""
    graph = random_graph(3000, 90_000, 5)
    x = torch.randn(3000, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    kinds = [SAGEConv(64, 64), nn.ReLU(), GCNConv(64, 64), nn.ReLU(), SAGEConv(64, 8)]

    def outputs(rows_on: str, **options) -> tuple[HybridParallel, torch.Tensor, list[torch.Tensor]]:
        mine = [layer.double().cuda() for layer in copy.deepcopy(kinds)]
        model = HybridParallel(mine, graph, **options)
        for _ in range(2):
            model.zero_grad()
            out = model(x.to(rows_on))
            out.square().mean().backward()
        return model, out.detach().cpu(), [p.grad.cpu() for p in model.parameters()]

    _, want, want_grads = outputs("cuda")
    model, out, grads = outputs("cpu", **options)
    _, again, _ = outputs("cpu", **options)
    assert "once for each of" in model.describe(x)
    assert out.is_contiguous() and torch.equal(out, again)
    close(out, want)
    largest = max(float(grad.abs().max()) for grad in want_grads)
    for got, grad in zip(grads, want_grads, strict=True):
        close(got, grad, at_least=1e-3 * largest)
    (plan,) = model._planner.plans.values()
    (kept,) = {step.source_sweeps.brings_structure for step in plan.steps if step.source_sweeps is not None}
    assert kept == ("memory_budget" in options)


@pytest.mark.parametrize("slow", ["bring", "fetch", "follow"])
@pytest.mark.parametrize("options", MOVING.values(), ids=MOVING)
def test_streams_that_lag_behind_each_other_change_nothing(options, slow, monkeypatch):
    """Each stream in turn is held up before its work, so that whoever does not wait for it is seen."""
    want = epochs("cpu", **options)
    before = getattr(CudaStreams, slow)

    def held_up(streams, *args):
        stream = {"bring": streams._in, "fetch": streams._out}.get(slow) or torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(300_000)
        result = before(streams, *args)
        if slow == "follow":
            torch.cuda._sleep(300_000)  # and so are the kernels
        return result

    monkeypatch.setattr(CudaStreams, slow, held_up)
    agree(epochs("cpu", **options), want)


def test_page_locked_buffers_are_lent_again(monkeypatch):
    made = []
    before = CudaStreams.buffer
    monkeypatch.setattr(CudaStreams, "buffer", lambda streams, size: made.append(before(streams, size)) or made[-1])
    graph, x = random_graph(N, 1500, 1), torch.randn(N, WIDTH)
    layers = [GATConv(WIDTH, 8).cuda(), nn.ReLU(), GATConv(8, 4).cuda()]
    model = HybridParallel(layers, graph, schedule=BinSchedule(packing=Packing(num_bins=8)), recompute=True)
    for _ in range(2):
        model(x).square().sum().backward()
    num_made = len(made)
    for _ in range(3):
        model(x).square().sum().backward()
    assert 0 < num_made == len(made) and all(buffer.is_pinned() for buffer in made)


def test_a_bin_is_brought_while_another_computes(monkeypatch):
    """The copy of the next bin is over before the kernels of this one are, which are made to take long."""
    graph, x = random_graph(N, 1500, 1), torch.randn(N, WIDTH)
    model = HybridParallel([GATConv(WIDTH, 8).cuda()], graph, schedule=BinSchedule(packing=Packing(num_bins=6)))
    with torch.no_grad():
        model(x)
    marks, overlaps = [], []
    bring, follow, fetch = CudaStreams.bring, CudaStreams.follow, CudaStreams.fetch

    def bring_and_look(streams, *sources):
        block, mark = bring(streams, *sources)
        if marks:
            mark.synchronize()
            overlaps.append(not marks[-1].query())  # kernels of the bin before are still at work
        return block, mark

    def follow_slowly(streams, mark):
        follow(streams, mark)
        torch.cuda._sleep(100_000_000)  # some 50 ms

    def fetch_and_note(streams, tensors, into):
        mark = fetch(streams, tensors, into)
        marks.append(mark)
        return mark

    monkeypatch.setattr(CudaStreams, "bring", bring_and_look)
    monkeypatch.setattr(CudaStreams, "follow", follow_slowly)
    monkeypatch.setattr(CudaStreams, "fetch", fetch_and_note)
    with torch.no_grad():
        model(x)
    assert len(overlaps) == 5 and all(overlaps)


def told_on(device: str, conv, edge_name: str, rows: torch.Tensor, **options):
    """Rows and gradients of a layer of PyG's that is told of edges, on a graph with one self loop per node at most."""
    edges = random_graph(N, 1500, 1).edge_index()
    is_loop = edges[0] == edges[1]
    loops = edges[0, is_loop].unique()
    edges = torch.cat([edges[:, ~is_loop], loops.expand(2, -1)], dim=1)
    graph = Graph.from_edge_index(edges, N)
    mine = copy.deepcopy(conv).double().to(device)
    x = torch.randn(N, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).to(device)
    x.requires_grad_()
    model = HybridParallel([mine], graph, edge_data={edge_name: rows[: edges.shape[1]]}, **options)
    out = model(x)
    out.square().sum().backward()
    return out.detach().cpu(), x.grad.cpu(), [p.grad.cpu() for p in mine.parameters()]


@pytest.mark.parametrize(
    "options", [{}, {"schedule": BinSchedule(packing=Packing(num_bins=4))}], ids=["one bin", "bins"]
)
def test_pygs_layers_that_are_told_of_edges_run_on_a_device(options):
    pyg = pytest.importorskip("torch_geometric.nn")
    draws = torch.Generator().manual_seed(4)
    weight, attr = torch.rand(1500, dtype=torch.float64, generator=draws) + 0.1, torch.randn(1500, 3, generator=draws)
    torch.manual_seed(0)
    for conv, name, rows in [
        (pyg.GCNConv(WIDTH, 8), "edge_weight", weight),
        (pyg.GCNConv(WIDTH, 8, improved=True), "edge_weight", weight),
        (pyg.GraphConv(WIDTH, 8), "edge_weight", weight),
        (pyg.GATConv(WIDTH, 8, edge_dim=3), "edge_attr", attr.double()),
    ]:
        want, found = (told_on(device, conv, name, rows, **options) for device in ("cpu", "cuda"))
        close(found[0], want[0])
        close(found[1], want[1])
        largest = max(float(grad.abs().max()) for grad in want[2])
        for got, grad in zip(found[2], want[2], strict=True):
            close(got, grad, at_least=1e-3 * largest)


@pytest.mark.parametrize("rows_on", ["cpu", "cuda"])
def test_torchs_default_device_changes_nothing(rows_on):
    want = epochs(rows_on)
    torch.set_default_device("cuda")
    try:
        found = epochs_beside_default(rows_on)
    finally:
        torch.set_default_device(None)
    agree(found, want)


def epochs_beside_default(rows_on: str) -> tuple[list[float], list[torch.Tensor]]:
    """As `epochs`; what is made on the host says so."""
    with torch.device("cpu"):
        graph = random_graph(3000, 30_000, 5)
        x = torch.randn(3000, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).to(rows_on)
    mine = [layer.double().cuda() for layer in copy.deepcopy(MODEL)]
    model = HybridParallel(mine, graph, seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert model.total(1.0) == 1.0
    return losses, [p.grad.cpu() for p in model.parameters()]


@pytest.mark.parametrize("rows_on", ["cpu", "cuda"])
def test_changed_layers_on_a_device_are_the_plain_ones_on_the_whole_graph(rows_on):
    """Bins stay on the device, or move there; changes come after a first pass."""
    graph = random_graph(N, 1500, 1)
    csc = graph.csc().to("cuda")
    for what in ("LoRA around", "weight_norm", "prune", "parametrised", "backward hook", "assign=True", "subclass"):
        for make in (lambda: SAGEConv(WIDTH, 6), lambda: GCNConv(WIDTH, 6), lambda: GATConv(WIDTH, 6)):
            torch.manual_seed(0)
            conv = make().double().cuda()
            rows = torch.randn(N, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
            x = rows.to(rows_on).requires_grad_()
            model = HybridParallel([conv], graph, **OPTIONS[2])
            model(x).square().sum().backward()
            (CHANGES | OF_THE_LAYER)[what](conv)
            found = []
            for run in (conv, None):
                model.zero_grad(set_to_none=True)
                x.grad = None
                out = model(x) if run is None else run(x.cuda(), csc)
                out.square().sum().backward()
                grads = [None if p.grad is None else p.grad.cpu() for p in model.parameters()]
                found.append((out.detach().cpu(), x.grad.cpu(), grads))
            want, got = found
            close(got[0], want[0])
            close(got[1], want[1])
            largest = max(float(grad.abs().max()) for grad in want[2] if grad is not None)
            for grad, wanted in zip(got[2], want[2], strict=True):
                assert (grad is None) == (wanted is None), what
                if grad is not None:
                    close(grad, wanted, at_least=1e-3 * largest)
