"""One request inside a server: from its arrival to the last message of its answer.

The thread that reads the socket makes it; a worker runs its handler and sends what the handler yields. A worker never
waits until there is room for a reply: the job is parked, and returns to the queue when it is its turn (`Egress`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from gnnsys.comm import wire
from gnnsys.comm.arrays import ReceivedFrame
from gnnsys.comm.client_quotas import client_of, peer_of
from gnnsys.comm.egress import Egress, countable
from gnnsys.comm.errors import ShardLost, TrainerLost
from gnnsys.comm.kinds import is_change, kind_name
from gnnsys.comm.request import Handlers, Reply, Request
from gnnsys.comm.sealed_sessions import SealedMessage
from gnnsys.comm.wire import Buffer, Header, Limits

_MAX_TEXT = 2000  # characters of an error's text: at most twelve bytes each as JSON, so that they fit into any reply


class Outbound(Protocol):
    """Where a job's messages go: the server. What is sealed is sent, where the job's connection is a sealed one."""

    def seal(self, job: Job, frames: list[Buffer]) -> SealedMessage | None: ...

    def send(self, job: Job, frames: list[Buffer], sealed: SealedMessage | None, is_last: bool) -> bool: ...

    def resume(self, job: Job) -> None: ...

    def is_awaited(self) -> bool: ...

    def note(self, event: str) -> None: ...


class Job:
    """A request, its frames as received, and what has been answered so far."""

    __slots__ = (
        "_began", "_chunks", "_egress", "_frames", "_outbound", "arrived", "client", "deadline", "header", "identity",
        "is_kept", "is_paced", "key", "num_bytes", "num_chunks", "peer", "priority", "queued_us", "served_us",
    )  # fmt: skip

    def __init__(
        self,
        outbound: Outbound,
        identity: bytes,
        header: Header,
        frames: Sequence[ReceivedFrame],
        num_bytes: int,
        deadline: float,
        egress: Egress,
    ) -> None:
        self._outbound = outbound
        self._frames = frames
        self.arrived = time.monotonic()
        self._began: float | None = None  # when a worker took it
        self._chunks: Iterator[Reply] | None = None  # what is left of a reply in chunks
        self._egress = egress
        self.peer = peer_of(identity)
        self.is_paced = bool(header.share)
        self.priority = header.priority  # now; the header keeps what it came with
        self.num_chunks = 0  # messages answered so far
        self.queued_us = 0  # until a worker took it, or it was refused
        self.served_us = 0  # from then on
        self.identity = identity
        self.client = client_of(identity)
        self.header = header
        self.key = (identity, header.request_id)
        self.num_bytes = num_bytes  # of the request
        self.deadline = deadline
        self.is_kept = True  # its reply, where it is small: BUSY is for this time only

    def run(self, handlers: Handlers, limits: Limits) -> None:
        """Runs the handler and sends what it answers, or goes on with that; an exception is an answer too."""
        if time.monotonic() > self.deadline:
            self.expire("its time had passed before work began" if self._chunks is None else self._too_slow())
            return
        if self._must_wait():
            return
        try:
            if self._chunks is None:
                self._begin(handlers, limits)
            if self._chunks is not None:
                self._send_chunks(limits)
        except BaseException as error:
            self._chunks = None
            self.fail(error)

    def _must_wait(self) -> bool:
        """Parks the job until it is its turn to send. Returns whether it was parked.

        A reply to a change is never parked: it has a few bytes, and all ranks may wait for it.
        """
        return not is_change(self.header.kind) and self._egress.park(self)

    def _begin(self, handlers: Handlers, limits: Limits) -> None:
        self._began = time.monotonic()
        try:
            header = self.header
            if header.priority != self.priority:  # raised meanwhile
                header = header._replace(priority=self.priority)
            message = wire.read_message(header, self._frames, limits)
        except wire.WireError as error:
            self.refuse(wire.MALFORMED, "WireError", str(error), event=f"malformed: {error.reason}")
            return
        self._frames = []
        answer = handlers[self.header.kind](Request(message, self.deadline, self._chunk_bytes))
        if isinstance(answer, Reply):
            self._send(self._frames_of(answer, True, limits), True)
        elif isinstance(answer, Future):
            answer.add_done_callback(lambda future: self._send_future(future, limits))
        elif isinstance(answer, Iterator):
            self._chunks = answer
        else:
            kind = kind_name(self.header.kind)
            raise TypeError(f"the handler of {kind} returned a {type(answer).__name__}, not a Reply")

    def _chunk_bytes(self, most: int) -> int:
        return self._egress.chunk_bytes(self, most)

    def fail(self, error: BaseException) -> None:
        facts = error.to_json() if isinstance(error, (ShardLost, TrainerLost)) else None
        is_value = isinstance(error, ValueError)
        self.refuse(
            wire.FAILED, type(error).__name__, str(error), event="handler raised", is_value=is_value, facts=facts
        )

    def expire(self, why: str) -> None:
        if self._egress.unpark(self):
            self._chunks = None  # the rest is not sent
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
        error = future.exception(timeout=0)  # not raised: it may be remembered, and would remember this job
        if error is not None:
            self.fail(error)
            return
        try:
            self._send(self._frames_of(future.result(timeout=0), True, limits), True)
        except BaseException as failure:
            self.fail(failure)

    def _send_chunks(self, limits: Limits) -> None:
        """Sends chunks until that was all, it is not this job's turn, or another job waits for a worker.

        After `park` and `resume` another thread may be here.
        """
        assert self._chunks is not None
        for chunk in self._chunks:
            is_last = chunk.last
            frames = self._frames_of(chunk, is_last, limits)
            self._send(frames, is_last)
            if is_last:
                self._chunks = None
                return
            del frames, chunk  # what is sent leaves the window when nobody holds it
            if time.monotonic() > self.deadline:
                self._chunks = None
                self.expire(self._too_slow())
                return
            if self._must_wait():
                return
            if self._outbound.is_awaited():
                self._outbound.resume(self)
                return
        self._chunks = None
        self._send(wire.encode(self._reply_header(num_chunks=self.num_chunks, flags=wire.END), (), None, limits), True)

    def _too_slow(self) -> str:
        return f"the reply was not taken in time, after {self.num_chunks} chunks"

    def _frames_of(self, reply: Reply, is_last: bool, limits: Limits) -> list[Buffer]:
        header = self._reply_header(num_chunks=self.num_chunks + 1 if is_last else 0)
        return wire.encode(header, reply.arrays, reply.options, limits)

    def _reply_header(self, *, status: int = wire.OK, num_chunks: int, flags: int = 0) -> Header:
        now = time.monotonic()
        began = now if self._began is None else self._began
        self.queued_us, self.served_us = int((began - self.arrived) * 1e6), int((now - began) * 1e6)
        return wire.reply_header(
            self.header, status=status, queued_us=self.queued_us, served_us=self.served_us, chunk=self.num_chunks,
            num_chunks=num_chunks, flags=flags,
        )  # fmt: skip

    def _send(self, frames: list[Buffer], is_last: bool) -> None:
        self.num_chunks += 1
        sealed = self._outbound.seal(self, frames)
        frames = countable(frames)
        if sealed is not None:
            sealed.frames[:] = countable(sealed.frames)
        is_sent = self._outbound.send(self, frames, sealed, is_last)
        sent = frames if sealed is None else sealed.frames
        self._egress.enter(
            self.peer, sent if is_sent else (), wire.num_bytes(frames), priority=self.priority, is_paced=self.is_paced,
            job=self,
        )  # fmt: skip
