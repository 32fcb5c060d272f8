"""Edge tables and .npz files, against numpy, and datasets by name."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
import torch

from gnnsys.graph import EDGE, NODE, dataset, external_graph, load
from gnnsys.graph.datasets import available_datasets, find_dataset

CITES, WRITES = ("paper", "cites", "paper"), ("author", "writes", "paper")


def write(path, text):
    path.write_text(text)
    return path


def test_an_edge_list_with_comments_is_read(tmp_path):
    path = write(tmp_path / "web.txt", "# Nodes: 4\n# Edges: 3\n0\t2\n3 1\n\n% more\n2   0\n")
    graph = load(path)
    assert graph.edge_index().tolist() == [[0, 3, 2], [2, 1, 0]]
    assert graph.num_nodes() == 4 and load(path, num_nodes=9).num_nodes() == 9


def test_a_table_with_weights_and_times_is_read_with_or_without_a_header(tmp_path):
    late = 2**53 + 1  # not a float64
    lines = f"0,1,0.5,{late}\n2,0,1.25,7\n"
    for text, columns in [("src,dst,weight,time\n" + lines, None), (lines, ("src", "dst", "weight", "time"))]:
        graph = load(write(tmp_path / "edges.csv", text), columns=columns)
        assert graph.edge_index().tolist() == [[0, 2], [1, 0]]
        assert graph.edge_data[EDGE]["weight"].tolist() == [0.5, 1.25]
        assert graph.edge_data[EDGE]["time"].tolist() == [late, 7]
    swapped = load(write(tmp_path / "edges.tsv", "dst\tsrc\n5\t3\n"))
    assert swapped.edge_index().tolist() == [[3], [5]]


def test_a_large_table_agrees_with_numpy(tmp_path):
    edges = np.random.default_rng(0).integers(0, 1000, (5000, 2))
    np.savetxt(tmp_path / "edges.txt", edges, fmt="%d")
    assert np.array_equal(load(tmp_path / "edges.txt").edge_index().numpy(), edges.T)


def test_an_empty_table_is_a_graph_without_edges(tmp_path):
    graph = load(write(tmp_path / "edges.csv", "# nothing\n"), num_nodes=3)
    assert graph.num_nodes() == 3 and graph.num_edges() == 0


@pytest.mark.parametrize(
    "name,text,message",
    [
        ("edges.csv", "0,1,2\n", "have 3 fields, but columns names 2"),
        ("edges.csv", "a,b\n0,1\n", r"no column is called 'src', there are \['a', 'b'\]; .*\(--columns src,dst,...\)"),
        ("edges.csv", "0,1\n1,x\n", "edges.csv"),
        ("edges.csv", "0,1\n1\n", "edges.csv"),
        ("edges.csv", "0,1\n0.5,1\n", "edges.csv"),
        ("edges.txt", "0 1\n-1 2\n", "edges.txt: src must be 0 or more, ids count from 0, got -1 at position 1"),
        ("edges.csv", "alice,bob\nbob,carol\n", r"there are \['alice', 'bob'\].*numpy.unique.*return_inverse=True"),
        ("edges.csv", "src,dst\nalice,bob\n", "line 2: .* got 'alice': ids must be 0 to N-1: .*numpy.unique"),
        ("edges.csv", "0,1\n1,bob\n", "line 2: field 2 .* got 'bob': ids must be 0 to N-1: .*numpy.unique"),
        ("edges.csv", "", "edges.csv: there are no edges in it"),
        ("edges.txt", "src dst\n", "edges.txt: there are no edges in it"),
        ("data.pt", "", r"partition_graph\(torch.load\(\".*data.pt\", weights_only=False\), 2, \"parts/\"\)"),
        ("edges.csv", "src,dst,weight\n0,1,nan\n", "edges.csv: .*'weight'.* must be finite"),
        ("edges.txt", "# ids\nO 1\n1 2\n", "edges.txt: line 2: 'O' is not a number, and a header has no numbers"),
        ("edges.csv", "src,dst,a,w\n0,1,inf,2\n# big\n0,1,2,1e39\n", "line 4: field 4 must fit in float32, got '1e39'"),
        ("edges.xls", "", "expected a directory or one of .npz"),
    ],
)
def test_a_malformed_table_is_refused_by_name(name, text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load(write(tmp_path / name, text))


def test_with_columns_given_only_as_many_names_are_a_header(tmp_path):
    for header in ("src,dst", "from,to"):
        graph = load(write(tmp_path / "edges.csv", f"{header}\n0,1\n2,0\n"), columns=["src", "dst"])
        assert graph.edge_index().tolist() == [[0, 2], [1, 0]]
    for first in ("edges of the web", "src,dst,weight", "x"):
        with pytest.raises(ValueError, match=r"edges.csv: line 1: .* is neither an edge nor a header of the columns"):
            load(write(tmp_path / "edges.csv", f"{first}\n0,1\n2,0\n"), columns=["src", "dst"])


@pytest.mark.parametrize("text", ["0,1\n2,0\n", "# edges\n0,1\n2,0\n", "src,dst\n0,1\n2,0\n"])
def test_a_byte_order_mark_is_skipped(text, tmp_path):
    (tmp_path / "edges.csv").write_text(text, encoding="utf-8-sig")
    assert load(tmp_path / "edges.csv").edge_index().tolist() == [[0, 2], [1, 0]]


@pytest.mark.parametrize("largest", [2**50, 2**62, 2**63 - 2, 2**63 - 1])
def test_an_id_too_large_for_any_machine_is_named_with_its_edge(largest, tmp_path):
    write(tmp_path / "e.txt", f"0 1\n1 {largest}\n2 0\n")
    np.savez(tmp_path / "e.npz", edge_index=np.array([[0, 1, 2], [1, largest, 0]]))
    for name in ("e.txt", "e.npz"):
        message = rf"{name}: edge 1 names node {largest}; so many nodes need .* TB, .*: renumber the ids from 0$"
        with pytest.raises(ValueError, match=message):
            load(tmp_path / name)
        with pytest.raises(ValueError, match=message):
            external_graph(tmp_path / name, tmp_path / "out", memory_limit=64 << 20)


def test_a_number_of_nodes_too_large_for_any_machine_is_refused(tmp_path):
    write(tmp_path / "e.txt", "0 1\n")
    message = f"num_nodes is {2**50}; so many nodes need .* TB"
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "e.txt", num_nodes=2**50)
    with pytest.raises(ValueError, match=message):
        external_graph(tmp_path / "e.txt", tmp_path / "out", memory_limit=64 << 20, num_nodes=2**50)
    edges = {"edge_index": np.array([[0], [1]])}
    x = {"x_data": np.ones(1), "x_indices": [0], "x_indptr": [0, 1, 1], "x_shape": [2, 2**50]}
    for arrays, wanted in [({"num_nodes": np.array(2**50)}, message), (x, r"x \[2, .*\] becomes dense and .* TB")]:
        np.savez(tmp_path / "e.npz", **edges, **arrays)
        with pytest.raises(ValueError, match=wanted):
            load(tmp_path / "e.npz")
        with pytest.raises(ValueError, match=wanted):
            external_graph(tmp_path / "e.npz", tmp_path / "out", memory_limit=64 << 20)


def test_a_table_larger_than_memory_is_refused_as_one_that_is_not(tmp_path):
    for text, message in (("", "there are no edges"), ("0,1\n2,-1\n", "dst must be 0 or more.* got -1 at position 1")):
        with pytest.raises(ValueError, match=f"edges.csv: {message}"):
            external_graph(write(tmp_path / "edges.csv", text), tmp_path / "out", memory_limit=64 << 20)


def test_a_file_that_is_not_there_is_no_dataset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("nofile.csv", "some/folder", "data.pt"):
        with pytest.raises(ValueError, match=f"there is no file {name} in {tmp_path}"):
            dataset(name)
    with pytest.raises(ValueError, match=f"there is no file {tmp_path}/x.txt: give the path"):
        dataset(f"{tmp_path}/x.txt")
    with pytest.raises(ValueError, match="dataset 'coraa' is not there"):
        dataset("coraa")


def test_a_missing_path_is_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="not a saved graph"):
        load(tmp_path / "empty")


def test_a_parquet_table_is_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="parquet needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="parquet needs pyarrow")
    columns = {"src": [0, 2, 1], "dst": [1, 0, 1], "weight": [0.5, 1.0, 2.0], "time": [3, 2, 1]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "edges.parquet")
    graph = load(tmp_path / "edges.parquet")
    assert graph.edge_index().tolist() == [[0, 2, 1], [1, 0, 1]]
    assert graph.edge_data[EDGE]["weight"].tolist() == [0.5, 1.0, 2.0]
    assert load(tmp_path / "edges.parquet", columns=["dst", "src", "w", "t"]).edge_index()[0].tolist() == [1, 0, 1]
    for bad, message in [
        ({"src": [0, None], "dst": [1, 1]}, "'src' has 1 missing"),
        ({"src": ["a"], "dst": [1]}, "'src'"),
    ]:
        parquet.write_table(pyarrow.table(bad), tmp_path / "bad.parquet")
        with pytest.raises(ValueError, match=message):
            load(tmp_path / "bad.parquet")


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "uint8", "uint16", "uint32", "uint64"])
def test_ids_in_parquet_may_be_any_integers(dtype, tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="parquet needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="parquet needs pyarrow")
    parquet.write_table(
        pyarrow.table({"src": np.array([0, 2], dtype), "dst": np.array([1, 0], dtype)}), tmp_path / "e.parquet"
    )
    assert load(tmp_path / "e.parquet").edge_index().tolist() == [[0, 2], [1, 0]]
    external_graph(tmp_path / "e.parquet", tmp_path / "out", memory_limit=64 << 20)
    assert load(tmp_path / "out").edge_index().tolist() == [[0, 2], [1, 0]]
    if dtype == "uint64":
        parquet.write_table(
            pyarrow.table({"src": np.array([2**63], dtype), "dst": np.array([1], dtype)}), tmp_path / "e.parquet"
        )
        with pytest.raises(ValueError, match=r"e.parquet: column 'src' must fit in int64, got 9223372036854775808"):
            load(tmp_path / "e.parquet")


def test_a_plain_npz_sorts_its_arrays_into_nodes_and_edges(tmp_path):
    rng = np.random.default_rng(0)
    edges = rng.integers(0, 6, (2, 20))
    np.savez(
        tmp_path / "g.npz",
        edge_index=edges,
        x=rng.random((7, 3), dtype=np.float32),
        y=np.arange(7, dtype=np.int16),
        train_idx=np.array([0, 4]),
        val_masks=rng.random((10, 7)) > 0.5,
        edge_attr=rng.random((20, 2)),
        edge_type=np.zeros(20, dtype=np.int8),
        class_names=np.array(["a", "b"]),
    )
    graph = load(tmp_path / "g.npz")
    assert graph.num_nodes() == 7 and np.array_equal(graph.edge_index().numpy(), edges)
    data = graph.node_data[NODE]
    assert data["y"].dtype == torch.int64 and data["train_mask"].nonzero().flatten().tolist() == [0, 4]
    assert data["val_mask"].shape == (7, 10)
    assert set(graph.edge_data[EDGE]) == {"edge_attr", "edge_type"}
    assert graph.info == {"class_names": ["a", "b"]}


def test_sparse_features_in_an_npz_become_dense(tmp_path):
    x = scipy.sparse.random(9, 30, 0.2, "csr", random_state=0, data_rvs=lambda n: np.arange(1, n + 1)).astype(np.uint8)
    np.savez(
        tmp_path / "g.npz",
        edge_index=np.array([[0], [1]]),
        x_data=x.data,
        x_indices=x.indices,
        x_indptr=x.indptr,
        x_shape=np.array(x.shape),
    )
    rows = load(tmp_path / "g.npz").node_data[NODE]["x"]
    assert rows.dtype == torch.float32 and np.array_equal(rows.numpy(), x.toarray())


def test_an_npz_with_offsets_becomes_a_typed_graph(tmp_path):
    np.savez(
        tmp_path / "g.npz",
        edge_index=np.array([[0, 1, 5, 6, 2], [3, 0, 1, 2, 4]], dtype=np.int32),
        edge_type=np.array([0, 0, 1, 1, 0], dtype=np.int8),
        edge_type_names=np.array(["paper|cites|paper", "author|writes|paper"]),
        edge_weight=np.array([1.0, 2.0, 3.0, 4.0, 5.0]),
        node_type_names=np.array(["paper", "author"]),
        node_type_offsets=np.array([0, 5, 7]),
        target_type=np.array("paper"),
        x_author=np.ones((2, 3), dtype=np.float32),
        y=np.array([0, 1, 2, 0, 1], dtype=np.int8),
        test_idx_20=np.array([1]),
    )
    graph = load(tmp_path / "g.npz")
    assert graph.node_types == ["paper", "author"] and graph.edge_types == [CITES, WRITES]
    assert graph.edge_index(CITES).tolist() == [[0, 1, 2], [3, 0, 4]]
    assert graph.edge_index(WRITES).tolist() == [[0, 1], [1, 2]]
    assert graph.edge_data[WRITES]["edge_weight"].tolist() == [3.0, 4.0]
    assert graph.node_data["author"]["x"].shape == (2, 3)
    assert graph.node_data["paper"]["y"].tolist() == [0, 1, 2, 0, 1]
    assert graph.node_data["paper"]["test_mask_20"].tolist() == [False, True, False, False, False]


@pytest.mark.parametrize(
    "arrays,message",
    [
        ({"x": np.zeros(3)}, "has no edge_index"),
        ({"edge_index": np.array([[0], [1]]), "y": np.zeros(9), "z": np.zeros(4)}, r"'z'.* expected 9 rows"),
        ({"edge_index": np.array([[0], [9]]), "num_nodes": np.array(3)}, "dst must be in"),
        ({"edge_index": np.array([[0], [1]]), "train_idx": np.array([7])}, r"train_idx must be in \[0, 2\)"),
        ({"edge_index": np.array([[0], [1]]), "a": np.array([{}], dtype=object)}, "plain arrays"),
        ({"edge_index": np.array([[0], [1]]), "edge_type": np.array([3]), "edge_type_names": np.array(["a|b|a"])},
         r"edge_type must be in \[0, 1\)"),
    ],
)  # fmt: skip
def test_a_malformed_npz_is_refused_by_name(arrays, message, tmp_path):
    np.savez(tmp_path / "g.npz", **arrays)
    with pytest.raises(ValueError, match=f"g.npz.*{message}"):
        load(tmp_path / "g.npz")


def test_a_truncated_npz_is_refused_by_name(tmp_path):
    np.savez(tmp_path / "g.npz", edge_index=np.zeros((2, 1000), dtype=np.int64))
    content = (tmp_path / "g.npz").read_bytes()
    for size in (0, 10, len(content) // 2):
        (tmp_path / "g.npz").write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"g.npz cannot be read"):
            load(tmp_path / "g.npz")


def test_generated_datasets_have_names():
    graph = dataset("sbm-1.5k:num_classes=4,homophily=0.75,seed=3")
    assert graph.num_nodes() == 1500 and graph.info["homophily"] == 0.75 and graph.info["seed"] == 3
    assert dataset("rmat-2K").num_edges() == 40_000 and dataset("rmat-2k:num_edges=7").num_edges() == 7
    assert dataset("typed-1k").num_nodes("paper") == 1000
    with pytest.raises(ValueError, match="'colour' is not an argument of sbm"):
        dataset("sbm-1k:colour=3")
    with pytest.raises(ValueError, match="seed must be a number, got 'x'"):
        dataset("sbm-1k:seed=x")


def test_a_dataset_is_found_in_the_data_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GNNSYS_DATA", str(tmp_path))
    np.savez(tmp_path / "tiny.npz", edge_index=np.array([[0], [1]]), x=np.array([[1.0, 3.0], [0.0, 0.0]]))
    assert available_datasets() == ["tiny"]
    assert dataset("tiny").node_data[NODE]["x"].tolist() == [[1, 3], [0, 0]]
    assert dataset("tiny", row_normalize=True).node_data[NODE]["x"].tolist() == [[0.25, 0.75], [0, 0]]
    for name, message in (("other", r"is not there.*tiny.*are generated"), ("../tiny", r"there is no file \.\./tiny")):
        with pytest.raises(ValueError, match=message):
            dataset(name)


REAL = {  # nodes, edges stored: the README of the data
    "cora": (2708, 10_556),
    "tolokers": (11_758, 1_038_000),
    "dblp_hetero": (26_128, 119_783),
    "aifb": (8285, 29_043),
    "npm_deps_2016": (304_031, 2_345_189),
}


@pytest.mark.parametrize("name", REAL)
def test_real_graphs_have_the_published_counts(name):
    try:
        path = find_dataset(name)
    except ValueError as error:
        pytest.skip(str(error))
    graph = load(path)
    num_edges = sum(graph.num_edges(edge_type) for edge_type in graph.edge_types)
    assert (sum(graph.num_nodes(node_type) for node_type in graph.node_types), num_edges) == REAL[name]


@pytest.mark.parametrize("name", ["edges.csv", "edges.parquet"])
def test_columns_without_src_and_dst_are_refused_with_the_columns_to_write(name, tmp_path):
    path = tmp_path / name
    if name.endswith("csv"):
        path.write_text("customer,product,amount\n0,1,2.5\n")
    else:
        pq = pytest.importorskip("pyarrow.parquet")
        pyarrow = pytest.importorskip("pyarrow")
        pq.write_table(pyarrow.table({"customer": [0], "product": [1], "amount": [2.5]}), path)
    with pytest.raises(ValueError, match="no column is called 'src'") as caught:
        load(path, columns=["customer", "product", "amount"])
    assert str(caught.value).endswith("src and dst, such as --columns src,dst,amount")
    assert load(path, columns=["src", "dst", "amount"], num_nodes=2).num_edges() == 1


@pytest.mark.parametrize(
    ("columns", "instead"),
    [
        ("dst,b,c", "dst,src,c"),
        ("a,dst,c", "src,dst,c"),
        ("src,product,time", "src,dst,time"),
        ("time,a,b", "time,src,dst"),
        ("weight,a,b", "weight,src,dst"),
    ],
)
def test_columns_with_known_names_stay_in_their_places(columns, instead, tmp_path):
    path = tmp_path / "edges.csv"
    path.write_text("0,1,2\n")
    with pytest.raises(ValueError, match=f"such as --columns {instead}$"):
        load(path, columns=columns.split(","))
    load(path, columns=instead.split(","), num_nodes=3)


def test_columns_without_a_name_to_spare_get_no_example(tmp_path):
    (tmp_path / "edges.csv").write_text("0,1\n")
    with pytest.raises(ValueError, match=r"columns= calls the two ends of an edge src and dst$"):
        load(tmp_path / "edges.csv", columns=["time", "weight"])


def test_names_of_two_kinds_of_nodes_are_numbered_apart(tmp_path):
    (tmp_path / "buys.csv").write_text("src,dst\nann,tea\n")
    words = "of both columns together if their nodes are of one type, else of each column alone, for Graph.from_edge_in"
    with pytest.raises(ValueError, match=words):
        load(tmp_path / "buys.csv")
