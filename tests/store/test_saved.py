"""Tables on disk are whole or not there, and come back as they were."""

from functools import partial
from pathlib import Path
from threading import Barrier

import pytest
import torch
from torch import Tensor, nn

from gnnsys.store import DistEmbedding, RowWiseAdagrad, SparseAdagrad, SparseAdam, Store
from gnnsys.store.row_optimizers import STATES
from gnnsys.store.saved import part_folder
from tests.store.cluster import alone, cluster, random_ids, random_rows

NAME = "node/paper/../trained"


def test_a_table_comes_back_as_it_was_saved(tmp_path):
    rows = random_rows(50, 3, 2).bfloat16()
    with cluster([0, 1, 1], num_ranks=2) as c:
        table = c.stores[0].create(NAME, 50, (3, 2), torch.bfloat16)
        table[:] = rows
        c.stores[0].save(NAME, tmp_path)
        table[:] = torch.zeros(50, 3, 2)
        with pytest.raises(ValueError, match="exists: choose another, or overwrite"):
            c.stores[0].save(NAME, tmp_path)
        c.stores[1].load(NAME, tmp_path)
        assert torch.equal(table[:], rows), "a table that exists is filled again"
        c.stores[0].drop(NAME)
        assert torch.equal(c.stores[1].load(NAME, tmp_path)[:], rows)
    with cluster([0, 1, 1]) as c:
        assert torch.equal(c.stores[0].load(NAME, tmp_path)[:], rows)
    assert all(path.resolve().is_relative_to(tmp_path) for path in tmp_path.rglob("*"))


def test_saves_that_do_not_belong_together_are_refused(tmp_path):
    with cluster([0, 1]) as c:
        table = c.stores[0].create("t", 10)
        c.stores[0].save("t", tmp_path)
        keep = part_folder(str(tmp_path), "t", 1).rename(tmp_path / "kept")
        table[:] = torch.ones(10)
        c.stores[0].save("t", tmp_path, overwrite=True)
        part_folder(str(tmp_path), "t", 1).rename(tmp_path / "gone")
        keep.rename(part_folder(str(tmp_path), "t", 1))
        with pytest.raises(ValueError, match="different saves"):
            c.stores[0].load("t", tmp_path)


def test_what_is_missing_altered_or_another_table_is_named(tmp_path):
    with alone(2) as store:
        store.create("t", 10)
        with pytest.raises(ValueError, match=r"part00000' is not a saved table"):
            store.load("t", tmp_path)
        with pytest.raises(ValueError, match="table 'none' does not exist"):
            store.save("none", tmp_path)
        store.save("t", tmp_path)
        file = part_folder(str(tmp_path), "t", 1) / "0000.npy"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(bytes(content))
        with pytest.raises(ValueError, match=r"part00001/0000.npy does not match its checksum"):
            store.load("t", tmp_path)
    with alone(2) as store:
        store.create("t", 12)
        with pytest.raises(ValueError, match=r"checksum|exists and is another one"):
            store.load("t", tmp_path)


def train(store: Store, optimizer: SparseAdam | SparseAdagrad, steps: range) -> None:
    for step in steps:
        for embedding in optimizer.embeddings:
            embedding(random_ids(6, 12, seed=step).view(store.world_size, -1)[store.rank]).square().sum().backward()
        optimizer.step()


def test_loading_makes_a_table_what_it_was_whatever_was_trained_since(tmp_path):
    """Saved before first steps or after; loaded after steps of both kinds; trained on, as if from the save."""
    kinds = {
        "adam": (SparseAdam, {}),
        "adagrad": (SparseAdagrad, {"initial_accumulator_value": 0.2}),
        "row_adagrad": (RowWiseAdagrad, {"initial_accumulator_value": 0.2}),
    }

    def body(store: Store, barrier: Barrier, kind: str, first: int, folder: Path | None) -> list[Tensor]:
        embedding = DistEmbedding(store, 12, 2, "emb")
        optimizer = kinds[kind][0]([embedding], lr=0.1, **kinds[kind][1])
        train(store, optimizer, range(first))
        if folder is not None:
            barrier.wait(180)
            if store.rank == 0:
                store.save("emb", folder)
            barrier.wait(180)
            train(store, optimizer, range(10, 14))
            train(store, kinds["adam" if kind == "adagrad" else "adagrad"][0]([embedding]), range(20, 22))
            barrier.wait(180)
            store.load("emb", folder)
            barrier.wait(180)
        train(store, optimizer, range(30, 33))
        return [embedding.table[:], *(store.tensor(f"emb/{state}")[:] for state in STATES[kind])]

    for first, kind in [(0, "adam"), (0, "adagrad"), (2, "adam"), (2, "adagrad"), (2, "row_adagrad")]:
        results = []
        for folder in (tmp_path / f"{kind}{first}", None):
            with cluster([0, 1], 2) as c:
                run = partial(body, barrier=Barrier(2), kind=kind, first=first, folder=folder)
                results.append(c.on_ranks(run)[0])
                names = [name for name in c.shards[0].names() if name.startswith("emb/")]
                assert sorted(names) == sorted(f"emb/{state}" for state in STATES[kind]), "states that were not saved"
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other), f"{kind}, saved after {first} steps"


def test_each_kind_of_optimizer_counts_its_own_steps_and_saves_keep_them(tmp_path):
    start = random_rows(12, 2) / 50
    oracle = nn.Embedding.from_pretrained(start.clone(), freeze=False, sparse=True)
    theirs = [
        torch.optim.Adagrad([oracle.weight], lr=0.1, lr_decay=0.5),
        torch.optim.SparseAdam([oracle.weight], lr=0.1),
    ]
    with alone(2) as store:
        embedding = DistEmbedding(store, 12, 2, "emb", init=0.0)
        embedding.table[:] = start
        ours = [SparseAdagrad([embedding], lr=0.1, lr_decay=0.5), SparseAdam([embedding], lr=0.1)]
        for step, which in enumerate([0, 0, 0, 1, 1, 0, 1]):
            for module, optimizer in ((embedding, ours[which]), (oracle, theirs[which])):
                module(random_ids(6, 12, seed=step)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            if step == 4:
                store.save("emb", tmp_path)
                with pytest.raises(ValueError, match="optimizers of several kinds"):
                    store.snapshot("emb", 0, str(tmp_path / "snapshot"), "token")
                embedding(torch.arange(12)).sum().backward()
                ours[0].step()
                store.load("emb", tmp_path)
        torch.testing.assert_close(embedding.table[:], oracle.weight.detach(), rtol=1e-5, atol=1e-6)


def test_a_table_that_has_the_name_of_a_state_is_not_taken_for_one(tmp_path):
    with alone(2) as store:
        embedding = DistEmbedding(store, 12, 2, "emb")
        store.create("emb/exp_avg", 12, (2,))[:] = torch.ones(12, 2)
        embedding(torch.tensor([3])).sum().backward()
        with pytest.raises(ValueError, match=r"'emb/exp_avg' exists, and its name is kept for an optimizer's state"):
            SparseAdam([embedding]).step()
        store.drop("emb/exp_avg")
        before = embedding.table[:]
        embedding(torch.tensor([3])).sum().backward()
        SparseAdam([embedding]).step()
        assert (embedding.table[:] != before).any(1).nonzero().flatten().tolist() == [3]
