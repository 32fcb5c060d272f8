"""Every convolution of DGL on our blocks, forward and backward, against the same edges in a block that DGL made."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

os.environ.setdefault("DGLBACKEND", "pytorch")
dgl = pytest.importorskip("dgl", reason="dgl is not installed")

import gnnsys.dgl as ours  # noqa: E402
from gnnsys.graph import Graph  # noqa: E402
from gnnsys.sampling import DistGraph  # noqa: E402
from tests.sampling.machines import machines  # noqa: E402
from tests.support.grid import grid  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH, OUT, NUM_NODES = 6, 4, 40
conv = dgl.nn.pytorch.conv


class Rows(NamedTuple):
    """What convolutions are given on a block: rows of sources, destinations and edges, and types of the latter two."""

    src: Tensor
    dst: Tensor
    edge: Tensor
    weight: Tensor  # of edges
    edge_type: Tensor
    node_type: Tensor


Call = Callable[[Any, Any, Rows], Any]


def pair(layer: Any, block: Any, rows: Rows) -> Any:
    return layer(block, (rows.src, rows.dst))


def alone(layer: Any, block: Any, rows: Rows) -> Any:
    return layer(block, rows.src)


def weighted(layer: Any, block: Any, rows: Rows) -> Any:
    return layer(block, rows.src, edge_weight=rows.weight)


def with_edges(layer: Any, block: Any, rows: Rows) -> Any:
    return layer(block, (rows.src, rows.dst), rows.edge)


AGGREGATORS, SCALERS = ["mean", "max", "sum"], ["identity", "amplification"]
ON_WHOLE_GRAPHS: dict[str, tuple[Callable[[], Any], Call]] = {
    "TAGConv": (lambda: conv.TAGConv(WIDTH, OUT), alone),
    "SGConv": (lambda: conv.SGConv(WIDTH, OUT, k=2), alone),
    "SGConv, weighted": (lambda: conv.SGConv(WIDTH, OUT, k=2), weighted),
    "APPNPConv": (lambda: conv.APPNPConv(2, 0.1), alone),
    "APPNPConv, weighted": (lambda: conv.APPNPConv(2, 0.1), weighted),
    "GatedGraphConv": (lambda: conv.GatedGraphConv(WIDTH, WIDTH, 2, 3), lambda c, b, r: c(b, r.src, r.edge_type)),
    "ChebConv": (lambda: conv.ChebConv(WIDTH, OUT, 2), lambda c, b, r: c(b, r.src, lambda_max=[2.0])),
    "GCN2Conv": (lambda: conv.GCN2Conv(WIDTH, 1), lambda c, b, r: c(b, r.src, r.src)),
    "GCN2Conv, weighted": (lambda: conv.GCN2Conv(WIDTH, 1), lambda c, b, r: c(b, r.src, r.src, edge_weight=r.weight)),
    "AtomicConv": (
        lambda: conv.AtomicConv(torch.ones(2), torch.ones(2), torch.ones(2)),
        lambda c, b, r: c(b, r.src[:, :1], r.weight.view(-1, 1)),
    ),
    "TWIRLSConv": (lambda: conv.TWIRLSConv(WIDTH, OUT, WIDTH, 2, lam=0.5), alone),
    "TWIRLSConv, attention": (lambda: conv.TWIRLSConv(WIDTH, OUT, WIDTH, 2, attention=True, attn_bef=True), alone),
    "TWIRLSUnfoldingAndAttention": (lambda: conv.TWIRLSUnfoldingAndAttention(WIDTH, 0.5, 0.5, 2), alone),
    "HGTConv": (
        lambda: conv.HGTConv(WIDTH, 2, 2, 2, 3, dropout=0.0),
        lambda c, b, r: c(b, r.src, r.node_type, r.edge_type),
    ),
    "GroupRevRes": (
        lambda: conv.GroupRevRes(conv.GraphConv(3, 3), 2),
        lambda c, b, r: c(b, r.src) + 0,  # it frees its own output in the backward pass
    ),
    "EGNNConv": (
        lambda: conv.EGNNConv(WIDTH, 5, OUT, 3),
        lambda c, b, r: torch.cat(c(b, r.src, r.src[:, :3], r.edge), 1),
    ),
    "PNAConv": (
        lambda: conv.PNAConv(WIDTH, WIDTH, AGGREGATORS, SCALERS, 2.5, edge_feat_size=3),
        lambda c, b, r: c(b, r.src, r.edge),
    ),
    "DGNConv": (
        lambda: conv.DGNConv(WIDTH, WIDTH, ["dir1-av", "dir1-dx", "sum"], SCALERS, 2.5, edge_feat_size=3),
        lambda c, b, r: c(b, r.src, r.edge, r.src[:, :3]),
    ),
    "EGATConv": (
        lambda: conv.EGATConv(WIDTH, 3, OUT, 3, 2),
        lambda c, b, r: torch.cat([out.flatten() for out in c(b, r.src, r.edge)]),
    ),
}
ON_BLOCKS: dict[str, tuple[Callable[[], Any], Call]] = {
    **{
        f"GraphConv, {norm}": (lambda norm=norm: conv.GraphConv(WIDTH, OUT, norm=norm), pair)
        for norm in ("both", "left", "right", "none")
    },
    "GraphConv, weighted": (lambda: conv.GraphConv(WIDTH, OUT), weighted),
    "EdgeWeightNorm": (lambda: conv.EdgeWeightNorm(), lambda c, b, r: c(b, r.weight.abs() + 0.1)),
    **{
        f"SAGEConv, {kind}": (lambda kind=kind: conv.SAGEConv(WIDTH, OUT, kind), pair)
        for kind in ("mean", "gcn", "pool", "lstm")
    },
    "SAGEConv, weighted": (lambda: conv.SAGEConv(WIDTH, OUT, "mean"), weighted),
    "GATConv": (lambda: conv.GATConv(WIDTH, OUT, 2, residual=True), pair),
    "GATConv, weighted": (lambda: conv.GATConv(WIDTH, OUT, 2), weighted),
    "GATv2Conv": (lambda: conv.GATv2Conv(WIDTH, OUT, 2), pair),
    "DotGatConv": (lambda: conv.DotGatConv((WIDTH, WIDTH), OUT, 2), pair),
    "AGNNConv": (lambda: conv.AGNNConv(), pair),
    "EdgeGATConv": (lambda: conv.EdgeGATConv(WIDTH, 3, OUT, 2), with_edges),
    "EdgeConv": (lambda: conv.EdgeConv(WIDTH, OUT, batch_norm=True), pair),
    **{
        f"GINConv, {kind}": (lambda kind=kind: conv.GINConv(nn.Linear(WIDTH, OUT), kind, learn_eps=True), pair)
        for kind in ("sum", "mean", "max")
    },
    "GINConv, weighted": (lambda: conv.GINConv(nn.Linear(WIDTH, OUT)), weighted),
    "GINEConv": (lambda: conv.GINEConv(nn.Linear(3, OUT)), lambda c, b, r: c(b, (r.src[:, :3], r.dst[:, :3]), r.edge)),
    **{
        f"GMMConv, {kind}": (lambda kind=kind: conv.GMMConv(WIDTH, OUT, 3, 2, kind, residual=True), with_edges)
        for kind in ("sum", "mean", "max")
    },
    **{
        f"NNConv, {kind}": (lambda kind=kind: conv.NNConv(WIDTH, OUT, nn.Linear(3, WIDTH * OUT), kind), with_edges)
        for kind in ("sum", "mean", "max")
    },
    "CFConv": (lambda: conv.CFConv(WIDTH, 3, OUT, OUT), with_edges),
    **{
        f"RelGraphConv, {kind}": (
            lambda kind=kind: conv.RelGraphConv(WIDTH, OUT, 3, kind, 2),
            lambda c, b, r: c(b, r.src, r.edge_type, r.weight.view(-1, 1)),
        )
        for kind in (None, "basis", "bdd")
    },
}
WITHOUT_A_GRAPH = {"DenseGraphConv", "DenseSAGEConv", "DenseChebConv"}  # take a matrix
ON_GPUS_ALONE = {"CuGraphGATConv", "CuGraphRelGraphConv", "CuGraphSAGEConv"}


def test_every_convolution_of_dgl_is_in_the_tables() -> None:
    named = {name.split(",")[0] for name in (*ON_WHOLE_GRAPHS, *ON_BLOCKS)}
    assert named | WITHOUT_A_GRAPH | ON_GPUS_ALONE == set(conv.__all__) | {"TWIRLSUnfoldingAndAttention"}


def graph() -> Graph:
    generator = torch.Generator().manual_seed(3)
    src = torch.randint(0, NUM_NODES, (200,), generator=generator)
    dst = torch.cat([torch.arange(NUM_NODES), torch.randint(0, NUM_NODES, (160,), generator=generator)])
    src = torch.where(src == dst, (src + 1) % NUM_NODES, src)  # distances of 0 have no gradient
    return Graph.from_edge_index(torch.stack([src, dst]), NUM_NODES)


def dgl_graph(idtype: torch.dtype = torch.int64) -> Any:
    return dgl.graph(tuple(graph().edge_index()), num_nodes=NUM_NODES, idtype=idtype)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    with machines(graph(), tmp_path_factory.mktemp("convs") / "parts", 2) as graphs:
        yield graphs[0]


def their_block(block: Any) -> Any:
    """DGL's block of the same edges in the same order. It numbers the sources by itself."""
    src, dst = block.edges()
    src_ids, dst_ids = block.srcdata[dgl.NID], block.dstdata[dgl.NID]
    whole = dgl.graph((src_ids[src.long()], dst_ids[dst.long()]), num_nodes=NUM_NODES, idtype=block.idtype)
    made = dgl.to_block(whole, dst_ids)
    assert torch.equal(made.srcdata[dgl.NID][made.edges()[0].long()], whole.edges()[0])
    return made


