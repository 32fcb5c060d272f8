"""Who may speak, from where, and what happens to those who speak nonsense."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import zmq

from gnnsys.comm import Client, DeadlineExceeded, Keys, Kind, Limits, Reply, Request, Server, arrays, wire
from gnnsys.comm.arrays import FRAME_BYTES
from tests.comm.endpoints import DEADLINE, joined, until


def echo(request: Request) -> Reply:
    return Reply(request.arrays)


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.fixture
def stranger():
    """Connects bare sockets that send whatever they like."""
    context = zmq.Context()

    def connect(endpoint: str, keys: Keys | None = None, server_key: str = "", queue: int = 1000) -> zmq.Socket:
        dealer = context.socket(zmq.DEALER)
        dealer.rcvhwm = queue
        dealer.linger = 0
        dealer.rcvtimeo = int(1000 * DEADLINE)
        if keys is not None:
            dealer.curve_publickey, dealer.curve_secretkey = keys.public.encode(), keys.secret.encode()
            dealer.curve_serverkey = server_key.encode()
        dealer.connect(endpoint)
        return dealer

    yield connect
    context.destroy(linger=0)


@pytest.mark.parametrize("encrypts", [True, "curve", False])
def test_the_right_key_is_admitted_and_large_replies_pass(encrypts):
    keys = Keys.generate(encrypts=encrypts)
    with joined({16: echo}, keys=keys) as (server, client):
        array = torch.rand(300_000)
        assert torch.equal(client.request(0, 16, [array]).result().arrays[0], array)
        assert server.counters()["refused_keys"] == 0


@pytest.mark.parametrize("encrypts", [True, "curve", False])
def test_a_wrong_key_or_none_never_gets_a_reply(encrypts):
    keys, other = Keys.generate(encrypts=encrypts), Keys.generate(encrypts=encrypts)
    served = []
    with Server({16: lambda request: (served.append(1), Reply())[1]}, keys=keys) as server:
        # The second knows the server's public key, which is no secret, but not the secret key that belongs to it.
        half, misread = Keys(keys.public, other.secret, encrypts), Keys(keys.public, keys.secret, not encrypts)
        for wrong in (other, half, misread, None):
            client = Client({0: server.endpoints[0]}, sender=0, incarnation=0, keys=wrong)
            with client, pytest.raises(DeadlineExceeded, match="never heard of"):
                client.request(0, 16, timeout=0.3).result()
        assert not served
        with Client({0: server.endpoints[0]}, sender=0, incarnation=0, keys=keys, timeout=DEADLINE) as client:
            client.request(0, 16).result()
        assert served == [1]


def test_a_key_pair_of_another_job_is_refused_by_the_gate(stranger):
    keys, other = Keys.generate(), Keys.generate()
    with Server({16: echo}, keys=keys) as server:
        dealer = stranger(server.endpoints[0], keys=other, server_key=keys.public)
        dealer.rcvtimeo = 300
        dealer.send_multipart(wire.encode(wire.make_header(16, 1, timeout_us=10**6), (), None, Limits()))
        with pytest.raises(zmq.Again):
            dealer.recv_multipart()
        until(lambda: server.counters()["refused_keys"] >= 1)
        assert server.counters()["kinds"] == {}


@pytest.mark.parametrize("encrypts", [True, "curve", False])
def test_keys_travel_as_json_and_do_not_show_their_secret(encrypts):
    keys = Keys.generate(encrypts=encrypts)
    assert Keys.from_json(keys.to_json()) == keys
    assert keys.secret not in repr(keys)
    for bad in ({}, {"public": keys.public}, {"public": "x", "secret": keys.secret}, [keys.public, keys.secret]):
        with pytest.raises(ValueError, match=r"key"):
            Keys.from_json(bad)


@pytest.mark.parametrize("endpoint", ["tcp://*:*", "tcp://0.0.0.0:*", "tcp://[::]:*", "tcp://eth0:*"])
def test_an_address_that_others_can_reach_needs_keys(endpoint):
    with pytest.raises(ValueError, match=r"Keys.generate\(\)"):
        Server({16: echo}, bind=[endpoint])


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("keys", [None, Keys.generate()])
def test_ipv6_and_ipv4_are_served_side_by_side(keys):
    with Server({16: echo}, bind=["tcp://127.0.0.1:*", "tcp://[::1]:*"], keys=keys) as server:
        assert server.endpoints[1].startswith("tcp://[::1]:")
        peers = dict(enumerate([*server.endpoints, server.endpoints[0].replace("127.0.0.1", "localhost")]))
        with Client(peers, sender=0, incarnation=0, keys=keys, timeout=DEADLINE) as client:
            for peer in peers:
                assert client.request(peer, 16, [torch.tensor([peer])]).result().arrays[0].item() == peer


def test_garbage_is_counted_and_the_server_lives_on(stranger):
    arrays = [torch.arange(5), torch.arange(10_000)]
    generator = random.Random(0)
    with joined({16: echo}) as (server, client):
        dealer = stranger(server.endpoints[0])
        dealer.send_multipart([b""])
        dealer.send_multipart([b"GET / HTTP/1.1\r\n" * 10, b"", b""])
        dealer.send_multipart([b"x"] * 5000)
        for number in range(300):
            frames = wire.encode(wire.make_header(16, number, timeout_us=10**7), arrays, {"a": 1}, Limits())
            frames = [bytearray(frame) for frame in frames]
            for _ in range(generator.randint(1, 6)):
                frames[0][generator.randrange(len(frames[0]))] = generator.randrange(256)
            if generator.random() < 0.2:
                frames = frames[:1]
            if generator.random() < 0.2:
                frames[-1] = frames[-1][: generator.randint(0, len(frames[-1]))]
            dealer.send_multipart([bytes(frame) for frame in frames])
        dealer.send_multipart(wire.encode(wire.make_header(16, 2**40, timeout_us=10**7), (), None, Limits()))
        told = 0  # those whose message could be read far enough
        while (header := wire.read_header(dealer.recv_multipart()[0], Limits())).request_id != 2**40:
            told += header.status == wire.MALFORMED
        assert header.status == wire.OK and told > 10
        assert client.request(0, 16, [torch.arange(3)]).result().arrays[0].tolist() == [0, 1, 2]
        events = server.counters()["events"]
        assert sum(number for event, number in events.items() if event.startswith("malformed")) > 50


def test_a_message_of_another_version_is_answered_with_an_error(stranger):
    frames = wire.encode(wire.make_header(16, 77, timeout_us=10**6), (), None, Limits())
    with Server({16: echo}) as server:
        dealer = stranger(server.endpoints[0])
        dealer.send_multipart([frames[0][:4] + b"\x09\x00" + frames[0][6:]])
        (front,) = dealer.recv_multipart()
        header = wire.read_header(front, Limits())
        assert (header.status, header.request_id) == (wire.OTHER_VERSION, 77)
        assert b"version 9" in front


def test_an_absurd_shape_is_answered_with_an_error(stranger):
    frames = wire.encode(
        wire.make_header(16, 78, timeout_us=10**7), [torch.zeros(3, dtype=torch.int64)], None, Limits()
    )
    with Server({16: echo}) as server:
        dealer = stranger(server.endpoints[0])
        dealer.send_multipart([frames[0].replace((3).to_bytes(8, "little"), (2**61).to_bytes(8, "little"))])
        (front,) = dealer.recv_multipart()
        assert wire.read_header(front, Limits()).status == wire.MALFORMED
        assert server.counters()["events"] == {"malformed: shape": 1}


def test_a_frame_above_the_limit_ends_the_connection_before_it_is_read(stranger):
    limits = Limits(max_array_bytes=9 << 20, max_frames=3)
    with joined({16: echo}, limits=limits, client={"limits": limits}) as (server, client):
        for arrays in ([torch.zeros(3 << 20)], [torch.zeros(2 << 20)] * 2):
            with pytest.raises(ValueError, match="send it in pieces"):
                client.request(0, 16, arrays)
        dealer = stranger(server.endpoints[0])
        dealer.rcvtimeo = 300
        frames = wire.encode(wire.make_header(16, 1, timeout_us=10**7), [torch.zeros(1 << 20)], None, Limits())
        dealer.send_multipart([frames[0], bytes(FRAME_BYTES + 1024)])
        with pytest.raises(zmq.Again):
            dealer.recv_multipart()
        assert client.request(0, 16, [torch.zeros(2 << 20)]).result().arrays[0].numel() == 2 << 20
        assert server.counters()["kinds"]["PULL"]["messages_in"] == 1


@pytest.mark.parametrize("encrypts", [True, "curve", False])
def test_who_has_no_key_makes_a_server_take_no_memory(encrypts):
    """Eight say in the handshake that three gigabytes are coming, and begin to send them."""
    mechanism = (b"CURVE" if encrypts else b"PLAIN").ljust(20, b"\0")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism + bytes(32)
    word = b"\x05HELLO" + bytes(64)
    piece = bytes(1 << 20)

    def speak(where, size: int) -> int:
        """How many bytes of a frame of `size` were taken."""
        with contextlib.suppress(OSError), socket.create_connection(where, timeout=DEADLINE) as connection:
            connection.sendall(greeting + b"\x06" + size.to_bytes(8, "big") + word)
            for sent in range(0, min(size, 64 << 20), len(piece)):
                try:
                    connection.sendall(piece)
                except OSError:
                    return sent
            held.append(connection.dup())
            return size
        return 0

    held: list[socket.socket] = []
    with joined({16: echo}, keys=Keys.generate(encrypts=encrypts)) as (server, client):
        client.request(0, 16, [torch.zeros(1 << 20)]).result()
        host, _, port = server.endpoints[0].removeprefix("tcp://").rpartition(":")
        before = resident_bytes()
        with ThreadPoolExecutor(8) as pool:
            taken = list(pool.map(lambda _: speak((host, int(port)), 3 << 30), range(8)))
        grown = resident_bytes() - before
        assert client.request(0, 16, [torch.arange(3)]).result().arrays[0].tolist() == [0, 1, 2]
        for connection in held:
            connection.close()
        assert not held and max(taken) <= 16 << 20, f"frames of 3 GiB were taken, up to {max(taken)} bytes of them"
        assert grown < 64 << 20, f"{grown >> 20} MB were taken for strangers"


def resident_bytes() -> int:
    """Memory of this process, in which the server is."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_reply_that_is_nonsense_is_dropped_and_counted():
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    router.rcvtimeo = int(1000 * DEADLINE)
    router.bind("tcp://127.0.0.1:*")
    try:
        with Client({0: router.last_endpoint.decode()}, sender=0, incarnation=0, timeout=DEADLINE) as client:
            pending = client.request(0, 16)
            name, front = router.recv_multipart()
            while (header := wire.read_header(front, Limits())).kind != 16:  # it says that it lives, too
                name, front = router.recv_multipart()
            for nonsense in ([b"nonsense"], [front], [b""]):
                router.send_multipart([name, *nonsense])
            stray = wire.encode(wire.reply_header(header._replace(request_id=999)), (), None, Limits())
            router.send_multipart([name, *stray])
            router.send_multipart([name, *wire.encode(wire.reply_header(header), [torch.tensor([5])], None, Limits())])
            assert pending.result().arrays[0].item() == 5
            assert client.counters()["events"] == {"malformed: truncated": 2, "malformed: flags": 1, "late": 1}
    finally:
        context.destroy(linger=0)


