"""Loaders of links and subgraphs on parts against the same loaders on the whole graph, batch by batch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from gnnsys.graph import EDGE, NODE
from gnnsys.loader import LinkNeighborLoader, NeighborLoader
from gnnsys.loader.batch import Batch
from gnnsys.sampling import DistGraph, sample_from_blocks, sample_neighbors, to_block
from tests.sampling.machines import WRITES, homogeneous, machines, typed
from tests.seeds.test_shares import Seeds

pytestmark = pytest.mark.usefixtures("one_epoch")
LINKS = {
    "positives alone": {},
    "binary": {"neg_sampling": "binary"},
    "triplets": {"neg_sampling": ("triplet", 2)},
    "half as many negatives": {"neg_sampling": {"mode": "binary", "amount": 0.5}, "exclude_supervision": False},
    "weighted": {"neg_sampling": "binary", "weight_attr": "w"},
    "disjoint": {"neg_sampling": "binary", "disjoint": True},
    "blocks": {"neg_sampling": "binary", "expand": "frontier"},
    "induced": {"neg_sampling": "binary", "subgraph_type": "induced"},
    "node times": {"neg_sampling": "binary", "time_attr": "t"},
    "edge times": {"neg_sampling": ("triplet", 1), "time_attr": "et", "temporal_strategy": "last"},
}


def assert_same_batch(ours: Batch, theirs: Batch, graph: DistGraph) -> None:
    """Every value of the batch, ids in original ids, rows bit for bit."""
    for t, store in theirs.nodes.items():
        assert list(ours.nodes[t]) == list(store)
        for name, value in store.items():
            mine = graph.original_ids(ours.nodes[t][name], t) if name == "n_id" else ours.nodes[t][name]
            assert same(mine, value), (t, name)
    for t, store in theirs.edges.items():
        assert list(ours.edges[t]) == list(store)
        for name, value in store.items():
            mine = graph.original_edge_ids(ours.edges[t][name], t) if name == "e_id" else ours.edges[t][name]
            assert same(mine, value), (t, name)
    assert len(ours.blocks) == len(theirs.blocks)
    for a, b in zip(ours.blocks, theirs.blocks, strict=True):
        assert a.num_src == b.num_src and a.num_dst == b.num_dst
        assert all(same(a.csc[t].indices, b.csc[t].indices) and same(a.csc[t].indptr, b.csc[t].indptr) for t in b.csc)


def same(mine: object, value: object) -> bool:
    if isinstance(value, Tensor):
        return isinstance(mine, Tensor) and mine.dtype == value.dtype and torch.equal(mine, value)
    return mine == value


def assert_same_batches(ours: object, theirs: object, graph: DistGraph, at_least: int = 2) -> None:
    mine, expected = list(ours), list(theirs)  # type: ignore[call-overload]
    assert len(mine) == len(expected) >= at_least
    for a, b in zip(mine, expected, strict=True):
        assert_same_batch(a, b, graph)


@pytest.fixture(scope="module")
def parted(tmp_path_factory):
    graph = homogeneous()
    with machines(graph, tmp_path_factory.mktemp("parts") / "p", 2) as graphs:
        yield graph, graphs[-1]


@pytest.fixture(scope="module")
def parted_types(tmp_path_factory):
    graph = typed()
    with machines(graph, tmp_path_factory.mktemp("parts") / "p", 4, machine_of_part=[0, 1, 2, 1]) as graphs:
        yield graph, graphs[1]


@pytest.mark.parametrize("kind", LINKS)
def test_batches_of_links_are_those_of_one_process(parted, kind: str) -> None:
    graph, mine = parted
    links = graph.edge_index()[:, ::45]
    options = {"batch_size": 10, "shuffle": True, "seed": 5, **LINKS[kind]}
    if "time_attr" in options:
        options["edge_label_time"] = 5 + torch.arange(links.shape[1]) % 20
    theirs = LinkNeighborLoader(graph, [4, 3], edge_label_index=links, **options)
    ours = LinkNeighborLoader(mine, [4, 3], edge_label_index=mine.from_original(links), **options)
    assert_same_batches(ours, theirs, mine)


@pytest.mark.parametrize("kind", LINKS)
def test_batches_of_typed_links_are_those_of_one_process(parted_types, kind: str) -> None:
    graph, mine = parted_types
    links = graph.edge_index(WRITES)[:, ::25]
    options = {"batch_size": 6, **LINKS[kind]}
    if "time_attr" in options:
        options["edge_label_time"] = 5 + torch.arange(links.shape[1]) % 15
    names = mine.from_original(links, WRITES)
    theirs = LinkNeighborLoader(graph, [4, 3], edge_label_index=(WRITES, links), **options)
    ours = LinkNeighborLoader(mine, [4, 3], edge_label_index=(WRITES, names), **options)
    assert_same_batches(ours, theirs, mine)


@pytest.mark.parametrize("given", ["none", "type", "share"])
def test_edges_of_the_graph_are_looked_up_batch_by_batch(parted, given: str) -> None:
    graph, mine = parted
    ids = torch.arange(100, 160) if given == "share" else torch.arange(900)
    share = SimpleNamespace(ids=ids, type=EDGE, largest=61)
    chosen = {"none": None, "type": EDGE, "share": share}[given]
    options = {"batch_size": 200 if given != "share" else 16, "neg_sampling": "binary"}
    links = graph.edge_index()[:, mine.original_edge_ids(ids)]
    theirs_given = (
        links if given != "share" else SimpleNamespace(ids=mine.original_edge_ids(ids), type=EDGE, largest=61)
    )
    theirs = LinkNeighborLoader(graph, [3], edge_label_index=theirs_given, **options)
    ours = LinkNeighborLoader(mine, [3], edge_label_index=chosen, **options)
    assert_same_batches(ours, theirs, mine, at_least=4)


def test_a_share_of_nodes_is_not_a_share_of_links(parted) -> None:
    _, mine = parted
    with pytest.raises(ValueError, match="the share is of 'node'"):
        LinkNeighborLoader(mine, [3], edge_label_index=SimpleNamespace(ids=torch.arange(3), type=NODE, largest=3))


def test_labels_belong_to_the_links_as_given(parted) -> None:
    graph, mine = parted
    links, labels = graph.edge_index()[:, :40], torch.arange(40) % 3
    names = mine.from_original(links)
    options = {"edge_label": labels, "batch_size": 16, "shuffle": True}
    theirs = LinkNeighborLoader(graph, [3], edge_label_index=links, **options)
    assert_same_batches(LinkNeighborLoader(mine, [3], edge_label_index=names, **options), theirs, mine)


@pytest.mark.parametrize("subgraph_type", ["directional", "bidirectional", "induced"])
def test_subgraphs_are_those_of_one_process(parted, subgraph_type: str) -> None:
    graph, mine = parted
    seeds = torch.arange(0, 120, 4)
    options = {"batch_size": 11, "subgraph_type": subgraph_type}
    theirs = NeighborLoader(graph, [6, 5], input_nodes=seeds, **options)
    ours = NeighborLoader(mine, [6, 5], input_nodes=mine.from_original(seeds), **options)
    assert_same_batches(ours, theirs, mine)


@pytest.mark.parametrize("subgraph_type", ["induced"])
def test_typed_subgraphs_are_those_of_one_process(parted_types, subgraph_type: str) -> None:
    graph, mine = parted_types
    seeds = torch.arange(0, 90, 5)
    options = {"batch_size": 7, "subgraph_type": subgraph_type}
    theirs = NeighborLoader(graph, [6, 5], input_nodes=("paper", seeds), **options)
    ours = NeighborLoader(mine, [6, 5], input_nodes=mine.from_original(seeds, "paper"), **options)
    assert_same_batches(ours, theirs, mine)


def test_merged_edges_of_parts_without_edge_ids_are_those_of_one_process(tmp_path: Path) -> None:
    with machines(homogeneous(30, 400), tmp_path / "p", 3, edge_ids=False) as graphs:
        mine, seeds = graphs[0], torch.arange(0, 30, 3)
        graph = mine.parts.merge()  # edges numbered by position, as parts without edge ids know them
        options = {"batch_size": 5, "subgraph_type": "bidirectional"}
        theirs = NeighborLoader(graph, [6, 5], input_nodes=seeds, **options)
        ours = NeighborLoader(mine, [6, 5], input_nodes=mine.from_original(seeds), **options)
        for a, b in zip(list(ours), list(theirs), strict=True):
            assert torch.equal(a.edge_index, b.edge_index)
            assert torch.equal(a.number, b.number)  # rows of the chosen edges
        with pytest.raises(ValueError, match="without edge ids"):
            mine.original_edge_ids(torch.arange(3))


def two_hops(graph, seeds, key):
    """A sampler as a user writes one."""
    blocks, nodes = [], seeds
    for hop, fanout in enumerate((4, 3)):
        block, nodes = to_block(sample_neighbors(graph, nodes, fanout, key=key, hop=hop), nodes)
        blocks.insert(0, block)
    return sample_from_blocks(graph, blocks, nodes, seeds)


def test_a_users_own_sampler_is_the_same_on_parts_and_is_what_ours_does(parted_types) -> None:
    graph, mine = parted_types
    seeds = torch.arange(0, 90, 7)
    options = {"batch_size": 5, "shuffle": True}
    names = mine.from_original(seeds, "paper")
    theirs = list(NeighborLoader(graph, input_nodes=("paper", seeds), sampler=two_hops, **options))
    ours = NeighborLoader(graph, [4, 3], input_nodes=("paper", seeds), expand="frontier", **options)
    assert_same_batches(NeighborLoader(mine, input_nodes=names, sampler=two_hops, **options), theirs, mine)
    for a, b in zip(theirs, ours, strict=True):
        assert all(torch.equal(a.nodes[t]["n_id"], b.nodes[t]["n_id"]) for t in graph.node_types)
        for left, right in zip(a.blocks, b.blocks, strict=True):
            for t in left.csc:
                assert torch.equal(left.csc[t].indptr, right.csc[t].indptr)
                assert torch.equal(left.csc[t].indices, right.csc[t].indices)
                assert torch.equal(left.csc[t].edge_ids, right.csc[t].edge_ids)


def test_neighbours_of_a_user_are_the_samplers(parted) -> None:
    graph, mine = parted
    nodes = torch.tensor([3, 70, 3])
    found, there = sample_neighbors(graph, nodes, 4), mine.sample_neighbors(mine.global_ids(nodes), 4)
    assert torch.equal(found.indptr, there.indptr)
    assert torch.equal(mine.original_ids(there.ids), found.ids)
    assert torch.equal(mine.original_edge_ids(there.edge_ids), found.edge_ids)
    src, dst = found.edges()
    assert torch.equal(torch.stack([src, dst]), graph.edge_index()[:, found.edge_ids])
    block, source = to_block(found)
    assert torch.equal(source[NODE][block.csc[EDGE].indices], src)
    with pytest.raises(ValueError, match=r"must be in \[0, 120\)"):
        mine.sample_neighbors(torch.tensor([120]), 4)
    with pytest.raises(ValueError, match="fanout must be"):
        mine.sample_neighbors(nodes, -2)


def test_an_empty_batch_of_triplets_has_the_shape_of_a_full_one(tmp_path: Path) -> None:
    with machines(homogeneous(), tmp_path / "p", 2) as graphs:
        share = Seeds(torch.empty(0, dtype=torch.int64), EDGE, 3)  # type: ignore[arg-type]
        for amount, shape in ((2, [0, 2]), (1, [0])):
            options = {"neg_sampling": ("triplet", amount), "batch_size": 2}
            loader = LinkNeighborLoader(graphs[0], [2], edge_label_index=share, **options)
            assert [list(batch.dst_neg_index.shape) for batch in loader] == [shape] * 2
