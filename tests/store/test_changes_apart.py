"""Pushes and steps travel apart from rows: neither waits for the other, and both keep their order.

A proxy stands in both connections and holds one of them up, so what overtakes what is decided here.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from gnnsys.comm import Client, Keys, Kind, Request, Server
from gnnsys.store import Pull, Shard, Store
from tests.comm.endpoints import DEADLINE, Proxy, until
from tests.store.cluster import generator

NUM_ROWS, DIM = 60_000, 64  # of rows that are read: 15 MB, more than sockets hold
ADAM = {"kind": "adam", "lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
WIRES = pytest.mark.parametrize("encrypts", [None, "curve", True], ids=["open", "curve", "sealed"])
HOST = "127.0.0.2"  # proxies listen where the server does not, and so can have the port of its rows


class Wires:
    """A store, and proxies in all its connections to the shard that has the rows of "big" and "e"."""

    def __init__(self, stack: ExitStack, encrypts: str | bool | None) -> None:
        keys = None if encrypts is None else Keys.generate(encrypts=encrypts)
        self.shard = stack.enter_context(closing(Shard(1)))
        self.came: list[tuple[int, int]] = []  # kind and sequence number of requests, in the order of arrival
        handlers = {kind: self._noting(handler) for kind, handler in self.shard.handlers().items()}
        server = stack.enter_context(Server(handlers, keys=keys, threads=3))
        ports = [int(server.endpoints[0].rpartition(":")[2]), *server._bulk_ports.values()]
        self.proxies = [stack.enter_context(closing(Proxy(f"tcp://127.0.0.1:{port}", (HOST, port)))) for port in ports]
        self.client = stack.enter_context(
            Client(
                {1: f"tcp://{HOST}:{ports[0]}"}, sender=0, incarnation=1, keys=keys, timeout=DEADLINE,
                resend_after=0.2, ping_interval=0.2, lost_after=DEADLINE,
            )
        )  # fmt: skip
        self.store = Store(machine_of_part=[1], machine=0, client=self.client)
        self.store.create("big", NUM_ROWS, (DIM,), init=("uniform", -1.0, 1.0, 5), mutable=False)
        self.store.create("e", 50, (3,))
        self.rows = self.number_of(lambda: self.store.pull([Pull("e", torch.arange(50))]).result())
        self.changes = self.number_of(lambda: self.store.push("e", torch.arange(1), torch.zeros(1, 3)).result())

    @property
    def proxy(self) -> Proxy:
        """In the connections that carry rows, and pushes."""
        return self.proxies[-1]

    def number_of(self, use: Callable[[], Any]) -> int:
        """The connection that `use` opens, or that was opened last."""
        use()
        return self.proxy.num_joined - 1

    def _noting(self, handler: Callable[[Request], Any]) -> Callable[[Request], Any]:
        def serve(request: Request) -> Any:
            self.came.append((request.kind, request.sequence & 0xFFFFFFFF))
            return handler(request)

        return serve

    def numbers(self) -> list[int]:
        """Of the pushes and steps that came."""
        return [number for kind, number in self.came if kind in (Kind.PUSH, Kind.STEP)]


@contextmanager
def closing(made: Any) -> Iterator[Any]:
    try:
        yield made
    finally:
        made.close()


@contextmanager
def wires(encrypts: str | bool | None) -> Iterator[Wires]:
    with ExitStack() as stack:
        yield Wires(stack, encrypts)


def push_some(store: Store, expected: torch.Tensor, count: int, seed: int) -> list[Any]:
    """Writes and sums that do not commute; `expected` is what the rows are after them."""
    chance, pending = generator(seed), []
    for number in range(count):
        ids, rows = torch.randperm(50, generator=chance)[:30], torch.randn(30, 3, generator=chance)
        if number % 2:
            expected[ids] += rows
        else:
            expected[ids] = rows
        pending.append(store.push("e", ids, rows, mode="add" if number % 2 else "write"))
    return pending


@WIRES
def test_steps_and_pulls_of_few_rows_are_answered_while_many_rows_asked_for_before_are_held_up(encrypts):
    with wires(encrypts) as w:
        w.proxy.hold(w.rows)
        ids = torch.arange(NUM_ROWS)
        pull = w.store.pull([Pull("big", ids)])
        w.store.step("e", torch.arange(50), torch.ones(50, 3), ADAM).result()
        w.store.push("e", torch.arange(2), torch.ones(2, 3)).result()
        found = w.store.tensor("e")[torch.arange(50)]
        assert (found[:2] == 1).all() and torch.allclose(found[2:], torch.full((48, 3), -0.1))
        all_rows = w.shard.table("big").part(0).rows
        assert torch.equal(w.store.tensor("big")[ids[:900]], all_rows[:900])
        assert not pull.done()
        w.proxy.let_go()
        assert torch.equal(pull.result()[0], all_rows)


@WIRES
def test_a_pull_sees_the_pushes_before_it_though_theirs_is_the_slower_connection(encrypts):
    with wires(encrypts) as w, ThreadPoolExecutor(1) as pool:
        w.proxy.hold(w.changes)
        expected = torch.zeros(50, 3)
        push_some(w.store, expected, 7, seed=1)
        ids = torch.arange(100)
        assert torch.equal(w.store.tensor("big")[ids], w.shard.table("big").part(0).rows[ids]), "rows need not wait"
        asks = threading.Event()
        wait_for_pushes = w.store._outbox.wait

        def wait(*names: str) -> None:
            asks.set()
            wait_for_pushes(*names)

        w.store._outbox.wait = wait
        w.came.clear()
        pull = pool.submit(lambda: w.store.tensor("e")[torch.arange(50)])
        assert asks.wait(DEADLINE) and not pull.done()
        w.proxy.let_go()
        assert torch.equal(pull.result(DEADLINE), expected)
        assert [kind for kind, _ in w.came] == [Kind.PUSH] * 7 + [Kind.PULL]


@WIRES
def test_pushes_that_are_lost_with_their_connection_come_again_and_in_their_order(encrypts):
    with wires(encrypts) as w:
        expected = torch.zeros(50, 3)
        for turn in range(2):
            w.proxy.hold(w.changes)
            first = push_some(w.store, expected, 4, seed=10 + turn)
            w.proxy.cut_off(w.changes)
            then = push_some(w.store, expected, 4, seed=20 + turn)
            w.proxy.let_go()
            for push in first + then:
                push.result()
            assert torch.equal(w.store.tensor("e")[torch.arange(50)], expected)
            w.changes = w.proxy.num_joined - 1
        assert {*w.numbers()} == {*range(17)}


@WIRES
def test_pushes_that_overtake_each_other_on_two_connections_are_applied_by_their_numbers(encrypts):
    """Nothing sends them so: the order is that of the numbers, whichever connection a push takes."""
    with wires(encrypts) as w:
        link, others = w.client._links[1], w.client._links[1].connection_for
        turns = itertools.cycle([link.changes, link.lanes[0]])
        link.connection_for = lambda kind, size: next(turns) if kind == Kind.PUSH else others(kind, size)
        w.proxy.hold(w.changes)
        w.came.clear()
        expected = torch.zeros(50, 3)
        pushes = push_some(w.store, expected, 8, seed=3)
        until(lambda: len(w.came) == 4)
        assert {*w.numbers()} == {2, 4, 6, 8} and not any(push.done() for push in pushes), "they wait for 1, 3, 5 and 7"
        w.proxy.let_go()
        for push in pushes:
            push.result()
        assert torch.equal(w.store.tensor("e")[torch.arange(50)], expected)
