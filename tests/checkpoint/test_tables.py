"""Tables come back on other parts and other bounds, at the rows that mean the same; or it is said why they cannot."""

from __future__ import annotations

import pytest
import torch

import gnnsys
from gnnsys.checkpoint import tables
from gnnsys.checkpoint.tables import originals_key
from gnnsys.store import Shard, Store
from tests.checkpoint.training import DIM, NUM_NODES, Job, make_parts


def life(folder, num_parts, bounds=None, *, num_rows=50, dim=4, steps=0, optimizer=gnnsys.SparseAdam):
    """A table with its optimizer; what it and its states hold at the end."""
    shard = Shard(0)
    store = Store(machine_of_part=[0] * num_parts, local=shard)
    try:
        embedding = gnnsys.DistEmbedding(store, None if bounds else num_rows, dim, "users", bounds=bounds)
        sparse = optimizer([embedding], lr=0.1)
        with gnnsys.resume(folder, users=embedding, sparse=sparse) as saver:
            for _ in range(steps):
                ids = torch.tensor([saver.steps, 3, 49, 20])
                embedding(ids).pow(2).sum().backward()
                sparse.step()
                saver.step()
                sparse.lr *= 0.9
            saver.save()
        names = ["users", "users/exp_avg", "users/exp_avg_sq"] if optimizer is gnnsys.SparseAdam else ["users"]
        return [store.tensor(name)[:].clone() for name in names], sparse.lr
    finally:
        shard.close()


@pytest.mark.parametrize(("num_parts", "bounds"), [(1, None), (5, None), (3, (0, 0, 41, 50))])
def test_rows_and_optimizer_state_are_cut_anew_and_train_on(tmp_path, num_parts, bounds):
    saved = life(tmp_path, 2, (0, 13, 50), steps=4)
    restored = life(tmp_path, num_parts, bounds)
    assert all(map(torch.equal, saved[0], restored[0])) and saved[1] == restored[1]
    trained = life(tmp_path, num_parts, bounds, steps=3)
    unbroken = life(tmp_path / "unbroken", 2, (0, 13, 50), steps=7)
    assert all(map(torch.equal, trained[0], unbroken[0])), "the number of steps came back too"


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"num_rows": 51}, r"'users' was saved with rows 50 and now has rows 51"),
        ({"dim": 5}, r"'users' was saved with values of shape \[4\] and now has values of shape \[5\]"),
        ({"optimizer": gnnsys.SparseAdagrad}, r"sparse does not take .* is of 'adam', this optimizer is 'adagrad'"),
    ],
)
def test_tables_that_are_others_are_refused_with_both_sizes(tmp_path, other, words):
    life(tmp_path, 2, steps=1)
    with pytest.raises(ValueError, match=words):
        life(tmp_path, 2, **other)


def test_an_optimizer_that_had_no_state_when_it_was_saved_has_none_afterwards(tmp_path):
    shard = Shard(0)
    store = Store(machine_of_part=[0, 0], local=shard)
    embedding = gnnsys.DistEmbedding(store, 50, 4, "users")
    sparse = gnnsys.SparseAdam([embedding])
    gnnsys.resume(tmp_path, users=embedding, sparse=sparse, asynchronous=False).save()
    before = embedding.table[:]

    def train_once():
        embedding(torch.arange(50)).sum().backward()
        sparse.step()
        return embedding.table[:]

    first = train_once()
    train_once()
    gnnsys.resume(tmp_path, users=embedding, sparse=sparse)
    assert torch.equal(embedding.table[:], before) and shard.find("users/exp_avg") is None
    assert torch.equal(train_once(), first)
    shard.close()


def by_original_id(parts, folder, name="node/node/users"):
    """The embedding and its state after a restore, in the user's own order of nodes."""
    with gnnsys.init(process_group=False):
        graph = gnnsys.open(parts)
        job = Job(graph, name=name)
        states = {key: value for key, value in job.states.items() if key != "loader"}
        with gnnsys.resume(folder, **states) as saver:
            assert saver.steps == 3
        ids = graph.global_ids(torch.arange(NUM_NODES))
        return torch.cat([graph.store.tensor(table)[ids] for table in (name, f"{name}/exp_avg")], 1)


