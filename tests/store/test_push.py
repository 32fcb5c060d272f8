"""Pushes change rows as one dense tensor would change: once, in order, and seen by whoever made them."""

import itertools
import random
import threading
import time

import numpy as np
import pytest
import torch

from gnnsys.comm import Client, CommError, Kind, Reply, Request
from gnnsys.store import Pull, Shard, Store, TableSpec
from gnnsys.store.push_order import PushOrder
from tests.loader.test_inputs import HOLDERS
from tests.store.cluster import alone, cluster, random_ids, random_rows
from tests.support.grid import grid


def test_writes_and_sums_are_those_of_a_dense_tensor():
    with cluster([0, 1, 1]) as c:
        table = c.stores[0].create("t", 500, (6,))
        dense = torch.zeros(500, 6)
        for turn in range(10):
            ids, rows = random_ids(200, 500, turn), random_rows(200, 6, seed=turn)
            if turn % 2:
                c.stores[0].push("t", ids, rows, "add")
                for i, row in zip(ids.tolist(), rows, strict=True):
                    dense[i] += row
            else:
                table[ids] = rows
                for i, row in zip(ids.tolist(), rows, strict=True):
                    dense[i] = row
            assert torch.equal(table[:], dense)


@grid(hold=HOLDERS)
def test_rows_are_named_by_whatever_holds_their_numbers(hold):
    ids, mask = torch.tensor([7, 0, 7, 33]), torch.arange(40) % 3 == 0
    with cluster([0, 1]) as c:
        table = c.stores[0].create("t", 40, (2,))
        table[:] = torch.arange(80.0).view(40, 2)
        assert torch.equal(table[hold(ids)], table[ids]) and torch.equal(table.pull(hold(ids)), table[ids])
        assert torch.equal(table[hold(mask)], table[mask.nonzero().view(-1)])
        assert torch.equal(table.begin_read(hold(ids)).result(), table[ids])
        assert torch.equal(table.begin_read(hold(mask)).result(), table[mask])
        table[hold(torch.tensor([5, 39]))] = np.full((2, 2), -1, np.float32)
        table[hold(mask)] = [[0.5, 1.5]] * int(mask.sum())
        assert table[[5, 39]].tolist() == [[-1, -1], [0.5, 1.5]]
    for wrong in (torch.tensor([0.5]), "3", [True, False]):
        with pytest.raises(ValueError, match="index of table 't'"):
            table[wrong]
        with pytest.raises(ValueError, match="index of table 't'"):
            table.begin_read(wrong)


@grid(dtype=[torch.float32, torch.float64, torch.float16, torch.int32, torch.int64, torch.uint8])
def test_whole_numbers_of_a_list_are_rows_of_any_table_that_holds_them(dtype):
    with alone() as store:
        table = store.create("t", 4, (2,), dtype)
        table[[1, 2]] = [[1, 2], [3, 4]]
        assert table[:].tolist() == [[0, 0], [1, 2], [3, 4], [0, 0]] and table[:].dtype == dtype
        table[1:2] = ((5, 6),)
        assert table[[1]].tolist() == [[5, 6]]
        if not dtype.is_floating_point:
            for lossy in ([[0.5, 1.0]], [[1 << 40, -1]] if dtype != torch.int64 else [[0.5, 1.0]]):
                with pytest.raises(ValueError, match="rows for table 't' must be"):
                    table[[1]] = lossy
            assert table[[1]].tolist() == [[5, 6]]


def test_rows_of_an_array_keep_their_own_dtype():
    with alone() as store:
        table = store.create("t", 4, (2,))
        with pytest.raises(ValueError, match=r"must be torch\.float32, got torch\.int64"):
            table[[1]] = np.ones((1, 2), np.int64)


