"""A snapshot holds the rows of the moment it was taken, and is written while the table goes on."""

from __future__ import annotations

import threading

import pytest
import torch

from gnnsys.graph.arrays import file_checksum
from gnnsys.store import snapshots
from gnnsys.store.saved import load_part
from tests.store.cluster import cluster, random_rows


def test_rows_are_those_of_the_moment_and_files_are_listed_with_their_checksums(tmp_path):
    rows = random_rows(50, 3)
    with cluster([0, 1, 1]) as c:
        table = c.stores[0].create("t", 50, (3,))
        table[:] = rows
        for machine in range(2):
            taken = c.stores[0].snapshot("t", machine, str(tmp_path), "token")
            assert taken == {"steps": 0, "states": [], "copied": True}
        table[:] = torch.zeros(50, 3)
        files = {}
        for machine in range(2):
            files |= c.stores[0].written(machine, "token")
        with pytest.raises(ValueError, match="begun by another life of this shard"):
            c.stores[0].written(0, "another")
    found = {file.relative_to(tmp_path).as_posix(): file for file in tmp_path.rglob("*") if file.is_file()}
    assert {name: [file.stat().st_size, file_checksum(file)] for name, file in found.items()} == files
    assert torch.equal(torch.cat([load_part(str(tmp_path), "t", part).rows for part in range(3)]), rows)


def test_a_table_has_one_snapshot_at_a_time_and_the_same_token_again_is_nothing(tmp_path):
    with cluster([0]) as c:
        store, shard, go_on = c.stores[0], c.shards[0], threading.Event()
        store.create("t", 50)
        store.snapshot("t", 0, str(tmp_path / "first"), "first")
        store.written(0, "first")
        shard._snapshots._writer.submit(go_on.wait, 20)
        for _ in range(2):
            store.snapshot("t", 0, str(tmp_path / "second"), "second")
        with pytest.raises(ValueError, match="'t' is still being written"):
            store.snapshot("t", 0, str(tmp_path / "third"), "third")
        go_on.set()
        assert len(store.written(0, "second")) == 2
        store.snapshot("t", 0, str(tmp_path / "third"), "third")
        assert len(store.written(0, "third")) == 2


def test_states_that_no_optimizer_keeps_are_not_made(tmp_path):
    with cluster([0]) as c:
        c.stores[0].create("t", 50)
        with pytest.raises(ValueError, match=r"cannot have states \['x'\]"):
            c.stores[0].begin_restore("t", 1, ["x"])
        assert c.shards[0].names() == ["t"]


def test_without_a_copy_rows_are_written_from_where_they_are_and_changes_wait(tmp_path, monkeypatch):
    rows, written_from = random_rows(50, 3), []
    save_part = snapshots.save_part
    monkeypatch.setattr(
        snapshots,
        "save_part",
        lambda saved, *a, **k: (written_from.append(saved.rows.data_ptr()), save_part(saved, *a, **k)),
    )
    with cluster([0, 0], num_ranks=2) as c:
        store, shard, go_on = c.stores[0], c.shards[0], threading.Event()
        table = store.create("t", 50, (3,))
        table[:] = rows
        store.snapshot("t", 0, str(tmp_path / "before"), "before")  # makes the thread that writes
        store.written(0, "before")
        shard._snapshots._writer.submit(go_on.wait, 20)
        written_from.clear()
        for _ in range(2):  # a request that was sent again is answered though the table is held
            assert store.snapshot("t", 0, str(tmp_path / "t"), "token", copy=False)["copied"] is False
        push = c.stores[1].push("t", torch.arange(50), torch.zeros(50, 3))
        assert torch.equal(table[:], rows), "who reads does not wait"
        assert not push.done()
        go_on.set()
        assert len(store.written(0, "token")) == 4
        push.result()
        assert not table[:].any()
        assert written_from == [part.rows.data_ptr() for _, part in sorted(shard.table("t").parts.items())]
    assert torch.equal(torch.cat([load_part(str(tmp_path / "t"), "t", part).rows for part in range(2)]), rows)


@pytest.mark.parametrize(("free", "copied"), [(50 * 3 * 4 * 3 / 0.9 + 1, True), (50 * 3 * 4 * 3, False)])
def test_a_copy_that_would_not_fit_into_memory_is_not_made(tmp_path, monkeypatch, free, copied):
    monkeypatch.setattr(snapshots, "free_memory", lambda: free)
    with cluster([0]) as c:
        c.stores[0].create("t", 50, (3,))
        c.stores[0].begin_restore("t", 1, ["exp_avg", "exp_avg_sq"])  # states count too
        assert c.stores[0].snapshot("t", 0, str(tmp_path), "token")["copied"] is copied
        assert len(c.stores[0].written(0, "token")) == 4


def test_a_shard_that_is_closed_lets_go_of_what_it_holds(tmp_path):
    go_on = threading.Event()
    with cluster([0]) as c:
        store, shard = c.stores[0], c.shards[0]
        store.create("t", 50)
        store.snapshot("t", 0, str(tmp_path / "first"), "first")
        store.written(0, "first")
        shard._snapshots._writer.submit(go_on.wait, 20)
        store.snapshot("t", 0, str(tmp_path / "second"), "second", copy=False)
        outcome = shard._snapshots.written("second")
        shard.close()  # would wait for the table for ever
        with pytest.raises(ValueError, match="closed before the checkpoint was written"):
            outcome.result(0)
        go_on.set()
