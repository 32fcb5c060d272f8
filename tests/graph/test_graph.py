"""What a Graph accepts, refuses and gives back."""

from __future__ import annotations

import pytest
import torch

from gnnsys.graph import EDGE, NODE, Graph, as_ids, check_weight, sbm
from gnnsys.ops import CSC

EDGES = torch.tensor([[0, 3, 2, 1, 3], [2, 0, 2, 1, 1]])
WRITES = ("author", "writes", "paper")


def test_edges_come_back_in_the_users_order():
    edges = torch.randint(50, (2, 400))
    assert torch.equal(Graph.from_edge_index(edges, 50).edge_index(), edges)
    by_destination = edges[:, edges[1].argsort()]
    graph = Graph.from_edge_index(by_destination, 50)
    assert graph.csc().edge_ids is None
    assert torch.equal(graph.edge_index(), by_destination)


def test_ids_are_stored_as_int32_where_they_fit():
    csc = Graph.from_edge_index(EDGES, 4).csc()
    assert csc.indices.dtype == torch.int32 and csc.edge_ids is not None and csc.edge_ids.dtype == torch.int32
    huge = Graph.from_edge_indices({WRITES: torch.tensor([[2**31], [0]])}, {"author": 2**31 + 1, "paper": 1})
    assert huge.csc(WRITES).indices.dtype == torch.int64


def test_a_homogeneous_graph_needs_no_type_names():
    graph = Graph.from_edge_index(EDGES, 4, {"x": torch.rand(4, 2)}, {"w": torch.rand(5)}, {"made": "here"})
    assert graph.is_homogeneous and graph.node_types == [NODE] and graph.edge_types == [EDGE]
    assert graph.num_nodes() == graph.num_nodes(NODE) == 4 and graph.num_edges() == 5
    assert graph.info == {"made": "here"}
    assert repr(graph) == "Graph(nodes {node: 4}, edges {node|to|node: 5})"


def test_a_typed_graph_wants_types_named():
    graph = Graph.from_edge_indices({WRITES: torch.tensor([[0, 1, 1], [2, 0, 1]])}, {"author": 2, "paper": 3})
    assert not graph.is_homogeneous and graph.num_edges(WRITES) == graph.num_edges() == 3
    with pytest.raises(ValueError, match="node_type must be named, one of"):
        graph.num_nodes()
    with pytest.raises(ValueError, match="node type 'venue' does not exist"):
        graph.num_nodes("venue")
    with pytest.raises(ValueError, match=r"edge type .* does not exist"):
        graph.csc(("author", "reads", "paper"))


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda: Graph.from_edge_index(EDGES, 3), r"src must be in \[0, 3\), got 3 at position 1"),
        (lambda: Graph.from_edge_index(EDGES, -1), "num_src and num_dst must be >= 0"),
        (lambda: Graph({"a": -2}, {}), r"num_nodes\['a'\] must be >= 0"),
        (lambda: Graph.from_edge_index(EDGES, 4, {"x": torch.rand(5, 2)}), r"'x'.* expected 4 rows, one per node"),
        (lambda: Graph.from_edge_index(EDGES, 4, {"x": torch.tensor(1.0)}), r"'x'.* shape \[\]"),
        (lambda: Graph.from_edge_index(EDGES, 4, {"x": [1, 2, 3, 4]}), "'x'.* must be a torch.Tensor, got list"),
        (lambda: Graph.from_edge_index(EDGES, 4, {"x": torch.eye(4).to_sparse()}), "'x'.* must be dense"),
        (lambda: Graph.from_edge_index(EDGES, 4, None, {"w": torch.rand(4)}), r"'w'.* expected 5 rows, one per edge"),
        (lambda: Graph.from_edge_indices({WRITES: EDGES}, {"author": 4}), "names node type 'paper'"),
        (lambda: Graph.from_edge_indices({WRITES: EDGES}, {"author": 3, "paper": 3}), "'writes'.*src must be in"),
        (lambda: Graph.from_edge_indices({("a", "b"): EDGES}, {"a": 4, "b": 4}), "three names"),
        (lambda: Graph({NODE: 4}, {EDGE: CSC.from_edge_index(EDGES, 5)}), "its CSC is 5 x 5, but num_nodes says 4 x 4"),
        (lambda: Graph({NODE: 4}, {}, {"other": {"x": torch.rand(4)}}), "node type 'other' does not exist"),
    ],
)
def test_a_wrong_graph_is_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_csc_given_by_hand_is_checked_all_through():
    good = CSC.from_edge_index(EDGES, 4)
    bad_indices = CSC(good.indptr, good.indices + 1, 4, good.edge_ids)
    bad_indptr = CSC(torch.tensor([0, 5, 3, 5, 5]), good.indices, 4)
    bad_edge_ids = CSC(good.indptr, good.indices, 4, torch.tensor([0, 1, 2, 3, 5]))
    short_edge_ids = CSC(good.indptr, good.indices, 4, torch.tensor([0, 1]))
    for csc, message in [
        (bad_indices, "indices must be in"),
        (bad_indptr, "indptr must never decrease"),
        (bad_edge_ids, r"edge_ids must be in \[0, 5\), got 0 to 5"),
        (short_edge_ids, "edge_ids has shape"),
    ]:
        with pytest.raises(ValueError, match=message):
            Graph({NODE: 4}, {EDGE: csc})


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -0.5])
def test_a_weight_that_cannot_be_drawn_by_is_refused(bad):
    weight = torch.ones(5)
    weight[3] = bad
    with pytest.raises(ValueError, match=r"'edge_weight'.* must be finite and >= 0, got .* at edge 3"):
        Graph.from_edge_index(EDGES, 4, edge_data={"edge_weight": weight})
    with pytest.raises(ValueError, match="priority must be finite"):
        check_weight(weight, "priority")


