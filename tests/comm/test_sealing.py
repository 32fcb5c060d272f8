"""Sealed messages: what both ends derive, and a reviewer's list of what a stranger on the wire might try."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
import zmq

from gnnsys.comm import Client, Keys, Kind, Limits, Reply, Request, Server, sealing, wire
from gnnsys.comm.errors import WireError
from gnnsys.comm.keys import protect_bulk_client
from gnnsys.comm.sealed_sessions import SealedSessions
from gnnsys.comm.sealing import (
    AES,
    CHACHA,
    PIECE_BYTES,
    TO_CLIENT,
    TO_SERVER,
    Agreement,
    ReplayWindow,
    SealedChannel,
    derive_key,
)
from gnnsys.comm.sealing_threads import SealingThreads, default_sealing_threads
from tests.comm.endpoints import DEADLINE, Proxy, joined, until

CIPHERS = (AES, CHACHA)


def echo(request: Request) -> Reply:
    return Reply(request.arrays)


def agreed(cipher: str = AES) -> Agreement:
    return Agreement.make(bytes(16), b"a connection", cipher)


def both_ends(cipher: str = AES, threads: SealingThreads | None = None) -> tuple[SealedChannel, SealedChannel]:
    keys, agreement = Keys.generate(), agreed(cipher)
    client = SealedChannel(keys, agreement, is_server=False, threads=threads)
    return client, SealedChannel(keys, agreement, is_server=True, threads=threads)


def received(frames: list[bytes | np.ndarray]) -> list[zmq.Frame]:
    return [zmq.Frame(bytes(frame)) for frame in frames]


def opened(channel: SealedChannel, frames: list[zmq.Frame]) -> list[bytes]:
    return [bytes(frame.buffer) for frame in channel.open(frames)]


def some_frames() -> list[bytes | np.ndarray]:
    return [b"the front", np.arange(40_000, dtype=np.int64).reshape(200, 200), b"more"]


def refuses(channel: SealedChannel, frames: list[zmq.Frame], reason: str = "seal") -> None:
    with pytest.raises(WireError) as caught:
        opened(channel, frames)
    assert caught.value.reason == reason


@pytest.mark.parametrize("cipher", CIPHERS)
def test_what_one_end_seals_the_other_opens(cipher):
    client, server = both_ends(cipher)
    for sender, receiver in ((client, server), (server, client)):
        for _ in range(3):
            sealed = sender.seal(some_frames())
            assert [bytes(frame) for frame in some_frames()] == opened(receiver, received(sealed))
            text = b"".join(bytes(frame) for frame in sealed)
            assert b"the front" not in text and np.arange(8, dtype=np.int64).tobytes() not in text


def test_keys_differ_by_direction_connection_session_life_salt_cipher_and_job():
    keys, agreement = Keys.generate(), agreed()
    others = [
        (keys, agreement, TO_CLIENT),
        (Keys.generate(), agreement, TO_SERVER),
        (keys, replace(agreement, name=b"a connectioo"), TO_SERVER),
        (keys, replace(agreement, session=b"8 bytes."), TO_SERVER),
        (keys, replace(agreement, life=b"another start..."), TO_SERVER),
        (keys, replace(agreement, salt=bytes(32)), TO_SERVER),
        (keys, replace(agreement, cipher=CHACHA), TO_SERVER),
    ]
    derived = {derive_key(*each) for each in [(keys, agreement, TO_SERVER), *others]}
    assert len(derived) == 1 + len(others) and all(len(key) == 32 for key in derived)
    assert derive_key(keys, replace(agreement, token=bytes(32)), TO_SERVER) in derived, "the token is no secret"


def test_an_agreement_travels_as_json_and_does_not_show_its_secrets():
    agreement = agreed()
    assert Agreement.from_json(agreement.to_json()) == agreement
    assert agreement.salt.hex() not in repr(agreement) and repr(agreement.salt) not in repr(agreement)
    for bad in ({}, agreement.to_json() | {"salt": "00"}, agreement.to_json() | {"cipher": "none"}, {"session": "x"}):
        with pytest.raises(ValueError):
            Agreement.from_json(bad)


@pytest.mark.parametrize("num_threads", [0, 1, 3])
@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 17])
def test_frames_of_every_size_are_sealed_in_pieces_by_several_threads(size, num_threads):
    threads = SealingThreads(num_threads)
    client, server = both_ends(threads=threads)
    rows = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    for frames in ([rows.tobytes()], [b"front", rows], [b"front", rows.tobytes()]):
        sealed = received(client.seal(frames))
        assert [len(each) for each in server.open(sealed)] == [len(each) for each in frames]
        assert opened(afresh(server), sealed)[-1] == rows.tobytes()
    threads.close()
    assert opened(server, received(client.seal([b"", rows])))[-1] == rows.tobytes(), "the caller does it alone"


def test_a_frame_that_lost_a_piece_or_has_them_in_another_order_does_not_open():
    client, server = both_ends()
    front, rows = (frame.bytes for frame in received(client.seal([b"front", np.ones(3 * PIECE_BYTES, np.uint8)])))
    step = PIECE_BYTES + 16
    pieces = [rows[begin : begin + step] for begin in range(0, len(rows), step)]
    for chosen in ((0, 1), (1, 2), (0, 2), (1, 0, 2), (0, 0, 2), (0, 1, 2, 2)):
        refuses(afresh(server), received([front, b"".join(pieces[number] for number in chosen)]))
    assert opened(afresh(server), received([front, b"".join(pieces)]))[1] == b"\1" * 3 * PIECE_BYTES


# The reviewer's list: one line, one test.


@pytest.mark.parametrize("cipher", CIPHERS)
def test_no_bit_of_a_sealed_message_can_be_changed(cipher):
    chance = random.Random(0)
    client, server = both_ends(cipher)
    sealed = [bytes(frame) for frame in client.seal([b"front", b"a frame of some bytes"])]
    for place, frame in enumerate(sealed):
        for bit in range(8 * len(frame)):
            changed = bytearray(frame)
            changed[bit // 8] ^= 1 << bit % 8
            fresh = afresh(server)
            refuses(fresh, received([*sealed[:place], bytes(changed), *sealed[place + 1 :]]))
    assert opened(afresh(server), received(sealed)) == [b"front", b"a frame of some bytes"]
    refuses(server, received([chance.randbytes(200), chance.randbytes(60)]))


def afresh(channel: SealedChannel) -> SealedChannel:
    """The same end, as if nothing had come yet: a counter that is taken would hide that a message opens."""
    channel._window = ReplayWindow()
    return channel


def test_the_same_message_sent_twice_is_accepted_once():
    client, server = both_ends()
    first, second = received(client.seal([b"first"])), received(client.seal([b"second"]))
    assert opened(server, second) == [b"second"], "threads seal side by side, and may send in another order"
    assert opened(server, first) == [b"first"]
    for again in (first, second):
        refuses(server, again, "replay")


def test_of_many_threads_that_open_a_message_one_gets_it():
    client, server = both_ends()
    for _ in range(50):
        frames, got = received(client.seal([b"x" * 10_000])), []
        together = threading.Barrier(4)

        def take(frames=frames, got=got, together=together):
            together.wait(DEADLINE)
            with contextlib.suppress(WireError):
                got.append(opened(server, frames))

        threads = [threading.Thread(target=take) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE)
        assert got == [[b"x" * 10_000]]


def test_a_message_that_was_cut_or_lengthened_does_not_open():
    client, server = both_ends()
    frames = received(client.seal(some_frames()))
    for changed in (frames[:1], frames[:2], [*frames, frames[-1]], [*frames, zmq.Frame(b"")]):
        refuses(server, changed)
    for place in range(3):
        whole = frames[place].bytes
        for size in (0, 1, 15, 16, 43, 44, len(whole) - 1, len(whole) + 1):
            if size != len(whole):
                piece = zmq.Frame((whole + b"x")[:size])
                refuses(afresh(server), [*frames[:place], piece, *frames[place + 1 :]])


def test_frames_cannot_be_swapped_or_moved_between_messages():
    client, server = both_ends()
    same = [b"front", b"x" * 100, b"x" * 100]
    one, other = received(client.seal(same)), received(client.seal(same))
    refuses(server, [one[0], one[2], one[1]])
    refuses(afresh(server), [one[0], other[1], one[2]])
    refuses(afresh(server), [other[0], one[1], one[2]])
    assert opened(afresh(server), one) == same


def test_what_an_end_sent_does_not_open_there():
    client, server = both_ends()
    for end in (client, server):
        refuses(end, received(end.seal([b"reflected"])))


def test_no_nonce_is_used_twice_though_many_threads_seal():
    client, _ = both_ends()
    nonces: list[bytes] = []
    seal, seal_into = client._seal, client._seal_into
    client._seal = lambda nonce, *rest: (nonces.append(nonce), seal(nonce, *rest))[1]
    client._seal_into = lambda nonce, *rest: (nonces.append(nonce), seal_into(nonce, *rest))[1]
    threads = [threading.Thread(target=lambda: [client.seal(some_frames()) for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert len(nonces) == len(set(nonces)) == 4 * 200 * 3


def test_a_counter_that_cannot_be_written_is_not_begun_again():
    client, _ = both_ends()
    client._counters = iter([2**64 - 1, 2**64])
    client.seal([b"the last one"])
    with pytest.raises(struct.error):
        client.seal([b"one too many"])


def test_after_a_restart_of_either_end_keys_are_others():
    """Counters begin at one again, so a key that came again would use its nonces again."""
    keys, identity, question = Keys.generate(), b"g" * 14, {"lane": 0, "session": "", "cipher": AES}
    first, second = SealedSessions(keys), SealedSessions(keys)
    agreements = [Agreement.from_json(each.agree(identity, question)) for each in (first, first, second)]
    assert len({derive_key(keys, each, way) for each in agreements for way in (TO_SERVER, TO_CLIENT)}) == 6
    assert agreements[0].life == agreements[1].life != agreements[2].life
    recorded = received(SealedChannel(keys, agreements[0], is_server=False).seal([b"of before"]))
    for restarted in (first, second):  # the client, which agreed again; the server
        with pytest.raises(WireError, match="no session"):
            restarted.open(b"route", recorded)


@pytest.mark.parametrize("size", [1, 8, 100])
def test_the_window_accepts_each_counter_once_and_none_that_is_far_behind(size):
    chance, window, seen, highest = random.Random(size), ReplayWindow(size), set(), 0
    for _ in range(5000):
        counter = max(1, highest + chance.randint(-2 * size, size // 2 + 2 if chance.random() < 0.9 else 3 * size))
        expected = counter > highest or (counter not in seen and highest - counter < size)
        assert window.may_take(counter) == expected
        if expected:
            window.take(counter)
            seen.add(counter)
            highest = max(highest, counter)


# Servers and clients.


def test_two_cores_have_no_thread_that_only_seals():
    assert [default_sealing_threads(cores) for cores in (1, 2, 3, 4, 8, 16, 64)] == [0, 0, 0, 1, 2, 3, 3]


@pytest.mark.parametrize("cipher", CIPHERS)
def test_rows_travel_sealed_and_orders_by_curve(cipher, monkeypatch):
    monkeypatch.setattr("gnnsys.comm.sealed_sessions.best_cipher", lambda: cipher)
    array = torch.rand(3_000_000)  # three frames
    with joined({16: echo}, keys=Keys.generate()) as (server, client):
        assert torch.equal(client.request(0, 16, [array]).result().arrays[0], array)
        (lane,) = client._links[0].lanes
        assert lane.sealing.agreement.cipher == cipher
        assert server.counters()["events"] == client.counters()["events"] == {}
        assert server.counters()["refused_keys"] == 0


@contextmanager
def tapped(server: Server) -> Iterator[Proxy]:
    """All that is said at a server's bulk port passes here."""
    proxy = Proxy(f"tcp://127.0.0.1:{next(iter(server._bulk_ports.values()))}")
    port = int(proxy.endpoint.rpartition(":")[2])
    server._bulk_ports = dict.fromkeys(server._bulk_ports, port)
    try:
        yield proxy
    finally:
        proxy.close()


