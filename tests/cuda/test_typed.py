"""Sums over many relations, and the typed layers made of them, on the device: as on the CPU, and alike in every run."""

from __future__ import annotations

import pytest
import torch

import gnnsys
from gnnsys.graph import typed_graph
from gnnsys.nn import HGT, RGAT, RGCN, HeteroSAGE, RGCNConv
from gnnsys.ops import CSC, Relation, group_structures, relation_conv, sorted_structures
from tests.ops.test_relations import RELATIONS, structures, tensors

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 2e-2}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_results_and_gradients_are_those_of_the_host(dtype: torch.dtype, blocks: bool, reduce: str):
    found = []
    for device in ("cpu", "cuda", "cuda"):
        # Narrow types beside float64 rows of the same values: sums of host and device round alike, products do not.
        wide = torch.float64 if device == "cpu" else dtype
        lists = [[t.detach().to(dtype).to(device, wide).requires_grad_() for t in each] for each in tensors(blocks)]
        cscs = [CSC(c.indptr.to(device), c.indices.to(device), c.num_src) for c in structures()]
        outs = relation_conv(group_structures(cscs, reduce), *lists[:2], RELATIONS, [27, 17], lists[2], [0, 1])
        grads = torch.autograd.grad([o.sum() for o in outs], [t for each in lists for t in each])
        found.append([*outs, *grads])
    for host, first, second in zip(*found, strict=True):
        assert torch.equal(first, second)
        scale = float(host.abs().max())
        torch.testing.assert_close(first.double().cpu(), host, rtol=0, atol=scale * TOLERANCE[dtype])


def random_structures(num_relations: int, num_edges: int, seed: int, dtype: torch.dtype) -> list[CSC]:
    """Of several sizes, some without edges, destinations or sources."""
    g, found = torch.Generator().manual_seed(seed), []
    for r in range(num_relations):
        num_src, num_dst, edges = 1 + 37 * (r % 5), (r % 4) * 23, num_edges if r % 3 else 0
        edges = edges if num_dst else 0
        ends = torch.stack([torch.randint(n or 1, (edges,), generator=g) for n in (num_src, num_dst)])
        found.append(CSC.from_edge_index(ends.to(dtype), num_src, num_dst))
    return found


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_relations, num_edges", [(1, 0), (2, 50), (9, 300), (150, 40), (7, 20_000)])
def test_groups_on_the_device_are_those_of_the_host(num_relations: int, num_edges: int, dtype: torch.dtype):
    host = random_structures(num_relations, num_edges, num_relations, dtype)
    device = [CSC(c.indptr.cuda(), c.indices.cuda(), c.num_src) for c in host]
    ours, theirs = (group_structures(cscs, "mean") for cscs in (device, host))
    assert ours.ends == theirs.ends
    turned, expected = ours.by_source(), theirs.by_source()
    assert turned.ends == expected.ends
    for a, b in (
        (ours.dst, theirs.dst), (ours.indptr, theirs.indptr), (ours.indices, theirs.indices),
        (turned.src, expected.src), (turned.indptr, expected.indptr), (turned.indices, expected.indices),
        (turned.group, expected.group),
    ):  # fmt: skip
        assert a.dtype == b.dtype and torch.equal(a.cpu(), b)


@pytest.mark.parametrize("num_relations", [3, 45, 130])  # one launch takes 64
@pytest.mark.parametrize("width, out", [(8, 8), (67, 129), (130, 3)])  # tiles of 64 x 64, 16 deep
@pytest.mark.parametrize("num_edges", [60, 9000])  # shares of weights' gradients have 1024 rows
def test_products_of_small_relations_are_those_of_the_host(num_relations: int, width: int, out: int, num_edges: int):
    g = torch.Generator().manual_seed(1)
    edges = num_edges if num_relations < 100 else num_edges // 10
    sizes = [edges * (r % 3) // 2 for r in range(num_relations)]
    made = [torch.stack([torch.randint(n, (size,), generator=g) for n in (1700, 1500)]) for size in sizes]
    cscs = [CSC.from_edge_index(each.int(), 1700, 1500) for each in made]
    relations = [Relation(0, 0, 0, r) for r in range(num_relations)]
    lists = [torch.randn(1700, width, generator=g), torch.randn(num_relations, width, out, generator=g)]
    root, found = torch.randn(width, out, generator=g), []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32), ("cuda", torch.float32)):
        there = [CSC(c.indptr.to(device), c.indices.to(device), c.num_src) for c in cscs]
        x, weight, own = (t.to(device, dtype).requires_grad_() for t in (*lists, root))
        groups = group_structures(there, "mean")
        (result,) = relation_conv(groups, [x], [weight], relations, [1500], [own], [0])
        found.append([result, *torch.autograd.grad(result.square().sum(), [x, weight, own])])
    for host, first, second in zip(*found, strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first.double().cpu(), host, rtol=0, atol=1e-5 * float(host.abs().max()))