def test_a_full_queue_refuses_and_recovers():
    release, held = threading.Event(), threading.Event()

    def hold(_: Request) -> Reply:
        held.set()
        assert release.wait(DEADLINE)
        return Reply()

    with joined({16: hold}, threads=1, limits=Limits(max_queue=3)) as (_, client):
        running = client.request(0, 16)
        assert held.wait(DEADLINE)
        waiting = [client.request(0, 16) for _ in range(3)]
        with pytest.raises(DeadlineExceeded, match="3 requests are unanswered already"):
            client.request(0, 16, timeout=3.0).result()
        release.set()
        for pending in (running, *waiting):
            pending.result()
        assert client.request(0, Kind.PULL).result().arrays == []


@pytest.mark.parametrize("text", ["\U0001f600" * 70_000, "\0" * 70_000])
def test_an_error_of_any_length_is_told_and_ends_no_worker(text):
    def fail(_: Request) -> Reply:
        raise ValueError(text)

    with joined({16: fail, 17: echo}, threads=1) as (server, client):
        for _ in range(2):
            with pytest.raises(ValueError, match=text[:100]):
                client.request(0, 16).result()
        assert client.request(0, 17, [torch.tensor([5])]).result().arrays[0].item() == 5
        assert server.counters()["worker_errors"] == 0