def test_what_is_pulled_is_not_to_be_read_on_the_wire(monkeypatch):
    said: list[bytes] = []

    def listen(self: Proxy, source: socket.socket) -> None:
        target, _ = self._pairs[source]
        if data := source.recv(1 << 16):
            said.append(data)
            target.sendall(data)
        else:
            for each in (source, target):
                self._pairs.pop(each, None)
                each.close()

    monkeypatch.setattr(Proxy, "_forward", listen)
    secret = torch.full((40_000,), 0x1122334455667788)
    text = secret[:2].numpy().tobytes()
    with Server({16: echo}, keys=Keys.generate()) as server, tapped(server):
        client = Client({0: server.endpoints[0]}, sender=0, incarnation=0, keys=server._keys, timeout=DEADLINE)
        with client:
            for array in (secret, secret[:100]):
                assert torch.equal(client.request(0, 16, [array]).result().arrays[0], array)
        wire_text = b"".join(said)
        assert len(wire_text) > 2 * secret.nbytes and b"PLAIN" in wire_text, "this test hears what is said"
        assert text not in wire_text and wire.MAGIC not in wire_text
        assert server._keys.secret.encode() not in wire_text


@pytest.fixture
def bulk_stranger():
    """Connects to a server's bulk port with whatever session and token it is given."""
    context = zmq.Context()

    def connect(server: Server, session: bytes, token: bytes) -> zmq.Socket:
        dealer = context.socket(zmq.DEALER)
        dealer.linger, dealer.rcvtimeo, dealer.sndtimeo = 0, 300, 300
        protect_bulk_client(dealer, session, token)
        dealer.connect(f"tcp://127.0.0.1:{next(iter(server._bulk_ports.values()))}")
        return dealer

    yield connect
    context.destroy(linger=0)


