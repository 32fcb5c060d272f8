"""Each push is applied once, in the order its sender made them, however often its message comes.

A sender numbers what it pushes to a machine, 0, 1, 2, ..., in the low half of the message's sequence number; the high
half tells apart the streams of one process (it may have opened several graphs). A push that comes before its
predecessors waits for them; one that comes again gets the answer of the first time. What is remembered is a window per
sender, not its history. A push says how many before it were answered: those are forgotten, and a shard that knows
nothing of them is not the one that applied them.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from gnnsys.comm import Reply, Request

ANSWERED = "answered"  # the option of a push that says how many before it were

_WINDOW = 4096  # answers that are remembered, and pushes that may wait, per sender
_SENDERS = 4096
_LOOK_SECONDS = 5.0
_WAITING_BYTES = 1 << 30  # of pushes that came before their predecessors, of all senders
_STREAM_SHIFT = 32

Apply = Callable[[], "Future[Reply] | Reply"]


class Held(Exception):
    """A push cannot be applied now, and has changed nothing. `park(callback)`: whether it is called when it can be."""

    def __init__(self, park: Callable[[Callable[[], None]], bool]) -> None:
        super().__init__("a table is held")
        self.park = park


class SentPush(Protocol):
    """A push that was sent; `done` once its reply has come."""

    def done(self) -> bool: ...


class Numbering:
    """The sequence numbers of one stream of pushes, from the side that makes them: one count per machine."""

    def __init__(self) -> None:
        self.stream = secrets.randbits(63 - _STREAM_SHIFT)
        self._next: dict[int, int] = {}
        self._unanswered: dict[int, deque[SentPush]] = {}

    def next(self, machine: int) -> int:
        """The number of the next push to a machine; the same again until one was `sent`."""
        return (self.stream << _STREAM_SHIFT) | self._next.get(machine, 0)

    def sent(self, machine: int, answer: SentPush) -> None:
        """The next push went out, and the one after it has its turn."""
        self._next[machine] = self._next.get(machine, 0) + 1
        self._unanswered.setdefault(machine, deque()).append(answer)

    def answered(self, machine: int) -> int:
        """How many pushes to a machine were answered, without a gap."""
        waiting = self._unanswered.get(machine)
        while waiting and waiting[0].done():
            waiting.popleft()
        return self._next.get(machine, 0) - len(waiting or ())


class PushOrder:
    """The pushes of all senders; a sender that was restarted (another incarnation) begins anew.

    `forgot` makes the error for a stream whose beginning is not known here.
    """

    def __init__(
        self, window: int = _WINDOW, max_senders: int = _SENDERS, max_waiting_bytes: int = _WAITING_BYTES,
        forgot: Callable[[], Exception] | None = None,
    ) -> None:  # fmt: skip
        self._window, self._max_senders, self._forgot = window, max_senders, forgot or _too_many
        self._room = _Room(max_waiting_bytes)
        self._next_look = 0.0
        self._senders: OrderedDict[tuple[int, int, int], _Sender] = OrderedDict()  # least recently heard of first
        self._lock = threading.Lock()

    def submit(self, request: Request, apply: Apply) -> Future[Reply]:
        """Applies `apply` in its turn, in this call or in a later one of the same sender."""
        stream, number = divmod(request.sequence, 1 << _STREAM_SHIFT)
        now = time.monotonic()
        if now > self._next_look or self._room.is_full:
            self._next_look = now + _LOOK_SECONDS
            self._drop_overdue(now)
        return self._sender(request, stream).submit(number, _Early(apply, request), request.options.get(ANSWERED, 0))

    def end(self, request: Request, stream: int) -> None:
        """Applies nothing more of a stream: its sender has lost a push, and begins another one."""
        self._sender(request, stream).end()

    def _drop_overdue(self, now: float) -> None:
        """Ends streams whose early pushes nobody waits for any more: they would hold their rows for ever."""
        with self._lock:
            senders = list(self._senders.values())
        for sender in senders:
            sender.end(before=now)

    def _sender(self, request: Request, stream: int) -> _Sender:
        key = (request.sender, request.incarnation, stream)
        with self._lock:
            sender = self._senders.get(key)
            if sender is None:
                if request.options.get(ANSWERED, 0):
                    raise self._forgot()
                sender = self._senders[key] = _Sender(self._window, self._room)
            self._senders.move_to_end(key)
            forgotten = self._senders.popitem(last=False)[1] if len(self._senders) > self._max_senders else None
        if forgotten is not None:
            forgotten.end()
        return sender


class _Room:
    """Bytes of what waits for its predecessors: nobody may fill memory with pushes that never have their turn."""

    def __init__(self, max_bytes: int) -> None:
        self._bytes, self._max_bytes = 0, max_bytes
        self._lock = threading.Lock()

    @property
    def is_full(self) -> bool:
        return self._bytes >= self._max_bytes

    def change(self, num_bytes: int) -> None:
        with self._lock:
            self._bytes += num_bytes


class _Early:
    """A push that may have to wait, what it holds, and until when somebody waits for its answer."""

    def __init__(self, apply: Apply, request: Request) -> None:
        self.apply, self.deadline = apply, request.deadline
        self.num_bytes = sum(array.nbytes for array in request.arrays)  # that count: see `submit`


class _Sender:
    def __init__(self, window: int, room: _Room) -> None:
        self._window, self._room = window, room
        self._next = 0
        self._waiting: dict[int, _Early] = {}
        self._answers: OrderedDict[int, Future[Reply]] = OrderedDict()
        self._lock = threading.Lock()
        self._is_ended = False

    def end(self, before: float | None = None) -> None:
        """Applies nothing more, and fails what waits; with `before`, only where somebody has stopped waiting for it."""
        with self._lock:
            if before is not None and all(early.deadline >= before for early in self._waiting.values()):
                return
            self._is_ended = True
            for number, early in self._waiting.items():
                self._room.change(-early.num_bytes)
                self._answers[number].set_exception(_ended(number))
            self._waiting.clear()

    def submit(self, sequence: int, early: _Early, answered: object = 0) -> Future[Reply]:
        with self._lock:
            if isinstance(answered, int):
                self._forget(min(answered, self._next))
            known = self._answers.get(sequence)
            if known is not None:
                return known
            if self._is_ended:
                raise _ended(sequence)
            if sequence < self._next:
                raise RuntimeError(
                    f"push {sequence} was applied too long ago to say more: the next one is {self._next}"
                )
            if sequence >= self._next + self._window:
                raise ValueError(f"push {sequence} is too far ahead of {self._next}, which has not come yet")
            if sequence == self._next or self._next in self._waiting:
                early.num_bytes = 0  # none before it is missing: if it waits, it is for a table that is held
            elif self._room.is_full:
                raise RuntimeError(f"push {sequence} must wait for {self._next}, and too many bytes wait already")
            answer = self._answers[sequence] = Future()
            self._waiting[sequence] = early
            self._room.change(early.num_bytes)
            if sequence == self._next:
                self._run_waiting()
            while len(self._answers) > 2 * self._window:
                self._answers.popitem(last=False)
            return answer

    def go_on(self) -> None:
        """The next push, which could not be applied when it had its turn, can be now."""
        with self._lock:
            self._run_waiting()

    def _run_waiting(self) -> None:
        while self._next in self._waiting:
            turn = self._waiting[self._next]
            if not self._run(self._answers[self._next], turn.apply):
                return
            del self._waiting[self._next]
            self._room.change(-turn.num_bytes)
            self._next += 1

    def _forget(self, answered: int) -> None:
        """Forgets answers that the sender has: nobody asks for them again, and two kilobytes each add up."""
        while self._answers and (oldest := next(iter(self._answers))) < answered:
            del self._answers[oldest]

    def _run(self, answer: Future[Reply], apply: Apply) -> bool:
        """Whether the push had its turn. If not, the table it is for is held: `go_on` is called when it is free."""
        while True:
            try:
                done = apply()
            except Held as held:
                if held.park(self.go_on):
                    return False
                continue  # it is free meanwhile
            except Exception as error:  # the sender's: it gets it as its answer, and the next push has its turn
                answer.set_exception(_bare(error))
                return True
            if isinstance(done, Reply):
                answer.set_result(done)
            else:
                done.add_done_callback(lambda future: _pass_on(future, answer))
            return True


def _too_many() -> RuntimeError:
    return RuntimeError("this sender's pushes before are not known here any more: too many others have pushed since")


def _ended(number: int) -> RuntimeError:
    return RuntimeError(f"push {number} came after its sender had given it up for lost")


def _pass_on(done: Future[Reply], answer: Future[Reply]) -> None:
    error = done.exception()
    if error is not None:
        answer.set_exception(_bare(error))
    else:
        answer.set_result(done.result())


def _bare(error: BaseException) -> BaseException:
    """Without the frames it passed through: an answer is remembered, and they hold the rows that were pushed."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
