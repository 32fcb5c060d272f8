"""A server all of whose threads are busy still says that it lives, how it is, and who is silent; and can be ended."""

from __future__ import annotations

import threading

import pytest

from gnnsys.comm import Client, Kind, Reply
from gnnsys.comm.rendezvous import poll
from gnnsys.loader import BatchService
from gnnsys.sampling import GraphService
from gnnsys.session.graph_server import GRAPH_KINDS, GraphServer

DEADLINE = 120.0
SOON = 60.0  # seconds: less than a thread is held


@pytest.fixture
def busy():
    """A graph server whose only thread is held, and a client of it."""
    held, release = threading.Event(), threading.Event()

    def hold(_):
        held.set()
        assert release.wait(DEADLINE)
        return Reply()

    server = GraphServer(threads=1)
    server._services[Kind.PULL] = hold
    try:
        with Client({0: server.start()[0]}, sender=3, incarnation=7, timeout=DEADLINE) as client:
            running = client.request(0, Kind.PULL)
            waiting = [client.request(0, Kind.PULL) for _ in range(3)]
            assert held.wait(DEADLINE)
            assert poll(lambda: server.server.load()["queue"] == len(waiting), DEADLINE)  # they go by another lane
            yield server, client
            release.set()
            for pending in (running, *waiting):
                pending.result()
    finally:
        release.set()
        server.close()


def test_a_busy_server_answers_signs_of_life_and_tells_who_is_silent(busy):
    _, client = busy
    for _ in range(3):
        status = client.request(0, Kind.STATUS, options={"ranks": [3]}, timeout=SOON).result().options
        assert status["queue"] == 3 and 0 <= status["silent"][0] < SOON
    assert client.request(0, Kind.PING, timeout=SOON).result().arrays == []
    with pytest.raises(ValueError, match="STATUS on machine 0 raised ValueError"):
        client.request(0, Kind.STATUS, options={"ranks": ["x", {}]}, timeout=SOON).result()
    assert client.request(0, Kind.STATUS, timeout=SOON).result().options["served"] == 4, "and lives on"


def test_a_server_tells_its_counters_to_who_asks_for_them_whatever_strangers_have_sent(busy):
    server, client = busy
    for kind in range(1000, 1300):  # kinds that nobody serves do not fill the answer
        with pytest.raises(ValueError, match="is not served here"):
            client.request(0, kind, timeout=SOON).result()
    assert "counters" not in client.request(0, Kind.STATUS, timeout=SOON).result().options
    told = client.request(0, Kind.STATUS, options={"counters": True}, timeout=SOON).result().options["counters"]
    assert set(told["kinds"]) == {"PULL", "STATUS", "other"} | ({"PING"} & set(told["kinds"]))
    assert told["kinds"]["PULL"]["messages_in"] == 4 and told["kinds"]["other"]["messages_in"] == 300
    assert told["kinds"]["other"]["bytes_out"] > 0 and told["events"] == {"unknown kind": 300}
    assert set(told["times"]) == {"STATUS"} and told["times"]["STATUS"]["replies"] == 1
    assert told["queue"] == 3 and told["unanswered"] == 5 and told["clients"] == 2 and told["held_bytes"] > 0
    limits = server.server._limits
    assert told["limits"] == {name: getattr(limits, name) for name in told["limits"]} and len(told["limits"]) == 4


def test_a_busy_server_can_be_stopped(busy):
    server, client = busy
    client.request(0, Kind.STOP, timeout=SOON).result()
    assert server.stopped.is_set()


def test_every_kind_of_message_has_a_handler():
    served = {*object.__new__(GraphService).handlers(), Kind.SELECT}
    assert served == set(GRAPH_KINDS)
    server = GraphServer()
    try:
        of_samplers = BatchService(lambda opening: None, 1).handlers()
        assert not of_samplers.keys() & server.server._handlers.keys()
        assert {*server.server._handlers, *of_samplers, Kind.PING, Kind.SEAL, Kind.RAISE} == set(Kind)
        of_its_own = {Kind.PING, Kind.SEAL, Kind.RAISE, Kind.STATUS, Kind.OPEN, Kind.STOP}
        assert {*server._services} == set(Kind) - served - of_its_own - of_samplers.keys()
    finally:
        server.close()
