"""gnnsys.dgl on graphs in parts, over real connections: DGL's blocks of the whole graph in memory, id for id."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

os.environ.setdefault("DGLBACKEND", "pytorch")
dgl = pytest.importorskip("dgl", reason="dgl is not installed")

import gnnsys.dgl as ours  # noqa: E402
from gnnsys.graph import EDGE, NODE, Graph  # noqa: E402
from gnnsys.partition import Placement  # noqa: E402
from gnnsys.sampling import DistGraph  # noqa: E402
from gnnsys.seeds import split  # noqa: E402
from tests.sampling.machines import CITES, WRITES, homogeneous, machines, typed  # noqa: E402

SEEDS = torch.randperm(120, generator=torch.Generator().manual_seed(5))[:50]
PAPERS = torch.randperm(90, generator=torch.Generator().manual_seed(6))[:40]
FEATURES: Any = {"prefetch_node_feats": ["x"], "prefetch_labels": ["t"], "prefetch_edge_feats": ["w", "number"]}
TYPED_FEATURES: Any = {
    "prefetch_node_feats": {"paper": ["x"], "author": ["t"]},
    "prefetch_labels": {"paper": ["t"]},
    "prefetch_edge_feats": {"cites": ["w"], WRITES: ["et"]},
}


def as_dgl(graph: Graph) -> Any:
    """The whole graph as DGL's own, edges in their order."""
    if graph.is_homogeneous:
        g = dgl.graph(tuple(graph.edge_index()), num_nodes=graph.num_nodes())
        g.ndata.update(graph.node_data[NODE])
        g.edata.update(graph.edge_data[EDGE])
        return g
    edges = {t: tuple(graph.edge_index(t)) for t in graph.edge_types}
    g = dgl.heterograph(edges, num_nodes_dict={t: graph.num_nodes(t) for t in graph.node_types})
    for node_type, rows in graph.node_data.items():
        g.nodes[node_type].data.update(rows)
    for edge_type, rows in graph.edge_data.items():
        g.edges[edge_type].data.update(rows)
    return g


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    graph = homogeneous()
    graph.set_node_data("train_mask", torch.arange(120) % 3 == 0)
    graph.set_edge_data("keep", torch.arange(900) % 3 > 0)
    with machines(graph, tmp_path_factory.mktemp("dgl") / "parts", 3) as graphs:
        yield as_dgl(graphs[0].parts.merge()), graphs


@pytest.fixture(scope="module")
def hetero(tmp_path_factory):
    with machines(typed(), tmp_path_factory.mktemp("dgl") / "parts", 2) as graphs:
        yield as_dgl(graphs[0].parts.merge()), graphs


def assert_same(mine: Any, whole: Any, graph: DistGraph) -> None:
    """A triple from parts; in original ids it is the whole graph's, with the same features in place."""
    for a, b in zip(mine[:2], whole[:2], strict=True):
        if graph.is_homogeneous:
            a, b = {NODE: a}, {NODE: b}
        assert list(a) == list(b)
        assert all(torch.equal(graph.original_ids(a[t], t), b[t]) for t in a)
    assert len(mine[2]) == len(whole[2])
    for a, b in zip(mine[2], whole[2], strict=True):
        assert a.srctypes == b.srctypes and a.dsttypes == b.dsttypes and a.canonical_etypes == b.canonical_etypes
        assert a.idtype == b.idtype == torch.int64 and a.is_block
        for edge_type in a.canonical_etypes:
            assert all(
                torch.equal(x, y) for x, y in zip(a.edges(etype=edge_type), b.edges(etype=edge_type), strict=True)
            )
            known = EDGE if graph.is_homogeneous else edge_type
            ids = graph.original_edge_ids(a.edges[edge_type].data[dgl.EID], known)
            assert torch.equal(ids, b.edges[edge_type].data[dgl.EID])
            assert_same_rows(a.edges[edge_type].data, b.edges[edge_type].data)
        for t in a.srctypes:
            known = NODE if graph.is_homogeneous else t
            for x, y in ((a.srcnodes[t].data, b.srcnodes[t].data), (a.dstnodes[t].data, b.dstnodes[t].data)):
                assert torch.equal(graph.original_ids(x[dgl.NID], known), y[dgl.NID])
                assert_same_rows(x, y)


def assert_same_rows(mine: Any, whole: Any) -> None:
    for name in mine:
        if name not in (dgl.NID, dgl.EID):
            assert torch.equal(mine[name], whole[name]), name