def test_wide_relations_beside_narrow_ones_are_those_of_the_host():
    """Narrow ones are multiplied together, wide ones between them one by one."""
    g = torch.Generator().manual_seed(2)
    num_nodes, widths, out = 12_000, (768, 16), 48
    slots = [1, 0, 1, 1, 0, 1, 0, 1]  # which rows, and which weights, a relation has
    made = [torch.randint(num_nodes, (2, 40_000), generator=g) for _ in slots]
    cscs = [CSC.from_edge_index(each.int(), num_nodes, num_nodes) for each in made]
    relations = [Relation(slot, r % 2, slot, slots[:r].count(slot)) for r, slot in enumerate(slots)]
    tensors = [torch.randn(num_nodes, width, generator=g) for width in widths]
    tensors += [torch.randn(slots.count(slot), width, out, generator=g) for slot, width in enumerate(widths)]
    found = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32), ("cuda", torch.float32)):
        there = [CSC(c.indptr.to(device), c.indices.to(device), c.num_src) for c in cscs]
        mine = [t.to(device, dtype).requires_grad_() for t in tensors]
        groups = group_structures(there, "mean")
        results = relation_conv(groups, mine[:2], mine[2:], relations, [num_nodes, num_nodes])
        found.append([*results, *torch.autograd.grad(sum(r.square().sum() for r in results), mine)])
    for host, first, second in zip(*found, strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first.double().cpu(), host, rtol=0, atol=1e-5 * float(host.abs().max()))


@pytest.mark.parametrize("num_relations", [2, 9, 200])  # one launch takes 96
def test_structures_made_together_are_those_made_one_by_one(num_relations: int):
    g = torch.Generator().manual_seed(3)
    sizes = [(0, 1, 700, 5000)[r % 4] for r in range(num_relations)]
    edges, ends = [], [{0: 0} for _ in sizes]
    for r, size in enumerate(sizes):
        num_src, num_dst = 50 + r, 60 if size else 0
        made = torch.stack([torch.randint(num_src, (size + 3,), generator=g) for _ in range(2)])
        made[1] = (made[1] % max(num_dst, 1)).sort().values
        edges.append((made.cuda()[:, :size], num_src, num_dst + r % 2))  # a view; destinations without edges
    together = sorted_structures(edges, ends)
    for each, csc in zip(edges, together, strict=True):
        alone = CSC.from_sorted(*each)
        assert torch.equal(csc.indptr, alone.indptr) and torch.equal(csc.indices, alone.indices)
        assert csc.indices.dtype == alone.indices.dtype and csc.num_src == alone.num_src
        assert csc.ends([0]) == [0]


def test_models_on_the_device_are_those_of_the_host():
    graph = typed_graph(300)
    batch = next(iter(gnnsys.NeighborLoader(graph, [5, 5], input_nodes=("paper", torch.arange(64)), batch_size=64)))
    moved = batch.to("cuda")
    for model in (
        HeteroSAGE(64, 32, 2, 5, metadata=graph),
        RGCN(64, 32, 2, 5, metadata=graph),
        RGAT(64, 32, 2, 5, heads=4, metadata=graph),
        HGT(64, 32, 2, 5, heads=4, metadata=graph),
    ):
        results = []
        for each, module in ((batch, model), (moved, model)):
            module = module.to(each.device)
            out = module(each.x_dict, each.edge_index_dict, num_sampled_nodes=each.num_sampled_nodes_dict)["paper"]
            grads = torch.autograd.grad(out.square().sum(), list(module.parameters()), allow_unused=True)
            results.append([out.cpu(), *(g.cpu() for g in grads if g is not None)])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_rows_by_node_id_on_the_device_are_those_of_the_host():
    graph = typed_graph(300)
    batch = next(iter(gnnsys.NeighborLoader(graph, [5, 5], input_nodes=("paper", torch.arange(64)), batch_size=64)))
    model, found = RGCN(None, 16, 2, 5, metadata=graph, targets=["paper"]), []
    for device in ("cpu", "cuda", "cuda"):
        each, module = batch.to(device), model.to(device)
        x = {t: each[t].n_id.long() for t in graph.node_types}
        out = module(x, each.edge_index_dict, num_sampled_nodes=each.num_sampled_nodes_dict)["paper"]
        grads = torch.autograd.grad(out.square().sum(), list(module.parameters()), allow_unused=True)
        found.append([out.cpu(), *(g.cpu() for g in grads if g is not None)])
    for host, first, second in zip(*found, strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(host, first, rtol=1e-3, atol=1e-4)


def test_a_step_waits_for_the_device_only_where_its_structure_is_made():
    generator = torch.Generator().manual_seed(0)
    edges, types = torch.randint(500, (2, 4000), generator=generator).cuda(), torch.randint(45, (4000,)).cuda()
    conv, x = RGCNConv(32, 32, 45).cuda(), torch.randn(500, 32, device="cuda", requires_grad=True)
    (first,) = torch.autograd.grad(conv(x, edges, types).sum(), x)
    others = edges.clone()  # whose structure is not known
    torch.cuda.set_sync_debug_mode("error")
    try:
        (second,) = torch.autograd.grad(conv(x, edges, types).sum(), x)
        with pytest.raises(RuntimeError, match="synchronizing"):
            conv(x, others, types)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, second)
