"""Between ranks: who is named when one dies or falls silent, whatever was waited for; how much may be under way."""

from __future__ import annotations

import re
import threading
import weakref

import pytest
import torch
import torch.distributed as dist

from gnnsys.comm.errors import TrainerLost
from gnnsys.comm.rank_exchange import RankExchange
from tests.fullgraph.ranks import run_ranks as run_threads
from tests.support.processes import run_ranks

DEADLINE = 180.0

PROGRAM = """
import os, signal, sys
from datetime import timedelta
import torch
import torch.distributed as dist
import gnnsys.comm.rank_exchange
from gnnsys.comm.errors import TrainerLost
from gnnsys.comm.rank_exchange import RankExchange

gnnsys.comm.rank_exchange._PROBE_SECONDS = 60  # a rank that is busy names the one that died all the same
how, what, timeout = sys.argv[1], sys.argv[2], float(sys.argv[3])
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
group = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=120))
rows = torch.ones(3)
if rank == 1:
    store.set("pid", str(os.getpid()))
RankExchange(group, timeout=120).all_reduce(rows).wait()
assert rows.tolist() == [world_size] * 3
peers = RankExchange(group, timeout=timeout)
if rank == 1:
    os.kill(os.getpid(), getattr(signal, how))
if os.environ.get("LATE"):
    try:
        group.send([rows], 1, 99).wait(timedelta(seconds=120))  # which rank 1 never takes
    except RuntimeError:
        pass  # gloo knows now that the connection is gone
    else:
        sys.exit("rank 1 lives")
waits = {
    "sum": lambda: peers.all_reduce(rows).wait(),
    "rows": lambda: (peers.expect(1, 7, rows, "rows"), peers.next_arrival()),
    "swap": lambda: peers.swap([torch.arange(2)] * world_size),
}
try:
    if os.environ.get("ABSENT") != str(rank):
        waits[what]()
except TrainerLost as error:
    print(error.rank, error, flush=True)
store.add("told", 1)
while store.add("told", 0) < world_size - 1:  # nobody else's end is mistaken for that of rank 1
    pass
if rank == 0 and how == "SIGSTOP":
    os.kill(int(store.get("pid")), signal.SIGKILL)
os._exit(0)
"""


@pytest.mark.parametrize("what", ["sum", "rows", "swap"])
def test_the_rank_that_died_is_named_to_all_who_wait(what):
    """At once: what they would wait for is ten minutes."""
    ended = run_ranks(PROGRAM, 3, "SIGKILL", what, 600, timeout=DEADLINE, check=False)
    assert ended[1].returncode == -9
    for rank in (0, 2):
        assert ended[rank].stdout.startswith("1 rank 1 was lost"), ended[rank]


@pytest.mark.parametrize("what", ["sum", "rows", "swap"])
def test_a_rank_that_died_before_anything_was_asked_of_it_is_named_too(what, monkeypatch):
    """gloo then knows that the connection is gone, and refuses at once to use it."""
    monkeypatch.setenv("LATE", "1")
    ended = run_ranks(PROGRAM, 3, "SIGKILL", what, 600, timeout=DEADLINE, check=False)
    for rank in (0, 2):
        assert ended[rank].stdout.startswith("1 rank 1 was lost"), ended[rank]


def test_the_rank_that_died_is_named_to_one_who_waits_for_another_too(monkeypatch):
    """Rank 0 lives and has not come yet: it may be the first to know, and never come."""
    monkeypatch.setenv("ABSENT", "0")
    ended = run_ranks(PROGRAM, 3, "SIGKILL", "swap", 600, timeout=DEADLINE, check=False)
    assert ended[2].stdout.startswith("1 rank 1 was lost"), ended[2]


def test_a_rank_that_is_silent_for_longer_than_it_may_be_is_named():
    ended = run_ranks(PROGRAM, 3, "SIGSTOP", "rows", 2, timeout=DEADLINE, check=False)
    for rank in (0, 2):
        told = re.match(r"1 rank 1 was lost, or was not heard of for (\d+\.\d) s", ended[rank].stdout)
        assert told and 2 <= float(told[1]) < 120, ended[rank]


def test_swaps_follow_one_another_with_sizes_that_are_told_or_known_and_start_threads_once():
    """What rank r sends to rank s in round n is r * s numbers, none of them from or to rank 0."""

    def work(rank, group):
        peers, counts = RankExchange(group, timeout=60), []

        def swap(n):
            sizes = [rank * other for other in range(3)]
            rows = [torch.full((rank * other,), 100 * rank + 10 * other + n) for other in range(3)]
            got = peers.swap(rows, sizes if n % 2 else None)
            want = [torch.full((rank * other,), 100 * other + 10 * rank + n) for other in range(3)]
            assert all(torch.equal(one, two) for one, two in zip(got, want, strict=True))

        with peers.many_swaps():
            for n in range(6):
                with peers.many_swaps():
                    swap(n)
                counts.append(len(peers._swaps._threads))
            threads = list(peers._swaps._threads)
        for thread in threads:
            thread.join(60.0)
        swap(6)
        return counts, [thread.is_alive() for thread in threads], peers._swaps

    assert run_threads(3, work) == [([2] * 6, [False, False], None)] * 3