def trained(make: Callable[[], Any], call: Call, block: Any) -> list[Tensor]:
    """What a layer computes on a block, and every gradient; those of rows by the whole graph's nodes."""
    torch.manual_seed(0)
    layer, generator = make(), torch.Generator().manual_seed(4)
    x = torch.rand(NUM_NODES, WIDTH, generator=generator).requires_grad_()
    edge, weight = (torch.rand(block.num_edges(), n, generator=generator).requires_grad_() for n in (3, 1))
    src, dst = x[block.srcdata[dgl.NID].long()], x[block.dstdata[dgl.NID].long()]
    node_type = block.srcdata[dgl.NID].long() % 2
    out = call(layer, block, Rows(src, dst, edge, weight.view(-1), torch.arange(block.num_edges()) % 3, node_type))
    (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    leaves = [x, edge, weight, *layer.parameters()]
    return [out.detach(), *(torch.zeros(()) if leaf.grad is None else leaf.grad for leaf in leaves)]


def check(layer: str, block: Any, theirs: Any) -> None:
    make, call = (ON_WHOLE_GRAPHS | ON_BLOCKS)[layer]
    expected = trained(make, call, theirs)
    for mine, wanted in zip(trained(make, call, block), expected, strict=True):
        torch.testing.assert_close(mine, wanted)
    assert any(bool(grad.any()) for grad in expected[1:])


SEEDS = torch.tensor([3, 17, 20, 9, 33])


@grid(layer=list(ON_BLOCKS), idtype=[torch.int64, torch.int32])
def test_a_convolution_computes_what_it_computes_on_dgls_own_block(layer: str, idtype: torch.dtype) -> None:
    block = ours.MultiLayerFullNeighborSampler(1).sample_blocks(dgl_graph(idtype), SEEDS.to(idtype))[2][0]
    check(layer, block, their_block(block))


@grid(layer=["GATConv", "EdgeConv", "RelGraphConv, basis"])
def test_a_convolution_computes_it_on_blocks_from_parts_too(layer: str, parts: DistGraph) -> None:
    block = ours.MultiLayerFullNeighborSampler(1).sample_blocks(parts, SEEDS)[2][0]
    check(layer, block, their_block(block))


@grid(layer=[*ON_WHOLE_GRAPHS, *ON_BLOCKS], idtype=[torch.int64, torch.int32])
def test_a_convolution_computes_what_it_computes_on_dgls_own_subgraph(layer: str, idtype: torch.dtype) -> None:
    g = dgl_graph(idtype)
    every_node = torch.arange(NUM_NODES, dtype=idtype).flip(0)
    made = ours.ShaDowKHopSampler([-1]).sample(g, every_node)[2]
    theirs = dgl.graph(made.edges(), num_nodes=made.num_nodes(), idtype=idtype)
    theirs.ndata[dgl.NID] = made.ndata[dgl.NID]
    check(layer, made, theirs)


@pytest.mark.parametrize("module", [ours, dgl.dataloading], ids=["ours", "dgl"])
def test_attention_per_relation_trains_on_typed_blocks(module: Any) -> None:
    src, dst = graph().edge_index()
    g = dgl.heterograph(
        {("a", "cites", "b"): (src, dst), ("b", "back", "a"): (dst, src), ("b", "near", "b"): (src, dst)},
        num_nodes_dict={"a": NUM_NODES, "b": NUM_NODES},
    )
    block = module.MultiLayerFullNeighborSampler(1).sample_blocks(g, {"b": torch.arange(9)})[2][0]
    rows = {t: torch.rand(block.num_src_nodes(t), WIDTH, requires_grad=True) for t in ("a", "b")}
    for make in (lambda: conv.GATConv(WIDTH, OUT, 2), lambda: conv.EdgeConv(WIDTH, OUT)):
        layer = dgl.nn.HeteroGraphConv({name: make() for name in ("cites", "back", "near")})
        layer(block, (rows, {t: x[: block.num_dst_nodes(t)] for t, x in rows.items()}))["b"].sum().backward()
    assert all(bool(x.grad.any()) for x in rows.values())
