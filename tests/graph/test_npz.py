"""Malformed `.npz` files: every one refused in a sentence that names the array, in memory and outside it."""

from __future__ import annotations

import os

import numpy as np
import pytest

from gnnsys.graph import EDGE, NODE, external_graph, load
from tests.support.processes import run_code

EDGES = np.array([[0, 1, 2], [1, 2, 0]])
TYPED = {
    "edge_index": EDGES,
    "edge_type": np.array([0, 1, 0]),
    "edge_type_names": np.array(["a|to|b", "a|of|b"]),
    "node_type_names": np.array(["a", "b"]),
    "node_type_offsets": np.array([0, 2, 3]),
}
CSR = {
    "x_data": np.ones(2),
    "x_indices": np.array([0, 1]),
    "x_indptr": np.array([0, 1, 2, 2]),
    "x_shape": np.array([3, 2]),
}
# As many papers as authors, and as many edges as either: 5.
EQUAL = {
    "edge_index": np.array([[0, 1, 5, 2, 3], [5, 6, 0, 7, 8]]),
    "edge_type": np.array([0, 0, 1, 0, 0]),
    "edge_type_names": np.array(["paper|by|author", "author|of|paper"]),
    "node_type_names": np.array(["paper", "author"]),
    "node_type_offsets": np.array([0, 5, 10]),
}
ROWS, MASK, SOME_IDS = np.arange(5), np.eye(5, dtype=bool)[0], np.array([1, 2])


def plain(**arrays):
    return {"edge_index": EDGES, **arrays}


def without(arrays, name):
    return {key: value for key, value in arrays.items() if key != name}


MALFORMED = [
    (TYPED | {"edge_type_names": np.array(["a|to|b", "a|to|b"])}, r"edge_type_names has 'a\|to\|b' twice"),
    (TYPED | {"node_type_names": np.array(["a", "a"])}, "node_type_names has 'a' twice"),
    (TYPED | {"edge_type": np.array([0.0, 0.5, 1.0])}, "edge_type must hold integers, got float64"),
    (TYPED | {"edge_type": np.array([0, 1])}, "edge_type must have an entry per edge, 3"),
    (TYPED | {"edge_type": np.array([0, 1, 2])}, r"edge_type must be in \[0, 2\)"),
    (TYPED | {"edge_type_names": np.array("a|to|b")}, "edge_type_names must be a list of names"),
    (TYPED | {"edge_index": EDGES + 0.5}, "edge_index must hold integers, got float64"),
    (without(TYPED, "edge_type"), "has edge_type_names, but no edge_type"),
    (without(TYPED, "node_type_names"), "has node_type_offsets, but no node_type_names"),
    (TYPED | {"node_type_offsets": np.array([0, 2])}, "node_type_offsets must be 3 integers"),
    (TYPED | {"node_type_offsets": np.array([0, 3, 2])}, "node_type_offsets must start at 0 and ascend"),
    (TYPED | {"target_type": np.array("zz")}, r"target_type must be one of the node types \['a', 'b'\], got 'zz'"),
    (TYPED | {"edge_type_names": np.array(["a|to|b", "a|to|zz"])}, ".*'zz' is not one of the node types"),
    (plain(a=np.array([b"x", b"y", b"z"])), "a must hold numbers or text, got .S1"),
    (plain(a=np.ones(3, np.longdouble)), "a must hold numbers or text, got float128"),
    (plain(a=np.array(["2020-01-01"] * 3, "M8[D]")), "a must hold numbers or text, got datetime64"),
    (plain(a=np.zeros(3, [("p", "i4")])), "a must hold numbers or text"),
    (plain(num_nodes=np.array([3, 3])), "num_nodes must be one integer"),
    (plain(num_nodes=np.array(-1)), "num_nodes must be one integer >= 0"),
    (plain(x=np.array(1.0)), "x must have a row per node, got a single number"),
    (plain(y=np.array(1)), "y must have a row per node, got a single number"),
    (plain(**CSR | {"x_indptr": np.array([0.0, 1, 2, 2])}), "x_indptr must be a list of integers, got float64"),
    (plain(**CSR | {"x_shape": np.array([3])}), "x_shape must be rows and columns"),
    (plain(**CSR | {"x_indptr": np.array([0, 2, 1, 2], np.uint8)}), "x_indptr does not fit"),
    (plain(**CSR | {"x_data": np.array([1.0, 1e39])}), r"x_data must fit in float32, got 1e\+39"),
    (plain(**without(CSR, "x_indices")), "has x_data, but no x_indices"),
    (plain(train_mask=np.zeros((3, 0), bool)), r"train_mask must have shape \[num_nodes\] or"),
    (plain(val_mask=np.zeros((3, 2, 2), bool)), r"val_mask must have shape \[num_nodes\] or"),
    (EQUAL | {"x": np.eye(5), "x_paper": np.eye(5)}, "has 'x' of node type 'paper' twice, as x and as x_paper"),
    (EQUAL | {"x_author": np.eye(5), "x__author": np.eye(5)}, "has 'x' of node type 'author' twice"),
    (EQUAL | {"train_idx_paper": SOME_IDS, "train_mask": MASK}, ".* twice, as train_idx_paper and as train_mask"),
    (EQUAL | {"train_idx": SOME_IDS, "train_mask": MASK}, ".* twice, as train_idx and as train_mask"),
    (EQUAL | {"year": ROWS, "year_paper": ROWS}, ".* twice, as year and as year_paper"),
    (EQUAL | {"first_author": ROWS}, "first_author ends in .*first_author_paper if .* or first__author, with two"),
    (plain(train_idx=SOME_IDS, train_mask=MASK[:3]), ".* twice, as train_idx and as train_mask"),
    (plain(val_masks=np.eye(3) > 0, val_idx=SOME_IDS), ".* twice, as val_masks and as val_idx"),
    (plain(val_mask_2=MASK[:3], val_idx_2=SOME_IDS), "has 'val_mask_2' of node type 'node' twice"),
    (plain(test_masks=np.zeros(3, bool)), r"test_masks must have shape \[num_splits, num_nodes\]"),
]


