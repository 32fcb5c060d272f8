"""Batches that a consumer begins to wait for: what is asked of servers for them goes first from then on."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from gnnsys.comm import Client, Consumer, Keys, Kind, Reply, Request, RequestContext, Server, use_context
from gnnsys.comm.urgency import AHEAD, WAITED, need_of
from tests.comm.endpoints import DEADLINE, joined, until


class Held:
    """Answers one request at a time, each when it is told to, and notes of which batch it is."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.go_on = threading.Semaphore(0)

    def handle(self, request: Request) -> Reply:
        self.batches.append(request.batch)
        assert self.go_on.acquire(timeout=DEADLINE)
        return Reply([torch.arange(request.batch)])


def ask(client: Client, batch: int, loader: int = 1) -> Any:
    with use_context(RequestContext(batch=batch, loader=loader, consumer=Consumer())):
        return client.request(0, Kind.PULL)


def events(server: Server) -> dict[str, int]:
    return dict(server.counters()["events"])


@pytest.mark.parametrize("keys", [None, Keys.generate()], ids=["open", "sealed"])
def test_what_is_waited_for_is_served_before_what_is_ahead(keys) -> None:
    held = Held()
    with joined({Kind.PULL: held.handle}, threads=1, keys=keys) as (server, client):
        first = ask(client, 0)
        until(lambda: held.batches == [0])
        later = [ask(client, batch) for batch in (1, 2, 3)]
        other = ask(client, 3, loader=2)
        until(lambda: server.counters()["unanswered"] == 5)
        client.raise_batch(1, 3)
        until(lambda: events(server).get("raised") == 1)
        for _ in range(5):
            held.go_on.release()
        for pending, batch in ((first, 0), *zip(later, (1, 2, 3), strict=True), (other, 3)):
            assert pending.result().arrays[0].numel() == batch, "nothing is lost, and nothing served twice"
    assert held.batches == [0, 3, 1, 2, 3], "batch 3 of the loader that waits, then in the order of arrival"


def test_only_its_own_requests_are_raised_and_once() -> None:
    held = Held()
    with (
        joined({Kind.PULL: held.handle}, threads=1) as (server, client),
        Client({0: server.endpoints[0]}, sender=5, incarnation=1, timeout=DEADLINE) as other,
    ):
        first = ask(client, 0)
        until(lambda: held.batches == [0])
        theirs, mine = ask(other, 2), ask(client, 2)
        until(lambda: server.counters()["unanswered"] == 3)
        client.raise_batch(1, 2)
        client.raise_batch(1, 2)  # no news
        client.raise_batch(1, 7)  # nothing is outstanding of it
        until(lambda: events(server).get("raised") == 1)
        steps = {job.client: need_of(job.priority) for job in server._jobs.values() if job.header.batch == 2}
        assert sorted(steps.values()) == [WAITED, AHEAD] and "nothing to raise" not in events(server)
        for _ in range(3):
            held.go_on.release()
        for pending in (first, theirs, mine):
            pending.result()
        assert held.batches == [0, 2, 2]


def test_a_raise_for_what_was_answered_changes_nothing() -> None:
    with joined({Kind.PULL: lambda request: Reply([torch.arange(3)])}) as (server, client):
        link = client._links[0]
        ask(client, 4).result()
        client.send_order(link, link.control, Kind.RAISE, 99, loader=1, batch=4)
        until(lambda: events(server).get("nothing to raise") == 1)
        assert ask(client, 5).result().arrays[0].numel() == 3


def test_servers_pass_a_raise_on_to_who_makes_the_batch() -> None:
    heard: list[tuple[int, int]] = []
    with joined(
        {Kind.PULL: lambda request: Reply()}, on_raise=lambda header: heard.append((header.loader, header.batch))
    ) as (server, client):
        client.request(0, Kind.PULL).result()
        link = client._links[0]
        client.send_order(link, link.control, Kind.RAISE, 7, loader=6, batch=8)
        until(lambda: heard == [(6, 8)])
        assert server.counters()["unanswered"] == 0


@pytest.mark.parametrize("kind", [Kind.PING, Kind.RAISE])
def test_what_a_server_handles_itself_is_refused_as_a_handler(kind) -> None:
    with pytest.raises(ValueError, match=f"{kind.name} is for the server itself"):
        Server({kind: lambda request: Reply()})
