"""Small requests that the reading thread answers itself: where that takes nobody's turn, and counted like others."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import zmq

from gnnsys.comm import HEADER_BYTES, Header, Kind, Limits, RemoteValueError, Reply, Request, Server, ShortReply, wire
from tests.comm.endpoints import DEADLINE, joined, until

OTHER = int(Kind.SAMPLE)


class Short:
    """Answers PULL with the thread that did it, as options: `short` from bytes, `handle` as a handler."""

    def __init__(self) -> None:
        self.num_short = 0
        self.is_able = True
        self.release = threading.Event()
        self.handlers = {Kind.PULL: self.handle, OTHER: self.hold}

    def short(self, header: Header, front: memoryview) -> ShortReply | None:
        if not self.is_able:
            return None
        self.num_short += 1
        frames = wire.encode(header, [torch.tensor([7])], None, Limits())
        assert isinstance(frames[0], bytes)
        return [bytearray(frames[0])], 1

    def handle(self, request: Request) -> Reply:
        if request.options.get("fails"):
            raise ValueError("as was asked for")
        return Reply([torch.tensor([8])])

    def hold(self, request: Request) -> Reply:
        assert self.release.wait(DEADLINE)
        return Reply([torch.tensor([9])])


def value(pending: Any) -> int:
    return int(pending.result(DEADLINE).arrays[0])


def test_a_small_request_is_answered_while_all_workers_are_busy_and_nothing_waits():
    served = Short()
    with joined(served.handlers, short={Kind.PULL: served.short}, threads=2) as (server, client):
        held = [client.request(0, OTHER) for _ in range(2)]
        until(lambda: server.counters()["unanswered"] == 2 and server.counters()["queue"] == 0)
        until(lambda: "PING" in server.counters()["kinds"])  # the client's first heartbeat
        until(lambda: server._wake_up.sleeping)  # what comes right behind another is handed over
        assert value(client.request(0, Kind.PULL)) == 7
        served.release.set()
        assert [value(each) for each in held] == [9, 9]


def test_it_waits_its_turn_where_others_wait():
    served = Short()
    with joined(served.handlers, short={Kind.PULL: served.short}, threads=1) as (server, client):
        held = [client.request(0, OTHER) for _ in range(2)]
        until(lambda: server.counters()["queue"] == 1)
        behind = client.request(0, Kind.PULL)
        until(lambda: server.counters()["queue"] == 2)
        assert served.num_short == 0
        assert not behind.done()
        served.release.set()
        assert [value(each) for each in (*held, behind)] == [9, 9, 8]


@pytest.mark.parametrize("limits", [Limits(max_client_requests=1), Limits(max_client_bytes=1), Limits(max_bytes=1)])
def test_a_client_that_holds_too_much_is_refused_as_ever(limits):
    served = Short()
    with joined(served.handlers, short={Kind.PULL: served.short}, limits=limits) as (server, client):
        held = client.request(0, OTHER)
        until(lambda: server.counters()["unanswered"] == 1)
        refused = client.request(0, Kind.PULL)
        until(lambda: server.counters()["events"].get("busy", 0) > 0)
        assert served.num_short == 0
        served.release.set()
        assert value(held) == 9
        assert value(refused) in (7, 8)  # by whom, it does not matter any more


def test_what_cannot_be_answered_from_bytes_is_answered_by_the_handler():
    served = Short()
    with joined(served.handlers, short={Kind.PULL: served.short}) as (_, client):
        served.is_able = False
        assert value(client.request(0, Kind.PULL)) == 8
        with pytest.raises(RemoteValueError, match="as was asked for"):
            client.request(0, Kind.PULL, (), {"fails": True}).result()


def test_what_raises_is_answered_by_the_handler():
    def broken(header: Header, front: memoryview) -> ShortReply | None:
        raise RuntimeError("a mistake")

    with joined(Short().handlers, short={Kind.PULL: broken}) as (server, client):
        assert value(client.request(0, Kind.PULL)) == 8
        assert server.counters()["events"] == {}


def test_it_is_counted_as_any_other():
    served = Short()
    with joined(served.handlers, short={Kind.PULL: served.short}) as (server, client):
        asked = [client.request(0, Kind.PULL) for _ in range(20)]
        assert {value(each) for each in asked} <= {7, 8}
        there, here = server.counters(), client.counters()
        counts = there["kinds"]["PULL"]
        assert counts["messages_in"] == counts["messages_out"] == 20
        assert {"messages_in": 20, "bytes_in": counts["bytes_out"]}.items() <= here["kinds"]["PULL"].items()
        assert there["times"]["PULL"]["replies"] == 20
        assert (there["unanswered"], there["held_bytes"]) == (0, 0)
        assert server.liveness.silent_for(3, 7) < DEADLINE


def test_a_request_that_comes_twice_is_served_once():
    served = Short()
    with Server(served.handlers, short={Kind.PULL: served.short}) as server, zmq.Context() as context:
        dealer = context.socket(zmq.DEALER)
        dealer.rcvtimeo, dealer.linger = int(1000 * DEADLINE), 0
        dealer.connect(server.endpoints[0])
        front = wire.encode(wire.make_header(Kind.PULL, 5, timeout_us=10**8), (), None, Limits())[0]
        replies = []
        for _ in range(2):
            dealer.send(front)
            replies.append(dealer.recv())
        dealer.close()
        assert replies[0] == replies[1]
        assert len(replies[0]) > HEADER_BYTES
        assert served.num_short == 1
        assert server.counters()["events"] == {"repeated": 1}