def request_frames(request_id: int = 1) -> list[wire.Buffer]:
    return wire.encode(wire.make_header(16, request_id, timeout_us=10**7), [torch.arange(3)], None, Limits())


def test_without_the_token_of_a_session_the_bulk_port_is_closed(bulk_stranger):
    with joined({16: echo}, keys=Keys.generate()) as (server, client):
        client.request(0, 16).result()
        agreement = client._links[0].lanes[0].sealing.agreement
        for session, token in ((bytes(8), agreement.token), (agreement.session, bytes(32))):
            refused = server.counters()["refused_keys"]
            dealer = bulk_stranger(server, session, token)
            with suppress(zmq.Again):  # refused already, and nobody is there to send to
                dealer.send_multipart([bytes(frame) for frame in request_frames()])
            until(lambda refused=refused: server.counters()["refused_keys"] > refused)
        assert server.counters()["events"] == {} and server.counters()["kinds"]["PULL"]["messages_in"] == 1


def test_who_replays_a_token_is_refused_and_takes_nobodys_place(bulk_stranger):
    """The token is what a stranger who reads the wire has."""
    with joined({16: echo}, keys=Keys.generate()) as (server, client):
        client.request(0, 16).result()
        agreement = client._links[0].lanes[0].sealing.agreement
        dealer = bulk_stranger(server, agreement.session, agreement.token)
        until(lambda: server.counters()["refused_keys"] == 1)
        assert client.request(0, 16, [torch.arange(3)]).result().arrays[0].tolist() == [0, 1, 2]
        with pytest.raises(zmq.Again):
            dealer.recv_multipart()
        assert server.counters()["events"] == {}


