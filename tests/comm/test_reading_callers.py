"""Who waits for a reply reads the socket: every reply finds its caller, whoever reads it and however that ends."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from gnnsys.comm import Client, Closed, DeadlineExceeded, Kind, Reply, Request, Server, sockets
from gnnsys.comm.led_socket import LedSocket
from tests.comm.endpoints import DEADLINE, Proxy, joined, until


class Held:
    """A handler that answers request `name` when it is told to: `answer(name)`."""

    def __init__(self) -> None:
        self._answers: dict[str, Future[Reply]] = {}
        self._lock = threading.Lock()

    def of(self, name: str) -> Future[Reply]:
        with self._lock:
            return self._answers.setdefault(name, Future())

    def __call__(self, request: Request) -> Future[Reply]:
        return self.of(request.options["name"])

    def answer(self, name: str) -> None:
        self.of(name).set_result(Reply(options={"name": name}))


class NotingClient(Client):
    """Notes which thread took each reply."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.readers: dict[int, str] = {}
        super().__init__(*args, **options)

    def _accept(self, link: Any, connection: Any, frames: Any, now: float) -> None:
        before = set(connection.outstanding)
        super()._accept(link, connection, frames, now)
        for request_id in before - set(connection.outstanding):
            self.readers[request_id] = threading.current_thread().name


def socket_of(client: Client) -> LedSocket:
    socket = client._links[0].lanes[0].socket
    assert socket is not None
    return socket


def in_thread(name: str, call: Callable[[], Any]) -> Future[Any]:
    """The result of a call in a thread of that name."""
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result


def ask(client: Client, name: str, **options: Any) -> Any:
    return client.request(0, Kind.PULL, options={"name": name}, **options)


def name_in(pending: Any) -> Any:
    return pending.result(DEADLINE).options["name"]


def test_who_waits_takes_its_own_reply_and_those_of_others():
    held, seldom = Held(), {"resend_after": DEADLINE, "ping_interval": DEADLINE, "lost_after": 2 * DEADLINE}
    with (
        Server({Kind.PULL: held}) as server,
        NotingClient({0: server.endpoints[0]}, sender=0, incarnation=1, **seldom) as client,
    ):
        opens = ask(client, "opens the connection")
        held.answer("opens the connection")
        until(opens.done)
        first, second, unawaited = ask(client, "first"), ask(client, "second"), ask(client, "nobody waits")
        leading = in_thread("leader", lambda: name_in(first))
        until(lambda: socket_of(client).is_led)
        following = in_thread("follower", lambda: name_in(second))
        held.answer("second")
        held.answer("nobody waits")
        assert following.result(DEADLINE) == "second"
        until(unawaited.done)
        held.answer("first")
        assert leading.result(DEADLINE) == "first"
        assert [client.readers[each.request_id] for each in (first, second, unawaited)] == ["leader"] * 3
        assert name_in(unawaited) == "nobody waits"


def test_the_client_reads_again_when_the_caller_has_its_reply():
    held = Held()
    with joined({Kind.PULL: held}) as (_, client):
        first, unawaited = ask(client, "first"), ask(client, "unawaited")
        leading = in_thread("leader", lambda: name_in(first))
        until(lambda: socket_of(client).is_led)
        follower = ask(client, "follower")
        following = in_thread("follower", lambda: name_in(follower))
        held.answer("first")
        assert leading.result(DEADLINE) == "first"
        held.answer("unawaited")
        held.answer("follower")
        assert following.result(DEADLINE) == "follower"
        until(unawaited.done)


def test_replies_that_nobody_waits_for_are_read_after_a_caller_has_left_a_quiet_socket():
    """By the thread, which does not look by itself for as long as this test runs."""
    held, seldom = Held(), {"resend_after": DEADLINE, "ping_interval": DEADLINE, "lost_after": 2 * DEADLINE}
    with (
        Server({Kind.PULL: held}) as server,
        NotingClient({0: server.endpoints[0]}, sender=0, incarnation=1, **seldom) as client,
    ):
        opens = ask(client, "opens the connection")
        held.answer("opens the connection")
        until(opens.done)
        for number in range(10):
            awaited, meanwhile = ask(client, f"awaited {number}"), None
            leading = in_thread("leader", lambda pending=awaited: name_in(pending))
            until(lambda: socket_of(client).is_led)
            if number % 2:
                meanwhile = ask(client, f"meanwhile {number}")
            held.answer(f"awaited {number}")
            assert leading.result(DEADLINE) == f"awaited {number}"
            assert number % 2 or not socket_of(client)._wakes_thread
            if meanwhile is not None:
                held.answer(f"meanwhile {number}")
                until(meanwhile.done)
            later = ask(client, f"later {number}")
            held.answer(f"later {number}")
            until(later.done)
            assert client.readers[awaited.request_id] == "leader"


