"""No link is seen by the model that is asked for it: on a graph whose links nothing else tells, scores are at chance.

Nodes have random rows and every node the same number of random neighbours. A node's output is its row and those of its
in-neighbours, so two nodes are alike if, and only if, a message passes between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gnnsys.graph import EDGE, Graph
from gnnsys.loader import (
    Batch,
    HardNegatives,
    JointNegatives,
    LinkNeighborLoader,
    LocalNegatives,
    NegativeSampling,
    ScoredNegatives,
)
from gnnsys.sampling import DistGraph
from tests.sampling.machines import machines

NODES, DEGREE, NEGATIVES = 600, 3, 9
CHANCE = sum(1 / rank for rank in range(1, NEGATIVES + 2)) / (NEGATIVES + 1)
LIKES, REV_LIKES = ("user", "likes", "item"), ("item", "rev_likes", "user")


def random_links(seed: int = 0) -> Tensor:
    """DEGREE links from every node, and as many to every node."""
    g = torch.Generator().manual_seed(seed)
    return torch.cat([torch.stack([torch.arange(NODES), torch.randperm(NODES, generator=g)]) for _ in range(DEGREE)], 1)


def rows(seed: int) -> Tensor:
    return torch.randn(NODES, 128, generator=torch.Generator().manual_seed(seed))


LINKS = random_links()


def by_number(ends: Tensor, nodes: Tensor) -> Tensor:
    return ((ends[:, None] * 31 + nodes[None] * 17) % 101).float()


KINDS: dict[str, Any] = {
    "uniform": "uniform",
    "degree": "degree",
    "joint": "joint",
    "in_batch": "in_batch",
    "local": LocalNegatives(),
    "local_joint": JointNegatives(LocalNegatives()),
    "hard": HardNegatives(torch.randint(NODES, (LINKS.shape[1], 20), generator=torch.Generator().manual_seed(4))),
    "scored": ScoredNegatives(by_number, 60),
}


@pytest.fixture(scope="module")
def graph() -> Graph:
    """Every link with its reverse; a third of the links is held out."""
    held_out = torch.arange(LINKS.shape[1]) % 3 == 0
    masks = {"train_mask": ~held_out.repeat(2)}
    return Graph.from_edge_index(torch.cat([LINKS, LINKS.flip(0)], 1), NODES, {"x": rows(1)}, masks)


@pytest.fixture(scope="module")
def parted(graph: Graph, tmp_path_factory) -> Iterator[DistGraph]:
    with machines(graph, tmp_path_factory.mktemp("leaks") / "p", 3, machine_of_part=[0, 1, 1]) as (mine, _):
        yield mine


def outputs(batch: Batch) -> Tensor:
    src, dst = batch.edge_index
    return torch.nn.functional.normalize(batch.x.index_add(0, dst, batch.x[src]))


def reciprocal_ranks(src: Tensor, dst: Tensor, negatives: Tensor) -> Tensor:
    """Of the rows of links' ends and [num_links, NEGATIVES] others; a link stands in the middle of its ties."""
    positive, negative = (src * dst).sum(1, keepdim=True), (src[:, None] * negatives).sum(2)
    return 1 / (1 + (negative > positive).sum(1) + (negative == positive).sum(1) / 2)


def mrr(graph: Graph | DistGraph, links: Tensor, kind: Any, **options: Any) -> float:
    given = graph.from_original(links)
    negatives = NegativeSampling("triplet", NEGATIVES, kind=kind)
    loader = LinkNeighborLoader(
        graph,
        [-1],
        edge_label_index=given,
        neg_sampling=negatives,
        batch_size=300,
        shuffle=True,
        num_threads=0,
        **options,
    )
    found = []
    for batch in loader:
        out = outputs(batch)
        found.append(reciprocal_ranks(out[batch.src_index], out[batch.dst_pos_index], out[batch.dst_neg_index]))
    return float(torch.cat(found).mean())


@pytest.mark.parametrize("kind", KINDS)
def test_links_are_at_chance_for_every_kind_of_negative(graph: Graph, parted: DistGraph, kind: str) -> None:
    for of in (graph, parted):
        assert abs(mrr(of, LINKS, KINDS[kind]) - CHANCE) < 0.04
    assert mrr(graph, LINKS, KINDS[kind], exclude_supervision=False) > 0.9  # the test can fail


def test_held_out_links_are_at_chance_where_messages_pass_a_mask(graph: Graph, parted: DistGraph) -> None:
    held_out = LINKS[:, ::3]
    for of in (graph, parted):
        options = {"exclude_supervision": False}
        assert abs(mrr(of, held_out, "joint", edge_mask="train_mask", **options) - CHANCE) < 0.06
        assert mrr(of, held_out, "joint", **options) > 0.9
        assert mrr(of, LINKS[:, 1::3], "joint", edge_mask="train_mask", **options) > 0.9  # messages are not all gone


