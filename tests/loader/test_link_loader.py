"""gnnsys.LinkNeighborLoader: links, negatives, and that a batch never sees its own supervision edges."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from gnnsys.graph import Graph
from gnnsys.loader import LinkNeighborLoader, NegativeSampling
from gnnsys.loader.weighted_negatives import NodeDraw

NUM_NODES, NUM_EDGES = 200, 1500


@pytest.fixture(scope="module")
def edge_index() -> Tensor:
    """No parallel edges, half of the edges with their reverse."""
    pairs = torch.randperm(NUM_NODES * NUM_NODES, generator=torch.Generator().manual_seed(0))[: NUM_EDGES // 2]
    forward = torch.stack([pairs // NUM_NODES, pairs % NUM_NODES])
    return torch.cat([forward, forward.flip(0)], dim=1).unique(dim=1)


@pytest.fixture(scope="module")
def graph(edge_index: Tensor) -> Graph:
    return Graph.from_edge_index(edge_index, NUM_NODES, {"y": torch.arange(NUM_NODES)})


def ends(batch) -> tuple[Tensor, Tensor]:
    return tuple(batch.n_id[batch.edge_label_index])


def message_pairs(batch) -> set[tuple[int, int]]:
    return set(map(tuple, batch.n_id[batch.edge_index].t().tolist()))


@pytest.mark.parametrize("disjoint", [False, True])
def test_links_are_found_again_by_their_local_ids(graph: Graph, edge_index: Tensor, disjoint: bool) -> None:
    loader = LinkNeighborLoader(graph, [3, 2], batch_size=64, shuffle=True, disjoint=disjoint)
    seen = []
    for batch in loader:
        assert torch.equal(torch.stack(ends(batch)), edge_index[:, batch.input_id])
        assert torch.equal(batch.n_id[batch.edge_index], edge_index[:, batch.e_id])
        assert "edge_label" not in batch
        assert "batch_size" not in batch
        seen.append(batch.input_id)
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(edge_index.shape[1]))


@pytest.mark.parametrize("subgraph_type", ["directional", "bidirectional", "induced"])
def test_supervision_edges_and_their_reverses_are_not_messages(graph: Graph, subgraph_type: str) -> None:
    options = {"batch_size": 40, "subgraph_type": subgraph_type, "neg_sampling": "binary"}
    leaked = 0
    for batch in LinkNeighborLoader(graph, [-1, -1], **options):
        positive = batch.n_id[batch.edge_label_index[:, : batch.input_id.numel()]]
        links = set(map(tuple, positive.t().tolist()))
        assert not message_pairs(batch) & (links | {(b, a) for a, b in links})
        assert batch.num_edges > 0
    for batch in LinkNeighborLoader(graph, [-1, -1], exclude_supervision=False, **options):
        leaked += len(message_pairs(batch) & set(map(tuple, batch.n_id[batch.edge_label_index].t().tolist())))
    assert leaked > graph.num_edges() // 2


def test_supervision_edges_are_excluded_in_time_order_too(edge_index: Tensor) -> None:
    time = torch.arange(edge_index.shape[1]).flip(0)
    graph = Graph.from_edge_index(edge_index, NUM_NODES, edge_data={"time": time})
    loader = LinkNeighborLoader(
        graph, [-1, -1], batch_size=32, time_attr="time", edge_label_time=torch.full_like(time, NUM_EDGES)
    )
    for batch in loader:
        links = set(map(tuple, torch.stack(ends(batch)).t().tolist()))
        assert not message_pairs(batch) & (links | {(b, a) for a, b in links})
        assert batch.num_edges > 0


@pytest.mark.parametrize(("amount", "disjoint"), [(1, False), (2.5, False), (0.3, True), (2, True)])
def test_binary_negatives_follow_the_positives_with_label_zero(graph: Graph, amount: float, disjoint: bool) -> None:
    negatives = NegativeSampling("binary", amount)
    for batch in LinkNeighborLoader(graph, [2], neg_sampling=negatives, batch_size=30, disjoint=disjoint):
        num_positives = batch.input_id.numel()
        num_negatives = -int(-num_positives * amount // 1)
        assert batch.edge_label.tolist() == [1.0] * num_positives + [0.0] * num_negatives
        assert batch.edge_label_index.shape == (2, num_positives + num_negatives)
        if disjoint:
            owner = torch.arange(num_positives + num_negatives) % num_positives
            assert torch.equal(batch.batch[batch.edge_label_index], torch.stack([owner, owner]))
            src, dst = batch.batch[batch.edge_index]
            assert torch.equal(src, dst)


def test_labels_are_kept_and_classes_from_zero_make_room_for_negatives(graph: Graph, edge_index: Tensor) -> None:
    labels = torch.arange(edge_index.shape[1]) % 3
    batch = next(iter(LinkNeighborLoader(graph, [2], edge_label=labels, batch_size=20)))
    assert torch.equal(batch.edge_label, labels[:20])
    batch = next(iter(LinkNeighborLoader(graph, [2], edge_label=labels, neg_sampling="binary", batch_size=20)))
    assert torch.equal(batch.edge_label, torch.cat([labels[:20] + 1, torch.zeros(20, dtype=torch.int64)]))
    batch = next(iter(LinkNeighborLoader(graph, [2], edge_label=labels + 1, neg_sampling="binary", batch_size=20)))
    assert torch.equal(batch.edge_label[:20], labels[:20] + 1)


@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.parametrize("amount", [1, 3])
def test_triplets_index_sources_and_destinations(graph: Graph, edge_index: Tensor, disjoint: bool, amount: int) -> None:
    loader = LinkNeighborLoader(
        graph, [2], neg_sampling={"mode": "triplet", "amount": amount}, batch_size=25, disjoint=disjoint
    )
    for batch in loader:
        src, dst = edge_index[:, batch.input_id]
        assert torch.equal(batch.n_id[batch.src_index], src)
        assert torch.equal(batch.n_id[batch.dst_pos_index], dst)
        shape = (src.numel(),) if amount == 1 else (src.numel(), amount)
        assert batch.dst_neg_index.shape == shape
        assert "edge_label_index" not in batch
        if disjoint:
            owner = batch.batch[batch.dst_neg_index].view(src.numel(), amount)
            assert torch.equal(owner, torch.arange(src.numel())[:, None].expand(-1, amount))


def test_negatives_are_a_function_of_seed_epoch_and_batch(graph: Graph) -> None:
    def negatives(num_threads: int, seed: int = 1) -> list[Tensor]:
        loader = LinkNeighborLoader(
            graph, [2], neg_sampling="binary", batch_size=100, seed=seed, num_threads=num_threads, shuffle=True
        )
        return [torch.stack(ends(batch)) for _ in range(2) for batch in loader]

    first, second, other = negatives(0), negatives(3), negatives(0, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[0], first[len(first) // 2])


def test_a_state_saved_in_mid_epoch_resumes_links_and_negatives(graph: Graph) -> None:
    def make() -> LinkNeighborLoader:
        return LinkNeighborLoader(graph, [3], neg_sampling="triplet", batch_size=100, shuffle=True)

    whole = [b.n_id[b.dst_neg_index] for b in make()]
    first = make()
    iterator = iter(first)
    for _ in range(3):
        next(iterator)
    second = make()
    second.load_state_dict(first.state_dict())
    rest = [b.n_id[b.dst_neg_index] for b in second]
    assert len(rest) == len(whole) - 3
    assert all(torch.equal(a, b) for a, b in zip(rest, whole[3:], strict=True))


def test_negatives_exist_at_the_time_of_their_link(edge_index: Tensor) -> None:
    time = torch.arange(NUM_NODES) * 7 % NUM_NODES
    graph = Graph.from_edge_index(edge_index, NUM_NODES, {"time": time})
    link_time = torch.randint(1, NUM_NODES, (edge_index.shape[1],), generator=torch.Generator().manual_seed(3))
    for mode in ("binary", "triplet"):
        loader = LinkNeighborLoader(
            graph, [2], time_attr="time", edge_label_time=link_time, neg_sampling=mode, batch_size=50
        )
        for batch in loader:
            when = link_time[batch.input_id]
            if mode == "binary":
                drawn = torch.stack(ends(batch))[:, when.numel() :]
                assert torch.equal(batch.edge_label_time, when.repeat(2))
            else:
                drawn = batch.n_id[batch.dst_neg_index]
                assert torch.equal(batch.seed_time, when)
            assert bool((time[drawn] <= when).all())


@pytest.mark.parametrize("timed", [False, True])
def test_weighted_negatives_are_drawn_in_proportion(timed: bool) -> None:
    weight = torch.tensor([0.0, 1.0, 2.0, 5.0, 90.0])
    time = torch.tensor([0, 3, 1, 2, 9]) if timed else None
    limit = torch.tensor([5]) if timed else None
    if not timed:
        weight[4] = 0
    drawn = NodeDraw(5, weight, time, "weight").draw(8000, torch.Generator().manual_seed(0), limit)
    counts = Counter(drawn.tolist())
    assert set(counts) == {1, 2, 3}  # node 4 is later than the limit, or weighs nothing
    chi_square = sum((counts[n] - 1000 * weight[n]) ** 2 / (1000 * weight[n]) for n in (1, 2, 3))
    assert float(chi_square) < 13.8  # 99.9% of chi-square with 2 degrees of freedom


def test_where_no_node_is_early_enough_the_earliest_is_taken() -> None:
    draw = NodeDraw(3, None, torch.tensor([7, 4, 9]), "weight")
    assert draw.draw(4, torch.Generator(), torch.tensor([0, 0])).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"neg_sampling": "ternary"}, "neg_sampling"),
        ({"neg_sampling": {"mode": "binary", "amount": 0}}, "amount"),
        ({"neg_sampling": {"mode": "triplet", "amount": 1.5}}, "amount"),
        ({"neg_sampling": {"mode": "binary", "src_weight": torch.ones(3)}}, "src_weight"),
        ({"neg_sampling": {"mode": "triplet", "dst_weight": torch.full((200,), float("nan"))}}, "dst_weight"),
        ({"neg_sampling": "triplet", "edge_label": torch.ones(5)}, "edge_label"),
        ({"edge_label": torch.ones(5)}, "edge_label must have one entry per link"),
        ({"edge_label_time": torch.ones(5)}, "time_attr"),
        ({"edge_label_index": torch.tensor([[0], [200]])}, "edge_label_index"),
        ({"edge_label_index": torch.empty(2, 0, dtype=torch.int64)}, "edge_label_index is empty"),
        ({"edge_label_index": torch.zeros(3, 4, dtype=torch.int64)}, "edge_label_index"),
        ({"edge_label_index": ("a", "to", "b")}, "does not exist"),
    ],
)
def test_bad_arguments_are_refused_by_name(graph: Graph, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LinkNeighborLoader(graph, [2], **arguments)
