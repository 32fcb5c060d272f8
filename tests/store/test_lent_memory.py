"""Gradients that a rank leaves in memory: the same step to the last bit, and what is written there does no harm."""

import gc
import json
import os
import resource
import signal

import pytest
import torch

from gnnsys.comm import CommError, Kind, Request, UnnamedMemory
from gnnsys.store import Shard, Store
from gnnsys.store.lent_memory import Borrowed, Lender, StepWriter
from gnnsys.store.push_order import Numbering
from tests.comm.endpoints import until
from tests.store.cluster import cluster, random_ids, random_rows

ADAM = {"kind": "adam", "lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
SGD = {"kind": "sgd", "lr": 1.0}
ROWS, WIDTH = 3000, 16


def _pieces() -> int:
    """Of lent memory, that this process has mapped."""
    gc.collect()  # stores of other tests
    with open("/proc/self/maps") as maps:
        return len({line.split()[4] for line in maps if "memfd:gnnsys-gradients" in line})


def _sent(c) -> int:
    return sum(counts["bytes_out"] for client in c.clients for counts in client.counters()["kinds"].values())


def _train(machine_of_part, num_ranks, steps=3):
    with cluster(machine_of_part, num_ranks) as c:
        for store in c.stores:
            store.create("t", 2 * ROWS, (WIDTH,), init=("uniform", -1.0, 1.0, 3))
        before = _sent(c)
        for turn in range(steps):
            under_way = [
                store.step("t", random_ids(ROWS, 2 * ROWS, seed=9 * r + turn), random_rows(ROWS, WIDTH, seed=r), ADAM)
                for r, store in enumerate(c.stores)
            ]
            for step in under_way:
                step.result()
        return c.stores[0].tensor("t")[:], _sent(c) - before, _pieces()


@pytest.mark.parametrize(("machine_of_part", "num_ranks"), [([0], 1), ([0], 3), ([0, 0], 2), ([0, 1], 2), ([1, 0], 3)])
def test_gradients_in_memory_and_sent_ones_give_the_same_bits(monkeypatch, machine_of_part, num_ranks):
    lent, sent_with_memory, _ = _train(machine_of_part, num_ranks)
    monkeypatch.setattr("gnnsys.store.push.LEAST_BYTES", 1 << 40)
    sent, all_sent, _ = _train(machine_of_part, num_ranks)
    assert torch.equal(lent, sent)
    of_gradients = 3 * num_ranks * ROWS * WIDTH * 4
    machines = len(set(machine_of_part))
    assert all_sent > of_gradients
    assert sent_with_memory < (machines - 1) / machines * 1.3 * all_sent + 100_000


def test_memory_is_used_again():
    before = _pieces()
    *_, after = _train([0], 2, steps=6)
    assert after - before == 2, "one for each rank"


def test_memory_that_was_outgrown_is_let_go_of_on_both_sides():
    before = _pieces()
    with cluster([0]) as c:
        store = c.stores[0]
        store.create("t", 100_000, (64,))
        for count in (1000, 30_000, 100_000):
            store.step("t", torch.arange(count), torch.ones(count, 64), SGD).result()
        assert _pieces() - before == 1
        assert len(c.shards[0]._borrowed._known) == 1
        store.close()
    assert _pieces() == before


def test_a_server_that_cannot_read_it_is_sent_gradients(monkeypatch):
    monkeypatch.setattr(UnnamedMemory, "open", lambda what, address: None)  # as in another container
    with cluster([0], 2) as c:
        for store in c.stores:
            store.create("t", ROWS, (WIDTH,))
        steps = [store.step("t", torch.arange(ROWS), torch.ones(ROWS, WIDTH), SGD) for store in c.stores]
        for step in steps:
            step.result()
        assert _sent(c) > 2 * ROWS * WIDTH * 4
        assert torch.equal(c.stores[0].tensor("t")[:], -torch.ones(ROWS, WIDTH))


def _step(store, count=ROWS, **options):
    return store.step("t", torch.arange(count), torch.ones(count, WIDTH), SGD, **options)


def _borrowed(c, machine=0):
    """The memory that a server keeps mapped after it has swept."""
    gc.collect()
    c.shards[machine]._borrowed.sweep()
    return list(c.shards[machine]._borrowed._known.values())


def test_memory_of_refused_steps_goes_on_both_sides():
    before = _pieces()
    with cluster([0], 2) as c:
        for store in c.stores:
            store.create("t", ROWS, (WIDTH,))
        for turn in range(12):
            waiting = _step(c.stores[0])  # for the other rank
            for step in (waiting, _step(c.stores[1], problem="planted")):
                with pytest.raises(ValueError, match="planted"):
                    step.result()
            del waiting, step
            if turn == 1:
                descriptors = len(os.listdir("/proc/self/fd"))
        assert len(_borrowed(c)) <= 1, "what ranks were asked with, whether it can be read"
        assert _pieces() - before <= 2 and len(os.listdir("/proc/self/fd")) <= descriptors + 2
        for step in [_step(store) for store in c.stores]:
            step.result()
        assert torch.equal(c.stores[0].tensor("t")[:], -torch.ones(ROWS, WIDTH))


def test_memory_of_a_step_that_ends_after_its_store_was_closed_goes():
    with cluster([0], 2) as c:
        for store in c.stores:
            store.create("t", ROWS, (WIDTH,))
        steps = [_step(store) for store in c.stores]
        c.stores[0].close()
        for step in steps:
            step.result()
        assert len(_borrowed(c)) == 1, "that of the other rank"
        assert c.stores[0]._lender.lend(1) is None


def test_memory_of_a_step_that_nobody_waits_for_goes_with_its_store():
    with cluster([0], 2) as c:
        for store in c.stores:
            store.create("t", ROWS, (WIDTH,))
        _step(c.stores[0])
        waited = _step(c.stores[1])
        waited.result()
        assert len(_borrowed(c)) == 2
        del c.stores[0]
        assert len(_borrowed(c)) == 1


def test_memory_goes_that_a_server_was_shown_when_another_one_refused():
    with cluster([0, 1]) as c:
        store = c.stores[0]
        store.create("t", ROWS, (WIDTH,))
        c.shards[1].drop("t")
        with pytest.raises(ValueError, match="does not exist"):
            _step(store)
        assert _borrowed(c) == []


def test_a_server_keeps_no_more_memory_than_it_has_descriptors_for():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (320, limits[1]))
    try:
        borrowed = Borrowed(lambda seconds, callback: None)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    lent = [Lender().lend(1) for _ in range(25)]
    assert all(borrowed.reaches(memory.address()) for memory in lent)
    assert len(borrowed._known) == 320 // 16


