"""Weights of links: in every batch beside the links they were given for, in memory and on parts."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gnnsys.graph import EDGE, Graph
from gnnsys.loader import LinkNeighborLoader, NegativeSampling
from gnnsys.sampling import DistGraph
from tests.loader.sources import Source
from tests.loader.test_dist_links import assert_same_batches
from tests.sampling.machines import CITES, WRITES, homogeneous, machines, typed

pytestmark = pytest.mark.usefixtures("one_epoch")
Parted = tuple[Graph, DistGraph]


@pytest.fixture(scope="module")
def parted(tmp_path_factory) -> Iterator[Parted]:
    graph = homogeneous()
    with machines(graph, tmp_path_factory.mktemp("weights") / "p", 2) as graphs:
        yield graph, graphs[-1]


@pytest.fixture(scope="module")
def parted_types(tmp_path_factory) -> Iterator[Parted]:
    graph = typed()
    for number, edge_type in enumerate((WRITES, CITES)):
        graph.set_edge_data("how_much", torch.rand(graph.num_edges(edge_type)) + number, edge_type)
    with machines(graph, tmp_path_factory.mktemp("weights") / "p", 3, machine_of_part=[0, 1, 1]) as graphs:
        yield graph, graphs[0]


def check_weights(loader: LinkNeighborLoader, weights: torch.Tensor, negatives: int, num_links: int) -> None:
    """A link has its own weight, a negative of a binary pair has 1; every link comes once."""
    seen = []
    for batch in loader:
        seen.append(batch.input_id)
        expected = torch.cat([weights[batch.input_id], torch.ones(negatives * batch.input_id.numel())])
        assert torch.equal(batch.edge_label_weight, expected)
        labels = batch.edge_label_index if hasattr(batch, "edge_label_index") else batch.dst_pos_index
        assert labels.shape[-1] == expected.numel()
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(num_links))


def test_a_batch_has_the_weights_of_its_links_and_ones_for_negatives(parted: Parted) -> None:
    graph, _ = parted
    links = graph.edge_index()[:, ::30]
    weights = torch.rand(links.shape[1])
    options: dict[str, Any] = {
        "edge_label_index": links,
        "edge_label_weight": weights,
        "batch_size": 9,
        "shuffle": True,
    }
    for neg_sampling, negatives in ((None, 0), ("binary", 1), (("binary", 2), 2), (("triplet", 3), 0)):
        loader = LinkNeighborLoader(graph, [4], neg_sampling=neg_sampling, **options)
        check_weights(loader, weights, negatives, weights.numel())
        assert (
            loader.state_dict()
            != LinkNeighborLoader(
                graph, [4], neg_sampling=neg_sampling, **options | {"edge_label_weight": weights + 1}
            ).state_dict()
        )


def test_an_array_of_the_edges_weighs_the_links_that_are_edges(parted: Parted) -> None:
    """In memory and on parts, all edges or a share of them."""
    graph, mine = parted
    by_edge = graph.edge_data[EDGE]["w"]
    whole = {"edge_label_weight": "w", "neg_sampling": "binary", "batch_size": 300, "shuffle": True}
    check_weights(LinkNeighborLoader(graph, [3], **whole), by_edge, 1, graph.num_edges())
    every = torch.arange(graph.num_edges())
    check_weights(LinkNeighborLoader(mine, [3], **whole), by_edge[mine.original_edge_ids(every)], 1, every.numel())
    ids = torch.arange(100, 160)
    share = SimpleNamespace(ids=ids, type=EDGE, largest=61)
    for of, original in ((graph, ids), (mine, mine.original_edge_ids(ids))):
        named = LinkNeighborLoader(of, [3], edge_label_index=share, **whole | {"batch_size": 16})
        check_weights(named, by_edge[original], 1, 60)


def test_weights_are_the_same_on_parts(parted: Parted) -> None:
    graph, mine = parted
    links = graph.edge_index()[:, ::30]
    names = mine.from_original(links)
    for neg_sampling in ("binary", ("triplet", 2)):
        options = {"batch_size": 9, "neg_sampling": neg_sampling, "edge_label_weight": torch.rand(links.shape[1])}
        theirs = LinkNeighborLoader(graph, [4, 3], edge_label_index=links, **options)
        assert_same_batches(LinkNeighborLoader(mine, [4, 3], edge_label_index=names, **options), theirs, mine)


def test_links_of_several_types_have_weights_by_type_where_they_were_given(parted_types: Parted) -> None:
    graph, mine = parted_types
    for of in (graph, mine):
        loader = LinkNeighborLoader(
            of, [3], edge_label_index={WRITES: None, CITES: None}, edge_label_weight={CITES: "how_much"},
            neg_sampling={WRITES: "binary", CITES: NegativeSampling("triplet", 2)}, batch_size=200, shuffle=True,
        )  # fmt: skip
        by_edge = graph.edge_data[CITES]["how_much"]
        for batch in loader:
            edges = batch[CITES].input_id if of is graph else mine.original_edge_ids(batch[CITES].input_id, CITES)
            assert torch.equal(batch[CITES].edge_label_weight, by_edge[edges])
            assert "edge_label_weight" not in batch[WRITES]


def with_weight(graph: Graph, edge: int, weight: float) -> Graph:
    """The graph with one bad weight among its edges."""
    by_edge = torch.ones(graph.num_edges())
    by_edge[edge] = weight
    graph.set_edge_data("bad", by_edge)
    return graph


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), -0.5])
def test_a_weight_that_no_loss_can_use_is_refused_with_its_link(bad: float) -> None:
    graph = with_weight(homogeneous(), 47, bad)
    weights = torch.tensor([1.0, 0.0, bad, bad])
    told = f"must be finite and >= 0, got {bad} at link"
    with pytest.raises(ValueError, match=f"^edge_label_weight {told} 2"):
        LinkNeighborLoader(graph, [2], edge_label_index=graph.edge_index()[:, :4], edge_label_weight=weights)
    with pytest.raises(ValueError, match=f"^edge_label_weight {told} 2"):
        LinkNeighborLoader(
            graph, [2], edge_label_index={EDGE: graph.edge_index()[:, :4]}, edge_label_weight={EDGE: weights}
        )
    with pytest.raises(ValueError, match=f"^edge_label_weight: 'bad' {told} 47"):
        LinkNeighborLoader(graph, [2], edge_label_weight="bad")


def test_a_bad_weight_of_an_edge_is_refused_where_a_share_has_that_edge(tmp_path) -> None:
    """Edges of other shares may have none: they are not read."""
    graph = with_weight(homogeneous(), 47, float("nan"))
    with machines(graph, tmp_path / "p", 2) as graphs:
        edge = int((graphs[-1].original_edge_ids(torch.arange(graph.num_edges())) == 47).nonzero())
        for of, bad in ((graph, 47), (graphs[-1], edge)):
            without = torch.arange(graph.num_edges())[torch.arange(graph.num_edges()) != bad][:50]
            options = {"edge_label_weight": "bad", "batch_size": 8}
            share = SimpleNamespace(ids=without, type=EDGE, largest=51)
            loader = LinkNeighborLoader(of, [2], edge_label_index=share, **options)
            assert sum(batch.edge_label_weight.sum() for batch in loader) == 50
            share = SimpleNamespace(ids=torch.cat([without, torch.tensor([bad])]), type=EDGE, largest=51)
            with pytest.raises(ValueError, match=r"edge_label_weight: .bad. must be finite .*, got nan at link 50"):
                list(LinkNeighborLoader(of, [2], edge_label_index=share, **options))


def test_weights_may_be_a_source_of_rows() -> None:
    graph = homogeneous()
    weights = torch.rand(graph.num_edges())
    graph.set_edge_data("far", Source(weights[:, None]))
    loader = LinkNeighborLoader(graph, [3], edge_label_weight="far", batch_size=300, shuffle=True)
    check_weights(loader, weights, 0, graph.num_edges())


def test_what_are_no_weights_is_refused_in_one_line(parted: Parted, parted_types: Parted) -> None:
    graph, _ = parted
    links = graph.edge_index()[:, :10]
    for given, told in (
        (torch.ones(9), "edge_label_weight must have one entry per link, 10, got \\[9\\]"),
        (torch.ones(10, dtype=torch.int64), "must be floating point numbers, got torch.int64"),
        ("w", "'w' is by edge, and links were given by their ends"),
        ("v", "have no array 'v'"),
        ({EDGE: torch.ones(10)}, "edge_label_weight is by edge type, and edge_label_index is not"),
    ):
        with pytest.raises(ValueError, match=told):
            LinkNeighborLoader(graph, [2], edge_label_index=links, edge_label_weight=given)
    with pytest.raises(ValueError, match="edge_label_weight must be a dict by edge type"):
        LinkNeighborLoader(parted_types[0], [2], edge_label_index={WRITES: None}, edge_label_weight="how_much")
