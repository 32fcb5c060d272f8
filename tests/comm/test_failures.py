"""Deadlines, lost messages and lost peers: every wait ends, nothing is done twice, slow is not dead."""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
import zmq

from gnnsys.comm import Client, CommError, DeadlineExceeded, Kind, PeerLost, Reply, Request, Server
from gnnsys.comm.peer_link import Link
from tests.comm.endpoints import DEADLINE, Proxy, joined, until

QUICK = {"resend_after": 0.1, "ping_interval": 5.0, "lost_after": DEADLINE}


@contextlib.contextmanager
def through_proxy(handlers, **client):
    with Server(handlers) as server:
        proxy = Proxy(server.endpoints[0])
        try:
            with Client({0: proxy.endpoint}, sender=0, incarnation=0, timeout=DEADLINE, **client) as asking:
                yield proxy, asking
        finally:
            proxy.close()


def test_a_request_fails_at_its_deadline_and_the_error_tells_peer_kind_and_remedy():
    release = threading.Event()
    with joined({Kind.PULL: lambda _: (release.wait(DEADLINE), Reply())[1]}) as (server, client):
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded) as raised:
            client.request(0, Kind.PULL, timeout=0.2).result()
        assert 0.2 <= time.monotonic() - began < DEADLINE
        for part in ("rank 3", "0.2 s", "machine 0", server.endpoints[0], "PULL", "raise timeout"):
            assert part in str(raised.value)
        release.set()
        if "machine 0 says" not in str(raised.value):  # it may have been the first to say that time is up
            until(lambda: client.counters()["events"].get("late") == 1)  # the reply that nobody waits for is dropped


def test_a_request_whose_time_has_passed_is_not_worked_on():
    held, release, done = threading.Event(), threading.Event(), []

    def handler(request: Request) -> Reply:
        if request.sequence == 0:
            held.set()
            assert release.wait(DEADLINE)
        done.append(request.sequence)
        return Reply()

    with joined({16: handler}, threads=1) as (server, client):
        first = client.request(0, 16)
        assert held.wait(DEADLINE)
        hasty = client.request(0, 16, sequence=1, timeout=1.0)
        until(lambda: server.counters()["queue"] >= 1)
        with pytest.raises(DeadlineExceeded):
            hasty.result()
        passed = time.monotonic() + 1.0  # the server's clock began when the request arrived
        until(lambda: client.request(0, Kind.PING).result() is not None and time.monotonic() > passed)
        release.set()
        first.result()
        client.request(0, 16, sequence=2).result()
        assert done == [0, 2]
        assert server.counters()["events"]["expired"] >= 1  # by the worker, and before that perhaps by the server


def test_a_future_that_never_comes_is_forgotten_after_its_deadline():
    with joined({21: lambda _: Future()}) as (server, client):
        with pytest.raises(DeadlineExceeded):
            client.request(0, 21, timeout=1.0).result()
        until(lambda: server.counters()["events"].get("expired") == 1)
        until(lambda: server.counters()["unanswered"] == 0)


def test_a_lost_reply_is_sent_again_and_the_work_is_done_once():
    pushed = []

    def push(request: Request) -> Reply:
        pushed.append(request.sequence)
        return Reply(options={"applied": len(pushed)})

    with through_proxy({Kind.PUSH: push}, **QUICK) as (proxy, client):
        assert client.request(0, Kind.PUSH, sequence=1).result().options == {"applied": 1}
        proxy.swallow = "replies"
        pending = client.request(0, Kind.PUSH, [torch.ones(100_000)], sequence=2)
        assert proxy.wait_swallowed(80)
        proxy.cut()
        assert pending.result().options == {"applied": 2}
        assert pushed == [1, 2]


def test_a_lost_request_is_sent_again():
    pulled = []

    def pull(request: Request) -> Reply:
        pulled.append(request.sequence)
        return Reply(request.arrays)

    with through_proxy({Kind.PULL: pull}, **QUICK) as (proxy, client):
        client.request(0, Kind.PULL, sequence=1).result()
        proxy.swallow = "requests"
        pending = client.request(0, Kind.PULL, [torch.arange(20_000)], sequence=2)
        assert proxy.wait_swallowed(160_000)
        proxy.cut()
        assert torch.equal(pending.result().arrays[0], torch.arange(20_000))
        assert pulled == [1, 2]
        assert client.counters()["events"]["resent"] >= 1


def test_a_chunked_reply_cut_in_the_middle_arrives_whole_and_each_chunk_once():
    arrived = threading.Event()

    def pull(request: Request):
        yield Reply([torch.full((50_000,), 0)])
        assert arrived.wait(DEADLINE)
        for number in range(1, 5):
            yield Reply([torch.full((50_000,), number)])

    with through_proxy({Kind.PULL: pull}, **QUICK) as (proxy, client):
        chunks = client.request(0, Kind.PULL).chunks()
        numbers = [int(next(chunks).arrays[0][-1])]
        proxy.swallow = "replies"
        arrived.set()
        assert proxy.wait_swallowed(500_000)
        proxy.cut()
        numbers += [int(chunk.arrays[0][-1]) for chunk in chunks]
        assert sorted(numbers) == [0, 1, 2, 3, 4] and numbers[0] == 0