@pytest.mark.parametrize("options", [{}, {"prob": "w"}, {"replace": True}], ids=["uniform", "weighted", "repeats"])
def test_batches_are_those_of_the_whole_graph(plain, options: dict) -> None:
    g, graphs = plain
    for mine in graphs[::2] if not options else graphs[1:2]:
        kwargs: Any = {"batch_size": 16, "seed": 4, "shuffle": True}
        parted = ours.DataLoader(
            mine, mine.from_original(SEEDS), ours.NeighborSampler([3, 4], **options, **FEATURES), **kwargs
        )
        whole = ours.DataLoader(g, SEEDS, ours.NeighborSampler([3, 4], **options, **FEATURES), **kwargs)
        assert len(parted) == len(whole) == 4
        for _ in range(2):
            for a, b in zip(parted, whole, strict=True):
                assert_same(a, b, mine)
                assert {"x", dgl.NID} == set(a[2][0].srcdata) and {"t", dgl.NID} == set(a[2][-1].dstdata)
                assert all({"w", "number", dgl.EID} == set(block.edata) for block in a[2])
        parted.close()
        whole.close()


@pytest.mark.usefixtures("one_epoch")
def test_typed_batches_are_those_of_the_whole_graph(hetero) -> None:
    g, graphs = hetero
    fanouts = [{"cites": 3, WRITES: 2, "rev_writes": -1}, {"cites": 4, "writes": 4}]
    for mine in graphs:
        papers = {"paper": mine.from_original(PAPERS, "paper")}
        parted = ours.DataLoader(mine, papers, ours.NeighborSampler(fanouts, **TYPED_FEATURES), batch_size=16, seed=4)
        whole = ours.DataLoader(
            g, {"paper": PAPERS}, ours.NeighborSampler(fanouts, **TYPED_FEATURES), batch_size=16, seed=4
        )
        count = 0
        for a, b in zip(parted, whole, strict=True):
            assert_same(a, b, mine)
            assert set(a[1]) == {"paper"} and {"x"} < set(a[2][0].srcnodes["paper"].data)
            assert {"w"} < set(a[2][0].edges[CITES].data) and {"t"} < set(a[2][-1].dstnodes["paper"].data)
            count += 1
        assert count == 3
        parted.close()
        whole.close()


def test_a_sampler_alone_brings_what_is_to_be_prefetched(plain) -> None:
    g, (mine, *_) = plain
    torch.manual_seed(0)
    a = ours.NeighborSampler([2, 3], **FEATURES).sample(mine, mine.global_ids(SEEDS))
    torch.manual_seed(0)
    b = ours.NeighborSampler([2, 3], **FEATURES).sample_blocks(g, SEEDS)
    assert_same(a, b, mine)
    assert "x" in a[2][0].srcdata and "t" in a[2][-1].dstdata and "number" in a[2][0].edata


def test_all_of_a_mask_is_refused_among_several_ranks(plain, monkeypatch) -> None:
    _, (mine, *_) = plain
    monkeypatch.setattr(mine, "placement", Placement(0, (0, 1), (0,) * mine.parts.num_parts))
    with pytest.raises(ValueError, match=r'2 ranks.* write gnnsys.split\(graph, "train"\)'):
        ours.DataLoader(mine, "train", ours.NeighborSampler([2]))
    ours.DataLoader(mine, mine.from_global(SEEDS), ours.NeighborSampler([2])).close()


@pytest.mark.usefixtures("one_epoch")
def test_edges_that_are_excluded_are_never_drawn(plain, hetero) -> None:
    _, (mine, *_) = plain
    banned = torch.arange(0, 900, 3)
    _, _, blocks = ours.MultiLayerFullNeighborSampler(1).sample_blocks(mine, torch.arange(120), exclude_eids=banned)
    assert blocks[0].edata[dgl.EID].sort().values.tolist() == [i for i in range(900) if i % 3]
    _, (mine, *_) = hetero
    seeds = {"paper": torch.arange(90)}
    _, _, blocks = ours.MultiLayerFullNeighborSampler(1).sample_blocks(mine, seeds, {"cites": torch.arange(400)})
    assert blocks[0].edges[CITES].data[dgl.EID].sort().values.tolist() == list(range(400, 500))
    with pytest.raises(ValueError, match=r"exclude_eids must be in \[0, 500\)"):
        ours.MultiLayerFullNeighborSampler(1).sample_blocks(mine, seeds, {CITES: torch.tensor([500])})