def test_a_rank_reads_what_it_wrote_without_waiting_for_it():
    with cluster([1, 1]) as c:
        store = c.stores[0]
        table = store.create("t", 1000, (64,))
        for value in range(1, 20):
            store.push("t", torch.arange(1000), torch.full((1000, 64), float(value)))
            assert (table[torch.tensor([0, 999])] == value).all()


def test_the_pushers_own_rows_may_change_right_after_the_push():
    with cluster([1]) as c:
        table = c.stores[0].create("t", 1000, (256,))
        rows = torch.ones(1000, 256)
        pending = c.stores[0].push("t", torch.arange(1000), rows)
        rows.zero_()
        pending.result()
        assert (table[:] == 1).all()


def test_pushes_larger_than_a_message_arrive_whole(monkeypatch):
    monkeypatch.setattr("gnnsys.store.push._MESSAGE_BYTES", 4096)
    with cluster([0, 1]) as c:
        table = c.stores[0].create("t", 3000, (16,), torch.bfloat16)
        rows, ids = random_rows(3000, 16), torch.randperm(3000)
        c.stores[0].push("t", ids, rows).result()
        assert torch.equal(table[ids], rows.bfloat16())


@pytest.mark.parametrize("mode", ["write", "add"])
def test_pieces_of_a_push_are_applied_in_its_order(monkeypatch, mode):
    monkeypatch.setattr("gnnsys.store.push.FRAME_BYTES", 1024)  # 16 rows
    with cluster([1, 1]) as c:
        table = c.stores[0].create("t", 300, (16,))
        rows, ids = random_rows(1000, 16), random_ids(1000, 300)
        c.stores[0].push("t", ids, rows, mode).result()
        dense = torch.zeros(300, 16)
        for number, row in zip(ids.tolist(), rows, strict=True):
            dense[number] = row if mode == "write" else dense[number] + row
        assert torch.equal(table[torch.arange(300)], dense)


def push_request(spec: TableSpec, sequence: int, value: float, *, incarnation: int = 1) -> Request:
    plan = torch.tensor([[spec.number, 0, 1, 2, 1]])
    arrays = [plan, torch.tensor([3]), torch.tensor([value])]
    return Request.local(Kind.PUSH, arrays, sender=5, incarnation=incarnation, sequence=sequence)


def test_a_push_that_comes_again_is_applied_once_and_answered_again():
    shard, spec = Shard(0), TableSpec("t", (), torch.float32, (0, 10), True)
    rows = shard.create(spec, [0], {"kind": "zeros"}).part(0).rows
    push = shard.handlers()[Kind.PUSH]
    for _ in range(3):
        assert isinstance(push(push_request(spec, 0, 1.0)).result(60), Reply)
    assert rows[3] == 1
    late = push(push_request(spec, 2, 10.0))
    assert not late.done() and rows[3] == 1, "push 2 waits for push 1"
    assert push(push_request(spec, 2, 10.0)) is late
    push(push_request(spec, 1, 100.0)).result(60)
    late.result(60)
    assert rows[3] == 111
    push(push_request(spec, 0, 1000.0, incarnation=2)).result(60)
    assert rows[3] == 1111, "a restarted sender counts from the beginning"
    shard.close()


def test_an_answer_is_kept_until_the_sender_says_that_it_has_it():
    pushes, applied = PushOrder(), itertools.count()

    def push(sequence: int, answered: object = 0):
        request = Request.local(Kind.PUSH, [], {"answered": answered}, sender=5, incarnation=1, sequence=sequence)
        return pushes.submit(request, lambda: Reply(options={"n": next(applied)}))

    first = push(0)
    assert push(0) is first and push(1, 0).result(60).options == {"n": 1}
    assert push(2, 1).result(60).options == {"n": 2} and push(1).result(60).options == {"n": 1}
    with pytest.raises(RuntimeError, match="too long ago"):
        push(0)
    for number in range(3, 50):
        push(number, number)
    (sender,) = pushes._senders.values()
    assert len(sender._answers) == 1
    push(50, "absurd"), push(51, 10**30), push(52, None), push(53, -(10**30))
    assert next(applied) == 54, "every push was applied, once"


