"""Connections that libzmq gives up: requests end in their time, and nothing waits for a send."""

from __future__ import annotations

import pytest
import zmq

from gnnsys.comm import Client, Closed, DeadlineExceeded, Keys, Reply, Request, Server
from gnnsys.comm.sockets import SharedSocket, WakeUp
from tests.comm.endpoints import DEADLINE


def echo(request: Request) -> Reply:
    return Reply(request.arrays)


@pytest.mark.parametrize("wrong", ["no key", "another protocol"])
def test_requests_end_in_their_time_after_libzmq_has_given_the_connection_up(wrong):
    """It does so for good when the other end wants a key and is offered none: a send would wait for ever then."""
    keys = Keys.generate(encrypts=True)
    bad = None if wrong == "no key" else Keys(keys.public, keys.secret, encrypts=False)
    with (
        Server({16: echo}, keys=keys) as server,
        Client({0: server.endpoints[0]}, sender=0, incarnation=0, keys=bad, ping_interval=0.05) as client,
    ):
        while not client.counters()["events"].get("connection cut"):
            with pytest.raises(DeadlineExceeded):
                client.request(0, 16, timeout=0.1).result(DEADLINE)
        with pytest.raises(DeadlineExceeded):
            client.request(0, 16, timeout=0.1).result(DEADLINE)


def test_a_socket_that_was_let_go_of_says_so_to_a_thread_that_still_sends():
    """By `zmq.Again`, which leaves the request outstanding; one that was closed says that."""
    context = zmq.Context()
    for is_cut, error in ((True, zmq.Again), (False, zmq.ZMQError)):
        shared = SharedSocket(context.socket(zmq.DEALER), WakeUp())
        shared.is_cut = is_cut
        shared.close(0)
        with pytest.raises(error) as raised:
            shared.send([b"x"])
        assert isinstance(raised.value, zmq.Again) == is_cut
    context.term()


def test_a_closed_client_says_so_also_after_its_connection_was_cut():
    with Server({16: echo}) as server:
        client = Client({0: server.endpoints[0]}, sender=0, incarnation=0)
        client.request(0, 16).result(DEADLINE)
        client._links[0].connection_for(16).socket.is_cut = True
        client.close()
        with pytest.raises(Closed):
            client.request(0, 16).result(DEADLINE)
