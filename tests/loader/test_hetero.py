"""Loaders on a graph of several node and edge types."""

from __future__ import annotations

import pytest
import torch

from gnnsys.graph import Graph
from gnnsys.loader import LinkNeighborLoader, NeighborLoader

WRITES, WRITTEN, CITES = ("author", "writes", "paper"), ("paper", "rev_writes", "author"), ("paper", "cites", "paper")
SIZES = {"paper": 120, "author": 50, "venue": 4}


@pytest.fixture(scope="module")
def edges() -> dict:
    stream = torch.Generator().manual_seed(0)
    pairs = torch.randperm(50 * 120, generator=stream)[:400]
    writes = torch.stack([pairs // 120, pairs % 120])
    return {WRITES: writes, WRITTEN: writes.flip(0), CITES: torch.randint(120, (2, 500), generator=stream)}


@pytest.fixture(scope="module")
def graph(edges: dict) -> Graph:
    nodes = {t: {"x": torch.arange(n).float()[:, None]} for t, n in SIZES.items()}
    return Graph.from_edge_indices(edges, SIZES, nodes, {CITES: {"when": torch.arange(500)}})


def test_every_type_is_in_the_batch_with_its_own_rows(graph: Graph, edges: dict) -> None:
    for batch in NeighborLoader(graph, [3, 2], input_nodes="paper", batch_size=32, shuffle=True):
        assert batch.node_types == list(SIZES) and batch.edge_types == list(edges)
        for t in SIZES:
            assert torch.equal(batch[t].x[:, 0], batch[t].n_id.float())
            assert sum(batch[t].num_sampled_nodes) == batch[t].n_id.numel()
        for t, index in edges.items():
            ends = torch.stack([batch[t[0]].n_id[batch[t].edge_index[0]], batch[t[2]].n_id[batch[t].edge_index[1]]])
            assert torch.equal(ends, index[:, batch[t].e_id])
        assert torch.equal(batch[CITES].when, batch[CITES].e_id)
        assert batch["paper"].batch_size == batch.batch_size == batch["paper"].num_sampled_nodes[0]
        assert batch.input_type == "paper"
        assert list(batch.x_dict) == list(SIZES)
        assert list(batch.edge_index_dict) == list(edges)
        assert batch["venue"].n_id.numel() == 0


def test_fanouts_may_differ_by_edge_type_and_zero_means_none(graph: Graph) -> None:
    fanouts = {WRITES: [2, 0], WRITTEN: [0, 3], CITES: [1, -1]}
    batch = next(iter(NeighborLoader(graph, fanouts, input_nodes=("paper", [0, 1, 2, 3]), batch_size=4)))
    assert batch[WRITES].num_sampled_edges[0] > 0 and batch[WRITES].num_sampled_edges[1] == 0
    assert batch[WRITTEN].num_sampled_edges[0] == 0
    assert int(torch.bincount(batch[WRITES].edge_index[1]).max()) <= 2


def test_supervision_edges_are_kept_out_with_those_of_the_reverse_type(graph: Graph, edges: dict) -> None:
    options = {"edge_label_index": WRITES, "batch_size": 40, "shuffle": True}
    named = LinkNeighborLoader(graph, [-1, -1], reverse_edge_type=WRITTEN, **options)
    found = LinkNeighborLoader(graph, [-1, -1], **options)  # rev_writes goes by its name
    for batch in [*named, *found]:
        links = set(map(tuple, edges[WRITES][:, batch.input_id].t().tolist()))
        assert torch.equal(batch["author"].n_id[batch.edge_label_index[0]], edges[WRITES][0, batch.input_id])
        assert torch.equal(batch["paper"].n_id[batch[WRITES].edge_label_index[1]], edges[WRITES][1, batch.input_id])
        assert not links & set(map(tuple, edges[WRITES][:, batch[WRITES].e_id].t().tolist()))
        assert not links & set(map(tuple, edges[WRITES][:, batch[WRITTEN].e_id].t().tolist()))
    batch = next(iter(LinkNeighborLoader(graph, [-1], exclude_supervision=False, **options)))
    assert set(batch.input_id.tolist()) <= set(batch[WRITTEN].e_id.tolist())


@pytest.mark.parametrize("disjoint", [False, True])
def test_triplets_sit_in_the_stores_of_their_node_types(graph: Graph, edges: dict, disjoint: bool) -> None:
    loader = LinkNeighborLoader(
        graph,
        [2],
        edge_label_index=(WRITES, edges[WRITES][:, :70]),
        neg_sampling="triplet",
        disjoint=disjoint,
        batch_size=20,
    )
    for batch in loader:
        src, dst = edges[WRITES][:, batch[WRITES].input_id]
        assert torch.equal(batch["author"].n_id[batch["author"].src_index], src)
        assert torch.equal(batch["paper"].n_id[batch["paper"].dst_pos_index], dst)
        assert int(batch["paper"].dst_neg_index.max()) < batch["paper"].num_sampled_nodes[0]
        if disjoint:
            at = [batch["author"].batch[batch["author"].src_index]]
            at += [batch["paper"].batch[batch["paper"][name]] for name in ("dst_pos_index", "dst_neg_index")]
            assert all(torch.equal(owner, torch.arange(src.numel())) for owner in at)


def test_bidirectional_joins_a_type_with_its_reverse(graph: Graph) -> None:
    options = {"input_nodes": "paper", "batch_size": 20}
    plain = next(iter(NeighborLoader(graph, [3, 2], **options)))
    batch = next(iter(NeighborLoader(graph, [3, 2], subgraph_type="bidirectional", **options)))
    forward = set(map(tuple, plain[WRITES].edge_index.t().tolist()))
    backward = {(a, p) for p, a in plain[WRITTEN].edge_index.t().tolist()}
    assert set(map(tuple, batch[WRITES].edge_index.t().tolist())) == forward | backward
    assert set(map(tuple, batch[WRITTEN].edge_index.flip(0).t().tolist())) == forward | backward
    assert "e_id" not in batch[WRITES]


def test_moving_a_batch_keeps_its_shape(graph: Graph) -> None:
    batch = next(iter(NeighborLoader(graph, [3], input_nodes="author", batch_size=8)))
    moved = batch.to("meta")
    assert moved["paper"].x.device.type == "meta"
    assert moved["paper"].x.shape == batch["paper"].x.shape
    assert moved["author"].num_sampled_nodes == batch["author"].num_sampled_nodes
    assert "venue" in repr(batch)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_nodes": None}, "node type"),
        ({"input_nodes": "journal"}, "journal"),
        ({"input_nodes": ("paper", [120])}, "input_nodes"),
        ({"input_nodes": "paper", "num_neighbors": {WRITES: [1]}}, "num_neighbors"),
        ({"input_nodes": "paper", "num_neighbors": {("a", "b", "c"): [1]}}, "does not exist"),
        (
            {"input_nodes": "paper", "num_neighbors": {WRITES: [1], WRITTEN: [1], CITES: [1, 2]}},
            "hops must be the same",
        ),
    ],
)
def test_bad_arguments_are_refused_by_name(graph: Graph, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NeighborLoader(graph, **{"num_neighbors": [2], **arguments})