def test_a_push_that_fails_says_so_and_gives_the_next_its_turn():
    shard, spec = Shard(0), TableSpec("t", (), torch.float32, (0, 10), True)
    push, other = shard.handlers()[Kind.PUSH], TableSpec("other", (), torch.float32, (0, 10), True)
    rows = shard.create(spec, [0], {"kind": "zeros"}).part(0).rows
    failed = push(push_request(other, 0, 1.0))
    with pytest.raises(ValueError, match="does not exist"):
        failed.result(60)
    push(push_request(spec, 1, 1.0)).result(60)
    assert rows[3] == 1
    shard.close()


def test_malformed_pushes_steps_and_orders_are_refused_and_change_nothing():
    shard, spec = Shard(0), TableSpec("t", (2,), torch.float32, (0, 10), True)
    rows = shard.create(spec, [0], {"kind": "zeros"}).part(0).rows
    ids, values, sequence = torch.tensor([3]), torch.ones(1, 2), itertools.count()
    adagrad = {"kind": "adagrad", "lr": 0.5, "lr_decay": 0.0, "initial": 0.0, "eps": 0.0}
    good = {"table": spec.number, "step": 0, "world_size": 1, "optimizer": adagrad}
    number, make = spec.number, {"spec": spec.to_json() | {"name": "u"}, "init": {"kind": "zeros"}}
    for kind, arrays, options in [
        (Kind.PUSH, [], {}),
        (Kind.PUSH, [torch.tensor([[number, 0, 1, 2, 7]]), ids, values], {}),
        (Kind.PUSH, [torch.tensor([[number, 0, 1, 3, 0]]), ids, values], {}),
        (Kind.PUSH, [torch.tensor([[number, 1, 1, 2, 0]]), ids, values], {}),
        (Kind.PUSH, [torch.tensor([[number, 0, 1, 2, 0]]), torch.tensor([10]), values], {}),
        (Kind.PUSH, [torch.tensor([[number, 0, 1, 2, 0]]), ids.double(), values], {}),
        (Kind.PUSH, [torch.tensor([[number, 0, 1, 2, 0]]), ids, torch.ones(1, 3)], {}),
        (Kind.STEP, [torch.tensor([[0, 1, 2]]), ids, values], {**good, "table": 5}),
        (Kind.STEP, [torch.tensor([[0, 1, 2]]), ids, values], {**good, "step": None}),
        (Kind.STEP, [torch.tensor([[0, 1, 2]]), ids, values], {**good, "world_size": 1 << 40}),
        (Kind.STEP, [torch.tensor([[0, 1, 2]]), ids, values], {**good, "world_size": "1"}),
        (Kind.STEP, [torch.tensor([[0, 1, 2]]), ids, torch.ones(1, 3)], good),
        (Kind.STEP, [torch.tensor([[4, 1, 2]]), ids, values], good),
        (Kind.CREATE, [], make | {"parts": [1]}),
        (Kind.CREATE, [], make | {"parts": [0], "init": {"kind": "magic"}}),
        (Kind.CREATE, [torch.tensor([5, 3])], make | {"parts": [0]}),
        (Kind.DESCRIBE, [], {"name": ["t"]}),
        (Kind.DROP, [], {}),
    ]:
        request = Request.local(kind, arrays, options, sequence=next(sequence) if kind in (Kind.PUSH, Kind.STEP) else 0)
        with pytest.raises(ValueError):
            answer = shard.handlers()[kind](request)
            answer.result(0)
    assert not rows.any() and shard.names() == ["t"]
    shard.close()