def without_loader(parts, folder, name="node/node/users"):
    with gnnsys.init(process_group=False):
        job = Job(gnnsys.open(parts), name=name)
        states = {key: value for key, value in job.states.items() if key != "loader"}
        with gnnsys.resume(folder, every=3, **states) as saver:
            job.run(saver, 3)
        job.loader.close()  # its threads would be waited for when the tests end


def test_rows_of_nodes_follow_their_nodes_to_other_parts(tmp_path):
    parts = make_parts(tmp_path / "parts")
    without_loader(parts, tmp_path / "checkpoints")
    rows = by_original_id(parts, tmp_path / "checkpoints")
    assert rows.shape == (NUM_NODES, 2 * DIM) and rows[:, DIM:].any()
    for num_parts, seed in ((3, 7), (1, 0), (2, 9)):
        others = make_parts(tmp_path / f"{num_parts}-{seed}", num_parts, seed)
        assert torch.equal(by_original_id(others, tmp_path / "checkpoints"), rows)


def test_embeddings_of_a_node_type_follow_their_nodes_with_one_value_per_row(tmp_path):
    graph = gnnsys.graph.dataset("typed-1k")

    def by_user(num_parts: int, steps: int) -> torch.Tensor:
        folder = tmp_path / f"parts-{num_parts}"
        gnnsys.partition.partition_graph(graph, num_parts, folder)
        with gnnsys.init(process_group=False):
            parts = gnnsys.open(folder)
            embedding = gnnsys.DistEmbedding(parts, dim=3, node_type="author")
            optimizer = gnnsys.RowWiseAdagrad([embedding], lr=0.1)
            with gnnsys.resume(tmp_path / "checkpoints", embedding=embedding, optimizer=optimizer) as saver:
                for step in range(steps):
                    embedding(torch.arange(step, 40)).square().sum().backward()
                    optimizer.step()
                saver.save()
            users = parts.global_ids(torch.arange(parts.num_nodes("author")), "author")
            sums = parts.store.tensor("node/author/embedding/row_sum")[users]
            return torch.cat([embedding.table[users], sums.unsqueeze(1)], 1)

    rows = by_user(2, steps=3)
    assert rows[:, 3].count_nonzero() == 40
    assert torch.equal(by_user(3, steps=0), rows)


def test_original_ids_are_read_once_however_many_pieces_rows_go_in(tmp_path, monkeypatch):
    without_loader(make_parts(tmp_path / "parts"), tmp_path / "checkpoints")
    read, files = tables.read_array, []
    monkeypatch.setattr(tables, "read_array", lambda path: (files.append(path.name), read(path))[1])
    monkeypatch.setattr(tables, "_PIECE_BYTES", 64)
    rows = by_original_id(make_parts(tmp_path / "others", 3, 7), tmp_path / "checkpoints")
    assert files == ["0-00000.npy", "0-00001.npy"] and rows.any()


def test_a_table_that_may_or_may_not_be_of_nodes_is_refused_on_other_parts(tmp_path):
    parts = make_parts(tmp_path / "parts")
    without_loader(parts, tmp_path / "checkpoints", "users")
    by_original_id(parts, tmp_path / "checkpoints", "users")
    others = make_parts(tmp_path / "others", 3, 7)
    with pytest.raises(ValueError, match=r"'embedding' was saved with other parts.*named 'node/node/...'"):
        by_original_id(others, tmp_path / "checkpoints", "users")


def test_a_table_of_parts_is_not_restored_where_none_are_open(tmp_path):
    with gnnsys.init(process_group=False):
        graph = gnnsys.open(make_parts(tmp_path / "parts"))
        users = graph.store.create("users", NUM_NODES, (2,))
        gnnsys.resume(tmp_path / "checkpoints", users=users, asynchronous=False).save()
    shard = Shard(0)
    users = Store(machine_of_part=[0], local=shard).create("users", NUM_NODES, (2,))
    with pytest.raises(ValueError, match="'users' was saved beside parts, and none are open now"):
        gnnsys.resume(tmp_path / "checkpoints", users=users)
    shard.close()


def test_nodes_of_two_graphs_are_told_apart_though_their_type_has_one_name():
    assert originals_key({"graph": "a", "type": "node"}) != originals_key({"graph": "b", "type": "node"})
