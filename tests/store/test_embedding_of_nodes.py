"""Embeddings of nodes lie where their nodes do, however they were asked for."""

from collections.abc import Iterator

import pytest
import torch

import gnnsys
from gnnsys.graph import dataset
from gnnsys.partition import partition_graph
from gnnsys.store import DistEmbedding
from tests.store.cluster import alone


@pytest.fixture(scope="module")
def graph(tmp_path_factory) -> Iterator[gnnsys.DistGraph]:
    folder = tmp_path_factory.mktemp("typed") / "parts"
    partition_graph(dataset("typed-1k"), 3, folder)
    with gnnsys.init(process_group=False):
        yield gnnsys.open(folder)


def test_rows_of_a_node_type_are_cut_where_the_book_cuts_its_nodes(graph):
    for node_type in graph.node_types:
        embedding = DistEmbedding(graph, dim=4, node_type=node_type)
        assert embedding.name == f"node/{node_type}/embedding"
        assert embedding.num_rows == graph.num_nodes(node_type)
        for part in range(3):
            owned = graph.book.part_range(part, node_type)
            ids = torch.arange(owned.start, owned.stop)
            assert [run.part for run in embedding.table.locate(ids)] == ([part] if ids.numel() else [])


def test_a_type_makes_the_name_and_no_name_makes_the_cut(graph):
    typed = DistEmbedding(graph, dim=4, node_type="author", name="by-type")
    assert typed.name == "node/author/by-type"
    assert graph.store.spec(typed.name).bounds == (0, *graph.book.ranges("author")[:, 1].tolist())
    number = graph.num_nodes("author")
    for name, num_rows in (("relations", 100), ("node/author/by-name", number)):
        free = DistEmbedding(graph, num_rows, 4, name)
        assert graph.store.spec(free.name).bounds == tuple(num_rows * part // 3 for part in range(4))


def test_a_table_that_was_saved_before_there_were_types_is_loaded_by_the_line_that_made_it(graph, tmp_path):
    name, number = "node/author/before", graph.num_nodes("author")
    saved = graph.store.create(name, number, (4,), torch.float32, init=("uniform", -0.5, 0.5, 3))[:]  # cut evenly
    graph.store.save(name, tmp_path)
    graph.store.drop(name)
    embedding = DistEmbedding(graph, number, 4, name)
    assert not torch.equal(embedding.table[:], saved)
    graph.store.load(name, tmp_path)
    assert torch.equal(embedding.table[:], saved)
    even = graph.store.spec(name).bounds
    graph.store.drop(name)
    typed = DistEmbedding(graph, dim=4, node_type="author", name="before")
    with pytest.raises(ValueError, match=r"Only their cuts differ: make the table with bounds=") as refused:
        graph.store.load(typed.name, tmp_path)
    assert str(even) in str(refused.value)
    graph.store.drop(name)
    again = DistEmbedding(graph, dim=4, name=name, bounds=even)
    graph.store.load(name, tmp_path)
    assert torch.equal(again.table[:], saved)


def test_rows_are_trained_by_the_ids_of_a_batch(graph):
    embedding = DistEmbedding(graph, dim=4, node_type="author", name="trained", init=0.0)
    optimizer = gnnsys.SparseSGD([embedding], lr=0.5)
    loader = gnnsys.NeighborLoader(graph, [3], input_nodes=graph.from_global(range(8), "paper"), batch_size=8)
    (batch,) = loader
    loader.close()
    ids = batch["author"].n_id
    embedding(ids).sum().backward()
    optimizer.step()
    expected = torch.zeros(embedding.num_rows, 4)
    expected[ids.long()] = -0.5
    assert ids.numel() and torch.equal(embedding.table[:], expected)


def test_bad_use_says_what_to_write_instead(graph):
    bounds = (0, *graph.book.ranges("author")[:, 1].tolist())
    for options, words in (
        ({"node_type": "autor"}, r"no nodes of 'autor', only of .*author.*did you mean"),
        ({"node_type": "author", "num_rows": 7}, r"nodes of 'author', not 7: leave num_rows out"),
        ({"node_type": "author", "bounds": bounds}, r"leave bounds out"),
        ({}, r"pass node_type="),
        ({"node_type": "author", "dim": 0}, r"dim must be at least 1"),
    ):
        with pytest.raises(ValueError, match=words):
            DistEmbedding(graph, **{"dim": 4, **options})
    with alone() as store, pytest.raises(ValueError, match=r"'author' needs a graph .* gnnsys.open"):
        DistEmbedding(store, dim=4, node_type="author")
    with pytest.raises(ValueError, match=r"With a graph in memory use torch.nn.Embedding"):
        DistEmbedding(dataset("typed-1k"), dim=4, node_type="author")
