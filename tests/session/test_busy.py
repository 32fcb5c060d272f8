"""A server all of whose threads are busy still says that it lives, how it is, and who is silent; and can be ended."""

from __future__ import annotations

import threading

import pytest

from gnnsys.comm import Client, Kind, Reply
from gnnsys.session.graph_server import GraphServer

DEADLINE = 20.0


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
        status = client.request(0, Kind.STATUS, options={"ranks": [3]}, timeout=5).result().options
        assert status["queue"] == 3 and 0 <= status["silent"][0] < 5
    assert client.request(0, Kind.PING, timeout=5).result().arrays == []
    with pytest.raises(ValueError, match="STATUS on machine 0 raised ValueError"):
        client.request(0, Kind.STATUS, options={"ranks": ["x", {}]}, timeout=5).result()
    assert client.request(0, Kind.STATUS, timeout=5).result().options["served"] == 4, "and lives on"


def test_a_busy_server_can_be_stopped(busy):
    server, client = busy
    client.request(0, Kind.STOP, timeout=5).result()
    assert server.stopped.is_set()