def test_a_swap_that_failed_leaves_nothing_for_the_next():
    """Rank 0 is told of no bytes in time: its next swap has threads of its own."""

    def work(rank, group):
        if rank == 1:
            return None
        peers = RankExchange(group, timeout=0.2)
        with peers.many_swaps():
            with pytest.raises(TrainerLost):
                peers.swap([torch.arange(2)] * 2)
            return peers._swaps is None

    assert run_threads(2, work) == [True, None]


def test_a_group_without_a_backend_for_the_host_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match="cpu:gloo,cuda:nccl"):
        RankExchange(dist.ProcessGroup(dist.HashStore(), 0, 2))


LEAVING = """
import os, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
import gnnsys.comm.rank_exchange
from gnnsys.comm.rank_exchange import RankExchange, Waiter

gnnsys.comm.rank_exchange._LEAVE_SECONDS = 120  # the other may be late to leave


class WaitedFor(Waiter):
    \"\"\"The other rank leaves once this one waits for the thread.\"\"\"

    def join(self, timeout=None):
        sys.lasting.is_waited_for = True
        store.set("leaves", "now")
        super().join(timeout)


class Lasting:
    \"\"\"Where nobody waits for the thread, the other rank leaves while the interpreter is being taken down.\"\"\"

    def __init__(self):
        self.is_waited_for, self.store, self.sleep = False, store, time.sleep

    def __del__(self):
        if not self.is_waited_for:
            self.store.set("leaves", "now")
            self.sleep(30)  # long before that the process is aborted


rank = int(os.environ["RANK"])
store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=120))
if rank == 1:
    store.get("leaves")
    os._exit(0)
peers = RankExchange(group)
peers.expect(1, 5, torch.empty(3), "what never comes")
(thread,) = peers._threads
thread.__class__ = WaitedFor
sys.lasting = Lasting()
sys.exit(3)
"""


def test_a_rank_that_leaves_while_another_ends_is_not_aborted():
    """A wait that ended while the interpreter was being taken down aborted the process (signal 6)."""
    left, _ = run_ranks(LEAVING, 2, timeout=DEADLINE, check=False)
    assert left.returncode == 3, left


def test_no_more_is_under_way_than_may_be_and_all_of_it_arrives():
    """A rank that does not ask for what it is sent keeps the sender waiting, not memory."""
    size, number, begin = 1 << 18, 12, threading.Event()
    sent: list[int] = []
    held: list[int] = []  # how many were sent, whenever the sender had to wait

    class Watched(RankExchange):
        def _wait_send(self) -> None:
            held.append(len(sent))
            begin.set()
            super()._wait_send()

    def work(rank, group):
        peers = Watched(group, timeout=120, max_outstanding=3 * size)
        if rank == 0:
            for each in range(number):
                peers.send(1, 100 + each, torch.full((size,), each, dtype=torch.uint8))
                sent.append(each)
            peers.flush()
            return []
        begin.wait(120)
        rows = [torch.empty(size, dtype=torch.uint8) for _ in range(number)]
        for each in range(number):
            peers.expect(0, 100 + each, rows[each], each)
        assert sorted(peers.next_arrival() for _ in range(number)) == list(range(number))
        return rows

    _, rows = run_threads(2, work)
    assert held == [*range(3, number), *[number] * 3] and len(sent) == number
    assert all(bool((each == value).all()) for value, each in enumerate(rows))


@pytest.mark.parametrize("linked", [False, True], ids=["host", "linked"])
def test_what_was_sent_arrives_though_nobody_closed_the_exchange(linked):
    """It is asked for when whoever sent it has forgotten the exchange, and with it a link that it made."""
    is_gone = threading.Event()
    rows = torch.arange(300_000)  # more than sockets keep

    def work(rank, group):
        exchange = RankExchange(group, timeout=60)
        exchange.agree_on_route(rows.device, linked)
        if rank == 0:
            exchange.send(1, 5, rows)
            known = weakref.ref(exchange)
            del exchange
            is_gone.set()
            return known() is None  # what is still to be delivered does not keep it
        assert is_gone.wait(60)
        got = torch.empty_like(rows)
        exchange.expect(0, 5, got, "rows")
        assert exchange.next_arrival() == "rows"
        exchange.close(grace=60)
        return torch.equal(got, rows)

    assert run_threads(2, work, linked=linked) == [True, True]