def test_what_is_remembered_of_a_sender_is_bounded():
    pushes, applied = PushOrder(window=8), itertools.count()

    def apply() -> Reply:
        next(applied)
        return Reply()

    def request(sequence: int) -> Request:
        return Request.local(Kind.PUSH, sender=1, sequence=sequence)

    for sequence in range(100):
        assert pushes.submit(request(sequence), apply).done()
    with pytest.raises(RuntimeError, match="too long ago"):
        pushes.submit(request(0), apply)
    with pytest.raises(ValueError, match="too far ahead of 100"):
        pushes.submit(request(108), apply)
    assert next(applied) == 100
    many = PushOrder(max_senders=3)
    for sender in range(50):
        many.submit(Request.local(Kind.PUSH, sender=sender), apply)
    assert len(many._senders) == 3


def test_two_stores_of_one_process_do_not_mix_up_their_pushes():
    with cluster([0]) as c:
        second = Store(machine_of_part=[0], client=c.clients[0])
        tables = [store.create("t", 10) for store in (c.stores[0], second)]
        tables[0][torch.tensor([1])] = torch.tensor([1.0])
        tables[1][torch.tensor([2])] = torch.tensor([2.0])
        assert tables[0][torch.tensor([1, 2])].tolist() == [1.0, 2.0]


def test_after_a_push_that_was_lost_no_other_is_tried():
    with cluster([0]) as c, Client(c.clients[0].peers, sender=9, incarnation=1, timeout=120) as client:
        store = Store(machine_of_part=[0], machine=-1, client=client, rank=9)
        store.create("t", 10)
        one, row = torch.tensor([1]), torch.ones(1)
        store.push("t", one, row).result()
        client._timeout = 0.5  # for what will not be answered
        c.servers[0].close()
        with pytest.raises(CommError):
            store.push("t", one, row).result()
        with pytest.raises(RuntimeError, match=r"an earlier push was lost.*load tables from a save"):
            store.push("t", one, row)


@pytest.mark.parametrize("served", ["by another", "by itself"])
def test_pushes_that_cannot_be_say_why(served):
    spec = TableSpec("node/n/x", (2,), torch.float32, (0, 10))
    with cluster([1]) as c, alone() as lonely:
        if served == "by another":
            store = c.stores[0]
            c.add(spec, torch.zeros(10, 2))
        else:
            store = lonely
            store._local.add(spec, 0, torch.zeros(10, 2))
            store.register(spec)
        store.create("t", 10, (2,))
        one = torch.tensor([1])
        for name, ids, rows, mode, message in [
            ("node/n/x", one, torch.zeros(1, 2), "write", "'node/n/x' is mapped from the files"),
            ("none", one, torch.zeros(1, 2), "write", "'none' does not exist"),
            ("t", one, torch.zeros(1, 3), "write", r"must be \[1, 2\], got \[1, 3\]"),
            ("t", one, torch.zeros(1, 2, dtype=torch.int64), "write", "must be torch.float32, got torch.int64"),
            ("t", one, torch.zeros(1, 2), "multiply", "mode must be one of"),
            ("t", torch.tensor([10]), torch.zeros(1, 2), "write", r"must be in \[0, 10\), got 10"),
        ]:
            with pytest.raises(ValueError, match=message):
                store.push(name, ids, rows, mode).result()
        store.push("t", one, torch.ones(1, 2)).result()
        assert (store.tensor("t")[one] == 1).all()


def test_a_dropped_table_is_gone_for_everyone_and_may_be_made_again():
    with cluster([0, 1], num_ranks=3) as c:
        ids = torch.tensor([1, 8])
        views = [store.create("t", 10, (2,), init=4.0) for store in c.stores]
        assert all((view[ids] == 4).all() for view in views)
        c.stores[1].drop("t")
        for view in views:
            with pytest.raises(ValueError, match="table 't' does not exist"):
                view[ids]
            with pytest.raises(ValueError, match="table 't' does not exist"):
                view[ids] = torch.zeros(2, 2)
        with pytest.raises(ValueError, match="table 't' does not exist"):
            c.stores[2].drop("t")
        c.stores[2].create("t", 10, (2,), init=5.0)
        assert all((view[ids] == 5).all() for view in views)