def test_messages_that_are_sent_again_on_their_own_connection_are_counted_and_not_answered():
    """What a stranger who writes into a connection has: all that was sent."""
    with joined({16: echo}, keys=Keys.generate()) as (server, client):
        client.request(0, 16).result()
        sent: list[list[bytes]] = []
        socket_ = client._links[0].lanes[0].socket
        seal = socket_.channel.seal

        def record(frames):
            sealed = seal(frames)
            sent.append([bytes(frame) for frame in sealed])
            return sealed

        socket_.channel.seal = record
        for size in (3, 100_000):
            client.request(0, 16, [torch.arange(size)]).result()
        assert len(sent) == 2
        for frames in list(sent):
            socket_.send(frames)
        socket_.send([bytes(frame) for frame in request_frames()])  # not sealed at all
        until(lambda: server.counters()["events"] == {"malformed: replay": 2, "malformed: seal": 1})
        assert client.request(0, 16, [torch.arange(5)]).result().arrays[0].tolist() == [0, 1, 2, 3, 4]
        assert server.counters()["kinds"]["PULL"]["messages_in"] == 4
        assert client.counters()["events"] == {}


def test_a_reply_that_was_changed_on_the_wire_is_an_error_and_the_next_one_is_read():
    with joined({16: echo}, keys=Keys.generate(), client={"resend_after": 0.2}) as (server, client):
        client.request(0, 16).result()
        (session,) = server._sessions._by_session.values()
        seal = SealedChannel.seal

        def spoil(frames):
            *others, last = seal(session.channel, frames)
            last = np.frombuffer(bytes(last), np.uint8).copy()
            last[-1] ^= 1
            return [*others, last if others else last.tobytes()]

        session.channel.seal = spoil
        pending = client.request(0, 16, [torch.arange(100_000)])
        with pytest.raises(WireError, match="does not open"):
            pending.result()
        late = client.request(0, 16, [torch.arange(3)], timeout=DEADLINE)  # its only frame is dropped
        until(lambda: client.counters()["events"].get("malformed: seal"))
        del session.channel.seal
        assert late.result().arrays[0].tolist() == [0, 1, 2]


def test_a_request_whose_rows_were_changed_on_the_wire_is_refused_and_counted():
    with joined({16: echo}, keys=Keys.generate()) as (server, client):
        client.request(0, 16).result()
        *others, last = client._links[0].lanes[0].socket.channel.seal(wire.encode(
            wire.make_header(16, 10**6, timeout_us=10**7), [torch.arange(100_000)], None, Limits()
        ))  # fmt: skip
        last[100] ^= 1
        client._links[0].lanes[0].socket.send([*others, last])
        until(lambda: server.counters()["events"] == {"malformed: seal": 1})
        assert client.request(0, 16, [torch.arange(3)]).result().arrays[0].tolist() == [0, 1, 2]


