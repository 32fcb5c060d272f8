"""A table that is held, for a save, a load or a snapshot, keeps no thread of a server waiting: what comes is parked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from gnnsys.comm import Client
from gnnsys.store import Pull, Shard, Store
from gnnsys.store import shard as shards
from gnnsys.store.saved import load_part
from tests.store.cluster import DEADLINE, Cluster, cluster, random_rows

ADAGRAD = {"kind": "adagrad", "lr": 0.5, "lr_decay": 0.0, "initial": 0.0, "eps": 0.0}
ROWS = 60
ALL = torch.arange(ROWS)


@contextmanager
def snapshot_under_way(c: Cluster, folder: Path, rank: int = 0) -> Iterator[None]:
    """Table "t" is being written from where it is, because of a rank, for as long as the block takes."""
    store, go_on = c.stores[rank], threading.Event()
    store.create("first", 1)
    store.snapshot("first", 0, str(folder / "first"), "first")  # makes the thread that writes
    store.written(0, "first")
    c.shards[0]._snapshots._writer.submit(go_on.wait, DEADLINE)
    assert store.snapshot("t", 0, str(folder / "t"), "token", copy=False)["copied"] is False
    try:
        yield
    finally:
        go_on.set()
        store.written(0, "token")


@contextmanager
def save_under_way(c: Cluster, folder: Path, monkeypatch) -> Iterator[None]:
    """Table "t" is being saved by a rank that waits for it."""
    begun, go_on, save_part = threading.Event(), threading.Event(), shards.save_part

    def slow(*args: object) -> None:
        begun.set()
        assert go_on.wait(DEADLINE)
        save_part(*args)

    monkeypatch.setattr(shards, "save_part", slow)
    saving = threading.Thread(target=c.stores[0].save, args=("t", folder / "saved"))
    saving.start()
    assert begun.wait(DEADLINE)
    try:
        yield
    finally:
        go_on.set()
        saving.join(DEADLINE)


@contextmanager
def load_under_way(c: Cluster, folder: Path, monkeypatch) -> Iterator[None]:
    """Table "t" is being loaded, with what it holds, by a rank that waits for it."""
    begun, go_on, restart = threading.Event(), threading.Event(), Shard._restart
    c.stores[0].save("t", folder / "saved")

    def slow(*args: object) -> None:
        begun.set()
        assert go_on.wait(DEADLINE)
        restart(*args)

    monkeypatch.setattr(Shard, "_restart", slow)
    loading = threading.Thread(target=c.stores[0].load, args=("t", folder / "saved"))
    loading.start()
    assert begun.wait(DEADLINE)
    try:
        yield
    finally:
        go_on.set()
        loading.join(DEADLINE)


@contextmanager
def far_away(c: Cluster) -> Iterator[Store]:
    """One more client, which has all rows from the server; nobody waits for steps of it."""
    peers = {machine: server.endpoints[0] for machine, server in enumerate(c.servers)}
    client = Client(peers, sender=77, incarnation=1, timeout=120)
    try:
        yield Store(machine_of_part=c.machine_of_part, machine=7, client=client, rank=77, world_size=78)
    finally:
        client.close()


@pytest.mark.parametrize("what", ["snapshot", "save", "load"])
def test_pushes_to_a_held_table_leave_the_server_to_others(what, tmp_path, monkeypatch):
    rows = random_rows(ROWS, 3)
    with cluster([0], num_ranks=4) as c, far_away(c) as other:
        for store in c.stores:
            store.create("t", ROWS, (3,))
            store.create("u", ROWS, (3,))
        c.stores[0].tensor("t")[:], c.stores[0].tensor("u")[:] = rows, rows
        hold = {"snapshot": snapshot_under_way, "save": save_under_way, "load": load_under_way}[what]
        with hold(c, tmp_path, *([] if what == "snapshot" else [monkeypatch])):
            ones = torch.ones(ROWS, 3)
            pushes = [store.push("t", ALL, ones * 10**store.rank, "add") for store in c.stores[1:] for _ in range(3)]
            behind = c.stores[1].push("u", ALL, ones, "add")
            for _ in range(3):
                assert torch.equal(other.pull([Pull("u", ALL)]).result()[0], rows), "its reads do not wait"
                assert torch.equal(other.pull([Pull("t", ALL)]).result()[0], rows), "of the held table neither"
            other.create("v", ROWS)
            other.push("v", ALL, torch.ones(ROWS)).result()
            assert not any(push.done() for push in pushes)
            assert not behind.done(), "a rank's pushes are applied in order"
        for push in [*pushes, behind]:
            push.result()
        torch.testing.assert_close(other.tensor("t")[:], rows + 3 * (10 + 100 + 1000))
        assert torch.equal(other.tensor("u")[:], rows + 1)


def test_steps_that_wait_for_a_held_table_or_for_other_ranks_leave_the_server_to_others(tmp_path):
    with cluster([0], num_ranks=3) as c, far_away(c) as other:
        for store in c.stores:
            store.create("t", ROWS, (3,))
        grads = torch.ones(ROWS, 3)
        steps = [store.step("t", ALL, grads, ADAGRAD) for store in c.stores[:2] for _ in range(4)]
        assert not other.pull([Pull("t", ALL)]).result()[0].any()
        with snapshot_under_way(c, tmp_path, rank=2):  # the others wait for their steps first
            steps += [c.stores[2].step("t", ALL, grads, ADAGRAD) for _ in range(4)]
            assert not other.pull([Pull("t", ALL)]).result()[0].any()
            assert not any(step.done() for step in steps)
        for step in steps:
            step.result()
        expected = -0.5 * sum(k**-0.5 for k in range(1, 5))
        torch.testing.assert_close(other.tensor("t")[:], torch.full((ROWS, 3), expected))


def test_what_waits_for_a_held_table_is_told_when_it_is_dropped(tmp_path):
    with cluster([0], num_ranks=2) as c:
        for store in c.stores:
            store.create("t", ROWS, (3,))
        with snapshot_under_way(c, tmp_path):
            push = c.stores[1].push("t", ALL, torch.ones(ROWS, 3))
            c.stores[0].drop("t")
            with pytest.raises(ValueError, match=r"'t' was dropped|does not exist"):
                push.result()


def test_states_are_held_with_their_table(tmp_path):
    with cluster([0]) as c, far_away(c) as other:
        store = c.stores[0]
        store.create("t", ROWS, (3,))
        store.step("t", ALL, torch.ones(ROWS, 3), ADAGRAD).result()
        with snapshot_under_way(c, tmp_path):
            push = other.push("t/sum", ALL, torch.zeros(ROWS, 3))
            for _ in range(3):  # behind the push
                assert other.pull([Pull("t", ALL)]).result()[0].all()
        push.result()
        assert not store.tensor("t/sum")[:].any()
    assert torch.equal(load_part(str(tmp_path / "t"), "t", 0).states["sum"], torch.ones(ROWS, 3))
