"""A push that is refused, or cannot be sent, costs nobody else anything; one that is lost is made good by a save."""

import threading
import time

import pytest
import torch

from gnnsys.comm import Client, DeadlineExceeded, Kind, Limits, RemoteError, Reply, Request, Server
from gnnsys.store import Shard, Store, TableSpec, outbox, push
from tests.store.cluster import alone, cluster

ADAGRAD = {"kind": "adagrad", "lr": 1.0, "lr_decay": 0.0, "initial": 0.0, "eps": 1e-10}
IDS = torch.arange(3)


def test_a_refused_push_does_not_keep_the_table_from_being_read():
    with cluster([0, 1]) as c:
        c.add(TableSpec("node/n/x", (2,), torch.float32, (0, 5, 10)), torch.ones(10, 2))
        table = c.stores[0].tensor("node/n/x")
        with pytest.raises(ValueError, match="never written"):
            table[IDS] = torch.zeros(3, 2)
        assert table[IDS].sum() == 6


def test_a_refused_push_that_nobody_asked_about_is_told_once():
    with cluster([0, 1]) as c:
        c.add(TableSpec("node/n/x", (2,), torch.float32, (0, 5, 10)), torch.ones(10, 2))
        store = c.stores[0]
        for told in (store.tensor("node/n/x").__getitem__, lambda ids: store.flush()):
            store.push("node/n/x", torch.tensor([0, 9]), torch.zeros(2, 2))
            with pytest.raises(ValueError, match="never written"):
                told(IDS)
            store.flush()
            assert store.tensor("node/n/x")[IDS].sum() == 6


@pytest.mark.parametrize("how", ["timeout", "optimizer"])
def test_a_step_that_could_not_be_sent_leaves_no_gap_that_later_pushes_wait_for(how):
    with cluster([0, 1]) as c:
        store = c.stores[0]
        store.create("e", 10, (2,))
        with pytest.raises(ValueError):
            if how == "timeout":
                store.step("e", IDS, torch.zeros(3, 2), ADAGRAD, timeout=0)
            else:
                store.step("e", IDS, torch.zeros(3, 2), {"kind": "sgd"})
        began = time.monotonic()
        store.push("e", IDS, torch.ones(3, 2)).result()
        store.step("e", IDS, torch.zeros(3, 2), ADAGRAD).result()
        assert time.monotonic() - began < 100  # each had 120 s


def test_a_push_that_reached_one_shard_and_not_another_counts_as_lost():
    with cluster([0, 1]) as c, Client({0: c.clients[0].peers[0]}, sender=0, incarnation=5) as client:
        c.stores[0].create("e", 10, (2,))
        half = Store(machine_of_part=[0, 1], machine=7, client=client)
        half.register(c.stores[0].spec("e"))
        half.push("e", IDS, torch.ones(3, 2)).result()
        for ids, error in [(torch.tensor([9]), "no peer 1"), (torch.arange(10), "no peer 1"), (IDS, "lost, to table")]:
            with pytest.raises((ValueError, RuntimeError), match=error):
                half.push("e", ids, torch.ones(ids.numel(), 2))


def test_what_a_server_is_too_busy_for_is_sent_again():
    shard, spec = Shard(0), TableSpec("e", (), torch.float32, (0, 10), True)
    shard.create(spec, [0], {"kind": "zeros"})
    began, go_on = threading.Event(), threading.Event()

    def hold(request: Request) -> Reply:
        began.set()
        go_on.wait(120)
        return Reply()

    handlers = {**shard.handlers(), Kind.STATUS: hold}
    with (
        Server(handlers, threads=1, limits=Limits(max_queue=2)) as server,
        Client({0: server.endpoints[0]}, sender=0, incarnation=1, timeout=120) as client,
    ):
        store = Store(machine_of_part=[0], machine=7, client=client)
        store.register(spec)
        running = client.request(0, Kind.STATUS)
        assert began.wait(120)
        first, second = store.push("e", IDS, torch.ones(3)), store.push("e", IDS, torch.ones(3))
        while not client.counters()["events"].get("busy"):
            client.request(0, Kind.PING).result()
        go_on.set()
        running.result()
        first.result()
        second.result()
        store.push("e", IDS, torch.ones(3)).result()
    shard.close()


def test_a_push_larger_than_what_may_be_under_way_waits_for_its_own_beginning(monkeypatch):
    monkeypatch.setattr(push, "_MESSAGE_BYTES", 400)
    monkeypatch.setattr(outbox, "_UNDER_WAY_BYTES", 2000)
    shard, spec, unanswered = Shard(0), TableSpec("e", (), torch.float32, (0, 2000), True), []
    shard.create(spec, [0], {"kind": "zeros"})

    def slow(request: Request) -> Reply:
        unanswered.append(server.counters()["held_bytes"])
        return shard.handlers()[Kind.PUSH](request)

    with (
        Server({**shard.handlers(), Kind.PUSH: slow}, threads=1, limits=Limits(max_client_bytes=8000)) as server,
        Client({0: server.endpoints[0]}, sender=0, incarnation=1, timeout=120) as client,
    ):
        store = Store(machine_of_part=[0], machine=7, client=client)
        store.register(spec)
        store.push("e", torch.arange(2000), torch.arange(2000.0)).result()
        assert torch.equal(store.tensor("e")[torch.arange(2000)], torch.arange(2000.0))
        assert len(unanswered) == 20 and max(unanswered) < 8000
        assert "busy" not in client.counters()["events"]
    shard.close()


