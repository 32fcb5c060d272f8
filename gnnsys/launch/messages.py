"""What launcher and agents say to each other: one JSON object per line over a pipe, some followed by raw bytes.

A request has `do` and an `id`, its answer the same `id` and `ok` or `error`. What an agent says unasked has `event`.
Nothing is read beyond `MOST_LINE` bytes of a line, and nothing but JSON is understood.
"""

from __future__ import annotations

import json
import os
import select
import threading
import time
from typing import Any

BANNER = {"gnnsys-agent": 1}  # an agent's first line: whatever a login shell prints comes before it
MOST_LINE = 16 << 20
_CHUNK = 1 << 18


class MessageReader:
    """Reads messages and bytes from a file descriptor. EOFError once the other end is closed."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._buffer = descriptor, bytearray()
        self._searched = 0  # so far there is no end of line

    def line(self, timeout: float | None = None) -> bytes | None:
        """The next line without its end; None where it has not come within `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (end := self._buffer.find(b"\n", self._searched)) < 0:
            self._searched = len(self._buffer)
            if self._searched > MOST_LINE:
                raise ValueError(f"a message is longer than {MOST_LINE} bytes")
            if not self._wait(deadline):
                return None
            self._more()
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._searched = 0
        return line

    def read(self, timeout: float | None = None) -> dict[str, Any] | None:
        """The next message; None where none has come within `timeout` seconds. ValueError for what is none."""
        line = self.line(timeout)
        return None if line is None else parse(line)

    def bytes(self, count: int, timeout: float | None = None) -> bytes:
        """The next `count` bytes, which follow a message that announces them.

        TimeoutError where none of them has come for `timeout` seconds.
        """
        while len(self._buffer) < count:
            if not self._wait(None if timeout is None else time.monotonic() + timeout):
                raise TimeoutError(f"nothing has come for {timeout:g} s")
            self._more()
        found = bytes(self._buffer[:count])
        del self._buffer[:count]
        return found

    def _wait(self, deadline: float | None) -> bool:
        return is_ready(self._descriptor, select.POLLIN, deadline and max(0.0, deadline - time.monotonic()))

    def _more(self) -> None:
        data = os.read(self._descriptor, _CHUNK)
        if not data:
            raise EOFError("the other end is closed")
        self._buffer += data


class MessageWriter:
    """Writes messages to a pipe, from any thread. TimeoutError where nobody has read for `patience` seconds."""

    def __init__(self, descriptor: int, patience: float | None = 60.0) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor, self.patience, self._lock = descriptor, patience, threading.Lock()

    def write(self, message: dict[str, Any], data: bytes | memoryview = b"") -> None:
        line = memoryview(json.dumps(message).encode() + b"\n")
        if not self._lock.acquire(timeout=-1 if self.patience is None else self.patience):
            raise TimeoutError(f"nothing was read for {self.patience:g} s")
        try:
            for part in (line, memoryview(data)):
                while part:
                    if not is_ready(self._descriptor, select.POLLOUT, self.patience):
                        raise TimeoutError(f"nothing was read for {self.patience:g} s")
                    part = part[os.write(self._descriptor, part) :]
        finally:
            self._lock.release()


def is_ready(descriptor: int, event: int, timeout: float | None) -> bool:
    """Whether a descriptor can be read or written within `timeout` seconds, or its other end is closed."""
    poll = select.poll()  # unlike select, it takes numbers above 1023: a launcher has three for each host
    poll.register(descriptor, event)
    return bool(poll.poll(None if timeout is None else timeout * 1000))


def parse(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except ValueError:
        raise ValueError(f"this is no message: {line[:200].decode(errors='replace')!r}") from None
    if not isinstance(message, dict):
        raise ValueError(f"a message must be an object, got {type(message).__name__}")
    return message
