"""One request inside a server: from its arrival to the last message of its answer.

A job lives on two threads: the one that owns the socket made it and sends what it yields; a worker runs its handler.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
import zmq

from gnnsys.comm import wire
from gnnsys.comm.kinds import kind_name
from gnnsys.comm.request import Handlers, Reply, Request
from gnnsys.comm.wire import Buffer, Header, Limits

WINDOW_BYTES = 16 << 20  # of one chunked reply, handed to libzmq and not sent yet


class Outbound(Protocol):
    """Where a job's messages go: the server."""

    closing: bool

    def send(self, job: Job, frames: list[Buffer], is_last: bool) -> None: ...

    def note(self, event: str) -> None: ...


class Job:
    """A request, its frames as received, and what has been answered so far."""

    __slots__ = (
        "_began", "_frames", "_outbound", "deadline", "header", "identity", "key", "num_chunks", "service_us",
    )  # fmt: skip

    def __init__(
        self, outbound: Outbound, identity: bytes, header: Header, frames: list[zmq.Frame], now: float
    ) -> None:
        self._outbound = outbound
        self._frames = frames
        self._began = now
        self.num_chunks = 0  # messages answered so far
        self.service_us = 0
        self.identity = identity
        self.header = header
        self.key = (identity, header.request_id)
        self.deadline = now + header.timeout_us / 1e6

    def run(self, handlers: Handlers, limits: Limits) -> None:
        """Runs the handler and sends what it answers; an exception is an answer too."""
        now = time.monotonic()
        if now > self.deadline:
            self.expire("its time had passed before work began")
            return
        self._began = now
        try:
            message = wire.read_message(self.header, self._frames, limits)
        except wire.WireError as error:
            self.refuse(wire.MALFORMED, "WireError", str(error), event=f"malformed: {error.reason}")
            return
        self._frames = []
        try:
            answer = handlers[self.header.kind](Request(message, self.deadline))
            if isinstance(answer, Reply):
                self._send(self._frames_of(answer, True, limits), True)
            elif isinstance(answer, Future):
                answer.add_done_callback(lambda future: self._send_future(future, limits))
            elif isinstance(answer, Iterator):
                self._send_chunks(answer, limits)
            else:
                kind = kind_name(self.header.kind)
                raise TypeError(f"the handler of {kind} returned a {type(answer).__name__}, not a Reply")
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        is_value = isinstance(error, ValueError)
        self.refuse(wire.FAILED, type(error).__name__, str(error), event="handler raised", is_value=is_value)

    def expire(self, why: str) -> None:
        self.refuse(wire.EXPIRED, "DeadlineExceeded", why, event="expired")

    def refuse(self, status: int, type_name: str, text: str, *, event: str, is_value: bool = False) -> None:
        """Answers with an error, as the last message of this job."""
        self._outbound.note(event)
        options: dict[str, Any] = {"type": type_name[:200], "text": text[:20_000]}
        if is_value:
            options["is_value_error"] = True
        header = self._reply_header(status=status, num_chunks=self.num_chunks + 1)
        self._send(wire.encode(header, (), options, Limits()), True)

    def _send_future(self, future: Future[Reply], limits: Limits) -> None:
        try:
            self._send(self._frames_of(future.result(timeout=0), True, limits), True)
        except BaseException as error:
            self.fail(error)

    def _send_chunks(self, chunks: Iterator[Reply], limits: Limits) -> None:
        window = Window(WINDOW_BYTES)
        for chunk in chunks:
            is_last = chunk.last
            frames = self._frames_of(chunk, is_last, limits)
            for frame in frames:
                if isinstance(frame, np.ndarray):
                    window.enter(frame)
            self._send(frames, is_last)
            if is_last:
                return
            del frames, frame, chunk  # what is sent leaves the window when nobody holds it
            while not window.wait(min(1.0, self.deadline - time.monotonic())):
                if self._outbound.closing or time.monotonic() > self.deadline:
                    raise TimeoutError(f"the reply was not taken in time, after {self.num_chunks} chunks")
        self._send(wire.encode(self._reply_header(num_chunks=self.num_chunks, flags=wire.END), (), None, limits), True)

    def _frames_of(self, reply: Reply, is_last: bool, limits: Limits) -> list[Buffer]:
        header = self._reply_header(num_chunks=self.num_chunks + 1 if is_last else 0)
        return wire.encode(header, reply.arrays, reply.options, limits)

    def _reply_header(self, *, status: int = wire.OK, num_chunks: int, flags: int = 0) -> Header:
        self.service_us = int((time.monotonic() - self._began) * 1e6)
        return wire.reply_header(
            self.header, status=status, service_us=self.service_us, chunk=self.num_chunks, num_chunks=num_chunks,
            flags=flags,
        )  # fmt: skip

    def _send(self, frames: list[Buffer], is_last: bool) -> None:
        self.num_chunks += 1
        self._outbound.send(self, frames, is_last)


class Window:
    """Counts the bytes of buffers that libzmq has not sent yet: each leaves when its array object dies."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._changed = threading.Condition(threading.RLock())  # re-entrant: finalizers run anywhere

    def enter(self, buffer: np.ndarray) -> None:
        with self._changed:
            self._bytes += buffer.nbytes
        weakref.finalize(buffer, self._leave, buffer.nbytes).atexit = False

    def _leave(self, num_bytes: int) -> None:
        with self._changed:
            self._bytes -= num_bytes
            self._changed.notify_all()

    def wait(self, timeout: float) -> bool:
        """Whether there is room, within `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._bytes < self._max_bytes, max(0.0, timeout))