@pytest.mark.usefixtures("one_epoch")
def test_edges_that_a_mask_leaves_out_are_never_drawn(plain) -> None:
    g, (mine, *_) = plain
    keep = torch.arange(900) % 3 > 0
    sampler = ours.NeighborSampler([-1, -1], mask="keep", prefetch_edge_feats=["keep"])
    options: Any = {"batch_size": 20, "num_workers": 1}
    parted = ours.DataLoader(mine, mine.from_original(SEEDS), sampler, **options)
    whole = ours.DataLoader(g, SEEDS, ours.NeighborSampler([-1, -1], mask="keep"), **options)
    for a, b in zip(parted, whole, strict=True):
        for theirs, blocks in zip(b[2], a[2], strict=True):
            drawn = mine.original_edge_ids(blocks.edata[dgl.EID])
            assert bool(keep[drawn].all()) and bool(blocks.edata["keep"].all())
            assert drawn.sort().values.tolist() == theirs.edata[dgl.EID].sort().values.tolist()
    parted.close()
    whole.close()
    few = ours.DataLoader(mine, mine.from_global(range(120)), ours.NeighborSampler([3], mask="keep"), batch_size=120)
    ((_, _, (block,)),) = few
    assert bool(keep[mine.original_edge_ids(block.edata[dgl.EID])].all()) and block.num_edges() > 200
    few.close()
    _, _, blocks = sampler.sample_blocks(mine, torch.arange(120))
    assert bool(keep[mine.original_edge_ids(blocks[-1].edata[dgl.EID])].all())


@pytest.mark.usefixtures("one_epoch")
def test_shares_have_equal_steps_and_masks_are_named(plain) -> None:
    _, graphs = plain
    seen, steps = [], set()
    for rank in range(4):
        placement = Placement(rank, (0, 1, 2, 2), (0, 1, 2))
        mine = graphs[placement.machine]
        loader = ours.DataLoader(
            mine,
            split(mine, mine.from_global(SEEDS), placement=placement),
            ours.NeighborSampler([2]),
            batch_size=4,
            shuffle=True,
        )
        seen += [output for _, output, _ in loader]
        steps.add(len(loader))
        loader.close()
    assert len(steps) == 1 and torch.equal(torch.cat(seen).sort().values, SEEDS.sort().values)
    for indices in ("train", {"node": "train_mask"}, {"_N": "train"}):
        loader = ours.DataLoader(graphs[0], indices, ours.NeighborSampler([2]), batch_size=100)
        ((_, output, _),) = loader
        assert torch.equal(graphs[0].original_ids(output).sort().values, torch.arange(0, 120, 3))
        loader.close()


@pytest.mark.usefixtures("one_epoch")
def test_a_dgl_model_trains_on_blocks_from_parts(plain) -> None:
    _, (mine, *_) = plain
    layers = torch.nn.ModuleList([dgl.nn.SAGEConv(4, 8, "mean"), dgl.nn.SAGEConv(8, 2, "mean")])
    sampler = ours.NeighborSampler([3, 3], prefetch_node_feats=["x"], prefetch_labels=["t"])
    for _, output_nodes, blocks in ours.DataLoader(mine, mine.from_global(range(60)), sampler, batch_size=30):
        h = blocks[0].srcdata["x"]
        for layer, block in zip(layers, blocks, strict=True):
            h = layer(block, h)
        torch.nn.functional.cross_entropy(h, blocks[-1].dstdata["t"] % 2).backward()
        assert h.shape == (output_nodes.numel(), 2)
    assert all(parameter.grad is not None for parameter in layers.parameters())


@pytest.mark.parametrize(
    ("sampler", "options", "message"),
    [
        ({"mask": "w"}, {}, r"'w' .* must be a mask, bool \[num_edges\], got torch.float32"),
        ({"mask": "nothing"}, {}, "no edge type has an array 'nothing'"),
        ({"prob": "nothing"}, {}, "no edge type has an array 'nothing'"),
        ({"prefetch_node_feats": ["nothing"]}, {}, "prefetch_node_feats: 'node' has no 'nothing'"),
        ({"prefetch_edge_feats": ["x"]}, {}, "prefetch_edge_feats"),
        ({"fanouts": [{"likes": 2}]}, {}, "edge type 'likes' must be one of"),
        ({}, {"indices": torch.tensor([1])}, r"indices: .* graph.from_original\(ids\)"),
        ({}, {"indices": "train", "use_ddp": True}, r"gnnsys.split\(graph, 'train'\)"),
    ],
)
def test_what_cannot_be_done_says_so_early(plain, sampler: dict, options: dict, message: str) -> None:
    _, (mine, *_) = plain
    arguments: Any = {"indices": mine.from_global(range(5)), **options}
    with pytest.raises(ValueError, match=message):
        ours.DataLoader(mine, graph_sampler=ours.NeighborSampler(**{"fanouts": [2], **sampler}), **arguments)
    share = split(mine, mine.from_global(SEEDS), placement=Placement(0, (0,), (0, 0, 0)))
    with pytest.raises(ValueError, match="leave use_ddp away"):
        ours.DataLoader(mine, share, ours.NeighborSampler([2]), use_ddp=True)