def test_creating_again_changes_nothing_and_creating_differently_is_refused():
    with cluster([0, 1], num_ranks=2) as c:
        first = c.stores[0].create("t", 10, (2,))
        first[torch.tensor([7])] = torch.ones(1, 2)
        again = c.stores[1].create("t", 10, (2,))
        assert (again[torch.tensor([7])] == 1).all()
        with pytest.raises(ValueError, match="'t' exists with"):
            c.stores[1].create("t", 10, (3,))
        with pytest.raises(ValueError, match="either num_rows or bounds"):
            c.stores[1].create("u")
        with pytest.raises(ValueError, match="bounds must have 3 entries"):
            c.stores[1].create("u", bounds=[0, 5])
        with pytest.raises(ValueError, match="init must be"):
            c.stores[1].create("u", 10, init="ones")


def test_first_values_are_the_same_on_any_number_of_parts():
    found = []
    for layout in ([0], [0, 1], [0, 1, 1, 0, 2]):
        with cluster(layout) as c:
            found.append(c.stores[0].create("t", 101, (5,), init=("uniform", -1.0, 1.0, 3))[:])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_many_clients_at_once_leave_what_the_same_operations_leave_one_after_the_other():
    """Each rank owns some rows and checks every read of them; sums into rows of all ranks must add up at the end."""
    num_ranks, per_rank, turns = 4, 60, 20
    with cluster([0, 1, 1, 0], num_ranks) as c:
        for store in c.stores:
            store.create("own", num_ranks * per_rank, (8,))
            store.create("all", 50, (3,), torch.int64)

        def work(store: Store) -> torch.Tensor:
            chance = random.Random(store.rank)
            dense = torch.zeros(per_rank, 8)
            total = torch.zeros(50, 3, dtype=torch.int64)
            for turn in range(turns):
                seed = 1000 * store.rank + turn
                ids = random_ids(chance.randrange(1, 40), per_rank, seed)
                rows = random_rows(ids.numel(), 8, seed=seed)
                where = ids * num_ranks + store.rank
                if chance.random() < 0.5:
                    store.push("own", where, rows)
                    for i, row in zip(ids.tolist(), rows, strict=True):
                        dense[i] = row
                else:
                    store.push("own", where, rows, "add")
                    for i, row in zip(ids.tolist(), rows, strict=True):
                        dense[i] += row
                common = random_ids(5, 50, seed + 7)
                amounts = torch.arange(15).view(5, 3) + store.rank
                store.push("all", common, amounts, "add")
                total.index_add_(0, common, amounts)
                probe = random_ids(20, per_rank, seed + 13)
                (found,) = store.pull([Pull("own", probe * num_ranks + store.rank)]).result()
                assert torch.equal(found, dense[probe])
            store.flush()
            return total

        totals = c.on_ranks(work)
        assert torch.equal(c.stores[0].tensor("all")[:], sum(totals))


def test_a_local_reader_never_sees_half_a_row_of_a_push():
    with cluster([0], num_ranks=2) as c:
        table = [store.create("t", 300, (256,)) for store in c.stores][1]
        assert c.stores[1].places("t")[0][0].kind == "shared"
        stop = threading.Event()

        def write() -> None:
            for value in itertools.count(1):
                if stop.is_set():
                    return
                c.stores[0].push("t", torch.arange(300), torch.full((300, 256), float(value))).result()

        writer = threading.Thread(target=write)
        writer.start()
        try:
            ids, seen, num_reads, deadline = torch.arange(300), set(), 0, time.monotonic() + 20
            while num_reads < 60 or (len(seen) < 2 and time.monotonic() < deadline):
                rows, num_reads = table[ids], num_reads + 1
                assert not (rows != rows[:, :1]).any()
                seen.update(rows[:, 0].tolist())
        finally:
            stop.set()
            writer.join(30)
    assert len(seen) > 1