def test_a_reverse_type_leaks_unless_it_is_excluded(tmp_path: Path) -> None:
    index = {LIKES: LINKS, REV_LIKES: LINKS.flip(0)}
    graph = Graph.from_edge_indices(
        index, {"user": NODES, "item": NODES}, {"user": {"x": rows(1)}, "item": {"x": rows(2)}}
    )

    def score(of: Graph | DistGraph, exclude: bool | str) -> float:
        given = of.from_original(LINKS, LIKES)
        options = {"neg_sampling": NegativeSampling("triplet", NEGATIVES), "batch_size": 300, "num_threads": 0}
        found = []
        for batch in LinkNeighborLoader(
            of, [-1], edge_label_index=(LIKES, given), exclude_supervision=exclude, **options
        ):
            user, item = batch["user"], batch["item"]
            src, dst = batch[REV_LIKES]["edge_index"]
            users = torch.nn.functional.normalize(user["x"].index_add(0, dst, item["x"][src]))
            src, dst = batch[LIKES]["edge_index"]
            items = torch.nn.functional.normalize(item["x"].index_add(0, dst, user["x"][src]))
            others = items[item["dst_neg_index"]]
            found.append(reciprocal_ranks(users[user["src_index"]], items[item["dst_pos_index"]], others))
        return float(torch.cat(found).mean())

    with machines(graph, tmp_path / "p", 2) as (mine, _):
        for of in (graph, mine):
            assert abs(score(of, True) - CHANCE) < 0.04 and abs(score(of, "reverse") - CHANCE) < 0.04
            assert score(of, "self") > 0.7 and score(of, False) > 0.9


def test_a_reverse_that_is_not_there_cannot_be_excluded() -> None:
    graph = Graph.from_edge_indices({LIKES: LINKS}, {"user": NODES, "item": NODES})
    with pytest.raises(ValueError, match=r"has no reverse type .'item', 'rev_likes', 'user'.*reverse_edge_type"):
        LinkNeighborLoader(graph, [2], edge_label_index=LIKES, exclude_supervision="reverse")
    for given, message in (("links", "must be True, False"), ("self", "leave reverse_edge_type away")):
        with pytest.raises(ValueError, match=message):
            LinkNeighborLoader(graph, [2], edge_label_index=LIKES, exclude_supervision=given, reverse_edge_type=LIKES)
    assert len(list(LinkNeighborLoader(graph, [2], edge_label_index=LIKES, batch_size=900))) == 2


def test_a_reverse_type_that_the_user_names_needs_a_mask_too() -> None:
    liked_by = ("item", "liked_by", "user")
    graph = Graph.from_edge_indices({LIKES: LINKS, liked_by: LINKS.flip(0)}, {"user": NODES, "item": NODES})
    mask = torch.ones(LINKS.shape[1], dtype=torch.bool)
    graph.set_edge_data("train_mask", mask, LIKES)
    options = {"edge_label_index": LIKES, "edge_mask": "train_mask", "reverse_edge_type": liked_by}
    with pytest.raises(ValueError, match=r"'liked_by', 'user'\) has none.* one of all true"):
        LinkNeighborLoader(graph, [2], **options)
    graph.set_edge_data("train_mask", mask, liked_by)
    LinkNeighborLoader(graph, [2], **options)


def test_a_graph_seen_through_a_mask_is_the_graph_of_these_edges(graph: Graph, parted: DistGraph) -> None:
    kept = graph.edge_data[EDGE]["train_mask"].nonzero().view(-1)
    alone = Graph.from_edge_index(graph.edge_index()[:, kept], NODES, {"x": graph.node_data["node"]["x"]})
    names = parted.from_original(LINKS)
    options = {"batch_size": 500, "neg_sampling": "binary", "num_threads": 0}
    theirs = list(LinkNeighborLoader(alone, [2, 2], edge_label_index=LINKS, **options))
    ours = list(LinkNeighborLoader(graph, [2, 2], edge_label_index=LINKS, edge_mask="train_mask", **options))
    there = list(LinkNeighborLoader(parted, [2, 2], edge_label_index=names, edge_mask="train_mask", **options))
    for a, b, c in zip(ours, theirs, there, strict=True):
        assert torch.equal(a.n_id, b.n_id) and torch.equal(parted.original_ids(c.n_id), b.n_id)
        assert torch.equal(a.edge_index, b.edge_index) and torch.equal(c.edge_index, b.edge_index)
        assert torch.equal(a.e_id, kept[b.e_id]) and torch.equal(parted.original_edge_ids(c.e_id), kept[b.e_id])
    for wrong, message in (("trian_mask", "did you mean 'train_mask'"), (3, "edge_mask must be the name")):
        for of in (graph, parted):
            with pytest.raises(ValueError, match=message):
                LinkNeighborLoader(of, [2], edge_label_index=EDGE, edge_mask=wrong)
    with pytest.raises(ValueError, match="does not go with edge_mask"):
        LinkNeighborLoader(graph, [2], edge_mask="train_mask", subgraph_type="induced")
