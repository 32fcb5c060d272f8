"""A peer of another version is told so at once, in both directions, and not after its time."""

from __future__ import annotations

import struct
import threading
import time

import pytest
import zmq

from gnnsys.comm import Client, Kind, WireError, wire
from gnnsys.comm.wire import Limits

OLDER = wire.VERSION - 1
_FLAGS_AT, _SHORTER = 8, 8  # bytes: where flags stand, and by how many version 3 had a shorter header


def of_version(front: bytes, version: int, flags: int = 0) -> bytes:
    changed = bytearray(front)
    struct.pack_into("<H", changed, 4, version)
    changed[_FLAGS_AT] |= flags
    return bytes(changed)


def test_a_request_of_an_older_version_is_no_truncated_one():
    front = bytes(wire.HEADER_BYTES - _SHORTER)
    front = wire.MAGIC + struct.pack("<H", OLDER) + front[6:]
    with pytest.raises(WireError, match=f"has version {OLDER}, this process speaks {wire.VERSION}") as told:
        wire.read_header(front, Limits())
    assert told.value.reason == "version"
    with pytest.raises(WireError, match="instead of") as told:
        wire.read_header(of_version(front, wire.VERSION), Limits())
    assert told.value.reason == "truncated"


def test_a_client_is_told_by_the_first_answer_of_an_older_server():
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    ended = threading.Event()

    def serve() -> None:
        while not ended.is_set():
            if router.poll(50):
                sender, front, *_ = router.recv_multipart()
                router.send_multipart([sender, of_version(front, OLDER, wire.REPLY)])

    server = threading.Thread(target=serve)
    server.start()
    client = Client({0: f"tcp://127.0.0.1:{port}"}, sender=0, incarnation=1, timeout=120.0)
    try:
        began = time.monotonic()
        with pytest.raises(WireError, match=f"machine 0 speaks version {OLDER} .* install the same gnnsys"):
            client.request(0, Kind.STATUS).result()
        assert time.monotonic() - began < 60
    finally:
        client.close()
        ended.set()
        server.join()
        router.close(0)
        context.term()
