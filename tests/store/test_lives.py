"""A shard that was started again: it has nothing of what was made at run time, and says so instead of starting over."""

import time

import pytest
import torch

from gnnsys.comm import Client, Kind, Server, ShardLost, TrainerLost
from gnnsys.comm.unnamed_memory import OwnerProcess
from gnnsys.store import Life, Shard, Store, TableSpec
from tests.store.cluster import cluster

ADAGRAD = {"kind": "adagrad", "lr": 1.0, "lr_decay": 0.0, "initial": 0.0, "eps": 1e-10}
IDS = torch.arange(10)
ONES = torch.ones(10, 2)


def restart(c, machine: int, life: int = 1) -> None:
    """Machine's shard dies with what it had, and another one listens where it was."""
    endpoint = c.servers[machine].endpoints[0]
    c.servers[machine].close()
    c.shards[machine] = Shard(machine, Life(machine, life))
    c.servers[machine] = Server(c.shards[machine].handlers(), bind=[endpoint]).start()


def far(c, rank: int = 0, world_size: int = 1) -> Store:
    """A store that reads everything through servers."""
    return Store(machine_of_part=[0, 1], machine=7, client=c.clients[rank], rank=rank, world_size=world_size)


@pytest.mark.parametrize("touch", ["pull", "push", "step", "save", "describe"])
def test_whoever_touches_a_table_of_an_earlier_life_is_told_that_the_shard_is_lost(touch, tmp_path):
    with cluster([0, 1]) as c:
        store = far(c)
        store.create("e", 10, (2,))
        store.push("e", IDS, ONES).result()
        restart(c, 1)
        acts = {
            "pull": lambda: store.tensor("e")[IDS],
            "push": lambda: store.push("e", IDS, ONES).result(),
            "step": lambda: store.step("e", IDS, ONES, ADAGRAD).result(),
            "save": lambda: store.save("e", str(tmp_path), overwrite=True),
            "describe": lambda: Store(machine_of_part=[1], machine=7, client=c.clients[0]).tensor("e"),
        }
        for _ in range(2):
            with pytest.raises(ShardLost, match=r"machine 1's shard was restarted.*last checkpoint") as raised:
                acts[touch]()
            assert (raised.value.machine, raised.value.rank) == (1, 0)


@pytest.mark.parametrize("machine", [0, 1])
def test_a_table_that_others_have_trained_is_not_made_anew_on_the_shard_that_lost_it(machine):
    with cluster([0, 1]) as c:
        far(c).create("e", 10, (2,))
        restart(c, machine)
        with pytest.raises(ShardLost, match=f"machine {machine}'s shard"):
            far(c).create("e", 10, (2,))


def test_a_table_made_after_the_restart_by_all_ranks_at_once_is_one_like_any_other():
    with cluster([0, 1], 4) as c:
        restart(c, 1)
        table = c.on_ranks(lambda store: store.create("e", 10, (2,)))[0]
        table[IDS] = ONES
        assert table[IDS].sum() == 20
        far(c).drop("e")
        with pytest.raises(ValueError, match="does not exist"):
            far(c).tensor("e")


def test_pushes_whose_beginning_went_with_an_earlier_life_are_not_waited_for():
    with cluster([0, 1]) as c:
        store = far(c)
        store.create("e", 10, (2,))
        store.push("e", IDS, ONES).result()  # the first of its stream
        restart(c, 1)
        store.create("f", 10, (2,))
        began = time.monotonic()
        with pytest.raises(ShardLost, match="machine 1's shard"):
            store.push("f", IDS, ONES).result()
        assert time.monotonic() - began < 100  # the push itself had 120 s


def test_a_lost_table_can_be_loaded_into_the_new_life_and_trained_on(tmp_path):
    with cluster([0, 1]) as c:
        store = far(c)
        store.create("e", 10, (2,))
        store.push("e", IDS, ONES).result()
        store.save("e", str(tmp_path))
        restart(c, 1)
        with pytest.raises(ShardLost):
            store.push("e", IDS, ONES).result()
        table = store.load("e", str(tmp_path))
        store.push("e", IDS, ONES, mode="add").result()
        store.step("e", IDS, ONES, ADAGRAD).result()
        assert torch.equal(table[IDS], torch.ones(10, 2))  # 1 + 1 - 1


def test_a_step_that_waits_for_a_rank_ends_when_that_was_silent_for_too_long():
    silence = {0: 0.0, 1: 7.5}
    shard = Shard(0, Life(0, lost_after=0.4, silent_for=lambda rank, _: silence[rank]))
    shard.create(TableSpec("e", (2,), torch.float32, (0, 10), True), [0], {"kind": "zeros"})
    with Server(shard.handlers()) as server:
        peers = {0: server.endpoints[0]}
        with (
            Client(peers, sender=0, incarnation=1, timeout=120) as first,
            Client(peers, sender=1, incarnation=1) as late,
        ):
            stores = [
                Store(machine_of_part=[0], machine=7, client=client, rank=rank, world_size=2)
                for rank, client in enumerate((first, late))
            ]
            texts = []
            for store in (stores[0], stores[0], stores[1]):  # who waits, who comes back, who was missed
                with pytest.raises(TrainerLost) as raised:
                    store.step("e", IDS, ONES, ADAGRAD).result()
                assert (raised.value.rank, raised.value.silent_for) == (1, 7.5)
                texts.append(str(raised.value))
            assert len(set(texts)) == 1 and "rank 1 was not heard of for 7.5 s" in texts[0]
            assert not stores[1].tensor("e")[IDS].any()
    shard.close()


def test_a_server_knows_how_long_it_has_not_heard_of_a_client_that_only_shows_that_it_lives():
    with Server({Kind.STATUS: lambda _: None}) as server:
        options = {"sender": 5, "incarnation": 3, "lost_after": 0.8, "ping_interval": 0.05}
        with Client({0: server.endpoints[0]}, **options):
            deadline = time.monotonic() + 120
            while server.counters()["kinds"].get("PING", {}).get("messages_in", 0) < 3:
                assert time.monotonic() < deadline
            assert server.liveness.silent_for(5, 3) < 60
        before = server.liveness.silent_for(5, 3)
        assert server.liveness.silent_for(5, 3) > before  # nothing comes any more
        asked = time.monotonic()
        assert server.liveness.silent_for(6, 3) <= time.monotonic() - asked  # never heard of: counts from this question
        assert 0 < server.liveness.silent_for(6, 3) <= time.monotonic() - asked


def test_the_end_of_a_process_is_seen_by_who_holds_on_to_it():
    import subprocess

    process = subprocess.Popen(["sleep", "60"])
    owner = OwnerProcess.of(process.pid)
    assert owner is not None and not owner.ended
    process.kill()
    process.wait()
    assert owner.ended and OwnerProcess.of(process.pid) is None