def test_a_server_that_begins_another_life_is_asked_again_how_to_seal():
    keys, port = Keys.generate(), 0
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    place = f"tcp://127.0.0.1:{port}"
    client = Client({0: place}, sender=0, incarnation=0, keys=keys, timeout=DEADLINE, lost_after=60, ping_interval=0.2)
    with client:
        sessions = []
        waiting = client.request(0, 16, [torch.arange(4)])  # before there is a server
        for life in range(3):
            with Server({16: echo}, bind=[place], keys=keys):
                assert waiting.result().arrays[0].tolist() == [0, 1, 2, 3]
                assert client.request(0, 16, [torch.arange(life)]).result().arrays[0].numel() == life
                sessions.append(client._links[0].lanes[0].sealing.agreement.session)
            waiting = client.request(0, 16, [torch.arange(4)])
        assert len(set(sessions)) == 3


def test_a_session_that_the_server_forgot_is_made_again():
    keys = Keys.generate()
    options = {"keys": keys, "timeout": DEADLINE, "ping_interval": 0.1, "resend_after": 0.2}
    with joined({16: echo}, keys=keys, client=options) as (server, client):
        server._sessions._max_sessions = 1
        client.request(0, 16).result()
        with Client({0: server.endpoints[0]}, sender=1, incarnation=0, keys=keys, timeout=DEADLINE) as other:
            other.request(0, 16).result()
            assert len(server._sessions) == 1
        assert client.request(0, 16, [torch.arange(3)]).result().arrays[0].tolist() == [0, 1, 2]
        assert len(server._sessions) == 1


@pytest.mark.parametrize(("of_server", "of_client"), [(True, "curve"), ("curve", True), ("curve", "curve")])
def test_where_one_end_seals_nothing_all_travels_by_curve(of_server, of_client):
    keys = Keys.generate(encrypts=of_server)
    client = {"keys": replace(keys, encrypts=of_client)}
    array = torch.rand(300_000)
    with joined({16: echo}, keys=keys, client=client) as (server, client):
        assert torch.equal(client.request(0, 16, [array]).result().arrays[0], array)
        assert client._links[0].lanes[0].sealing.agreement is None
        assert server._sessions is None or len(server._sessions) == 0


def test_nothing_is_sent_unsealed_on_a_connection_that_is_to_be_given_up():
    """A thread may have found the socket before the thread that reads learnt that the peer does not seal."""
    with joined({16: echo}, keys=Keys.generate()) as (server, client):
        client.request(0, 16).result()
        for forget in (lambda sealing: sealing.do_without(), lambda sealing: sealing.forget(())):
            forget(client._links[0].lanes[0].sealing)
            assert client.request(0, 16, [torch.arange(3)]).result().arrays[0].tolist() == [0, 1, 2]
        assert server.counters()["events"] == {}


def test_connections_that_are_cut_lose_nothing():
    keys = Keys.generate()
    with Server({16: echo}, keys=keys) as server, tapped(server) as proxy:
        options = {"timeout": DEADLINE, "resend_after": 0.2, "ping_interval": 0.1}
        with Client({0: server.endpoints[0]}, sender=0, incarnation=0, keys=keys, **options) as client:
            client.request(0, 16).result()
            for swallowed in ("replies", "requests"):
                proxy.swallow = swallowed
                pending = [client.request(0, 16, [torch.full((number,), number)]) for number in range(1, 20)]
                assert proxy.wait_swallowed(100)
                proxy.cut()
                for number, each in enumerate(pending, 1):
                    assert each.result().arrays[0].tolist() == [number] * number


def test_a_sealed_connection_cannot_ask_for_another():
    with joined({16: echo}, keys=Keys.generate()) as (server, client):
        client.request(0, 16).result()
        lane = client._links[0].lanes[0]
        header = wire.make_header(Kind.SEAL, 10**6, timeout_us=10**7)
        lane.socket.send(lane.socket.channel.seal(wire.encode(header, (), {"lane": 1}, Limits())))
        until(lambda: server.counters()["events"] == {"malformed: kind": 1})
        assert len(server._sessions) == 1


def test_a_processor_without_aes_has_the_other_cipher(monkeypatch, tmp_path):
    for flags, cipher in (("fp aes pmull", AES), ("fp asimd", CHACHA)):
        (tmp_path / "cpuinfo").write_text(f"processor : 0\nFeatures : {flags}\n")
        monkeypatch.setattr(sealing, "Path", lambda _: tmp_path / "cpuinfo")
        assert sealing.best_cipher.__wrapped__() == cipher
