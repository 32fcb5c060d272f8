"""Requests and replies over real sockets: what arrives, in which order, and what a handler may answer."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from gnnsys.comm import (
    Client,
    Closed,
    CommError,
    DeadlineExceeded,
    Kind,
    RemoteError,
    Reply,
    Request,
    RequestContext,
    Server,
    ShardLost,
    use_context,
)
from gnnsys.comm.arrays import DTYPES
from gnnsys.comm.urgency import user_of
from tests.comm.endpoints import DEADLINE, joined, until

# On a slow machine, too, nothing is asked twice.
PATIENT = {"ping_interval": DEADLINE, "lost_after": 2 * DEADLINE, "resend_after": DEADLINE}


def echo(request: Request) -> Reply:
    return Reply([array.clone() for array in request.arrays], request.options)


def test_arrays_of_every_dtype_and_size_make_the_round_trip():
    with joined({Kind.PULL: echo}) as (_, client):
        for length in (0, 1, 3, 1000, 100_000):
            arrays = [torch.arange(length).to(dtype) for dtype in DTYPES if not dtype.is_floating_point]
            arrays += [torch.rand(length, 2).to(dtype) for dtype in DTYPES if dtype.is_floating_point]
            reply = client.request(0, Kind.PULL, arrays, {"length": length}).result()
            assert reply.options == {"length": length} and len(reply.arrays) == len(arrays)
            for sent, received in zip(arrays, reply.arrays, strict=True):
                assert received.dtype == sent.dtype and received.shape == sent.shape
                assert torch.equal(received.view(torch.uint8), sent.view(torch.uint8))
                assert received.data_ptr() % received.dtype.itemsize == 0


def test_a_handler_sees_who_asks_and_the_reply_names_the_request():
    seen = []

    def handler(request: Request) -> Reply:
        seen.append((request.sender, request.incarnation, request.sequence, request.batch, request.layer))
        seen.append((user_of(request.priority), request.path, request.loader))
        assert 0 < request.remaining() <= 9
        return Reply()

    with joined({Kind.SAMPLE: handler}) as (_, client):
        reply = client.request(
            0, Kind.SAMPLE, sequence=5, batch=6, layer=2, timeout=9, priority=-4, path=8, loader=9
        ).result()
    assert seen == [(3, 7, 5, 6, 2), (-4, 8, 9)]
    assert (reply.batch, reply.layer, reply.sequence, reply.kind) == (6, 2, 5, Kind.SAMPLE)
    assert reply.queued_us >= 0 and reply.served_us >= 0


def test_a_priority_or_path_of_0_is_said_and_only_what_nobody_gave_is_the_clients():
    seen = []

    def handler(request: Request) -> Reply:
        seen.append((user_of(request.priority), request.path))
        return Reply()

    with joined({Kind.SAMPLE: handler}) as (_, client):
        client.request(0, Kind.SAMPLE).result()
        client.context = RequestContext(priority=5, path=6)
        client.request(0, Kind.SAMPLE).result()
        client.request(0, Kind.SAMPLE, priority=0, path=0).result()
        with use_context(RequestContext(priority=0)):
            client.request(0, Kind.SAMPLE).result()
            client.request(0, Kind.SAMPLE, priority=7, path=0).result()
    assert seen == [(0, 0), (5, 6), (0, 0), (0, 6), (7, 0)]
    with use_context(RequestContext(priority=4, path=3)):
        own = [Request.local(Kind.SAMPLE), Request.local(Kind.SAMPLE, priority=0, path=0)]
    assert [(user_of(request.priority), request.path) for request in own] == [(4, 3), (0, 0)]


def test_many_threads_ask_several_servers_at_once_and_each_gets_its_own_answer():
    def handler(number):
        return lambda request: Reply([request.arrays[0] * 10 + number])

    with Server({16: handler(0)}) as a, Server({16: handler(1)}) as b:
        peers = {0: a.endpoints[0], 1: b.endpoints[0]}
        with Client(peers, sender=0, incarnation=0, timeout=DEADLINE) as client, ThreadPoolExecutor(8) as pool:

            def ask(thread):
                pending = [(i, client.request(i % 2, 16, [torch.tensor([thread * 1000 + i])])) for i in range(100)]
                return all(
                    p.result().arrays[0].item() == (thread * 1000 + i) * 10 + i % 2 for i, p in reversed(pending)
                )

            assert all(pool.map(ask, range(8)))
            counters = client.counters()
            # What was about to be sent when a peer was first heard of may be sent twice; then its reply comes twice.
            again = counters["events"].get("resent", 0)
            assert counters["kinds"]["PULL"]["messages_out"] == 800 + again and again < 80
            assert counters["outstanding"] == 0 and counters["events"].keys() <= {"late", "resent"}


def test_waiting_requests_are_served_in_the_order_of_priority_then_arrival():
    held, release, order = threading.Event(), threading.Event(), []

    def handler(request: Request) -> Reply:
        if request.options.get("hold"):
            held.set()
            assert release.wait(DEADLINE)
        else:
            order.append(request.sequence)
        return Reply()

    with joined({Kind.PULL: handler}, threads=1) as (server, client):
        first = client.request(0, Kind.PULL, options={"hold": True})
        assert held.wait(DEADLINE)
        priorities = [5, 0, 7, -1, 5, 0]
        waiting = [client.request(0, Kind.PULL, priority=p, sequence=i) for i, p in enumerate(priorities)]
        client.request(0, Kind.PING).result()  # is answered at once; on another connection, so look at the queue too
        while server.counters()["queue"] < len(priorities):
            client.request(0, Kind.PING).result()
        release.set()
        for pending in (first, *waiting):
            pending.result()
    assert order == [3, 1, 5, 0, 4, 2]


def test_chunks_arrive_before_the_reply_ends():
    go_on = threading.Event()

    def handler(request: Request):
        yield Reply([torch.tensor([0])])
        assert go_on.wait(DEADLINE)
        yield Reply([torch.tensor([1])])
        yield Reply([torch.tensor([2])], last=bool(request.options))

    with joined({Kind.PULL: handler}) as (_, client):
        for options in ({}, {"mark": "last"}):
            pending = client.request(0, Kind.PULL, options=options)
            chunks = pending.chunks()
            assert next(chunks).arrays[0].item() == 0
            assert not pending.done()
            go_on.set()
            assert [chunk.arrays[0].item() for chunk in chunks] == [1, 2]
            assert pending.done() and list(pending.chunks()) == []
            go_on.clear()


def test_a_reply_larger_than_the_window_arrives_whole():
    blocks = [torch.full((8 << 20,), number, dtype=torch.uint8) for number in range(12)]
    with joined({Kind.PULL: lambda request: (Reply([block]) for block in blocks)}) as (_, client):
        chunks = list(client.request(0, Kind.PULL).chunks())
    assert [int(chunk.arrays[0][-1]) for chunk in chunks] == list(range(12))
    assert all(torch.equal(chunk.arrays[0], block) for chunk, block in zip(chunks, blocks, strict=True))


def test_no_chunk_and_many_chunks_are_no_single_result():
    with joined({16: lambda _: iter(()), 17: lambda _: iter([Reply(), Reply()]), 21: lambda _: iter([Reply()])}) as (
        _,
        c,
    ):
        assert list(c.request(0, 16).chunks()) == []
        for kind in (16, 17):
            with pytest.raises(ValueError, match=r"chunks\(\)"):
                c.request(0, kind).result()
        assert c.request(0, 21).result().arrays == []


def test_a_future_answers_later_and_leaves_the_worker_free():
    futures: list[Future] = []

    def later(request: Request) -> Future:
        futures.append(Future())
        return futures[-1]

    with joined({Kind.STEP: later, Kind.PULL: echo}, threads=1) as (_, client):
        pending = [client.request(0, Kind.STEP) for _ in range(2)]
        while len(futures) < 2:
            client.request(0, Kind.PULL, [torch.arange(3)]).result()  # the only worker is not held up
        assert not pending[0].done()
        futures[0].set_result(Reply([torch.tensor([4])]))
        futures[1].set_exception(KeyError("row"))
        assert pending[0].result().arrays[0].item() == 4
        with pytest.raises(RemoteError, match="KeyError"):
            pending[1].result()


def test_what_a_handler_raises_is_raised_again_and_the_server_lives_on():
    def handler(request: Request) -> Reply:
        raise {"value": ValueError("no such table"), "key": KeyError("x")}[request.options["what"]]

    def breaks(request: Request):
        yield Reply([torch.tensor([1])])
        raise OSError("disk full")

    with joined({16: handler, 17: breaks, 21: lambda _: "text", 22: echo}) as (server, client):
        with pytest.raises(ValueError, match="machine 0 raised ValueError: no such table") as raised:
            client.request(0, 16, options={"what": "value"}).result()
        assert isinstance(raised.value, RemoteError) and raised.value.remote_text == "no such table"
        with pytest.raises(RemoteError, match="KeyError") as raised:
            client.request(0, 16, options={"what": "key"}).result()
        assert not isinstance(raised.value, ValueError) and raised.value.peer == 0
        chunks = client.request(0, 17).chunks()
        assert next(chunks).arrays[0].item() == 1
        with pytest.raises(RemoteError, match="disk full"):
            next(chunks)
        with pytest.raises(RemoteError, match="str, not a Reply"):
            client.request(0, 21).result()
        with pytest.raises(ValueError, match="kind 99 is not served here; PULL, PUSH, STEP, DESCRIBE are"):
            client.request(0, 99).result()
        assert client.request(0, 22, [torch.ones(2)]).result().arrays[0].tolist() == [1, 1]
        events = server.counters()["events"]
        assert events == {"handler raised": 4, "unknown kind": 1}


def test_a_result_can_be_asked_for_again_and_by_several_threads():
    with joined({16: echo}) as (_, client):
        pending = client.request(0, 16, [torch.tensor([8])])
        with ThreadPoolExecutor(4) as pool:
            assert [m.arrays[0].item() for m in pool.map(lambda _: pending.result(), range(4))] == [8] * 4


def test_a_short_wait_leaves_the_request_outstanding():
    release = threading.Event()
    with joined({16: lambda _: (release.wait(DEADLINE), Reply())[1]}) as (_, client):
        pending = client.request(0, 16)
        with pytest.raises(TimeoutError, match="still outstanding") as raised:
            pending.result(timeout=0.01)
        assert not isinstance(raised.value, DeadlineExceeded)
        release.set()
        assert pending.result().arrays == []


def test_handlers_run_with_their_own_number_of_native_threads():
    before = torch.get_num_threads()
    with joined({16: lambda _: Reply(options={"threads": torch.get_num_threads()})}, native_threads=1) as (_, client):
        assert client.request(0, 16).result().options == {"threads": 1}
        assert torch.get_num_threads() == before


def test_counters_tell_messages_bytes_and_service_time():
    with joined({16: echo}, client=PATIENT) as (server, client):
        array = torch.zeros(1000, dtype=torch.uint8)
        for _ in range(3):
            client.request(0, 16, [array]).result()
        there, here = server.counters(), client.counters()
        ours, theirs = here["kinds"]["PULL"], there["kinds"]["PULL"]
        assert ours["messages_out"] == ours["messages_in"] == 3
        assert 3000 < ours["bytes_out"] < 4000
        assert theirs["bytes_in"] == ours["bytes_out"] and theirs["bytes_out"] == ours["bytes_in"]
        for name, count in here["peers"][0].items():  # what shows that a client lives is counted as well
            assert count == sum(kind[name] for kind in here["kinds"].values())
        assert there["queue"] == there["unanswered"] == 0 and there["times"]["PULL"]["replies"] > 0


def test_time_in_the_queue_and_time_in_work_are_told_apart_and_counted_per_peer_and_kind():
    held, release = threading.Event(), threading.Event()

    def hold(_: Request) -> Reply:
        held.set()
        assert release.wait(DEADLINE)
        return Reply()

    with joined({Kind.PULL: hold, Kind.SAMPLE: echo}, client=PATIENT, threads=1) as (server, client):
        first = client.request(0, Kind.PULL)
        assert held.wait(DEADLINE)
        second = client.request(0, Kind.SAMPLE)
        until(lambda: server.counters()["queue"] == 1)
        seen = time.monotonic()
        until(lambda: time.monotonic() > seen + 0.02)
        passed = int((time.monotonic() - seen) * 1e6)
        release.set()
        worked, waited = first.result(), second.result()
        assert worked.served_us >= passed and waited.queued_us >= passed
        assert worked.queued_us + worked.served_us < DEADLINE * 1e6
        until(lambda: len(client.counters()["times"].get(0, {})) == 2)
        times, there = client.counters()["times"][0], server.counters()["times"]
        for name, reply in (("PULL", worked), ("SAMPLE", waited)):
            told = {"replies": 1, "queued_us": reply.queued_us, "served_us": reply.served_us}
            assert times[name].items() >= told.items() and there[name] == told
            assert times[name]["waited_us"] >= reply.queued_us + reply.served_us - 2, "as this end measures it"


def test_bad_arguments_are_told_at_once():
    with joined({16: echo}) as (_, client):
        with pytest.raises(ValueError, match=r"no peer 4; this client knows \[0\]"):
            client.request(4, 16)
        with pytest.raises(ValueError, match="timeout is 0"):
            client.request(0, 16, timeout=0)
        with pytest.raises(ValueError, match="complex"):
            client.request(0, 16, [torch.zeros(1, dtype=torch.complex64)])
    with pytest.raises(ValueError, match="PING is for the server itself"):
        Server({Kind.PING: echo})
    with pytest.raises(ValueError, match=r"cannot serve at 'tcp://127.0.0.1:http'"):
        Server({16: echo}, bind=["tcp://127.0.0.1:http"]).start()
    with pytest.raises(ValueError, match="lost_after"):
        Client({}, sender=0, incarnation=0, lost_after=1, ping_interval=2)


def test_an_endpoint_that_is_none_fails_the_request_that_needs_it():
    with (
        Client({0: "tcp://nowhere"}, sender=0, incarnation=0) as client,
        pytest.raises(CommError, match="tcp://nowhere"),
    ):
        client.request(0, 16).result()


def test_closing_the_client_fails_what_is_outstanding_and_what_comes_after():
    release = threading.Event()
    with joined({16: lambda _: (release.wait(DEADLINE), Reply())[1]}) as (_, client):
        pending = client.request(0, 16)
        client.close()
        with pytest.raises(Closed):
            pending.result()
        with pytest.raises(Closed):
            client.request(0, 16).result()
        client.close()
        release.set()


def test_closing_the_server_tells_those_who_wait_and_ends_every_thread():
    release, held = threading.Event(), threading.Event()

    def hold(_: Request) -> Reply:
        held.set()
        assert release.wait(DEADLINE)
        return Reply(options={"served": True})

    before = threading.active_count()
    with joined({16: hold, 21: lambda _: Future()}, threads=1) as (server, client):
        never = client.request(0, 21)
        running = client.request(0, 16)
        assert held.wait(DEADLINE)
        waiting = client.request(0, 16)
        while server.counters()["queue"] < 1:
            client.request(0, Kind.PING).result()
        closing = threading.Thread(target=server.close)
        closing.start()
        release.set()
        closing.join(DEADLINE)
        assert running.result().options == {"served": True}
        for pending in (never, waiting):
            with pytest.raises(ShardLost, match=r"machine 0's shard was closed while .* waited"):
                pending.result()
        server.close()
    assert threading.active_count() <= before


def test_a_forked_child_is_told_instead_of_hanging():
    with joined({16: echo}) as (_, client):
        pending = client.request(0, 16)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            told = []
            for call in (lambda: client.request(0, 16), pending.result):
                try:
                    call()
                except CommError as error:
                    told.append("fork" in str(error))
            client.close()
            os.write(write, bytes(told))
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(read, 10) == bytes([True, True])
        os.close(read)
        os.close(write)
        assert pending.result().arrays == []
