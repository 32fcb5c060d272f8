"""Sealed messages: every frame is encrypted and authenticated on its own (AEAD), by the thread that makes or wants it.

Both ends derive a key for each direction of a connection from the job's key and what they agreed on (`Agreement`). A
message starts with a prefix in clear: whose it is, its counter and how many frames it has. Large frames are sealed in
pieces. A nonce is the message's counter, the frame's place and the piece's; the prefix and the frame's size are
associated data. So nothing can be changed, moved, cut off, sent again or sent back. `cryptography` lets go of the
interpreter's lock: several frames, and pieces of one, are sealed at once.
"""

from __future__ import annotations

import itertools
import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from zmq.utils import z85

from gnnsys.comm.arrays import Buffer, ReceivedFrame
from gnnsys.comm.errors import WireError
from gnnsys.comm.keys import Keys
from gnnsys.comm.sealing_threads import SealingThreads

MAGIC = b"GNNX"
VERSION = 1
TAG_BYTES = 16
SESSION_BYTES, LIFE_BYTES, SALT_BYTES, TOKEN_BYTES = 8, 16, 32, 32
AES, CHACHA = "AES-256-GCM", "ChaCha20-Poly1305"
TO_SERVER, TO_CLIENT = b"to the server", b"to the client"

_PREFIX = struct.Struct("<4sHHI8sQ")  # magic, version, zero, number of frames, session, counter
_NONCE = struct.Struct("<QHH")  # the message's counter, the frame's place, the piece's in it: twelve bytes
_SIZE = struct.Struct("<Q")
PIECE_BYTES = 1 << 20
# Messages. Threads seal side by side: small ones overtake a large one that has a smaller counter, for as long as it
# takes to seal.
_WINDOW = 1 << 17