def test_memory_of_a_rank_that_has_ended_goes_by_itself(monkeypatch):
    monkeypatch.setattr("gnnsys.store.lent_memory._SWEEP_SECONDS", 0.01)
    reading, writing = os.pipe()
    rank = os.fork()
    if rank == 0:
        signal.alarm(60)
        lent = Lender().lend(1)
        os.write(writing, json.dumps(lent.address()).encode())
        signal.pause()
    shard = Shard(0)
    try:
        assert shard._borrowed.reaches(json.loads(os.read(reading, 1000)))
    finally:
        os.kill(rank, signal.SIGKILL)
        os.waitpid(rank, 0)
        os.close(reading)
        os.close(writing)
    until(lambda: not shard._borrowed._known)
    mine = Lender().lend(1)
    assert shard._borrowed.reaches(mine.address()), "swept again for what comes later"
    mine.header[2] = 1
    until(lambda: not shard._borrowed._known)
    shard.close()


def test_a_forked_child_leaves_its_parents_memory_alone():
    with cluster([0], 2) as c:
        for store in c.stores:
            store.create("t", ROWS, (WIDTH,))
        for step in [_step(store) for store in c.stores]:
            step.result()
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                signal.alarm(60)
                torch.set_num_threads(1)  # those of OpenMP did not come along, and would be waited for
                os.read(reading, 1)
                with pytest.raises(CommError):
                    c.stores[0].step("t", torch.arange(ROWS), torch.full((ROWS, WIDTH), 1000.0), SGD)
                c.stores[0].close()
                del c.stores[0]
                gc.collect()
                os._exit(7)
            finally:
                os._exit(1)
        waiting = _step(c.stores[0])  # for the other rank, while the child steps
        os.write(writing, b"x")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7, "refused: its client is the parent's"
        for end in (reading, writing):
            os.close(end)
        for step in (waiting, _step(c.stores[1])):
            step.result()
        assert torch.equal(c.stores[0].tensor("t")[:], torch.full((ROWS, WIDTH), -2.0))
        assert len(_borrowed(c)) == 2, "none was taken away"


