"""Paced replies between real sockets: the receiver's share, what peers are told, and that the bytes are the same."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import zmq

from gnnsys.comm import Client, DeadlineExceeded, Keys, Kind, Limits, Reply, Request, Server, reply_pacing, wire
from gnnsys.comm.egress import Egress
from tests.comm.endpoints import DEADLINE, joined, until

MB = 10**6


class Chunks:
    """Answers PULL with `options["bytes"]` bytes that count up, in chunks as large as the rate says."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def handle(self, request: Request) -> Iterator[Reply]:
        self.requests.append(request)
        step, total = request.chunk_bytes(4 << 20) // 8, request.options["bytes"] // 8
        for first in range(0, total, step):
            yield Reply([torch.arange(first, min(total, first + step))], last=first + step >= total)


class Charges(Egress):
    """Notes when how much was sent of paced replies."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.noted: list[tuple[float, int]] = []

    def enter(self, peer: bytes, frames: Any, num_bytes: int, *, is_paced: bool = False, **options: Any) -> None:
        if is_paced:
            self.noted.append((time.monotonic(), num_bytes))
        super().enter(peer, frames, num_bytes, is_paced=is_paced, **options)


def rate_of_only_peer(server: Server) -> float:
    (peer,) = server._egress._flows
    return server._egress.rate_of(peer)


def received(pending: Any) -> torch.Tensor:
    return torch.cat([chunk.arrays[0] for chunk in pending.chunks(DEADLINE)])


@pytest.fixture(params=[True, "curve", None], ids=["sealed", "curve", "open"])
def paced(request, monkeypatch):
    monkeypatch.setattr("gnnsys.comm.server.Egress", Charges)
    keys = None if request.param is None else Keys.generate(encrypts=request.param)
    served = Chunks()
    with joined({Kind.PULL: served.handle}, keys=keys) as (server, client):
        yield served, server, client


def test_a_paced_server_sends_at_the_rate_and_the_bytes_are_the_same(paced):
    _, server, client = paced
    size, rate = 4 * MB, 20 * MB
    plain = received(client.request(0, Kind.PULL, options={"bytes": size}))
    assert server._egress.noted == [], "nobody is paced who does not say so"
    client.set_rate_in(rate)
    whole = received(client.request(0, Kind.PULL, options={"bytes": size}))
    assert torch.equal(plain, torch.arange(size // 8)) and torch.equal(whole, plain)
    noted = server._egress.noted
    until(lambda: len(noted) == 10)  # of 400,000 bytes each; the last is noted when it has left
    assert rate_of_only_peer(server) == pytest.approx(rate)
    burst = rate * reply_pacing._BURST_SECONDS
    for first in range(len(noted)):
        for last in range(first, len(noted)):
            moved = sum(size for _, size in noted[first:last])
            assert moved <= rate * (noted[last][0] - noted[first][0]) + burst + 2000  # headers of messages
    assert noted[-1][0] - noted[0][0] >= (size - 400_000 - burst) / rate - 1e-3  # what was saved up is sent at once


def test_two_requests_of_one_client_share_its_rate_and_both_end(paced):
    _, server, client = paced
    client.set_rate_in(20 * MB)
    asked = [client.request(0, Kind.PULL, options={"bytes": 1 * MB}) for _ in range(3)]
    assert all(torch.equal(received(each), torch.arange(MB // 8)) for each in asked)
    assert rate_of_only_peer(server) == pytest.approx(20 * MB)
    until(lambda: server.counters()["egress"]["paced"] == 0 and not server.counters()["unanswered"])


def test_a_servers_own_rate_is_divided_among_those_that_it_sends_to(monkeypatch):
    monkeypatch.setattr("gnnsys.comm.server.Egress", Charges)
    served = Chunks()
    with Server({Kind.PULL: served.handle}, rate_out=30 * MB) as server, contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(Client({0: server.endpoints[0]}, sender=rank, incarnation=1)) for rank in range(3)
        ]
        for client in clients:
            client.set_rate_in(1000 * MB)
        asked = [client.request(0, Kind.PULL, options={"bytes": 2 * MB}) for client in clients]
        assert all(torch.equal(received(each), torch.arange(2 * MB // 8)) for each in asked)
        noted = sorted(server._egress.noted)
        largest = max(size for _, size in noted)
        moved = sum(size for _, size in noted) - 3 * largest  # the last ones leave after that time
        assert moved <= 30 * MB * (noted[-1][0] - noted[0][0] + 3 * reply_pacing._BURST_SECONDS)


def test_a_client_divides_its_rate_among_the_peers_that_send_and_tells_them_when_that_changes():
    """Two of three peers hold their replies back, so that it is known who sends."""
    release, served = threading.Event(), Chunks()

    def hold(request: Request) -> Reply:
        served.requests.append(request)
        assert release.wait(DEADLINE)
        return Reply([torch.arange(5)])

    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(Server({Kind.PULL: hold})) for _ in range(3)]
        peers = {number: server.endpoints[0] for number, server in enumerate(servers)}
        client = stack.enter_context(Client(peers, sender=0, incarnation=1))
        client.set_rate_in(60 * MB, without=[2])
        here = client.request(2, Kind.PULL)
        first = client.request(0, Kind.PULL)
        second = client.request(1, Kind.PULL)
        until(lambda: len(served.requests) == 3)
        assert sorted(request.share for request in served.requests) == [0, 30 * MB, 60 * MB]
        peer = next(iter(servers[0]._egress._flows))
        until(lambda: servers[0]._egress.rate_of(peer) == 30 * MB)  # told by a heartbeat
        release.set()
        for each in (here, first, second):
            assert each.result(DEADLINE).arrays[0].tolist() == [0, 1, 2, 3, 4]
        client.set_rate_in(None)
        assert client.request(0, Kind.PULL).result(DEADLINE) and served.requests[-1].share == 0


@pytest.mark.parametrize("what", ["lost", "early"])
def test_a_share_whose_heartbeat_was_lost_or_came_before_the_request_is_told_again(what, monkeypatch):
    release = threading.Event()

    def hold(request: Request) -> Reply:
        assert release.wait(DEADLINE)
        return Reply()

    told: list[int] = []
    tell = Client._tell_share
    monkeypatch.setattr(Client, "_tell_share", lambda client, link, share: told.append(share))
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(Server({Kind.PULL: hold})) for _ in range(2)]
        peers = {number: server.endpoints[0] for number, server in enumerate(servers)}
        client = stack.enter_context(Client(peers, sender=0, incarnation=1, ping_interval=0.05))
        client.set_rate_in(60 * MB)
        asked = [client.request(number, Kind.PULL) for number in range(2)]
        until(lambda: servers[0]._egress._flows and told)
        peer = next(iter(servers[0]._egress._flows))
        if what == "early":
            tell(client, client._links[0], 30 * MB)
            until(lambda: servers[0]._egress.rate_of(peer) == 30 * MB)
            servers[0]._egress.tell(peer, 60 * MB)  # the request, which says what was right when it was made
        until(lambda: servers[0]._egress.rate_of(peer) == 30 * MB)
        release.set()
        for each in asked:
            each.result(DEADLINE)


def test_what_changes_tables_is_not_paced_and_takes_no_share():
    shares: list[int] = []

    def note(request: Request) -> Reply:
        shares.append(request.share)
        return Reply()

    with joined({Kind.PUSH: note, Kind.DESCRIBE: note}) as (_, client):
        client.set_rate_in(1 * MB)
        client.request(0, Kind.PUSH).result(DEADLINE)
        client.request(0, Kind.DESCRIBE).result(DEADLINE)
    assert shares == [0, 0]


@pytest.mark.parametrize("share", [1, 2**64 - 1])
def test_a_stranger_with_an_absurd_share_keeps_nobody_waiting(share):
    """It asks for far more than it says it can take. Others are answered, its requests end by their deadline."""
    served = Chunks()
    with joined({Kind.PULL: served.handle}, threads=1) as (server, client):
        context = zmq.Context()
        with context.socket(zmq.DEALER) as dealer:
            dealer.linger, dealer.rcvtimeo = 0, int(1000 * DEADLINE)
            dealer.connect(server.endpoints[0])
            seconds = DEADLINE if share > 1 else 1.5
            for number in range(1, 21):
                header = wire.make_header(Kind.PULL, number, timeout_us=int(seconds * 1e6), share=share)
                dealer.send_multipart(wire.encode(header, (), {"bytes": 1 * MB}, Limits()))
            client.set_rate_in(400 * MB)
            for _ in range(5):
                whole = received(client.request(0, Kind.PULL, options={"bytes": 2 * MB}))
                assert torch.equal(whole, torch.arange(2 * MB // 8))
            ended = {}
            while len(ended) < 20:
                header = wire.read_header(dealer.recv_multipart()[0], Limits())
                if header.kind == Kind.PULL and header.num_chunks:
                    ended[header.request_id] = header.status
        context.term()
        assert set(ended.values()) == ({wire.OK} if share > 1 else {wire.EXPIRED})
        until(lambda: server.counters()["unanswered"] == 0 and server.counters()["egress"]["waiting"] == 0)


def test_a_reply_that_cannot_be_sent_in_time_at_its_rate_is_an_error_at_the_deadline():
    served = Chunks()
    with joined({Kind.PULL: served.handle}) as (server, client):
        client.set_rate_in(100_000)
        pending = client.request(0, Kind.PULL, options={"bytes": 50 * MB}, timeout=1.0)
        with pytest.raises(DeadlineExceeded):
            received(pending)
        until(lambda: server.counters()["unanswered"] == 0)


@pytest.mark.parametrize("rate", [0, -5.0])
def test_a_rate_in_must_be_positive(rate):
    with joined({Kind.PULL: Chunks().handle}) as (_, client), pytest.raises(ValueError, match="rate_in"):
        client.set_rate_in(rate)
