"""Every node type has rows of one width, whatever it comes with, in memory and in parts."""

from collections.abc import Iterator

import pytest
import torch

import gnnsys
import gnnsys.pyg
from gnnsys.graph import Graph, dataset, to_pyg
from gnnsys.nn import HeteroSAGE, InputEncoder, to_homogeneous
from gnnsys.partition import partition_graph


def bare_authors() -> Graph:
    """Papers and institutions have features, authors have none."""
    graph = dataset("typed-1k")
    del graph.node_data["author"]["x"]
    return graph


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> Iterator[gnnsys.DistGraph]:
    folder = tmp_path_factory.mktemp("typed") / "parts"
    partition_graph(bare_authors(), 2, folder)
    with gnnsys.init(process_group=False):
        yield gnnsys.open(folder)


def a_batch(graph: gnnsys.Graph | gnnsys.DistGraph) -> gnnsys.Batch:
    papers = graph.from_global(torch.arange(30), "paper")
    loader = gnnsys.NeighborLoader(graph, [4, 4], input_nodes=papers, batch_size=30)
    (batch,) = loader
    loader.close()
    return batch


def test_rows_are_features_through_a_layer_and_learnable_rows_where_there_are_none():
    graph = bare_authors()
    encoder, batch = InputEncoder(graph, 8), a_batch(graph)
    found = encoder(batch)
    assert list(found) == graph.node_types and not encoder.embeddings
    for node_type, rows in found.items():
        if node_type == "author":
            assert torch.equal(rows, encoder.tables["author"].weight[batch["author"].n_id.long()])
        else:
            linear = encoder.linears[node_type]
            torch.testing.assert_close(rows, batch[node_type].x @ linear.weight.t() + linear.bias)
    whole = encoder(graph)
    for node_type, rows in found.items():
        torch.testing.assert_close(rows, whole[node_type][batch[node_type].n_id.long()])


def test_a_batch_of_pygs_is_encoded_as_ours_is():
    pytest.importorskip("torch_geometric")
    graph = bare_authors()
    encoder, batch = InputEncoder(graph, 8), a_batch(graph)
    data = to_pyg(graph)
    (theirs,) = gnnsys.pyg.NeighborLoader(data, [4, 4], input_nodes=("paper", torch.arange(30)), batch_size=30)
    want = encoder(graph)
    for node_type, rows in encoder(theirs).items():
        torch.testing.assert_close(rows, want[node_type][theirs[node_type].n_id])
    with pytest.raises(ValueError, match=r"graph is PyG's HeteroData: pass gnnsys.graph.from_pyg"):
        InputEncoder(data, 8)
    whole = r"'author' is looked up by node id, and this HeteroData has no 'n_id' of it: pass a loader.s batch, or"
    for encode in (encoder, InputEncoder(graph, 8, ids=["author"])):
        with pytest.raises(ValueError, match=whole):
            encode(data)
    with pytest.raises(ValueError, match=r"PyG's Data has no node types.*: pass .*from_pyg\(data\)"):
        encoder(to_pyg(dataset("sbm-1k")))
    with pytest.raises(ValueError, match=r"takes a batch of a loader, or a graph in memory, got dict: pass the batch"):
        encoder(batch.x_dict)
    with pytest.raises(ValueError, match=r"got HeteroData: a HeteroData has a to_homogeneous\(\) of its own"):
        to_homogeneous(theirs)


def test_a_type_that_is_named_has_both():
    graph = bare_authors()
    encoder, batch = InputEncoder(graph, 8, embed=["author", "paper"]), a_batch(graph)
    ids = batch["paper"].n_id.long()
    expected = encoder.linears["paper"](batch["paper"].x) + encoder.tables["paper"].weight[ids]
    assert torch.equal(encoder(batch)["paper"], expected)


def test_sparse_embeddings_in_memory_are_trained_row_by_row():
    graph = bare_authors()
    encoder, batch = InputEncoder(graph, 8, sparse=True), a_batch(graph)
    table, ids = encoder.tables["author"].weight, batch["author"].n_id.long()
    before = table.detach().clone()
    encoder(batch)["author"].sum().backward()
    assert table.grad.is_sparse and sorted(table.grad.coalesce().indices()[0].tolist()) == sorted(ids.tolist())
    torch.optim.SparseAdam(encoder.tables.parameters(), lr=0.1).step()
    changed = (table != before).any(1).nonzero().view(-1)
    assert changed.tolist() == sorted(ids.tolist())


def test_types_that_are_ids_stay_ids_in_memory_and_of_parts(parts):
    for graph in (bare_authors(), parts):
        encoder, batch = InputEncoder(graph, 8, ids="author"), a_batch(graph)
        found = encoder(batch)
        assert torch.equal(found["author"], batch["author"].n_id.long()) and found["author"].dtype == torch.int64
        assert found["paper"].shape[1] == 8 and not encoder.embeddings and "author" not in encoder.tables


def test_embeddings_of_parts_are_trained_where_their_nodes_are(parts):
    encoder, batch = InputEncoder(parts, 8), a_batch(parts)
    (embedding,) = encoder.embeddings
    assert parts.store.spec(embedding.name).bounds == (0, *parts.book.ranges("author")[:, 1].tolist())
    model = HeteroSAGE(8, 8, 2, 3, metadata=parts, targets=["paper"])
    sparse = gnnsys.SparseAdam(encoder.embeddings, lr=0.1)
    before = embedding.table[:]
    model(encoder(batch), batch.edge_index_dict)["paper"].square().sum().backward()
    sparse.step()
    changed = (embedding.table[:] != before).any(1).nonzero().flatten()
    assert changed.numel() and set(changed.tolist()) <= set(batch["author"].n_id.tolist())
    assert encoder.linears["paper"].weight.grad is not None
    assert not any("author" in name for name, _ in encoder.named_parameters()), "DDP never sees the table"


def test_a_graph_of_one_type_is_encoded_too():
    graph = dataset("sbm-1k")
    loader = gnnsys.NeighborLoader(graph, [2], input_nodes=torch.arange(5), batch_size=5)
    encoder, (batch,) = InputEncoder(graph, 4, embed=["node"]), loader
    loader.close()
    assert encoder(batch)["node"].shape == (batch.num_nodes, 4)


def test_bad_use_says_what_to_write_instead():
    graph = bare_authors()
    for options, words in (
        ({"embed": ()}, r"'author' has no 'x' and no embedding.* embed=\['author'\], or give the graph features of it"),
        ({"embed": ["autor"]}, r"no nodes of 'autor'.*did you mean"),
        ({"embed": "author"}, r"embed must be a list of node types"),
        ({"dim": 0}, r"dim must be a whole number of at least 1, got 0"),
        ({"name": "y"}, r"'y' of 'paper' has shape \[.*\]: features are \[nodes, width\]"),
    ):
        with pytest.raises(ValueError, match=words):
            InputEncoder(graph, **{"dim": 4, **options})
    encoder, batch = InputEncoder(graph, 4), a_batch(graph)
    del batch["paper"]["x"]
    with pytest.raises(ValueError, match=r"the batch has no 'x' of 'paper', only .*: have the loader fetch it"):
        encoder(batch)
