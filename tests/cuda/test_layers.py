"""Layers on a GPU: compiled by inductor, under autocast, on pinned structures, captured, and with wrong hops."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gnnsys.graph import sbm
from gnnsys.loader import NeighborLoader
from gnnsys.nn import GAT, GIN, GATConv, GCNConv, GINConv, GraphSAGE, RGCNConv, SAGEConv
from gnnsys.ops import CSC

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

NUM_NODES, NUM_EDGES = 60, 500
# What makes a layer, and what it is told of edges.
LAYERS: dict[str, tuple[Callable[[], nn.Module], str | None]] = {
    "sage, mean": (lambda: SAGEConv(6, 3), None),
    "sage, wide": (lambda: SAGEConv(6, 12, aggr="sum"), None),
    "sage, max": (lambda: SAGEConv(6, 3, aggr="max"), None),
    "gcn, narrow": (lambda: GCNConv(6, 3), None),
    "gcn, wide": (lambda: GCNConv(6, 12), None),
    "gcn, narrow, weighted": (lambda: GCNConv(6, 3), "edge_weight"),
    "gcn, wide, weighted": (lambda: GCNConv(6, 12), "edge_weight"),
    "gcn, without loops": (lambda: GCNConv(6, 12, add_self_loops=False), "edge_weight"),
    "gcn, not normalised": (lambda: GCNConv(6, 3, normalize=False), "edge_weight"),
    "gat": (lambda: GATConv(6, 3, heads=2), None),
    "gat, features": (lambda: GATConv(6, 3, heads=2, edge_dim=4), "edge_attr"),
    "gat, features, filled": (lambda: GATConv(6, 3, heads=2, edge_dim=4, fill_value=0.5), "edge_attr"),
    "gin": (lambda: GINConv(nn.Linear(6, 3)), None),
    "rgcn": (lambda: RGCNConv(6, 3, 3), "edge_type"),
    "rgcn, bases": (lambda: RGCNConv(6, 3, 3, num_bases=2), "edge_type"),
    "rgcn, blocks": (lambda: RGCNConv(6, 4, 3, num_blocks=2), "edge_type"),
}


def edges() -> Tensor:
    """On the CPU: parallel edges, self loops, some of them twice, nodes without in-edges."""
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randint(0, NUM_NODES - 5, (2, NUM_EDGES), generator=generator)
    drawn[1, :20] = drawn[0, :20]
    drawn[:, 20:24] = drawn[:, 0:1]
    return drawn


def told(kind: str | None) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    if kind == "edge_type":
        return {kind: torch.arange(NUM_EDGES) % 3}
    shape = (NUM_EDGES, 4) if kind == "edge_attr" else (NUM_EDGES,)
    return {} if kind is None else {kind: torch.rand(shape, generator=generator)}


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return make()


def results(
    layer: nn.Module, x: Tensor, structure: object, given: dict[str, Tensor], autocast: torch.dtype | None = None
) -> list[Tensor]:
    """The output and all gradients, on the CPU in float32."""
    leaf = x.detach().clone().requires_grad_()
    given = {n: rows.detach().clone().requires_grad_(rows.is_floating_point()) for n, rows in given.items()}
    with torch.autocast(x.device.type, dtype=autocast, enabled=autocast is not None):
        out = layer(leaf, structure, **given)
    leaves = [leaf, *layer.parameters(), *(rows for rows in given.values() if rows.requires_grad)]
    grads = torch.autograd.grad(out.float().pow(2).sum(), leaves, allow_unused=True)
    return [t.detach().float().cpu() for t in (out, *grads) if t is not None]


def compare(got: list[Tensor], expected: list[Tensor], allowed: float, name: str) -> None:
    largest = max(float(wide.abs().max()) for wide in expected)
    for ours, theirs in zip(got, expected, strict=True):
        assert (ours - theirs).abs().max() <= allowed * largest, name


# -- torch.compile ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize("name", ["sage", "gat", "gin"])
def test_a_model_compiled_by_inductor_has_the_losses_and_gradients_of_the_plain_one(name: str, trimmed: bool):
    """On batches of a loader, whose edges are known to come by destination: no layer looks whether they do."""
    make = {
        "sage": lambda: GraphSAGE(8, 8, 2, 3),
        "gat": lambda: GAT(8, 8, 2, 3, heads=2),
        "gin": lambda: GIN(8, 8, 2, 3),
    }[name]
    graph = sbm(400, num_classes=3, avg_degree=8, num_features=8, seed=1).to("cuda")
    losses, gradients = [], []
    for is_compiled in (False, True):
        model = seeded(make).cuda()
        call = torch.compile(model, dynamic=True) if is_compiled else model
        losses.append([])
        loader = NeighborLoader(graph, [4, 3], batch_size=32, seed=2, device="cuda")
        for batch in islice(loader, 3):
            given = {"num_sampled_nodes": batch.num_sampled_nodes} if trimmed else {}
            out = call(batch.x, batch.edge_index, **given)[: batch.batch_size]
            loss = F.cross_entropy(out, batch.y[: batch.batch_size])
            loss.backward()
            losses[-1].append(loss.detach())
        loader.close()
        gradients.append([p.grad for p in model.parameters()])
    torch._dynamo.reset()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-4)


def test_sorted_edges_compiled_by_inductor_are_those_of_the_plain_call():
    def structure(edge_index: Tensor, num_src: int, num_dst: int) -> tuple[Tensor, Tensor]:
        csc = CSC.from_sorted(edge_index, num_src, num_dst)
        return csc.indptr, csc.indices

    compiled = torch.compile(structure, dynamic=True)
    for num_edges in (50, 80, 131):
        edge_index = torch.stack([torch.arange(num_edges) % 9, (torch.arange(num_edges) * 7 // num_edges)]).cuda()
        for got, expected in zip(compiled(edge_index, 9, 7), structure(edge_index, 9, 7), strict=True):
            assert torch.equal(got, expected)
    torch._dynamo.reset()


# -- autocast --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_is_single_precision_rounded_whatever_a_layer_is_told_of_edges(dtype: torch.dtype):
    x, edge_index = torch.rand(NUM_NODES, 6), edges()
    for name, (make, kind) in LAYERS.items():
        expected = results(seeded(make), x, edge_index, told(kind))
        layer, given = seeded(make).cuda(), {n: rows.cuda() for n, rows in told(kind).items()}
        for rows in (x, x.to(dtype)):
            got = results(layer, rows.cuda(), edge_index.cuda(), given, dtype)
            compare(got, expected, 32 * torch.finfo(dtype).eps, f"{name}, {rows.dtype}")


@pytest.mark.parametrize("weighted", [False, True])
def test_a_node_of_more_edges_than_float16_can_count_has_its_row_under_autocast(weighted: bool):
    num_nodes = 80_000
    edge_index = torch.stack([torch.arange(1, num_nodes), torch.zeros(num_nodes - 1, dtype=torch.int64)]).cuda()
    x = torch.full((num_nodes, 4), 3.0, device="cuda")
    weight = torch.ones(num_nodes - 1, device="cuda") if weighted else None
    for num_out in (2, 8):
        layer = seeded(lambda num_out=num_out: GCNConv(4, num_out)).cuda()
        expected = layer(x, edge_index, weight)
        for trains in (False, weighted):
            given = None if weight is None else weight.clone().requires_grad_(trains)
            with torch.autocast("cuda", dtype=torch.float16):
                got = layer(x, edge_index, given)
            torch.testing.assert_close(got.float(), expected, rtol=1e-2, atol=1e-2)
            assert got[0].abs().sum() > 1


# -- structures in pinned memory -------------------------------------------------------------------------------------


def test_layers_train_on_a_structure_in_pinned_memory():
    x, host = torch.rand(NUM_NODES, 6), CSC.from_edge_index(edges(), NUM_NODES, narrow=True)
    host = CSC(host.indptr, host.indices, NUM_NODES)
    for name, (make, kind) in LAYERS.items():
        expected = results(seeded(make), x, host, told(kind))
        pinned = CSC(host.indptr, host.indices, NUM_NODES).pin_memory()
        given = {n: rows.cuda() for n, rows in told(kind).items()}
        got = results(seeded(make).cuda(), x.cuda(), pinned, given)
        compare(got, expected, 1e-5, name)
    turned = CSC(host.indptr, host.indices, NUM_NODES).pin_memory().transpose()
    assert turned.edge_ids is not None
    assert turned.indptr.is_pinned() and turned.indices.is_pinned() and turned.edge_ids.is_pinned()


# -- CUDA graphs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYERS)
def test_a_training_step_on_a_fixed_structure_can_be_captured(name: str):
    make, kind = LAYERS[name]
    csc = CSC.from_edge_index(edges(), NUM_NODES, narrow=True)
    csc = CSC(csc.indptr.cuda(), csc.indices.cuda(), NUM_NODES)
    layer, given = seeded(make).cuda(), {n: rows.cuda() for n, rows in told(kind).items()}
    x = torch.rand(NUM_NODES, 6, device="cuda", requires_grad=True)
    leaves = [x, *layer.parameters()]

    def step() -> list[Tensor]:
        out = layer(x, csc, **given)
        return [out.detach(), *torch.autograd.grad(out.pow(2).sum(), leaves)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        step()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        replayed = step()
    for _ in range(2):
        with torch.no_grad():
            x.uniform_()
        captured.replay()
        for a, b in zip(replayed, step(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["sage, mean", "gcn, narrow", "gat", "rgcn"])
@pytest.mark.parametrize("way", ["no warm-up", "edge_index"])
def test_what_cannot_be_captured_says_what_to_do(name: str, way: str):
    make, kind = LAYERS[name]
    edge_index = edges().cuda()
    layer, given = seeded(make).cuda(), {n: rows.cuda() for n, rows in told(kind).items()}
    x = torch.rand(NUM_NODES, 6, device="cuda", requires_grad=True)
    structure: Tensor | CSC = edge_index
    if way == "no warm-up":
        found = CSC.from_edge_index(edge_index, NUM_NODES, narrow=True)
        structure = CSC(found.indptr, found.indices, NUM_NODES)
    else:
        layer(x, edge_index, **given).sum().backward()
    torch.cuda.synchronize()
    remedy = "run the same layers once before the capture, on the very same CSC"
    with pytest.raises(RuntimeError, match=remedy), torch.cuda.graph(torch.cuda.CUDAGraph()):
        layer(x, structure, **given)
    gc.collect()
    torch.cuda.synchronize()
    assert layer(x, structure, **given).isfinite().all()  # the device lives


# -- numbers of hops -------------------------------------------------------------------------------------------------


def test_shifted_numbers_of_sampled_nodes_are_refused_before_a_kernel_runs():
    graph = sbm(400, num_classes=3, avg_degree=8, num_features=8, seed=1).to("cuda")
    loader = NeighborLoader(graph, [4, 3], batch_size=32, seed=2, device="cuda")
    batch = next(iter(loader))
    model = seeded(lambda: GraphSAGE(8, 8, 2, 3)).cuda()
    a, b, c = batch.num_sampled_nodes
    whole = model(batch.x, batch.edge_index)
    for known in (True, False):  # what the batch knows goes with its very edge_index
        edge_index = batch.edge_index if known else batch.edge_index.clone()
        for shifted in ([a, b - 5, c + 5], [a + 5, b - 5, c], [a, 0, b + c], [a + b, c, 0], [a, b + 5, c - 5]):
            try:
                out = model(batch.x, edge_index, num_sampled_nodes=shifted)
            except ValueError as error:
                assert "does not belong to these edges" in str(error)
            else:
                torch.testing.assert_close(out, whole[: out.shape[0]], rtol=1e-4, atol=1e-5)
        torch.cuda.synchronize()
        with pytest.raises(ValueError, match="does not belong to these edges"):
            model(batch.x, edge_index, num_sampled_nodes=[a, 0, b + c])
    loader.close()


def test_a_batch_that_knows_its_hops_is_trimmed_without_a_wait():
    graph = sbm(400, num_classes=3, avg_degree=8, num_features=8, seed=1).to("cuda")
    loader = NeighborLoader(graph, [4, 3], batch_size=32, seed=2, device="cuda")
    first, second, *_ = loader
    model = seeded(lambda: GraphSAGE(8, 8, 2, 3)).cuda()
    model(first.x, first.edge_index, num_sampled_nodes=first.num_sampled_nodes).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(second.x, second.edge_index, num_sampled_nodes=second.num_sampled_nodes).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    loader.close()


def test_layers_run_on_either_device_whatever_the_default_is():
    layer, x, edge_index = seeded(lambda: GATConv(6, 3, dropout=0.5)), torch.rand(NUM_NODES, 6), edges()
    torch.set_default_device("cuda")
    try:
        for device in ("cpu", "cuda"):
            out = layer.to(device)(x.to(device), edge_index.to(device))
            assert out.device.type == device
            assert CSC.from_edge_index(edge_index.to(device), NUM_NODES).dst().device.type == device
    finally:
        torch.set_default_device(None)