def test_a_request_in_work_is_not_done_twice_however_long_it_takes():
    calls = []

    def slow(request: Request) -> Reply:
        calls.append(request.sequence)
        so_far = num_messages()
        until(lambda: num_messages() >= so_far + 3)  # it is asked how it is, meanwhile
        return Reply()

    with joined({16: slow}, client=QUICK, threads=1) as (server, client):

        def num_messages() -> int:
            return server.counters()["peers"][3]["messages_in"]

        waiting = [client.request(0, 16, sequence=number) for number in range(2)]
        for pending in waiting:
            pending.result()
        assert calls == [0, 1]
        assert set(client.counters()["events"]) <= {"late"}  # an answer that was asked for once more


def test_a_slow_peer_is_not_lost_and_a_dead_one_is():
    release = threading.Event()
    # A pause of this process that is longer than `ping_interval` counts as nobody's silence, and machines do pause.
    quick = {"resend_after": 0.1, "ping_interval": 0.25, "lost_after": 2.0}
    with through_proxy({16: lambda _: (release.wait(DEADLINE), Reply())[1]}, **quick) as (proxy, client):
        slow = client.request(0, 16)
        with pytest.raises(TimeoutError):
            slow.result(timeout=3)  # longer than a silent peer would be given
        assert not slow.done()
        release.set()
        slow.result()
        release.clear()
        dead = client.request(0, 16)
        proxy.swallow = "replies"
        with pytest.raises(PeerLost) as raised:
            dead.result()
        assert raised.value.peer == 0 and raised.value.silent_for >= 2.0
        for part in ("machine 0", proxy.endpoint, "PULL", "lost_after"):
            assert part in str(raised.value)
        release.set()
        proxy.cut()

        def is_back() -> bool:  # and so are we: a connection is made again within seconds
            with contextlib.suppress(PeerLost):
                return client.request(0, 16).result().arrays == []
            return False

        until(is_back)


def test_a_peer_that_never_was_is_lost_or_late_whichever_is_first():
    with Server({}) as server:
        endpoint = server.endpoints[0]
    with Client({0: endpoint}, sender=0, incarnation=0, ping_interval=0.05, lost_after=0.2) as client:
        with pytest.raises(PeerLost, match=endpoint):
            client.request(0, 16).result()
        with pytest.raises(DeadlineExceeded, match="never heard of"):
            client.request(0, 16, timeout=0.05).result()


def test_a_client_that_was_paused_itself_takes_nobody_for_dead(monkeypatch):
    release, ahead = threading.Event(), [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0])
    monkeypatch.setattr("gnnsys.comm.client.time", clock)
    handlers = {16: lambda _: (release.wait(DEADLINE), Reply())[1], 17: lambda _: Reply()}
    with (
        Server(handlers) as first,
        Server(handlers) as second,
        Client(
            {0: first.endpoints[0], 1: second.endpoints[0]}, sender=0, incarnation=0, timeout=4 * DEADLINE,
            lost_after=DEADLINE,
        ) as client,
    ):  # fmt: skip
        for _ in range(2):
            client.request(1, Kind.PING).result()  # after that nothing of the second is on its way
        held = client.request(1, 16)
        ahead[0] = 2 * DEADLINE  # that much has passed when the client's thread looks again
        for _ in range(2):
            client.request(0, 17).result()  # it has looked
        release.set()
        held.result()
        assert "lost" not in client.counters()["events"]


def test_a_new_client_is_heard_of_at_once():
    with joined({}, client={"lost_after": 10 * DEADLINE}) as (server, _):
        deadline = time.monotonic() + DEADLINE
        while 3 not in server.counters()["peers"]:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_what_cannot_be_sent_says_why_and_the_client_lives_on(monkeypatch):
    def full(*_):
        raise zmq.ZMQError(errno.EMFILE)

    with joined({16: lambda _: Reply()}) as (_, client):
        with monkeypatch.context() as patch:
            patch.setattr(Link, "open", full)
            with pytest.raises(CommError, match=r"PULL was not sent to machine 0 .*Too many open files"):
                client.request(0, 16).result()
        client.request(0, 16).result()


def test_a_request_that_another_thread_has_ended_is_not_sent_again():
    with joined({16: lambda _: Future()}) as (_, client):
        pending = client.request(0, 16)
        link = client._links[0]
        connection = link.connection_for(pending.kind)
        pending.frames = []  # as `fail` leaves it, while it is still among those outstanding
        client.send_again(link, connection, pending, time.monotonic())
        assert pending.resent == 0


def test_a_peer_that_is_known_to_have_ended_is_waited_for_no_longer():
    release = threading.Event()
    with joined({16: lambda _: (release.wait(DEADLINE), Reply())[1]}) as (_, client):
        pending = client.request(0, 16)
        client.lose(0, "it ended with 9")
        for each in (pending, client.request(0, 16)):
            with pytest.raises(PeerLost, match="it ended with 9"):
                each.result(timeout=DEADLINE / 2)
        release.set()


def test_a_peer_that_starts_late_is_found():
    with Server({}) as server:
        endpoint = server.endpoints[0]
    with Client({0: endpoint}, sender=0, incarnation=0, timeout=DEADLINE) as client:
        pending = client.request(0, 16, [torch.arange(3)])
        with Server({16: lambda request: Reply(request.arrays)}, bind=[endpoint]):
            assert pending.result().arrays[0].tolist() == [0, 1, 2]
