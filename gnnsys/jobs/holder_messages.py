"""Messages between the holder of graphs and its users: a length and plain JSON over a Unix socket, and a descriptor.

No pickle. Lengths are checked before anything is read. The socket lies in a folder of the user's own.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_HEADER = struct.Struct("<4sI")
_MAGIC = b"GNh1"
_LONGEST = 1 << 26  # bytes: the description of a graph with a hundred thousand arrays
_PIECE = 1 << 16


class MessageError(ValueError):
    """What came is no message of ours."""


def encode(message: Mapping[str, Any]) -> bytes:
    text = json.dumps(message).encode()
    if len(text) > _LONGEST:
        raise MessageError(f"a message of {len(text):,} bytes is too long, {_LONGEST:,} are allowed")
    return _HEADER.pack(_MAGIC, len(text)) + text


def send(connection: socket.socket, message: Mapping[str, Any], descriptor: int | None = None) -> None:
    data = encode(message)
    if descriptor is not None:
        sent = socket.send_fds(connection, [data[: _HEADER.size]], [descriptor])
        data = data[sent:]
    connection.sendall(data)


class HolderMessages:
    """Puts messages together from what arrives."""

    def __init__(self) -> None:
        self._data = bytearray()

    def missing(self) -> int:
        """Bytes until the header is whole, or the message that it announces."""
        if len(self._data) < _HEADER.size:
            return _HEADER.size - len(self._data)
        return _HEADER.size + int(_HEADER.unpack_from(self._data)[1]) - len(self._data)

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """The messages that are whole now; MessageError where the sender speaks something else."""
        self._data += data
        while len(self._data) >= _HEADER.size:
            magic, length = _HEADER.unpack_from(self._data)
            if magic != _MAGIC or length > _LONGEST:
                raise MessageError("a message begins with something else than our header")
            end = _HEADER.size + length
            if len(self._data) < end:
                return
            text = bytes(self._data[_HEADER.size : end])
            del self._data[:end]
            try:
                message = json.loads(text)
            except ValueError as error:
                raise MessageError(f"a message is not JSON: {error}") from error
            if not isinstance(message, dict):
                raise MessageError("a message is not a JSON object")
            yield message


def receive(connection: socket.socket, timeout: float) -> tuple[dict[str, Any], int | None]:
    """The next message, and the descriptor that came with it. ConnectionError where the other side has ended.

    Exactly its bytes are read: the next one, with its descriptor, is left for the next call.
    """
    reader, end, descriptors = HolderMessages(), time.monotonic() + timeout, list[int]()
    try:
        missing = _HEADER.size
        while True:
            connection.settimeout(max(0.001, end - time.monotonic()))
            data, came, _, _ = socket.recv_fds(connection, min(missing, _PIECE), 1)
            descriptors += came
            if not data:
                raise ConnectionResetError("the connection was closed")
            for message in reader.feed(data):
                return message, descriptors.pop() if descriptors else None
            missing = reader.missing()
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """A name for a socket of any path: one of more than 107 bytes cannot be bound or connected to by itself."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
