"""Errors that newcomers meet first: each says what to call or write instead, in one line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import gnnsys
from gnnsys.graph import Graph, as_graph, external_graph, load, save, sbm, some, to_pyg, typed_graph
from gnnsys.partition import open_parts, partition_graph


@pytest.fixture(scope="module")
def graph() -> Graph:
    return sbm(300, seed=1)


@pytest.fixture(autouse=True)
def session_of_open() -> Iterator[None]:
    """`gnnsys.open` begins a session where there is none."""
    yield
    session = gnnsys.session.current()
    if session is not None:
        session.close()


def test_open_on_a_saved_graph_names_load_and_partition_and_load_on_parts_names_open(graph: Graph, tmp_path: Path):
    save(graph, tmp_path / "graph")
    partition_graph(graph, 2, tmp_path / "parts")
    with pytest.raises(ValueError, match=r"gnnsys\.graph\.load\('.*graph'\) reads.*gnnsys partition .*graph --parts"):
        gnnsys.open(tmp_path / "graph")
    with pytest.raises(ValueError, match=r"is a directory of parts, which gnnsys\.open\('.*parts'\) opens"):
        load(tmp_path / "parts")
    (tmp_path / "edges.txt").write_text("0 1\n")
    with pytest.raises(ValueError, match=r"make one with: gnnsys partition .*edges\.txt --parts P --out DIR"):
        gnnsys.open(tmp_path / "edges.txt")
    for name, content in (("x.json", '{"a": 1}'), ("y.json", "nope"), ("z.bin", "")):
        (tmp_path / name).write_text(content)
        words = r"gnnsys partition SOURCE --parts P .*, where SOURCE is a saved graph or a file .* \.npz, .*\.csv"
        with pytest.raises(ValueError, match=words):
            gnnsys.open(tmp_path / name)
    (tmp_path / "dgl").mkdir()
    described = {"graph_name": "g", "num_parts": 2, "part_method": "metis", "part-0": {}}
    (tmp_path / "dgl" / "g.json").write_text(json.dumps(described))
    for path in (tmp_path / "dgl" / "g.json", tmp_path / "dgl"):
        with pytest.raises(ValueError, match=r"a partition of DGL's, .*; make parts of the DGL graph itself") as caught:
            gnnsys.open(path)
        assert "gnnsys partition " not in str(caught.value)
    with pytest.raises(ValueError, match=r"'.*nowhere' is not a directory of parts.*gnnsys partition SOURCE"):
        gnnsys.open(tmp_path / "nowhere")


def test_graphs_of_pyg_and_dgl_are_partitioned_and_saved_as_they_are(graph: Graph, tmp_path: Path):
    pytest.importorskip("torch_geometric")
    for number, given in enumerate((to_pyg(graph), to_pyg(typed_graph(60)))):
        partition_graph(given, 2, tmp_path / f"parts-{number}")
        save(given, tmp_path / f"graph-{number}")
        same_graph(open_parts(tmp_path / f"parts-{number}").merge(), as_graph(given))
        same_graph(load(tmp_path / f"graph-{number}"), as_graph(given))
    dgl = pytest.importorskip("dgl")
    theirs = dgl.graph(tuple(graph.edge_index()), num_nodes=graph.num_nodes())
    theirs.ndata["x"] = graph.node_data["node"]["x"]
    partition_graph(theirs, 2, tmp_path / "dgl")
    assert torch.equal(open_parts(tmp_path / "dgl").merge().edge_index(), graph.edge_index())


def same_graph(found: Graph, wanted: Graph) -> None:
    assert (found.node_types, found.edge_types) == (wanted.node_types, wanted.edge_types)
    for edge_type in wanted.edge_types:
        assert torch.equal(found.edge_index(edge_type), wanted.edge_index(edge_type))
    for node_type in wanted.node_types:
        for name, rows in wanted.node_data[node_type].items():
            assert torch.equal(found.node_data[node_type][name], rows)


def test_what_is_no_graph_is_refused_with_what_to_pass(graph: Graph, tmp_path: Path):
    partition_graph(graph, 2, tmp_path / "parts")
    for given, remedy in [
        ("web.npz", r"pass gnnsys\.graph\.load\('web\.npz'\)"),
        (Path("web.npz"), r"pass gnnsys\.graph\.load\('web\.npz'\)"),
        (torch.zeros(2, 3), r"got Tensor: make one with gnnsys\.graph\.Graph\.from_edge_index"),
        (gnnsys.open(tmp_path / "parts"), r"pass graph\.parts\.merge\(\)"),
    ]:
        with pytest.raises(ValueError, match=remedy):
            partition_graph(given, 2, tmp_path / "out")
        with pytest.raises(ValueError, match=remedy):
            save(given, tmp_path / "out")


def test_errors_over_many_types_are_one_short_line_with_what_looks_like_the_one_asked_for(tmp_path: Path):
    kinds = [f"kind{i}" for i in range(60)]
    edges = {(kind, "to", kind): torch.zeros(2, 1, dtype=torch.int64) for kind in kinds}
    graph = Graph.from_edge_indices(edges, dict.fromkeys(kinds, 1))
    raised = []
    for call in (
        lambda: graph.num_nodes("kindd57"),
        lambda: graph.csc(("kind57", "too", "kind57")),
        lambda: graph.num_nodes(),
        lambda: graph.csc(),
    ):
        with pytest.raises(ValueError, match="and 52 more") as caught:
            call()
        raised.append(str(caught.value))
    assert all(len(text) < 500 and "\n" not in text for text in raised)
    assert all("kind57'" in text.partition("has")[2] for text in raised[:2])
    assert len(repr(graph)) < 500
    with pytest.raises(ValueError, match="and 52 more") as caught:
        np.savez(
            tmp_path / "g.npz",
            edge_index=np.zeros((2, 0), np.int64),
            edge_type=np.zeros(0, np.int64),
            edge_type_names=[f"{kind}|to|nothing" for kind in kinds],
            node_type_names=kinds,
            node_type_offsets=np.arange(61),
        )
        load(tmp_path / "g.npz")
    assert len(str(caught.value)) < 500 < len(str(kinds))


def test_a_short_list_is_shown_whole():
    assert some(["user", "item"]) == str(["user", "item"])
    assert some([]) == "[]"


USERS_AND_BOOKS = {
    "edge_index": np.array([[0, 1, 2], [3, 4, 3]]),
    "edge_type": np.zeros(3, np.int64),
    "edge_type_names": np.array(["user|reads|book"]),
    "node_type_names": np.array(["user", "book"]),
    "node_type_offsets": np.array([0, 3, 6]),
}


def both_ways(path: Path, **arrays: np.ndarray):
    """Loads the same `.npz` in memory and outside it."""
    np.savez(path / "g.npz", **(USERS_AND_BOOKS | arrays))
    yield lambda: load(path / "g.npz")

    def outside() -> Graph:
        external_graph(path / "g.npz", path / "out", memory_limit=64 << 20, overwrite=True)
        return load(path / "out")

    yield outside


def test_an_array_that_begins_with_another_types_name_is_refused_with_the_names_to_give_it(tmp_path: Path):
    """There are as many users as books as edges: nothing but the name can tell."""
    for name, years in (("book_year", np.arange(3)), ("book_train_mask", np.ones(3, bool))):
        bare = name.removeprefix("book_")
        for read in both_ways(tmp_path, **{name: years}):
            with pytest.raises(
                ValueError, match=f"g.npz: {name} begins with.*call it {bare}__?book.*{name}_user"
            ) as caught:
                read()
            assert "target_type" in str(caught.value)


def test_an_array_that_begins_with_a_types_name_is_the_one_types_that_has_as_many_rows(tmp_path: Path):
    sizes = {"node_type_offsets": np.array([0, 4, 6])}
    edges = {"edge_index": np.array([[0, 1, 2], [4, 5, 4]])}
    given = {"book_year": np.array([1990, 1991]), "book_train_mask": np.array([True, False]), "book_score": np.ones(4)}
    for read in both_ways(tmp_path, **sizes, **edges, **given):
        graph = read()
        assert sorted(graph.node_data["book"]) == ["train_mask", "year"]
        assert graph.node_data["book"]["year"].tolist() == [1990, 1991]
        assert list(graph.node_data["user"]) == ["book_score"], "a row per user"
    for read in both_ways(tmp_path, **sizes, **edges, book_year=np.arange(5)):
        with pytest.raises(ValueError, match="book_year begins with the node type 'book'"):
            read()


def test_an_array_that_ends_in_a_types_name_is_that_types(tmp_path: Path):
    given = {
        "year__book": np.array([1990, 1991, 1992]),  # two underscores: there are as many users
        "book_year_user": np.array([7, 8, 9]),
        "train_idx_book": np.array([2]),
        "val_mask_book": np.array([True, False, False]),
        "y_book": np.array([1, 2, 3], np.int8),
        "user_age": np.array([20, 30, 40]),
        "y": np.array([4, 5, 6], np.int8),
        "train_idx": np.array([0]),
        "x_book": np.ones((3, 2), np.float32),
        "edge_score": np.array([0.5, 0.6, 0.7]),
    }
    for read in both_ways(tmp_path, **given):
        graph = read()
        assert sorted(graph.node_data["book"]) == ["train_mask", "val_mask", "x", "y", "year"]
        assert sorted(graph.node_data["user"]) == ["book_year", "train_mask", "user_age", "y"]
        assert list(graph.edge_data["user", "reads", "book"]) == ["edge_score"]
        assert graph.node_data["book"]["year"].tolist() == [1990, 1991, 1992]
        assert graph.node_data["book"]["train_mask"].tolist() == [False, False, True]
        assert graph.node_data["book"]["y"].dtype == graph.node_data["user"]["y"].dtype == torch.int64
        assert graph.node_data["user"]["train_mask"].tolist() == [True, False, False]


def test_a_name_with_and_without_the_target_type_is_refused_as_given_twice(tmp_path: Path):
    for read in both_ways(tmp_path, age=np.arange(3), age_user=np.arange(3)):
        with pytest.raises(ValueError, match="has 'age' of node type 'user' twice, as age and as age_user"):
            read()