@pytest.mark.parametrize("machine_of_part", [[0], [0, 1]])
def test_steps_are_sent_where_no_memory_can_be_had(monkeypatch, machine_of_part):
    with cluster(machine_of_part, 2) as c:
        for store in c.stores:
            store.create("t", 40 * ROWS, (WIDTH,))
        for count in (2 * ROWS, 40 * ROWS, 2 * ROWS):  # the second outgrows what there is
            for step in [_step(store, count) for store in c.stores]:
                step.result()
            monkeypatch.delattr(os, "memfd_create", raising=False)
        rows = c.stores[0].tensor("t")[:]
        assert bool((rows[: 2 * ROWS] == -3).all()) and bool((rows[2 * ROWS :] == -1).all())


def test_a_step_that_cannot_be_written_to_memory_has_not_gone_to_other_machines(monkeypatch):
    def refuse(*_):
        raise MemoryError("planted")

    with cluster([0, 1], 2) as c:
        for store in c.stores:
            store.create("t", 4 * ROWS, (WIDTH,))
        for turn in range(2):
            for step in [_step(store, 4 * ROWS) for store in c.stores]:
                step.result()
            if turn == 0:
                with monkeypatch.context() as patch, pytest.raises(MemoryError, match="planted"):
                    patch.setattr(StepWriter, "add", refuse)
                    _step(c.stores[1], 4 * ROWS)
        assert torch.equal(c.stores[0].tensor("t")[:], torch.full((4 * ROWS, WIDTH), -2.0))
        assert len(_borrowed(c, 1)) == 1


def test_steps_are_sent_once_a_server_cannot_reach_memory_any_more(monkeypatch):
    with cluster([0], 2) as c:
        for store in c.stores:
            store.create("t", ROWS, (WIDTH,))
        for step in [_step(store) for store in c.stores]:
            step.result()
        c.shards[0]._borrowed.close()
        with monkeypatch.context() as patch:
            patch.setattr(UnnamedMemory, "open", lambda what, address: None)  # it is out of descriptors
            for step in [_step(store) for store in c.stores]:
                with pytest.raises(ValueError, match=r"cannot be reached from here\. Nothing of this step was applied"):
                    step.result()
        before = _sent(c)
        for step in [_step(store) for store in c.stores]:
            step.result()
        assert _sent(c) - before > 2 * ROWS * WIDTH * 4
        assert torch.equal(c.stores[0].tensor("t")[:], torch.full((ROWS, WIDTH), -2.0))


def test_a_server_is_asked_again_whether_it_reads_memory(monkeypatch, tmp_path):
    with cluster([0]) as c:
        store = c.stores[0]
        store.create("t", ROWS, (WIDTH,))
        _step(store).result()
        store.save("t", str(tmp_path))
        c.shards[0]._borrowed.close()
        with monkeypatch.context() as patch:
            patch.setattr(UnnamedMemory, "open", lambda what, address: None)  # another server, of another user
            store.load("t", str(tmp_path))
            _step(store).result()
        store.load("t", str(tmp_path))
        before = _sent(c)
        _step(store).result()
        assert _sent(c) - before < ROWS * WIDTH, "in memory again"
        assert torch.equal(store.tensor("t")[:], torch.full((ROWS, WIDTH), -2.0))


def _ask(shard: Shard, memory: object, plan: list[list[int]], table: int):
    step = shard.table("t").rounds.next
    options = {"table": table, "step": step, "world_size": 1, "optimizer": SGD, "memory": memory}
    arrays, sequence = [torch.tensor(plan, dtype=torch.int64).view(-1, 4)], Numbering().next(0)  # a stream of its own
    request = Request.local(Kind.STEP, arrays, options, timeout=30.0, sender=0, incarnation=1, sequence=sequence)
    answer = shard.handlers()[Kind.STEP](request)
    return answer.result(30) if hasattr(answer, "result") else answer


