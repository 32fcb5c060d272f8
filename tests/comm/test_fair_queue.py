"""Whose turn it is, by count and not by time; and what a client may have at a server."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future

import pytest
import torch
import zmq

from gnnsys.comm import Client, Kind, Limits, Reply, Request, Server, wire
from gnnsys.comm.fair_queue import FairQueue
from tests.comm.endpoints import DEADLINE, joined, until


def num_requests(server) -> int:
    return server.counters()["kinds"].get("PULL", {}).get("messages_in", 0)


def taken(turns: FairQueue) -> list:
    return [turns.take() for _ in range(len(turns))]


def test_clients_of_one_priority_take_turns_and_a_clients_own_keep_their_order():
    turns = FairQueue()
    for number in range(3):
        turns.put(0, "greedy", ("greedy", number))
    turns.put(0, "polite", ("polite", 0))
    turns.put(-1, "urgent", ("urgent", 0))
    turns.put(0, "greedy", ("greedy", "again"), first=True)
    order = taken(turns)
    assert order[0] == ("urgent", 0)
    assert order.index(("polite", 0)) == 2
    assert [what for who, what in order if who == "greedy"] == ["again", 0, 1, 2]
    assert turns.take() is None and len(turns) == 0


def test_ten_thousand_requests_of_one_client_delay_another_by_one():
    turns = FairQueue()
    for number in range(10_000):
        turns.put(0, "greedy", number)
    turns.put(0, "polite", "polite")
    assert "polite" in [turns.take() for _ in range(3)]
    assert len(turns) == 9_998


def test_who_calls_everything_urgent_starves_nobody():
    turns = FairQueue()
    for number in range(10_000):
        turns.put(-(2**31) + number % 7, "greedy", number)
    for number in range(3):
        turns.put(5, f"polite {number}", "polite")
    assert [turns.take() for _ in range(64)].count("polite") == 3


def test_a_greedy_client_does_not_make_a_polite_one_wait_for_all_of_its_requests():
    begun, held, served = threading.Event(), threading.Event(), []

    def handle(request: Request) -> Reply:
        begun.set()
        assert held.wait(DEADLINE)
        served.append(request.sender)
        return Reply()

    with (
        joined({16: handle}, threads=1, client={"sender": 1}) as (server, greedy),
        Client({0: server.endpoints[0]}, sender=2, incarnation=0, timeout=DEADLINE) as polite,
    ):
        pending = [greedy.request(0, 16) for _ in range(3000)]
        assert begun.wait(DEADLINE)
        until(lambda: server.counters()["unanswered"] == 3000)
        pending += [polite.request(0, 16) for _ in range(5)]
        until(lambda: server.counters()["unanswered"] == 3005)
        held.set()
        for each in pending:
            each.result()
    assert max(place for place, sender in enumerate(served) if sender == 2) <= 12


def test_a_reply_without_end_gives_way_to_others():
    """One worker: a stream that its reader takes as fast as it comes would keep it for as long as it lasts."""
    rows, ended = torch.zeros(1 << 15), threading.Event()

    def stream(_: Request):
        while not ended.is_set():
            yield Reply([rows])

    with (
        joined({16: stream, 17: lambda request: Reply()}, threads=1) as (server, greedy),
        Client({0: server.endpoints[0]}, sender=2, incarnation=0, timeout=DEADLINE) as polite,
    ):
        chunks = greedy.request(0, 16).chunks()
        next(chunks)
        for _ in range(3):
            polite.request(0, 17).result()
        assert not ended.is_set()
        ended.set()


def test_a_client_with_too_many_requests_is_refused_and_others_are_served():
    begun, held = threading.Event(), threading.Event()

    def handle(request: Request) -> Reply:
        begun.set()
        assert request.sender != 1 or held.wait(DEADLINE)
        return Reply()

    limits = Limits(max_client_requests=10)
    with (
        joined({16: handle}, threads=2, limits=limits, client={"sender": 1}) as (server, greedy),
        Client({0: server.endpoints[0]}, sender=2, incarnation=0, timeout=DEADLINE) as polite,
    ):
        first = greedy.request(0, 16)
        assert begun.wait(DEADLINE)
        later = [greedy.request(0, 16) for _ in range(15)]
        refused = greedy.request(0, 16)
        until(lambda: refused.refusal)
        assert "10 requests of this client are unanswered already" in refused.refusal
        held.set()
        for pending in (first, *later, refused):
            pending.result()
        polite.request(0, 16).result()
        greedy.request(0, 16).result()
        assert server.counters()["events"]["busy"] >= 7


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (Limits(max_client_bytes=1 << 20), "requests of this client with"),
        (Limits(max_bytes=1 << 20), "requests with"),
    ],
)
def test_requests_that_wait_take_so_many_bytes_and_no_more(limits, words):
    begun, held = threading.Event(), threading.Event()

    def handle(_: Request) -> Reply:
        begun.set()
        assert held.wait(DEADLINE)
        return Reply()

    with joined({16: handle}, threads=1, limits=limits) as (server, client):
        first = client.request(0, 16, [torch.zeros(1 << 18)])  # as much as is allowed
        assert begun.wait(DEADLINE)
        refused = client.request(0, 16, [torch.zeros(1 << 18)])
        until(lambda: refused.refusal)
        assert words in refused.refusal and server.counters()["held_bytes"] > 1 << 20
        held.set()
        first.result()
        refused.result()
        client.request(0, 16, [torch.zeros(1 << 19)]).result()  # alone, a larger one is taken
        counters = server.counters()
        assert counters["held_bytes"] == 0 and counters["unanswered"] == 0


def test_what_all_ranks_send_before_one_is_answered_is_not_refused_for_its_sum():
    futures = [Future() for _ in range(3)]
    handlers = {Kind.STEP: lambda request: futures[request.sender], Kind.PULL: lambda _: Reply()}
    with Server(handlers, limits=Limits(max_bytes=1 << 20)) as server, contextlib.ExitStack() as stack:
        peers = {0: server.endpoints[0]}
        ranks = [stack.enter_context(Client(peers, sender=rank, incarnation=0, timeout=DEADLINE)) for rank in range(3)]
        steps = [client.request(0, Kind.STEP, [torch.zeros(1 << 18)]) for client in ranks]
        until(lambda: server.counters()["unanswered"] == 3)
        ranks[0].request(0, Kind.PULL, timeout=5).result()  # steps leave the others their room
        for future, step in zip(futures, steps, strict=True):
            future.set_result(Reply())
            step.result()
        assert "busy" not in server.counters()["events"] and server.counters()["held_bytes"] == 0


@pytest.fixture
def dealer():
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.rcvhwm, socket.linger, socket.rcvtimeo = 1, 0, int(1000 * DEADLINE)
    socket.rcvbuf = 1 << 16
    yield socket
    context.destroy(linger=0)


def test_who_asks_and_does_not_read_is_not_answered_without_end(dealer):
    limits = Limits(max_unread=10)
    with joined({16: lambda request: Reply([torch.zeros(8000)])}, limits=limits) as (server, client):
        dealer.connect(server.endpoints[0])
        for number in range(2000):  # 64 MB of answers
            header = wire.make_header(16, number, timeout_us=10**7)
            dealer.send(wire.encode(header, (), None, Limits())[0])
        until(lambda: num_requests(server) == 2000 and not server.counters()["unanswered"])
        assert server.counters()["events"]["unread"] > 500
        client.request(0, 16).result()


def test_a_client_that_takes_no_replies_is_not_served_until_it_does(dealer):
    """Its window is full: its later requests wait, whatever they are, and memory is bounded by the window."""
    begun = []

    def large(request: Request) -> Reply:
        begun.append(request.sender)
        return Reply([torch.zeros(4 << 20)])  # 16 MB

    with joined({16: large, 17: lambda request: Reply()}) as (server, client):
        dealer.connect(server.endpoints[0])
        for number in range(12):
            header = wire.make_header(16, number, timeout_us=3 * 10**7, sender=9)
            dealer.send(wire.encode(header, (), None, Limits())[0])
        until(lambda: num_requests(server) == 12 and begun)
        for _ in range(20):
            client.request(0, 17).result()
        assert len(begun) <= 7
        for _ in range(12):
            dealer.recv_multipart(copy=False)
        assert len(begun) == 12
