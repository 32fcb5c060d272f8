"""Callers that read by themselves where rows are sealed: nothing that came lies unread, and nothing is left behind.

Clients look for what was overlooked so seldom here that a lost wake-up fails the test.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from gnnsys.comm import Keys, Kind, Reply, Request, wire
from gnnsys.comm.egress import Window
from gnnsys.comm.lane_agreements import LaneAgreements
from tests.comm.endpoints import DEADLINE, joined, until

SELDOM = {"resend_after": DEADLINE, "ping_interval": DEADLINE, "lost_after": 2 * DEADLINE, "timeout": DEADLINE / 2}


def echo(request: Request) -> Reply:
    return Reply(request.arrays)


@pytest.mark.parametrize("times", range(8))
def test_the_answer_to_a_lanes_question_is_read_though_its_reader_wanted_another(times):
    del times  # it is a race
    with joined({Kind.PULL: echo, Kind.STATUS: echo}, keys=Keys.generate(), client=SELDOM) as (_, client):
        client.request(0, Kind.STATUS).result()
        order = client.request(0, Kind.STATUS)
        pull = client.request(0, Kind.PULL, [torch.arange(4)])  # asks for the lane over the connection of the order
        order.result()
        assert torch.equal(pull.result().arrays[0], torch.arange(4))


@pytest.mark.parametrize("times", range(8))
def test_what_waited_for_a_lane_is_answered_though_senders_take_the_news(times):
    del times
    with joined({Kind.PULL: echo, Kind.STATUS: echo}, keys=Keys.generate(), client=SELDOM) as (_, client):
        client.request(0, Kind.STATUS).result()
        pulls = [client.request(0, Kind.PULL, [torch.full((40,), number)]) for number in range(200)]
        assert [int(pull.result().arrays[0][0]) for pull in pulls] == list(range(200))


def test_a_client_closes_a_connection_whose_place_another_took(monkeypatch):
    """Closed in the moment in which the old socket is still there."""
    begun, go_on = threading.Event(), threading.Event()
    begin = LaneAgreements._begin

    def begin_slowly(self, link, connection, now):
        if connection.socket is not None:
            begun.set()
            go_on.wait(DEADLINE)
        begin(self, link, connection, now)

    often = {"resend_after": 0.2, "ping_interval": 0.1, "lost_after": DEADLINE}
    with joined({Kind.PULL: echo}, keys=Keys.generate(), client=often) as (server, client):
        client.request(0, Kind.PULL, [torch.arange(4)]).result()
        monkeypatch.setattr(LaneAgreements, "_begin", begin_slowly)
        sessions = server._sessions
        assert sessions is not None
        sessions._by_session.clear()
        sessions._by_name.clear()
        lost = client.request(0, Kind.PULL, [torch.arange(4)])
        assert begun.wait(DEADLINE)
        closing = threading.Thread(target=client.close)
        closing.start()
        until(lambda: client._stop)
        go_on.set()
        closing.join(DEADLINE)
        until(lambda: not client._thread.is_alive())
        with pytest.raises(Exception, match="closed"):
            lost.result()


@pytest.mark.parametrize("keys", [None, Keys.generate()], ids=["open", "sealed"])
def test_replies_from_bytes_count_as_bytes_that_a_client_has_not_taken(keys, monkeypatch):
    """A client that asks and does not read is not answered for ever."""
    entered: list[int] = []
    add = Window.add
    monkeypatch.setattr(Window, "add", lambda self, level, size: (entered.append(max(0, size)), add(self, level, size)))
    rows, answered = np.ones(1 << 20, np.uint8), []

    def short(header, front):
        answered.append(header.request_id)
        frames = wire.encode(header, [torch.from_numpy(rows.copy())], None, wire.Limits())
        return [bytearray(frames[0]), *frames[1:]], 1

    with joined({Kind.PULL: echo}, keys=keys, short={Kind.PULL: short}) as (_, client):
        while len(answered) < 3:  # one that comes right behind another is handed over
            client.request(0, Kind.PULL).result()
        assert sum(entered) >= 3 * rows.nbytes