@pytest.mark.parametrize("arrays,message", MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_npz_is_refused_in_a_sentence(arrays, message, tmp_path):
    np.savez(tmp_path / "g.npz", **arrays)
    with pytest.raises(ValueError, match=f"g.npz: {message}"):
        load(tmp_path / "g.npz")
    with pytest.raises(ValueError, match=f"g.npz: {message}"):
        external_graph(tmp_path / "g.npz", tmp_path / "out", memory_limit=64 << 20)
    assert not (tmp_path / "out").exists()


def test_the_files_that_the_malformed_ones_were_made_of_are_read(tmp_path):
    np.savez(tmp_path / "typed.npz", **TYPED | {"edge_index": np.array([[0, 1, 0], [2, 2, 2]])})
    graph = load(tmp_path / "typed.npz")
    assert [graph.num_edges(t) for t in graph.edge_types] == [2, 1]
    np.savez(tmp_path / "csr.npz", **plain(**CSR))
    assert load(tmp_path / "csr.npz").node_data["node"]["x"].tolist() == [[1, 0], [0, 1], [0, 0]]


def test_with_as_many_nodes_as_edges_names_decide_what_rows_are_of(tmp_path):
    rows = np.arange(3.0)
    names = ["weight", "edge_weight", "edge_attr", "time", "score"]
    np.savez(tmp_path / "g.npz", **plain(**dict.fromkeys(names, rows)))
    graph = load(tmp_path / "g.npz")
    assert list(graph.edge_data[EDGE]) == names[:-1] and list(graph.node_data[NODE]) == ["score"]


def test_each_array_of_a_typed_graph_is_where_its_name_says_however_many_rows_it_has(tmp_path):
    """Five of everything: no number of rows tells one from another."""
    ids = np.array([4, 3, 2, 1, 0])
    arrays = {
        "first_author_paper": ROWS,
        "first__author": ROWS + 10,
        "y_author": ROWS + 20,
        "train_idx": ids,
        "val_idx_author": ids,
        "test_masks": np.zeros((5, 5), bool),
        "edge_of_author": ROWS + 30,
        "_author": ROWS + 40,
    }
    np.savez(tmp_path / "g.npz", **EQUAL | arrays)
    graph = load(tmp_path / "g.npz")
    assert set(graph.node_data["paper"]) == {"first_author", "train_mask", "test_mask", "_author"}
    assert set(graph.node_data["author"]) == {"first", "y", "val_mask"}
    assert graph.node_data["paper"]["first_author"].tolist() == ROWS.tolist()
    assert graph.node_data["author"]["first"].tolist() == (ROWS + 10).tolist()
    assert graph.node_data["author"]["val_mask"].all() and graph.node_data["paper"]["train_mask"].all()
    assert graph.edge_data["author", "of", "paper"]["edge_of_author"].tolist() == [32]


def test_a_full_disk_while_unpacking_is_not_called_an_unreadable_file(tmp_path):
    """Files may grow to 4 MB: the array inside is larger."""
    np.savez_compressed(tmp_path / "g.npz", edge_index=np.zeros((2, 1 << 19), np.int64))
    program = """
import resource, sys
from gnnsys.graph import external_graph
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 22, 1 << 22))
try:
    external_graph(sys.argv[1], sys.argv[2], memory_limit=64 << 20)
except OSError as error:
    print(error)
"""
    result = run_code(program, tmp_path / "g.npz", tmp_path / "out")
    assert "File too large while writing what" in result.stdout and "cannot be read" not in result.stdout, result
    assert os.listdir(tmp_path) == ["g.npz"]


def test_a_single_array_under_the_name_of_an_npz_is_refused(tmp_path):
    with open(tmp_path / "g.npz", "wb") as file:
        np.save(file, EDGES)
    with pytest.raises(ValueError, match=r"g.npz cannot be read"):
        load(tmp_path / "g.npz")
