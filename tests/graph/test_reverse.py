"""`add_reverse`: what is added, what is not, and whose rows a reverse has; PyG's own is the oracle where it can be."""

import pytest
import torch

from gnnsys.graph import EDGE, Graph, from_pyg, sbm, typed_graph


def random_graph(num_nodes: int, num_edges: int, seed: int) -> Graph:
    generator = torch.Generator().manual_seed(seed)
    edges = torch.randint(num_nodes, (2, num_edges), generator=generator)
    return Graph.from_edge_index(edges, num_nodes, edge_data={"time": torch.arange(num_edges)}, info={"name": "g"})


def pairs(edges: torch.Tensor) -> list[tuple[int, int]]:
    return list(zip(*edges.tolist(), strict=True))


def test_each_edge_without_a_reverse_gets_one_behind_the_others_with_its_rows():
    for seed in range(20):
        graph = random_graph(8, 20, seed)
        both = graph.add_reverse()
        given = pairs(graph.edge_index())
        added = [(v, u) for u, v in given if u != v and (v, u) not in set(given)]
        times = [i for i, (u, v) in enumerate(given) if u != v and (v, u) not in set(given)]
        assert pairs(both.edge_index()) == given + added
        assert both.edge_data[EDGE]["time"].tolist() == [*range(20), *times]
        assert both.info == graph.info


def test_as_a_set_of_edges_it_is_what_pyg_makes_undirected():
    utils = pytest.importorskip("torch_geometric.utils")
    graph = random_graph(50, 200, 0)
    assert set(pairs(graph.add_reverse().edge_index())) == set(pairs(utils.to_undirected(graph.edge_index())))


def test_doing_it_twice_changes_nothing_and_an_undirected_graph_stays_as_it_is():
    for graph in (random_graph(30, 100, 1).add_reverse(), sbm(200).add_reverse(), typed_graph(60).add_reverse()):
        again = graph.add_reverse()
        assert again.edge_types == graph.edge_types
        assert all(torch.equal(again.edge_index(t), graph.edge_index(t)) for t in graph.edge_types)


def test_a_typed_graph_gets_a_type_per_type_with_all_its_edges_and_rows():
    edges = {
        ("user", "likes", "book"): torch.tensor([[0, 1, 1], [2, 0, 0]]),
        ("user", "knows", "user"): torch.tensor([[0, 1], [1, 1]]),
    }
    rows = {("user", "likes", "book"): {"weight": torch.tensor([1.0, 2.0, 3.0])}}
    both = Graph.from_edge_indices(edges, {"user": 2, "book": 3}, edge_data=rows).add_reverse()
    assert both.edge_types == [*edges, ("book", "rev_likes", "user"), ("user", "rev_knows", "user")]
    for (src, relation, dst), given in edges.items():
        assert torch.equal(both.edge_index((dst, f"rev_{relation}", src)), given.flip(0))
    assert both.edge_data["book", "rev_likes", "user"]["weight"].tolist() == [1.0, 2.0, 3.0]


def test_a_typed_graph_of_pygs_gets_the_types_that_pyg_adds():
    transforms = pytest.importorskip("torch_geometric.transforms")
    from gnnsys.graph import to_pyg

    ends = {"user": 9, "book": 5}
    edges = {
        (src, "to", dst): torch.randint(ends[dst], (2, 20)) % torch.tensor([[ends[src]], [ends[dst]]])
        for src, dst in (("user", "book"), ("book", "book"), ("user", "user"))
    }
    graph = Graph.from_edge_indices(edges, ends)
    theirs = from_pyg(transforms.ToUndirected(merge=False)(to_pyg(graph)))
    ours = graph.add_reverse()
    assert set(theirs.edge_types) == set(ours.edge_types)
    for edge_type in theirs.edge_types:
        assert sorted(pairs(theirs.edge_index(edge_type))) == sorted(pairs(ours.edge_index(edge_type)))
