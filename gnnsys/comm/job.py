"""One request inside a server: from its arrival to the last message of its answer.

The thread that reads the socket makes it; a worker runs its handler and sends what that yields. A worker never waits
for a reader: a job whose reader has fallen behind is parked, and comes back to the queue when there is room again.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
import zmq

from gnnsys.comm import wire
from gnnsys.comm.errors import ShardLost, TrainerLost
from gnnsys.comm.kinds import kind_name
from gnnsys.comm.request import Handlers, Reply, Request
from gnnsys.comm.wire import Buffer, Header, Limits

WINDOW_BYTES = 16 << 20  # of one chunked reply, handed to libzmq and not sent yet
_MAX_TEXT = 2000  # characters of an error's text: at most twelve bytes each as JSON, so that they fit into any reply


class Outbound(Protocol):
    """Where a job's messages go: the server."""

    def send(self, job: Job, frames: list[Buffer], is_last: bool) -> None: ...

    def resume(self, job: Job) -> None: ...

    def note(self, event: str) -> None: ...


class Job:
    """A request, its frames as received, and what has been answered so far."""

    __slots__ = (
        "_began", "_chunks", "_frames", "_outbound", "_window", "deadline", "header", "identity", "key", "num_chunks",
        "order", "service_us",
    )  # fmt: skip

    def __init__(
        self,
        outbound: Outbound,
        identity: bytes,
        header: Header,
        frames: list[zmq.Frame],
        deadline: float,
        arrival: int,
    ) -> None:
        self._outbound = outbound
        self._frames = frames
        self._began = time.monotonic()
        self._chunks: Iterator[Reply] | None = None  # what is left of a reply in chunks
        self._window: Window | None = None
        self.num_chunks = 0  # messages answered so far
        self.service_us = 0
        self.identity = identity
        self.header = header
        self.key = (identity, header.request_id)
        self.deadline = deadline
        self.order = (header.priority, arrival)

    def run(self, handlers: Handlers, limits: Limits) -> None:
        """Runs the handler and sends what it answers, or goes on with that; an exception is an answer too."""
        if time.monotonic() > self.deadline:
            self.expire("its time had passed before work began" if self._chunks is None else self._too_slow())
            return
        try:
            if self._chunks is None:
                self._begin(handlers, limits)
            if self._chunks is not None:
                self._send_chunks(limits)
        except BaseException as error:
            self._chunks = None
            self.fail(error)

    def _begin(self, handlers: Handlers, limits: Limits) -> None:
        self._began = time.monotonic()
        try:
            message = wire.read_message(self.header, self._frames, limits)
        except wire.WireError as error:
            self.refuse(wire.MALFORMED, "WireError", str(error), event=f"malformed: {error.reason}")
            return
        self._frames = []
        answer = handlers[self.header.kind](Request(message, self.deadline))
        if isinstance(answer, Reply):
            self._send(self._frames_of(answer, True, limits), True)
        elif isinstance(answer, Future):
            answer.add_done_callback(lambda future: self._send_future(future, limits))
        elif isinstance(answer, Iterator):
            self._window = Window(WINDOW_BYTES, lambda: self._outbound.resume(self))
            self._chunks = answer
        else:
            kind = kind_name(self.header.kind)
            raise TypeError(f"the handler of {kind} returned a {type(answer).__name__}, not a Reply")

    def fail(self, error: BaseException) -> None:
        facts = error.to_json() if isinstance(error, (ShardLost, TrainerLost)) else None
        is_value = isinstance(error, ValueError)
        self.refuse(
            wire.FAILED, type(error).__name__, str(error), event="handler raised", is_value=is_value, facts=facts
        )

    def expire(self, why: str) -> None:
        if self._window is not None and self._window.unpark():
            self._chunks = None  # nobody comes back for the rest
        self.refuse(wire.EXPIRED, "DeadlineExceeded", why, event="expired")

    def refuse(
        self, status: int, type_name: str, text: str, *, event: str, is_value: bool = False,
        facts: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Answers with an error, as the last message of this job."""
        self._outbound.note(event)
        options: dict[str, Any] = {"type": type_name[:200], "text": text[:_MAX_TEXT]}
        if is_value:
            options["is_value_error"] = True
        if facts is not None:
            options["facts"] = facts
        header = self._reply_header(status=status, num_chunks=self.num_chunks + 1)
        self._send(wire.encode(header, (), options, Limits()), True)

    def _send_future(self, future: Future[Reply], limits: Limits) -> None:
        try:
            self._send(self._frames_of(future.result(timeout=0), True, limits), True)
        except BaseException as error:
            self.fail(error)

    def _send_chunks(self, limits: Limits) -> None:
        """Sends chunks until that was all, or the reader has fallen behind. After `park` another thread may be here."""
        window = self._window
        assert self._chunks is not None and window is not None
        for chunk in self._chunks:
            is_last = chunk.last
            frames = self._frames_of(chunk, is_last, limits)
            for frame in frames:
                if isinstance(frame, np.ndarray):
                    window.enter(frame)
            self._send(frames, is_last)
            if is_last:
                self._chunks = None
                return
            del frames, frame, chunk  # what is sent leaves the window when nobody holds it
            if time.monotonic() > self.deadline:
                self._chunks = None
                self.expire(self._too_slow())
                return
            if window.park():
                return
        self._chunks = None
        self._send(wire.encode(self._reply_header(num_chunks=self.num_chunks, flags=wire.END), (), None, limits), True)

    def _too_slow(self) -> str:
        return f"the reply was not taken in time, after {self.num_chunks} chunks"

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
    """Counts the bytes of buffers that libzmq has not sent yet: each leaves when its array object dies.

    `on_room` is called once for each `park` that was True, from whatever thread made room, unless `unpark` came first.
    """

    def __init__(self, max_bytes: int, on_room: Callable[[], None]) -> None:
        self._max_bytes = max_bytes
        self._on_room = on_room
        self._bytes = 0
        self._is_parked = False
        self._lock = threading.RLock()  # re-entrant: finalizers run anywhere

    def enter(self, buffer: np.ndarray) -> None:
        with self._lock:
            self._bytes += buffer.nbytes
        weakref.finalize(buffer, self._leave, buffer.nbytes).atexit = False

    def park(self) -> bool:
        """Whether there is no room."""
        with self._lock:
            self._is_parked = self._bytes >= self._max_bytes
            return self._is_parked

    def unpark(self) -> bool:
        """Whether somebody was parked, who is not called now."""
        with self._lock:
            was_parked, self._is_parked = self._is_parked, False
            return was_parked

    def _leave(self, num_bytes: int) -> None:
        with self._lock:
            self._bytes -= num_bytes
            has_room = self._bytes < self._max_bytes and self.unpark()
        if has_room:
            self._on_room()