@pytest.fixture
def lent():
    """A shard with a table of ones, memory with a step of ten rows of it, and the plan of that step."""
    shard = Shard(0)
    store = Store(machine_of_part=[0], local=shard)
    store.create("t", 100, (4,), init=1.0)
    memory = Lender().lend(1000)
    writer = StepWriter(memory)
    writer.add(0, torch.arange(10), (4,)).fill_(1.0)
    yield shard, memory, writer.plan().tolist(), store
    shard.close()


HARM = [
    ("a plan beyond its end", lambda a, p: (a, [[0, 10, 1 << 40, 128]])),
    ("gradients beyond its end", lambda a, p: (a, [[0, 10, 0, 1 << 62]])),
    ("more rows than it holds", lambda a, p: (a, [[0, 1 << 60, 0, 128]])),
    ("fewer than none", lambda a, p: (a, [[0, -1, 0, 128]])),
    ("before its beginning", lambda a, p: (a, [[0, 10, -64, 128]])),
    ("between two numbers", lambda a, p: (a, [[0, 10, 4, 128]])),
    ("another token", lambda a, p: ({**a, "token": 1}, p)),
    ("another descriptor", lambda a, p: ({**a, "fd": 0}, p)),
    ("no process", lambda a, p: ({**a, "pid": 1 << 40}, p)),
    ("a negative process", lambda a, p: ({**a, "pid": -1}, p)),
    ("a text", lambda a, p: ({**a, "pid": "self"}, p)),
    ("no address", lambda a, p: (True, p)),
    ("nothing", lambda a, p: (None, p)),
    ("the same rows over and over", lambda a, p: (a, p * 5000)),
    ("rows that make up for others", lambda a, p: (a, [*p, *[[0, -10, 0, 128], *p] * 5000])),
    ("a part of elsewhere", lambda a, p: (a, [[1, *p[0][1:]]])),
]  # fmt: skip


@pytest.mark.parametrize("harm", [pytest.param(harm, id=name) for name, harm in HARM])
def test_what_a_message_says_of_memory_is_checked(lent, harm):
    shard, owned, good, store = lent
    bad = harm(owned.address(), good)
    with pytest.raises(ValueError, match=r"malformed request|cannot be reached|not served here"):
        _ask(shard, *bad, store.spec("t").number)
    assert torch.equal(store.tensor("t")[:], torch.ones(100, 4))
    _ask(shard, owned.address(), good, store.spec("t").number)
    assert torch.equal(store.tensor("t")[:10], torch.zeros(10, 4))


def test_a_tables_own_memory_is_not_taken_for_lent_one(lent):
    shard, _, _, store = lent
    described = Request.local(Kind.DESCRIBE, [], {"name": "t"}, timeout=30.0, sender=0, incarnation=1)
    address = shard.handlers()[Kind.DESCRIBE](described).options["shared"]["0"]
    assert UnnamedMemory.open("rows", address) is not None
    assert not shard._borrowed.reaches(address)
    with pytest.raises(ValueError, match="cannot be reached"):
        _ask(shard, address, [[0, 10, 0, 128]], store.spec("t").number)


def test_row_numbers_are_checked_as_they_are_used(lent):
    shard, owned, good, store = lent
    ids = owned.view(torch.int64, good[0][2], 10)
    ids[3] = 100
    with pytest.raises(ValueError, match="has 100 rows"):
        _ask(shard, owned.address(), good, store.spec("t").number)
    ids[3] = 3
    options = {"memory": owned.address()}
    request = Request.local(Kind.STEP, [torch.tensor(good)], options, timeout=30.0, sender=0, incarnation=1)
    ((_, taken, _),) = shard._borrowed.items(request, shard.table("t"))
    ids.fill_(1 << 40)
    assert torch.equal(taken, torch.arange(10)), "a copy: what is written later is not what is used"


def test_memory_cannot_shrink_while_it_is_read(lent):
    *_, owned, _, _ = lent
    with pytest.raises(PermissionError):
        os.ftruncate(owned.address()["fd"], 64)
    opened = UnnamedMemory.open("gradients", owned.address())
    assert opened.num_bytes == owned.num_bytes