def test_a_caller_whose_time_is_over_leaves_and_the_reply_is_read_without_it():
    held = Held()
    with joined({Kind.PULL: held}) as (_, client):
        pending = ask(client, "late")
        with pytest.raises(TimeoutError, match="still outstanding"):
            pending.result(timeout=0.05)
        assert not socket_of(client).is_led
        held.answer("late")
        until(pending.done)
        assert name_in(pending) == "late"


def test_the_deadline_of_a_request_ends_the_wait_of_who_reads():
    with joined({Kind.PULL: Held()}) as (_, client):
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            ask(client, "never", timeout=0.2).result()
        assert time.monotonic() - began < DEADLINE / 4


def test_a_caller_that_is_interrupted_leaves_the_socket_to_others():
    assert threading.current_thread() is threading.main_thread()
    held = Held()
    with joined({Kind.PULL: held}) as (_, client):
        main = threading.get_ident()
        for number in range(5):
            pending, other = ask(client, f"mine {number}"), ask(client, f"other {number}")

            def interrupt() -> None:
                until(lambda: socket_of(client).is_led)
                signal.pthread_kill(main, signal.SIGINT)

            interrupting = in_thread("interrupts", interrupt)
            with pytest.raises(KeyboardInterrupt):
                pending.result()
            interrupting.result(DEADLINE)
            held.answer(f"other {number}")
            until(other.done)
            held.answer(f"mine {number}")
            assert name_in(pending) == f"mine {number}"


def test_a_socket_whose_leader_was_cut_off_midway_is_taken_back():
    """As where an exception from outside comes between two steps of leaving."""
    held = Held()
    with joined({Kind.PULL: held}, client={"ping_interval": 0.1, "lost_after": DEADLINE}) as (_, client):
        ask(client, "opens")
        held.answer("opens")
        socket = socket_of(client)
        with socket._lead:
            socket._take_over()  # and nobody leads
        pending = ask(client, "next")
        held.answer("next")
        until(pending.done)
        until(lambda: not socket_of(client).is_led)


def test_closing_a_client_ends_the_wait_of_who_reads():
    with Server({Kind.PULL: Held()}) as server:
        client = Client({0: server.endpoints[0]}, sender=0, incarnation=1)
        waits = [in_thread(f"caller {n}", ask(client, "never").result) for n in range(3)]
        until(lambda: socket_of(client).is_led)
        began = time.monotonic()
        client.close()
        for wait in waits:
            with pytest.raises(Closed):
                wait.result(DEADLINE)
        assert time.monotonic() - began < DEADLINE / 4


def test_a_connection_that_is_cut_while_a_caller_reads_is_made_again():
    held = Held()
    with Server({Kind.PULL: held}) as server:
        proxy = Proxy(server.endpoints[0])
        options = {"resend_after": 0.2, "ping_interval": 0.2, "lost_after": DEADLINE}
        with Client({0: proxy.endpoint}, sender=0, incarnation=1, **options) as client:
            leading = in_thread("leader", lambda: name_in(ask(client, "through two connections")))
            until(lambda: client._links[0].lanes[0].socket is not None and socket_of(client).is_led)
            proxy.cut()
            held.answer("through two connections")
            assert leading.result(DEADLINE) == "through two connections"
        proxy.close()


def test_replies_in_chunks_are_whole_whoever_reads_them():
    def count(request: Request) -> Any:
        return (Reply([torch.full((20_000,), n)]) for n in range(request.options["chunks"]))

    with joined({Kind.PULL: count}) as (_, client), ThreadPoolExecutor(4) as threads:

        def pull(chunks: int) -> list[int]:
            return [int(each.arrays[0][-1]) for each in client.request(0, Kind.PULL, (), {"chunks": chunks}).chunks()]

        assert list(threads.map(pull, range(40))) == [list(range(chunks)) for chunks in range(40)]


def test_it_goes_without_a_call_into_libzmq(monkeypatch):
    monkeypatch.setattr(sockets, "_getsockopt", None)
    with joined({Kind.PULL: lambda request: Reply(options=request.options)}) as (_, client):
        assert [name_in(ask(client, str(number))) for number in range(20)] == [str(number) for number in range(20)]


def test_many_threads_that_send_and_wait_at_once_all_have_their_own_replies():
    def echo(request: Request) -> Reply:
        return Reply([array.clone() for array in request.arrays])

    with joined({Kind.PULL: echo}) as (_, client), ThreadPoolExecutor(6) as threads:

        def talk(seed: int) -> int:
            generator, right = torch.Generator().manual_seed(seed), 0
            for _ in range(50):
                sizes = torch.randint(1, 40_000, (3,), generator=generator).tolist()
                sent = [torch.randint(0, 1 << 40, (size,), generator=generator) for size in sizes]
                pending = [client.request(0, Kind.PULL, [array]) for array in sent]
                right += all(
                    torch.equal(each.result(DEADLINE).arrays[0], array)
                    for each, array in zip(pending, sent, strict=True)
                )
            return right

        assert list(threads.map(talk, range(6))) == [50] * 6
        assert client.counters()["outstanding"] == 0
        assert client.counters()["kinds"]["PULL"]["messages_in"] == 6 * 150
