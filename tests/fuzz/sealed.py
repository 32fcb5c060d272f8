"""Sealed messages as a stranger who reads the wire has them, changed in every way: none of them may be accepted.

The stranger's connection has a session's token, and real messages of two sessions, which the server has taken once. So
a message that comes out as it was is one that was sent again. Others are kept from the server, and come with a frame
behind the first one changed. A server answers whatever it accepts: the only replies that may come are those to the
markers, which the attacker seals with the key that a stranger has not, and that the frames of a message do not open.
"""

from __future__ import annotations

import itertools
import os
import random
import struct
import time
from pathlib import Path
from typing import Any

import torch
import zmq

from gnnsys.comm import Keys, Kind, Limits, Message, read_key, wire
from gnnsys.comm.keys import protect_bulk_client
from gnnsys.comm.sealing import _PREFIX, Agreement, SealedChannel, best_cipher
from tests.fuzz.mutate import ANYWHERE, Frames
from tests.fuzz.served import DEADLINE

WAIT_MS = 30_000
MAX_BYTES = 1 << 18  # of a message that is changed
KEPT_BACK = 8  # one message in so many
ORIGINAL_US = 10**6  # that the originals may take
_FIRST_ID, _MARKER = 10**9, 1 << 62
_DROPPED = ("malformed: seal", "malformed: replay")


class AcceptedError(AssertionError):
    """The server has answered what nobody with the key has sent."""


class Lane:
    """A sealed connection of the attacker's own."""

    def __init__(self, context: zmq.Context[Any], keys: Keys, agreement: Agreement, endpoint: str) -> None:
        self.agreement = agreement
        self.channel = SealedChannel(keys, agreement, is_server=False)
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger, self.socket.rcvtimeo, self.socket.rcvhwm, self.socket.sndhwm = 0, WAIT_MS, 0, 0
        protect_bulk_client(self.socket, agreement.session, agreement.token)
        self.socket.connect(endpoint)

    def seal(self, frames: Frames) -> Frames:
        return [bytes(frame) for frame in self.channel.seal(frames)]

    def receive(self) -> tuple[Frames, wire.Header]:
        received = self.socket.recv_multipart(copy=False)
        front = self.channel.open(received)[0].buffer
        return [frame.bytes for frame in received], wire.read_header(front, Limits())