@dataclass(frozen=True)
class Agreement:
    """What both ends of a bulk connection know, sent over the encrypted control connection and never again.

    `session` names it, `life` is the server's start, `name` the connection's. `token` admits to the bulk port and is
    seen by who reads the wire; `salt` is not, so that the job's key alone does not open what was recorded.
    """

    session: bytes
    life: bytes
    name: bytes
    cipher: str
    salt: bytes = field(repr=False)
    token: bytes = field(repr=False)

    def __post_init__(self) -> None:
        sizes = {"session": SESSION_BYTES, "life": LIFE_BYTES, "salt": SALT_BYTES, "token": TOKEN_BYTES}
        if self.cipher not in (AES, CHACHA) or any(len(getattr(self, name)) != size for name, size in sizes.items()):
            raise ValueError("this is no agreement on how to seal messages")

    @classmethod
    def make(cls, life: bytes, name: bytes, cipher: str) -> Agreement:
        return cls(os.urandom(SESSION_BYTES), life, name, cipher, os.urandom(SALT_BYTES), os.urandom(TOKEN_BYTES))

    def to_json(self) -> dict[str, str]:
        return {key: value.hex() if isinstance(value, bytes) else value for key, value in vars(self).items()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Agreement:
        texts = {name: str(values.get(name, "")) for name in cls.__dataclass_fields__}
        cipher = texts.pop("cipher")
        return cls(cipher=cipher, **{name: bytes.fromhex(text) for name, text in texts.items()})


def derive_key(keys: Keys, agreement: Agreement, direction: bytes) -> bytes:
    """HKDF-SHA256 of the job's secret key: other bytes for each direction, connection, session and server's life."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    parts = (b"gnnsys sealed frames", bytes([VERSION]), direction, agreement.cipher.encode(), agreement.name,
             agreement.life, agreement.session)  # fmt: skip
    info = b"".join(struct.pack("<H", len(part)) + part for part in parts)
    return HKDF(SHA256(), 32, agreement.salt, info).derive(z85.decode(keys.secret))


@cache
def best_cipher() -> str:
    """AES-256-GCM where the processor has instructions for it, else ChaCha20-Poly1305."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return AES  # no Linux: such machines have them
    flags = {flag for line in lines if line.lower().startswith(("flags", "features")) for flag in line.split()}
    return AES if "aes" in flags else CHACHA


def _make_aead(cipher: str, key: bytes) -> Any:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

    return AESGCM(key) if cipher == AES else ChaCha20Poly1305(key)


class ReplayWindow:
    """The counters that were accepted. Each is accepted once, and none that is far behind the highest."""

    def __init__(self, size: int = _WINDOW) -> None:
        self._size, self._highest = size, 0
        self._seen = bytearray(-(-size // 8))  # a bit for each counter modulo its size

    def may_take(self, counter: int) -> bool:
        if counter > self._highest:
            return True
        return self._highest - counter < self._size and not self._has(counter)

    def take(self, counter: int) -> None:
        """Only once the message is known to be authentic."""
        if counter - self._highest >= self._size:
            self._seen = bytearray(len(self._seen))
        else:
            for passed in range(self._highest + 1, counter):
                self._set(passed, False)
        self._set(counter, True)
        self._highest = max(self._highest, counter)

    def _has(self, counter: int) -> bool:
        place = counter % self._size
        return bool(self._seen[place >> 3] >> (place & 7) & 1)

    def _set(self, counter: int, is_seen: bool) -> None:
        place = counter % self._size
        bit = 1 << (place & 7)
        self._seen[place >> 3] = self._seen[place >> 3] & ~bit | (bit if is_seen else 0)


class OpenedFrame:
    """The bytes of a frame that was opened, as `zmq.Frame` has them."""

    __slots__ = ("buffer",)

    def __init__(self, buffer: memoryview) -> None:
        self.buffer = buffer

    def __len__(self) -> int:
        return len(self.buffer)


class SealedFrame:
    """A frame that is opened by who uses it. Its message's first frame was authentic; WireError where this is not."""

    __slots__ = ("_channel", "_counter", "_frame", "_place", "_prefix")

    def __init__(self, channel: SealedChannel, counter: int, place: int, prefix: bytes, frame: zmq.Frame) -> None:
        self._channel, self._counter, self._place = channel, counter, place
        self._prefix, self._frame = prefix, frame

    def __len__(self) -> int:
        return opened_size(len(self._frame))

    @property
    def buffer(self) -> memoryview:
        """New memory with its bytes."""
        opened = np.empty(len(self), np.uint8)
        self.copy_to(opened)
        return opened.data

    def copy_to(self, target: np.ndarray) -> None:
        """Opens it there; what is there afterwards is of no use where this raises."""
        self._channel.open_into(self._counter, self._place, self._prefix, self._frame.buffer, target)


class SealedChannel:
    """One end of a bulk connection. Any thread seals and opens."""

    def __init__(
        self, keys: Keys, agreement: Agreement, *, is_server: bool, threads: SealingThreads | None = None
    ) -> None:
        ways = (TO_CLIENT, TO_SERVER) if is_server else (TO_SERVER, TO_CLIENT)
        sending, receiving = (_make_aead(agreement.cipher, derive_key(keys, agreement, way)) for way in ways)
        self.session = agreement.session
        self._seal, self._seal_into, self._open_into = sending.encrypt, sending.encrypt_into, receiving.decrypt_into
        self._threads = threads or SealingThreads(0)
        self._counters = itertools.count(1)  # next() is one step, whichever thread takes it
        self._window = ReplayWindow()
        self._lock = threading.Lock()  # of the window

    def seal(self, frames: Sequence[Buffer]) -> list[Buffer]:
        """The message as it travels, under a counter of its own: sealed again, it is other bytes."""
        counter = next(self._counters)
        prefix = _PREFIX.pack(MAGIC, VERSION, 0, len(frames), self.session, counter)
        sealed: list[Buffer] = []
        for place, frame in enumerate(frames):
            lead = b"" if place else prefix
            if isinstance(frame, (bytes, bytearray)) and len(frame) <= PIECE_BYTES:
                bound = prefix + _SIZE.pack(len(frame))
                sealed.append(lead + self._seal(_NONCE.pack(counter, place, 0), frame, bound))
                continue
            if isinstance(frame, np.ndarray):
                plain = frame.reshape(-1).view(np.uint8)
            else:
                plain = np.frombuffer(frame, np.uint8)
            bound = prefix + _SIZE.pack(plain.size)
            whole = np.empty(len(lead) + sealed_size(plain.size), np.uint8)
            whole[: len(lead)] = np.frombuffer(lead, np.uint8)
            pieces = [
                (_NONCE.pack(counter, place, number), plain[begin : begin + PIECE_BYTES], bound, whole[at:end])
                for number, (begin, at, end) in enumerate(_places(plain.size, len(lead)))
            ]
            self._threads.run(self._seal_into, pieces)
            sealed.append(whole)
        return sealed

    def open(self, frames: Sequence[zmq.Frame]) -> list[ReceivedFrame]:
        """The message, its first frame opened, the others when they are used; WireError for what is none of ours."""
        session, prefix, counter = read_prefix(frames)
        if session != self.session:
            raise WireError("seal", "a message of another session")
        if not self._window.may_take(counter):
            raise WireError("replay", f"message {counter} came before")
        front = frames[0].buffer[_PREFIX.size :]
        opened = np.empty(opened_size(len(front)), np.uint8)
        self.open_into(counter, 0, prefix, front, opened)
        with self._lock:
            if not self._window.may_take(counter):  # another thread has opened it meanwhile
                raise WireError("replay", f"message {counter} came before")
            self._window.take(counter)
        others = (SealedFrame(self, counter, place, prefix, frame) for place, frame in enumerate(frames[1:], 1))
        return [OpenedFrame(opened.data), *others]

    def open_into(self, counter: int, place: int, prefix: bytes, sealed: Any, target: np.ndarray) -> None:
        """Opens a frame; WireError where a piece of it does not open, or its size is another than it was."""
        from cryptography.exceptions import InvalidTag

        bound = prefix + _SIZE.pack(target.size)
        pieces = [
            (_NONCE.pack(counter, place, number), sealed[at:end], bound, target[begin : begin + PIECE_BYTES])
            for number, (begin, at, end) in enumerate(_places(target.size, 0))
        ]
        try:
            self._threads.run(self._open_into, pieces)
        except (InvalidTag, ValueError):  # ValueError: shorter than a tag
            raise WireError("seal", "a frame does not open: it was changed, or is of another connection") from None


def _places(size: int, lead: int) -> Iterator[tuple[int, int, int]]:
    """Where each piece of a frame of `size` bytes begins, and where it lies sealed behind `lead` other bytes."""
    for number, begin in enumerate(range(0, max(size, 1), PIECE_BYTES)):
        at = lead + number * (PIECE_BYTES + TAG_BYTES)
        yield begin, at, at + min(PIECE_BYTES, size - begin) + TAG_BYTES


def sealed_size(size: int) -> int:
    """Bytes of a frame of `size` bytes once it is sealed."""
    return size + TAG_BYTES * max(1, -(-size // PIECE_BYTES))


def opened_size(size: int) -> int:
    """Bytes of a sealed frame once it is opened."""
    return max(0, size - TAG_BYTES * max(1, -(-size // (PIECE_BYTES + TAG_BYTES))))


def read_prefix(frames: Sequence[zmq.Frame]) -> tuple[bytes, bytes, int]:
    """Session, prefix and counter as a message gives them, which nothing has proven yet."""
    front = frames[0].buffer if frames else memoryview(b"")
    if len(front) < _PREFIX.size + TAG_BYTES:
        raise WireError("seal", f"a first frame of {len(front)} bytes is not sealed")
    prefix = bytes(front[: _PREFIX.size])
    magic, version, zero, num_frames, session, counter = _PREFIX.unpack(prefix)
    if (magic, version, zero) != (MAGIC, VERSION, 0):
        raise WireError("seal", f"the message begins with {prefix[:8].hex()}, which is not how sealed ones do")
    if num_frames != len(frames):
        raise WireError("seal", f"{len(frames)} of {num_frames} frames of a message")
    return session, prefix, counter


def sealing_seconds(num_bytes: int = 4 * PIECE_BYTES, turns: int = 5) -> float:
    """Core-seconds to seal one byte of a large message on this machine, which are those to open it: the least of some
    turns."""
    aead = _make_aead(best_cipher(), bytes(32))
    plain = np.zeros(num_bytes, np.uint8)
    sealed = np.empty(sealed_size(num_bytes), np.uint8)
    least = float("inf")
    for turn in range(turns):
        began = time.thread_time()
        for number, (begin, at, end) in enumerate(_places(num_bytes, 0)):
            aead.encrypt_into(_NONCE.pack(turn, 0, number), plain[begin : begin + PIECE_BYTES], b"", sealed[at:end])
        least = min(least, time.thread_time() - began)
    return least / num_bytes
