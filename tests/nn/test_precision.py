"""Layers in half precision: under autocast or as a whole, with what is told of edges, and with large degrees."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from gnnsys.nn import GATConv, GCNConv, GINConv, RGCNConv, SAGEConv
from gnnsys.nn.gcn import whole_scales
from gnnsys.ops import CSC, WholeDegrees

HALF = [torch.float16, torch.bfloat16]
# Both widths, so that each order of a layer's halves is taken.
LAYERS: dict[str, tuple[Callable[[], nn.Module], str | None]] = {
    **{f"sage, {a}": (lambda a=a: SAGEConv(6, 3, aggr=a), None) for a in ("mean", "sum", "max", "min")},
    "gcn, narrow": (lambda: GCNConv(6, 3), None),
    "gcn, wide": (lambda: GCNConv(6, 9), None),
    "gcn, narrow, weighted": (lambda: GCNConv(6, 3), "edge_weight"),
    "gcn, wide, weighted": (lambda: GCNConv(6, 9), "edge_weight"),
    "gcn, without loops": (lambda: GCNConv(6, 9, add_self_loops=False), "edge_weight"),
    "gcn, not normalised": (lambda: GCNConv(6, 3, normalize=False), "edge_weight"),
    "gat": (lambda: GATConv(6, 3, heads=2), None),
    "gat, features": (lambda: GATConv(6, 3, heads=2, edge_dim=4), "edge_attr"),
    "gat, features, filled": (lambda: GATConv(6, 3, heads=2, edge_dim=4, fill_value=0.5), "edge_attr"),
    "gin": (lambda: GINConv(nn.Linear(6, 3)), None),
    "rgcn": (lambda: RGCNConv(6, 3, 2), "edge_type"),
    "rgcn, bases": (lambda: RGCNConv(6, 3, 2, num_bases=2), "edge_type"),
    "rgcn, blocks": (lambda: RGCNConv(6, 4, 2, num_blocks=2), "edge_type"),
}


def told(kind: str | None, num_edges: int) -> Tensor | None:
    generator = torch.Generator().manual_seed(5)
    if kind == "edge_type":
        return torch.arange(num_edges) % 2
    return None if kind is None else torch.rand(num_edges, *([4] if kind == "edge_attr" else []), generator=generator)


def run(layer: nn.Module, x: Tensor, edges: Tensor, kind: str | None, trains: bool, autocast: torch.dtype | None):
    x, rows = x.clone().requires_grad_(), told(kind, edges.shape[1])
    if rows is not None and rows.is_floating_point():
        rows = (rows if autocast else rows.to(x.dtype)).requires_grad_(trains)
    with torch.autocast(x.device.type, dtype=autocast, enabled=autocast is not None):
        out = layer(x, edges, **({} if rows is None else {kind: rows}))
    out.float().pow(2).sum().backward()
    grads = [x.grad, *(p.grad for p in layer.parameters()), *([rows.grad] if rows is not None and trains else [])]
    layer.zero_grad(set_to_none=True)
    return [out.detach().float(), *(grad.float() for grad in grads if grad is not None)]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("kind", ["autocast", "autocast, half rows", "half"])
def test_half_precision_is_single_precision_rounded(dtype: torch.dtype, kind: str, edge_index: Tensor):
    """Within some roundings of the largest numbers, forward and backward, whether weights of edges train or not."""
    for name, (make, edge_rows) in LAYERS.items():
        for trains in (False, True) if edge_rows in ("edge_weight", "edge_attr") else (False,):
            torch.manual_seed(1)
            layer = make()
            with torch.no_grad():  # numbers that both have
                for parameter in layer.parameters():
                    parameter.copy_(parameter.to(dtype))
            x = torch.rand(40, 6).to(dtype)
            expected = run(layer, x.float(), edge_index, edge_rows, trains, None)
            if kind == "half":
                got = run(layer.to(dtype), x, edge_index, edge_rows, trains, None)
            else:
                rows = x if kind == "autocast, half rows" else x.float()
                got = run(layer, rows, edge_index, edge_rows, trains, dtype)
            largest = max(float(wide.abs().max()) for wide in expected)
            for ours, wide in zip(got, expected, strict=True):
                allowed = 16 * torch.finfo(dtype).eps * largest
                assert (ours - wide).abs().max() <= allowed, f"{name}, trains={trains}: {(ours - wide).abs().max()}"


@pytest.mark.parametrize("weighted", [False, True])
def test_a_node_of_more_edges_than_half_precision_can_count_has_its_row(weighted: bool):
    """79,999 in-edges, and sums of their rows that are more than float16 can say before they are scaled."""
    num_nodes = 80_000
    edges = torch.stack([torch.arange(1, num_nodes), torch.zeros(num_nodes - 1, dtype=torch.int64)])
    x = torch.full((num_nodes, 2), 3.0)
    weight = torch.ones(num_nodes - 1) if weighted else None
    for add_self_loops in (True, False):
        layer = GCNConv(2, 2, add_self_loops=add_self_loops, bias=False)
        with torch.no_grad():
            layer.lin.weight.copy_(torch.eye(2))
        expected = layer(x, edges, weight)
        for trains in (False, weighted):
            given = None if weight is None else weight.half().requires_grad_(trains)
            got = layer.half()(x.half(), edges, given)
            assert got.dtype == torch.float16
            torch.testing.assert_close(got.float(), expected, rtol=4e-3, atol=0)
            layer.float()
    with torch.autocast("cpu", dtype=torch.float16):
        mean = SAGEConv(2, 2)(x, edges)
    assert mean.isfinite().all() and mean[0].abs().sum() > 0


def test_weights_that_half_precision_cannot_say_count_as_pygs_do(edge_index: Tensor):
    """float16 ends at 65504 and at 6e-8: large ones, small ones, and both in one graph."""
    generator = torch.Generator().manual_seed(6)
    drawn = 0.5 + torch.rand(edge_index.shape[1], generator=generator)
    mixed = drawn * 10.0 ** torch.randint(-8, 6, drawn.shape, generator=generator)
    weights = {"large": 1e5 * drawn, "small": 1e-8 * drawn, "mixed": mixed}
    for loops, narrow, (name, weight) in itertools.product((True, False), (True, False), weights.items()):
        torch.manual_seed(1)
        peer = pyg.GCNConv(*((12, 3) if narrow else (3, 12)), add_self_loops=loops)
        layer = GCNConv(*((12, 3) if narrow else (3, 12)), add_self_loops=loops)
        layer.load_state_dict(peer.state_dict())
        x = torch.rand(40, 12 if narrow else 3, generator=generator).half().float()
        found = []
        for each, dtype in ((layer, torch.float16), (layer, torch.bfloat16), (peer, None)):
            rows = x.clone().requires_grad_()
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                out = each(rows, edge_index, weight)
            of_rows = torch.autograd.grad(out.float().sum(), rows)[0]
            found.append((out.detach().float(), of_rows))
        for got, dtype in zip(found[:-1], HALF, strict=True):
            for ours, theirs in zip(got, found[-1], strict=True):
                near = 16 * torch.finfo(dtype).eps * theirs.abs().max()
                assert (ours - theirs).abs().max() <= near, (loops, narrow, name, dtype)


@pytest.mark.parametrize("loops", [False, True])
def test_scales_by_the_whole_graphs_degrees_are_made_wide_and_then_rounded(loops: bool):
    whole = WholeDegrees(torch.tensor([79_999, 3, 0]), torch.tensor([0, 1, 0]))
    piece = CSC(torch.tensor([0, 1]), torch.tensor([1]), 3, whole=whole)
    for dtype in HALF:
        rounded = whole_scales(piece, loops, 1.0, dtype)
        for got, expected in zip(rounded, whole_scales(piece, loops, 1.0, torch.float32), strict=True):
            assert got.dtype == dtype and torch.equal(got, expected.to(dtype))