def test_pushes_go_on_after_a_lost_one_once_every_table_of_unknown_rows_was_loaded_or_dropped(tmp_path):
    with cluster([0, 1]) as c:
        store = c.stores[0]
        for name in ("e", "f", "g"):
            store.create(name, 10, (2,))
        store.save("e", str(tmp_path))
        lost = store._outbox._numbering.next(0)
        for name in ("e", "f"):
            store._outbox.lose(name, DeadlineExceeded("no answer"))
        with pytest.raises(RuntimeError, match="drop them: 'e', 'f'"):
            store.push("g", IDS, torch.ones(3, 2))
        store.load("e", str(tmp_path))
        with pytest.raises(RuntimeError, match="or drop them: 'f'"):
            store.push("e", IDS, torch.ones(3, 2))
        store.drop("f")
        store.push("e", IDS, torch.ones(3, 2)).result()
        plan = torch.tensor([[store.spec("e").number, 0, 1, 2, 0]])
        late = c.clients[0].request(0, Kind.PUSH, [plan, IDS[:1], torch.zeros(1, 2)], sequence=lost)
        with pytest.raises(RemoteError, match="given it up for lost"):
            late.result()
        assert store.tensor("e")[IDS].sum() == 6


def test_a_reader_notices_that_a_table_was_dropped_and_made_anew():
    with cluster([0, 1], 2) as c:
        owner, far = c.stores[0], Store(machine_of_part=[0, 1], machine=7, client=c.clients[1], rank=1, world_size=2)
        view = None
        for num_rows in (10, 100, 30):
            table = owner.create("e", num_rows, (1,))
            table[:] = torch.arange(float(num_rows)).view(-1, 1)
            view = view or far.tensor("e")
            assert view[torch.tensor([2, 7])].flatten().tolist() == [2, 7]
            assert view.shape == (num_rows, 1)
            if num_rows != 30:
                owner.drop("e")


def test_a_reader_that_looked_at_a_table_and_not_at_its_rows_notices_too():
    with cluster([0, 0], 2) as c:
        owner, near = c.stores
        owner.create("e", bounds=(0, 4, 10))
        view = near.tensor("e")
        owner.drop("e")
        owner.create("e", bounds=(0, 6, 10))[:] = torch.arange(10.0)
        assert view[torch.arange(10)].tolist() == list(range(10))


def test_a_push_to_a_table_that_was_made_anew_is_refused_once_and_changes_nothing():
    with cluster([0, 1]) as c:
        owner, far = c.stores[0], Store(machine_of_part=[0, 1], machine=7, client=c.clients[0])
        owner.create("e", 10, (1,))
        far.tensor("e")[IDS] = torch.ones(3, 1)
        owner.drop("e")
        owner.create("e", 100, (1,))
        with pytest.raises(ValueError, match="table 'e' does not exist: it was dropped"):
            far.push("e", torch.tensor([7]), torch.ones(1, 1)).result()
        assert not owner.tensor("e")[:].any()
        far.push("e", torch.tensor([60]), torch.ones(1, 1)).result()
        assert owner.tensor("e")[torch.tensor([60])] == 1


@pytest.mark.parametrize("name", ["node", "edge", "global", "original/n", "node/n", "edge/n|to|n"])
def test_a_table_named_like_the_beginning_of_the_graphs_is_refused(name):
    with alone() as store, pytest.raises(ValueError, match="tables of the graph begin like this"):
        store.create(name, 4)


def test_making_and_dropping_a_table_leaves_alone_what_the_process_reads_by_itself():
    with alone(2) as store:
        for name in ("x/sum", "x/y"):
            for part in range(2):
                store.add_local(TableSpec(name, (2,), torch.float32, (0, 5, 10)), part, torch.ones(5, 2))
        store.create("x", 4)
        store.drop("x")
        for name in ("x/sum", "x/y"):
            assert store.tensor(name)[IDS].sum() == 6


@pytest.mark.parametrize(
    ("dtype", "init", "message"),
    [
        (torch.int8, 1000, "has no 1000"),
        (torch.int32, 0.5, "has no 0.5"),
        (torch.bool, 2, "has no 2"),
        (torch.float16, 1e9, "has no 1000000000.0"),
        (torch.float32, 10**400, "to begin with"),
        (torch.float32, float("nan"), "has no nan"),
        (torch.float32, ("uniform", 0.0, 1.0, 2**70), "seed"),
        (torch.float32, ("uniform", "a", 1.0, 1), "has no 'a'"),
        (torch.complex64, "zeros", "cannot be torch.complex64"),
    ],
)
def test_tables_that_cannot_begin_so_are_refused_and_not_there(dtype, init, message):
    with cluster([0]) as c:
        with pytest.raises(ValueError, match=message):
            c.stores[0].create("t", 10, dtype=dtype, init=init)
        assert c.shards[0].names() == []


def test_whole_numbers_are_first_values_to_the_last_digit():
    with alone() as store:
        assert store.create("t", 2, dtype=torch.int64, init=2**53 + 1)[:].tolist() == [2**53 + 1] * 2


def test_a_push_of_several_items_is_applied_whole_or_not_at_all():
    shard, spec = Shard(0), TableSpec("t", (2,), torch.float32, (0, 10), True)
    rows = shard.create(spec, [0], {"kind": "zeros"}).part(0).rows
    good, ids, number = torch.ones(1, 2), torch.tensor([3]), spec.number
    bad = [(torch.tensor([10]), good), (ids, torch.ones(1, 3)), (ids, good.long()), (good, good)]
    for turn, (bad_ids, bad_rows) in enumerate(bad):
        plan = torch.tensor([[number, 0, 1, 2, 0], [number, 0, 3, 4, 0]])
        request = Request.local(Kind.PUSH, [plan, ids, good, bad_ids, bad_rows], sequence=turn)
        with pytest.raises(ValueError):
            shard.handlers()[Kind.PUSH](request).result(0)
    assert not rows.any()
    shard.close()