def test_an_error_that_cannot_even_be_told_ends_no_worker():
    class Speechless(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    def fail(_: Request) -> Reply:
        raise Speechless

    with joined({16: fail, 17: echo}, threads=1) as (server, client):
        lost = [client.request(0, 16, timeout=4.0) for _ in range(2)]
        assert client.request(0, 17, [torch.tensor([5])]).result().arrays[0].item() == 5
        until(lambda: server.counters()["worker_errors"] == 2)  # the second kind has a connection of its own
        for pending in lost:
            with pytest.raises(DeadlineExceeded):
                pending.result()


def test_readers_that_do_not_read_hold_up_nobody_and_are_given_up(stranger):
    rows, closed = torch.ones(1 << 20), threading.Semaphore(0)

    def stream(_: Request):
        try:
            for _ in range(100):
                yield Reply([rows])
        finally:
            closed.release()

    with joined({16: stream, 17: echo}, threads=2) as (server, client):
        dealers = [stranger(server.endpoints[0], queue=1) for _ in range(3)]
        for dealer in dealers:
            dealer.send_multipart(wire.encode(wire.make_header(16, 1, timeout_us=10 * 10**6), (), None, Limits()))
        until(lambda: server.counters()["kinds"].get("PULL", {}).get("messages_in", 0) == 3)
        for number in range(20):
            assert client.request(0, 17, [torch.tensor([number])], timeout=8).result().arrays[0].item() == number
        counters = server.counters()
        assert counters["unanswered"] + counters["events"].get("expired", 0) >= 3  # both for a moment
        for _ in range(3):
            assert closed.acquire(timeout=DEADLINE), "the iterator of a reply that nobody takes was kept"
        until(lambda: server.counters()["events"].get("expired") == 3)


def test_a_reader_that_is_slow_gets_everything_in_order():
    def stream(_: Request):
        for number in range(40):
            yield Reply([torch.full((1 << 18,), number)])  # 80 MB in all

    with joined({16: stream, 17: echo}, threads=1) as (_, client):
        chunks = client.request(0, 16).chunks()
        numbers = []
        for chunk in chunks:
            numbers.append(int(chunk.arrays[0][-1]))
            client.request(0, 17).result()  # the only worker is free in between
        assert numbers == list(range(40))


def test_requests_that_wait_for_a_future_count_as_unanswered():
    futures = [Future() for _ in range(2)]
    with joined({21: lambda request: futures[request.sequence]}, limits=Limits(max_queue=2)) as (_, client):
        waiting = [client.request(0, 21, sequence=number) for number in range(2)]
        refused = client.request(0, 21)
        until(lambda: refused.refusal)
        assert "2 requests are unanswered already" in refused.refusal
        for future, pending in zip(futures, waiting, strict=True):
            future.set_result(Reply())
            pending.result()
        refused.result()


def test_a_server_keeps_no_request_longer_than_its_own_limit():
    left = []
    with joined(
        {16: lambda request: (left.append(request.remaining()), Reply())[1]}, limits=Limits(max_seconds=100)
    ) as (
        _,
        client,
    ):
        client.request(0, 16, timeout=10**9).result()
        client.request(0, 16, timeout=60).result()
    assert 60 < left[0] <= 100 and 0 < left[1] <= 60


@pytest.mark.parametrize("fields", [{"flags": 2}, {"flags": 128}, {"status": 1}, {"chunk": 1}, {"num_chunks": 1}])
def test_a_request_with_fields_of_a_reply_is_answered_with_an_error(stranger, fields):
    header = wire.make_header(16, 79, timeout_us=10**7)._replace(**fields)
    with Server({16: echo}) as server:
        dealer = stranger(server.endpoints[0])
        dealer.send_multipart(wire.encode(header, (), None, Limits()))
        (front,) = dealer.recv_multipart()
        assert wire.read_header(front, Limits()).status == wire.MALFORMED
        assert server.counters()["events"] == {"malformed: flags": 1}


def test_a_ping_about_more_requests_than_can_wait_is_refused(stranger):
    header = wire.make_header(Kind.PING, 80, timeout_us=10**7)
    with Server({16: echo}, limits=Limits(max_queue=100)) as server:
        dealer = stranger(server.endpoints[0])
        for count, status in ((101, wire.MALFORMED), (100, wire.OK)):
            dealer.send_multipart(wire.encode(header, [torch.zeros(count, dtype=torch.int64)], None, Limits()))
            assert wire.read_header(dealer.recv_multipart()[0], Limits()).status == status


def test_of_a_ping_that_is_refused_nothing_is_copied(stranger, monkeypatch):
    """The thread that reads it reads everybody's messages."""
    joins: list[int] = []

    def join(memories, size):
        joins.append(size)
        return arrays.join(memories, size)

    monkeypatch.setattr(wire, "join", join)
    header = wire.make_header(Kind.PING, 81, timeout_us=10**7)
    large = torch.zeros(2 * FRAME_BYTES, dtype=torch.uint8)
    with Server({16: echo}) as server:
        dealer = stranger(server.endpoints[0])
        for carried in ([large], [large.view(torch.int64)], [large, large], [torch.zeros(2, 2, dtype=torch.int64)]):
            dealer.send_multipart(wire.encode(header, carried, None, Limits()))
            assert wire.read_header(dealer.recv_multipart()[0], Limits()).status == wire.MALFORMED
        assert not joins
        dealer.send_multipart(wire.encode(wire.make_header(16, 82, timeout_us=10**7), [large], None, Limits()))
        assert wire.read_header(dealer.recv_multipart()[0], Limits()).status == wire.OK
        assert joins == [large.nbytes], "large requests are joined, and this test sees it"
        assert server.counters()["events"] == {"malformed: ping": 4}


def num_connections() -> int:
    """Sockets of this process, both ends of those that it has with itself."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return found


@pytest.mark.parametrize("encrypts", [True, "curve", False])
def test_thousands_who_have_no_key_leave_nothing_behind(stranger, encrypts):
    """Neither descriptors nor answers: some speak another protocol, some hang up at once, some have another key."""
    keys, other = Keys.generate(encrypts=encrypts), Keys.generate()
    with joined({16: echo}, keys=keys) as (server, client):
        for kind in (16, Kind.PING):  # each has a connection
            client.request(0, kind).result()
        host, _, port = server.endpoints[0].removeprefix("tcp://").rpartition(":")
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + (b"CURVE" if encrypts else b"PLAIN").ljust(20, b"\0")
        lines = (b"", b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 200, greeting + bytes(32) + b"\x04\xff\x00\x00")
        before = num_connections()
        for number in range(2000):
            with socket.create_connection((host, int(port)), timeout=DEADLINE) as connection:
                connection.sendall(lines[number % len(lines)])
        dealers = [stranger(server.endpoints[0], keys=other, server_key=keys.public) for _ in range(20)]
        for dealer in dealers:
            with contextlib.suppress(zmq.Again):  # it was refused already
                frames = wire.encode(wire.make_header(16, 1, timeout_us=10**6), (), None, Limits())
                dealer.send_multipart(frames, zmq.NOBLOCK)
        assert torch.equal(client.request(0, 16, [torch.arange(3)]).result().arrays[0], torch.arange(3))
        for dealer in dealers:
            assert not dealer.poll(5)
            dealer.close()
        deadline = time.monotonic() + DEADLINE
        while num_connections() > before:  # libzmq lets go of them in its own thread
            assert time.monotonic() < deadline, "connections that were refused are still open"
            client.request(0, 16).result()
        assert server.counters()["kinds"]["PULL"]["messages_in"] == server.counters()["kinds"]["PULL"]["messages_out"]