def test_as_ids_takes_ids_masks_lists_and_ranges():
    mask = torch.tensor([True, False, True, False])
    for given, expected in [(mask, [0, 2]), ([3, 1], [3, 1]), (range(1, 3), [1, 2]), (torch.tensor([2, 2]), [2, 2])]:
        assert as_ids(given, 4, "seeds").tolist() == expected
    for given, message in [
        ([4], r"seeds must be in \[0, 4\), got 4 to 4"),
        ([-1], "got -1 to -1"),
        (torch.ones(3, dtype=torch.bool), "a mask must have 4 entries"),
        (torch.rand(2), "int32, int64 or bool"),
        (torch.zeros(2, 2, dtype=torch.int64), "one-dimensional"),
    ]:
        with pytest.raises(ValueError, match=message):
            as_ids(given, 4, "seeds")


def test_a_graph_that_moves_nowhere_shares_everything():
    class Source:
        shape, dtype = (4, 2), torch.float32

        def read(self, ids, out=None): ...

        def begin_read(self, ids, out=None): ...

    source = Source()
    graph = Graph.from_edge_index(EDGES, 4, {"x": torch.rand(4, 2), "far": source}, info={"name": "small"})
    same = graph.to("cpu")
    assert graph.device == same.device == torch.device("cpu") and not same.is_pinned
    assert same.csc().indices.data_ptr() == graph.csc().indices.data_ptr()
    assert same.node_data[NODE]["x"] is graph.node_data[NODE]["x"] and same.node_data[NODE]["far"] is source
    same.set_node_data("y", torch.arange(4))
    same.info["name"] = "other"
    assert "y" not in graph.node_data[NODE] and graph.info == {"name": "small"}


def test_a_copy_has_the_same_structure_in_memory_and_another_graph_has_not():
    graph, other = sbm(50, avg_degree=3), sbm(50, avg_degree=3)
    assert graph.copy().is_copy_of(graph) and graph.is_copy_of(graph) and graph.is_copy_of(graph.copy())
    assert not other.is_copy_of(graph) and not graph.is_copy_of(None)
