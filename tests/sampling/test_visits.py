"""Expected visits against what follows exactly, against counting, and as what they are for: choosing rows to cache."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from torch import Tensor

from gnnsys.graph import NODE, Graph
from gnnsys.loader import NeighborLoader
from gnnsys.ops import CSC, planted_edges, rmat_edges
from gnnsys.sampling import NeighborSampler, degree_visits, expected_visits, presampled_visits, sample_batches, visits
from gnnsys.store.device_cache import highest


def rmat(num_nodes: int = 4000, num_edges: int = 60_000) -> Graph:
    edges = rmat_edges(torch.arange(num_nodes, dtype=torch.int32), num_edges, 0.57, 0.19, 0.19, key=3)
    return Graph.from_edge_index(edges, num_nodes)


def csc_of(graph: Graph) -> CSC:
    return graph.csc(graph.edge_types[0])


@pytest.mark.parametrize("fanouts", [[2], [3, 2], [2, 5, 1], [-1, 2, 3], [0, 4]])
def test_on_a_tree_a_node_is_visited_when_all_draws_on_its_way_to_the_seed_take_it(fanouts):
    generator = torch.Generator().manual_seed(len(fanouts))
    parent = [0] + [int(torch.randint(0, child, (), generator=generator)) for child in range(1, 60)]
    child = torch.arange(1, 60)
    csc = CSC.from_edge_index(torch.stack([child, torch.tensor(parent[1:])]), 60)
    degree = Counter(parent[1:])
    expected = []
    for node in range(60):
        path = []
        while node != 0:
            node = parent[node]
            path.insert(0, degree[node])
        fits = len(path) <= len(fanouts)
        draws = zip(fanouts, path, strict=False)  # a path may be shorter, or longer than there are hops
        taken = [1.0 if f < 0 else min(1.0, f / d) for f, d in draws]
        expected.append(float(torch.tensor(taken, dtype=torch.float64).prod()) if fits else 0.0)
    got = expected_visits(csc, fanouts, torch.tensor([0]), batch_size=1)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))


def test_one_hop_of_all_seeds_is_what_enumerating_every_draw_gives():
    lists = [[3, 4, 5], [4, 5], [5, 6, 7, 3]]  # in-neighbours of the seeds 0, 1, 2
    edges = torch.tensor([[u, v] for v, sources in enumerate(lists) for u in sources]).t()
    expected = torch.zeros(8, dtype=torch.float64)
    expected[:3] = 1
    draws = [list(itertools.combinations(sources, 2)) for sources in lists]
    for outcome in itertools.product(*draws):
        expected[list(set(itertools.chain(*outcome)))] += 1 / (3 * 1 * 6)
    got = expected_visits(CSC.from_edge_index(edges, 8), [2], torch.arange(3), batch_size=3)
    torch.testing.assert_close(got, expected)


def test_draws_with_replacement_take_an_edge_unless_all_of_them_miss_it():
    csc = CSC.from_edge_index(torch.tensor([[1, 2, 3], [0, 0, 0]]), 4)
    expected = torch.zeros(4, dtype=torch.float64)
    expected[0] = 1
    for draw in itertools.product([1, 2, 3], repeat=2):
        expected[list(set(draw))] += 1 / 9
    got = expected_visits(csc, [2], torch.tensor([0]), batch_size=1, replace=True)
    torch.testing.assert_close(got, expected)


def test_all_neighbours_are_visited_as_far_as_there_are_hops(monkeypatch):
    monkeypatch.setattr(visits, "_EDGES", 500)  # many pieces
    graph = rmat(500, 2000)
    sample = NeighborSampler(graph, [-1, -1]).sample({NODE: torch.tensor([1, 7])}, key=visits.SampleKey())
    got = expected_visits(csc_of(graph), [-1, -1], torch.tensor([7, 1]), batch_size=2)
    assert got.nonzero().view(-1).tolist() == sorted(sample.node[NODE].tolist())
    assert set(got.unique().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("replace", [False, True])
def test_counting_many_batches_comes_to_the_same(replace):
    """Independence is assumed, so not exactly: the size of a batch within 1%, a node within 0.005 on average."""
    graph = rmat()
    seeds = torch.arange(0, 4000, 8)
    sampler = NeighborSampler(graph, [5, 3], replace=replace)
    counted = presampled_visits(sample_batches(sampler, seeds, 20, seed=5), 800, num_nodes=4000)
    got = expected_visits(csc_of(graph), [5, 3], seeds, batch_size=20, replace=replace)
    assert abs(float(got.sum() / counted.sum()) - 1) < 0.01
    assert float((got - counted).abs().mean()) < 0.005
    assert float(torch.corrcoef(torch.stack([got, counted]))[0, 1]) > 0.99


def test_a_loader_is_counted_as_its_sampler_is():
    graph = rmat(300, 2000)
    loaders = [NeighborLoader(graph, [3, 2], input_nodes=torch.arange(50), batch_size=10) for _ in range(2)]
    expected = torch.zeros(300, dtype=torch.float64)
    for batch in loaders[0]:
        expected[batch.n_id.unique()] += 1
    got = presampled_visits(loaders[1], 100, num_nodes=300)  # it has five
    torch.testing.assert_close(got, expected / 5)


def hit_rate(scores: Tensor, num_cached: int, real: Tensor) -> float:
    """Of the rows that batches fetch, those that a cache of the highest-scored rows has."""
    return float(real[highest(scores, num_cached)].sum() / real.sum())


def test_expected_visits_choose_better_rows_than_degrees_where_seeds_are_in_few_places():
    num_nodes, num_classes = 8000, 16
    order = torch.arange(num_nodes, dtype=torch.int32)
    edges = planted_edges(order, order, 120_000, num_classes=num_classes, homophily=0.9, skew=(3, 1), key=1)
    graph = Graph.from_edge_index(edges, num_nodes)
    seeds = order[: num_nodes // num_classes]  # one class
    real = presampled_visits(
        sample_batches(NeighborSampler(graph, [10, 5]), seeds, 50, seed=9), 60, num_nodes=num_nodes
    )
    by_visits = expected_visits(csc_of(graph), [10, 5], seeds, batch_size=50)
    for num_cached in (80, 400, 1600):
        ours, theirs = (hit_rate(s, num_cached, real) for s in (by_visits, degree_visits(csc_of(graph))))
        assert ours >= theirs
        assert ours >= 0.97 * hit_rate(real, num_cached, real)  # what knowing the future would give
    assert hit_rate(by_visits, 400, real) > 1.5 * hit_rate(degree_visits(csc_of(graph)), 400, real)


def test_degrees_count_how_often_a_node_is_a_neighbour():
    csc = CSC.from_edge_index(torch.tensor([[1, 1, 2], [0, 2, 0]]), 3)
    assert degree_visits(csc).tolist() == [0.0, 2.0, 1.0]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"seeds": torch.tensor([9])}, "seeds must be in"),
        ({"seeds": torch.tensor([-1])}, "seeds must be in"),
        ({"seeds": torch.tensor([0.5])}, "seeds must be ids"),
        ({"seeds": torch.empty(0, dtype=torch.int64)}, "seeds"),
        ({"batch_size": 0}, "batch_size"),
        ({"csc": CSC(torch.tensor([0, 1]), torch.tensor([2]), 3)}, "csc"),
    ],
)
def test_bad_arguments_are_refused_by_name(change, name):
    csc = CSC.from_edge_index(torch.tensor([[1], [0]]), 3)
    given = {"csc": csc, "fanouts": [2], "seeds": torch.tensor([0]), "batch_size": 1}
    with pytest.raises(ValueError, match=name):
        expected_visits(**(given | change))


def test_edges_that_are_looked_at_piece_by_piece_add_up(monkeypatch):
    csc = csc_of(rmat(1000, 9000))
    whole = expected_visits(csc, [4, 4], torch.arange(100), batch_size=10)
    monkeypatch.setattr(visits, "_EDGES", 64)
    torch.testing.assert_close(expected_visits(csc, [4, 4], torch.arange(100), batch_size=10), whole)