class SealedAttacker:
    """Sends changed sealed messages over two sessions; `AcceptedError` where the server takes one."""

    def __init__(self, endpoint: str, key: Path, recorded: list[Frames], seed: int) -> None:
        self.statuses: dict[int, int] = {}
        self._seed = seed
        self._ids = itertools.count(1)  # a request that is sent again under its id is answered as before
        self._context = zmq.Context()
        self._keys = read_key(key)
        self._control = self._context.socket(zmq.DEALER)
        self._control.linger, self._control.rcvtimeo = 0, WAIT_MS
        self._control.routing_id = b"g" + os.urandom(13)
        self._keys.protect_client(self._control)
        self._control.connect(endpoint)
        self._lanes = [self._open(endpoint, lane) for lane in range(2)]
        self._num_sent = 0
        answered = [frames for frames in recorded if wire.read_header(frames[0], Limits()).kind != Kind.RAISE]
        self._material = self._send_originals([*answered, _large(1)])
        self._dropped_before = self._num_dropped()

    def message(self, number: int) -> tuple[int, Frames]:
        """Message `number` of a run, and the lane it goes over: of the material, the seed and the number alone."""
        chance = random.Random(f"{self._seed}/{number}")
        frames = list(chance.choice(self._material))
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            frames = chance.choice((*ANYWHERE, *_CHANGES))(frames, chance)
            if chance.random() < 0.2:  # frames of another message
                frames = [*frames[: chance.randint(0, len(frames))], *chance.choice(self._material)[1:]] or [b""]
        return chance.randrange(2), frames

    def send(self, first: int, end: int) -> None:
        """Messages [first, end); returns when the server has read them all. `zmq.Again` where that is never."""
        for number in range(first, end):
            lane, frames = self.message(number)
            if number % KEPT_BACK == 0:
                front, rows = self._lanes[lane].seal(_large(2 * _FIRST_ID + number))
                frames = [front, _change_one_bit(rows, random.Random(number))]
            self._lanes[lane].socket.send_multipart(frames)
        self._num_sent += end - first
        for lane in self._lanes:  # what comes behind the others on a connection is read after them
            header = wire.make_header(Kind.DESCRIBE, _MARKER + end, timeout_us=3 * 10**7, priority=2**31 - 1)
            lane.socket.send_multipart(lane.seal(_encoded(header)))
        for lane in self._lanes:
            while (answered := lane.receive()[1]).request_id != _MARKER + end:
                if answered.status != wire.MALFORMED:
                    raise AcceptedError(f"the server answered {answered}, which nobody asked")
                self.statuses[answered.status] = self.statuses.get(answered.status, 0) + 1

    def check(self) -> str | None:
        """What is wrong with the server's own count of what it dropped."""
        deadline = time.monotonic() + DEADLINE  # a worker may have the last of them
        while (dropped := self._num_dropped() - self._dropped_before) < self._num_sent:
            if time.monotonic() > deadline:
                break
        return None if dropped == self._num_sent else f"{dropped} of {self._num_sent} messages were dropped"

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _open(self, endpoint: str, lane: int) -> Lane:
        port = int(endpoint.rpartition(":")[2])
        question = {"lane": lane, "port": port, "session": "", "cipher": best_cipher()}
        told = self._ask(Kind.SEAL, question).options
        place = f"{endpoint.rpartition(':')[0]}:{told['port']}"
        return Lane(self._context, self._keys, Agreement.from_json(told), place)

    def _ask(self, kind: int, options: dict[str, Any]) -> Message:
        header = wire.make_header(kind, next(self._ids), timeout_us=3 * 10**7)
        self._control.send_multipart(_encoded(header, options))
        received = self._control.recv_multipart(copy=False)
        return wire.read_message(wire.read_header(received[0].buffer, Limits()), received, Limits())

    def _num_dropped(self) -> int:
        events = self._ask(Kind.STATUS, {"counters": True}).options["counters"]["events"]
        return sum(events.get(each, 0) for each in _DROPPED)

    def _send_originals(self, recorded: list[Frames]) -> list[Frames]:
        """Sends each recorded request over each lane, as it should be. These and what the server says are material."""
        material: list[Frames] = []
        for lane in self._lanes:
            waiting = set()
            for number, frames in enumerate(recorded, _FIRST_ID):
                if sum(map(len, frames)) > MAX_BYTES:
                    continue
                header = wire.Header._make(wire._HEADER.unpack_from(frames[0]))
                header = header._replace(request_id=number, timeout_us=ORIGINAL_US)
                sealed = lane.seal([wire._HEADER.pack(*header) + frames[0][wire._HEADER.size :], *frames[1:]])
                lane.socket.send_multipart(sealed)
                material.append(sealed)
                waiting.add(number)
            deadline = time.monotonic() + DEADLINE
            while waiting:
                assert time.monotonic() < deadline, f"requests {waiting} were not answered"
                reply, answered = lane.receive()
                if sum(map(len, reply)) <= MAX_BYTES:
                    material.append(reply)  # to be sent back
                self.statuses[answered.status] = self.statuses.get(answered.status, 0) + 1
                if answered.status != wire.OK or answered.num_chunks:
                    waiting.discard(answered.request_id)
        return material


def _encoded(header: wire.Header, options: dict[str, Any] | None = None) -> Frames:
    return [bytes(frame) for frame in wire.encode(header, (), options, Limits())]


def _large(request_id: int) -> Frames:
    """A request that has a frame behind the first one."""
    header = wire.make_header(Kind.PULL, request_id, timeout_us=10**7)
    return [bytes(frame) for frame in wire.encode(header, [torch.arange(10_000)], None, Limits())]


def _change_one_bit(frame: bytes, chance: random.Random) -> bytes:
    changed, bit = bytearray(frame), chance.randrange(8 * len(frame))
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def _set_prefix(frames: Frames, chance: random.Random) -> Frames:
    """Another counter, another number of frames, or another session in the part that is not encrypted."""
    if len(frames[0]) < _PREFIX.size:
        return frames
    magic, version, zero, num_frames, session, counter = _PREFIX.unpack_from(frames[0])
    others = (0, 1, (counter + 1) % 2**64, 10**6, 2**63, 2**64 - 1)
    changed = chance.choice((
        (magic, version, zero, num_frames, session, chance.choice(others)),
        (magic, version, zero, len(frames), session, chance.randrange(2**64)),
        (magic, version, zero, chance.choice((0, 1, 2, 2**32 - 1)), session, counter),
        (magic, version, zero, num_frames, chance.randbytes(8), counter),
        (magic, chance.randrange(2**16), chance.randrange(2**16), num_frames, session, counter),
    ))  # fmt: skip
    return [_PREFIX.pack(*changed) + frames[0][_PREFIX.size :], *frames[1:]]


def _count_again(frames: Frames, chance: random.Random) -> Frames:
    """As many frames as it says, whatever was done to it."""
    if len(frames[0]) < _PREFIX.size:
        return frames
    return [frames[0][:8] + struct.pack("<I", len(frames)) + frames[0][12:], *frames[1:]]


_CHANGES = (_set_prefix, _set_prefix, _count_again)
