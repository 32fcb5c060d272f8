"""A request on its way: what the caller waits on.

Whoever reads the socket puts frames in: the client's thread, or a caller that waits. The thread that waits makes arrays
of them and uses them (a scatter, say), so that a slow one does not hold up the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from gnnsys.comm import this_process, wire
from gnnsys.comm.arrays import ReceivedFrame
from gnnsys.comm.errors import (
    Closed,
    CommError,
    DeadlineExceeded,
    RemoteError,
    RemoteValueError,
    ShardLost,
    error_from_reply,
)
from gnnsys.comm.kinds import kind_name
from gnnsys.comm.sockets import WakeUp
from gnnsys.comm.wire import Buffer, Header, Limits, Message

_GRACE_SECONDS = 5.0  # beyond the deadline, which the sockets' thread keeps: for when that thread is gone

Arrival = tuple[Header, Sequence[ReceivedFrame]]
_NOTHING = object()
_CHUNKS, _ONE, _END = slice(19, 21), (0, 1), wire.END  # chunk and num_chunks of a header, and of a reply of one message


class Asker(Protocol):
    """Who made the request: the client."""

    def read_for(self, pending: Pending, until: float) -> None:
        """Reads in this thread until something has come for `pending`, where nobody else does."""
        ...

    def describe_timeout(self, pending: Pending) -> str: ...


class Pending:
    """The reply to one request, now or later. `result` for one message, `chunks` for a reply in several."""

    # How a request begins; what it is like now is the object's own.
    wake_up: WakeUp | None = None  # of the caller that waits for it and reads
    resent = 0
    num_received = 0  # bytes of a reply in several messages
    num_refused = 0  # how often the peer had no room for it
    refusal = ""  # what it said then
    _complete = False  # everything was put in
    _ended = False  # everything was taken out
    _put_back: Any = _NOTHING  # what `arrival` took and left to others
    _seen: set[int] | None = None
    _total = 0
    _error: CommError | None = None

    def __init__(
        self, peer: int, kind: int, request_id: int, connection: Any, frames: list[Buffer], timeout: float,
        limits: Limits, asker: Asker, load: int = 0, said: tuple[int, int, int] = (0, -1, 0),
    ) -> None:  # fmt: skip
        self.peer = peer
        self.kind = kind
        self.request_id = request_id
        self.connection = connection
        self.frames = frames  # kept for sending them again, until the reply is complete
        self.load = load  # bytes, of the request and of its reply as far as that is known
        self.loader, self.batch, self.priority = said
        self.timeout = timeout
        self.sent_at = self.last_sign = now = time.monotonic()  # for the first time; when something was heard of it
        self.deadline = now + timeout
        self._limits = limits
        self._asker = asker
        self._arrivals: SimpleQueue[Arrival | CommError | None] = SimpleQueue()  # None: that was all
        self._messages: list[Message] = []
        self._lock = threading.Lock()  # of `result`
        self._pid = this_process.pid

    def done(self) -> bool:
        """Whether the whole reply, or an error, has arrived."""
        return self._complete

    @property
    def count_arrivals(self) -> Callable[[], int]:
        """Counts what is there to be taken out."""
        return self._arrivals.qsize

    def result(self, timeout: float | None = None) -> Message:
        """The reply. Waits until the request's deadline, or for `timeout` seconds if that is sooner (TimeoutError)."""
        limit = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            if self._error is not None:
                raise self._error
            try:
                for message in self._receive(limit):
                    self._messages.append(message)
            except CommError as error:
                self._error = error
                raise
            if len(self._messages) != 1:
                raise ValueError(
                    f"the reply to {kind_name(self.kind)} came in {len(self._messages)} chunks: read it with chunks()"
                )
            return self._messages[0]

    def arrival(self) -> Arrival | None:
        """A reply of one message as it came, unread; once, by one thread.

        None where it is another: then read it with `chunks`.
        """
        arrival = self._take(None)
        if isinstance(arrival, tuple) and arrival[0].status == wire.OK and _is_single(arrival[0]):
            self._ended = True
            return arrival
        self._put_back = arrival
        return None

    def read(self, arrival: Arrival) -> Message:
        """What `arrival` returned, read."""
        return wire.read_message(*arrival, self._limits)

    def chunks(self, timeout: float | None = None) -> Iterator[Message]:
        """The messages of a reply in the order of arrival, each as soon as it is there; once, by one thread.

        TimeoutError where all of them have not come within `timeout` seconds; what has not is then let go.
        """
        return self._receive(None if timeout is None else time.monotonic() + timeout)

    # Whoever reads the socket

    def is_ended_by(self, header: Header) -> bool:
        """Whether a message is all that there is to the reply: then call `finish`, otherwise `deliver`."""
        return header.status != wire.OK or (self._seen is None and header[_CHUNKS] == _ONE and not header.flags & _END)

    def deliver(self, header: Header, frames: Sequence[ReceivedFrame], now: float) -> bool:
        """Takes one message of the reply; True where it was the last one missing. A repeated chunk is dropped."""
        self.last_sign = now
        if self._seen is None:
            self._seen = set()
        self._total = max(self._total, header.num_chunks)
        ended = header.flags & wire.END
        if not ended and header.chunk not in self._seen:
            self._seen.add(header.chunk)
            self._put((header, frames))
        if not (ended or self._total) or len(self._seen) < self._total:
            return False
        self.finish(None)
        return True

    def fail(self, error: CommError) -> None:
        self.finish(error)

    def finish(self, last: Arrival | CommError | None) -> None:
        self._complete = True
        self.frames = []
        self._put(last)  # one entry, so that the waiting thread is woken once

    def _put(self, arrival: Arrival | CommError | None) -> None:
        self._arrivals.put(arrival)
        if self.wake_up is not None:
            self.wake_up.wake()

    # The thread that waits

    def _receive(self, limit: float | None) -> Iterator[Message]:
        while not self._ended:
            arrival, self._put_back = self._put_back, _NOTHING
            if arrival is _NOTHING:
                arrival = self._take(limit)
            self._ended = arrival is None or isinstance(arrival, CommError)
            if arrival is None:
                return
            if isinstance(arrival, CommError):
                raise arrival
            header, frames = arrival
            self._ended = header.status != wire.OK or _is_single(header)
            message = wire.read_message(header, frames, self._limits)
            if header.status != wire.OK:
                raise self._remote_error(message)
            yield message

    def _take(self, limit: float | None) -> Any:
        if self._pid != this_process.pid:
            raise CommError("this request was made before a fork; only the process that made it receives the reply")
        arrivals = self._arrivals
        end = self.deadline + _GRACE_SECONDS
        until = end if limit is None or limit > end else limit
        if arrivals.empty():
            self._asker.read_for(self, until)
        try:
            return arrivals.get(timeout=0.0 if arrivals.qsize() else max(0.0, until - time.monotonic()))
        except Empty:
            if limit is not None and limit < end:
                raise TimeoutError(f"{kind_name(self.kind)} to machine {self.peer} is still outstanding") from None
            raise DeadlineExceeded(self._asker.describe_timeout(self)) from None

    def _remote_error(self, message: Message) -> CommError:
        remote_type = str(message.options.get("type", "Error"))
        remote_text = str(message.options.get("text", ""))
        kind = kind_name(self.kind)
        if message.status == wire.EXPIRED:
            return DeadlineExceeded(f"{self._asker.describe_timeout(self)} (machine {self.peer} says: {remote_text})")
        if remote_type == Closed.__name__:  # it ended, with its leader perhaps, and is no more than the silence to come
            why = f"machine {self.peer}'s shard was closed while {kind} waited: look at its output"
            return ShardLost(f"{why}, and start again from the last checkpoint", machine=self.peer)
        facts = message.options.get("facts")
        if isinstance(facts, dict):
            told = error_from_reply(remote_type, remote_text, facts, rank=message.sender)
            if told is not None:
                return told
        is_value = remote_type == "ValueError" or message.options.get("is_value_error") is True
        error = RemoteValueError if is_value else RemoteError
        text = f"{kind} on machine {self.peer} raised {remote_type}: {remote_text}"
        return error(text, peer=self.peer, kind=kind, remote_type=remote_type, remote_text=remote_text)


def _is_single(header: Header) -> bool:
    return header[_CHUNKS] == _ONE and not header.flags & _END
