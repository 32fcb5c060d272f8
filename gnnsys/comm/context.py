"""Whose traffic a message is: the batch and the loader it belongs to, its priority and its path.

The loader says it once, around a stage, and every request that the stage makes in this thread carries it: those of the
graph, of the tables, and of a user's own sampler. So no function in between has to pass it on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from gnnsys.comm.urgency import AHEAD, WAITED, need_of, user_of, user_priority
from gnnsys.comm.wire import Header

MAX_LOADER = (1 << 32) - 1


class Consumer:
    """Who uses a loader's batches. `wanted` is the number of the batch that it waits for or uses, -1 before the first.

    The loader's own thread writes it, threads that make batches read it.
    """

    __slots__ = ("wanted",)

    def __init__(self, wanted: int = -1) -> None:
        self.wanted = wanted


class Raiser(Protocol):
    """A client."""

    def raise_batch(self, loader: int, batch: int) -> None: ...


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What the header of a request says besides what is asked. The defaults say nothing.

    `batch` is the batch number: the position counted across epochs, -1 where the message belongs to no batch. `loader`
    tells the loaders of a process apart, 0 is none. A server answers the smaller `priority` first, and equal ones by
    urgency (`gnnsys/comm/urgency.py`). `path` is the number of a route, for a policy that chooses between several.
    None: the client's own, which is 0 unless `gnnsys.open` was given another. `consumer` uses the loader's batches; if
    it is None, the thread that makes the request waits for the reply.

    >>> with use_context(RequestContext(batch=7, loader=1)):
    ...     current_context().batch
    7
    """

    batch: int = -1
    loader: int = 0
    priority: int | None = None
    path: int | None = None
    consumer: Consumer | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        user_priority(self.priority)
        limits = {"batch": (-1, 1 << 62), "loader": (0, MAX_LOADER), "path": (0, (1 << 32) - 1)}
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if value is None and name == "path":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ValueError(f"{name} must be a whole number from {low} to {high}, got {value!r}")

    @classmethod
    def of_header(cls, header: Header) -> RequestContext:
        """What who serves a request says in requests of its own that it makes for it."""
        consumer = Consumer(header.batch if need_of(header.priority) == WAITED else -1)
        return cls(header.batch, header.loader, user_of(header.priority), header.path, consumer)

    @property
    def need(self) -> int:
        """AHEAD if the consumer has not asked for this batch yet, else WAITED. WAITED without a consumer."""
        return WAITED if self.consumer is None or self.batch <= self.consumer.wanted else AHEAD

    def await_batch(self, batch: int, clients: Iterable[Raiser], waits: bool) -> None:
        """The consumer asks for a batch; `waits`: it is not there yet. `clients` have asked peers for what it needs."""
        if self.consumer is not None:
            self.consumer.wanted = batch
        for client in clients if waits else ():
            client.raise_batch(self.loader, batch)

    def at(self, batch: int) -> RequestContext:
        """The same for another batch; a negative number is none."""
        return replace(self, batch=max(-1, batch))


def first_given(*values: int | None) -> int:
    """The first that is not None; 0 where nobody gave one."""
    for value in values:
        if value is not None:
            return value
    return 0


_NOTHING = RequestContext()
_current: ContextVar[RequestContext] = ContextVar("gnnsys_request_context", default=_NOTHING)


def current_context() -> RequestContext:
    """What requests of this thread say now."""
    return _current.get()


@contextmanager
def use_context(context: RequestContext) -> Iterator[None]:
    """Requests of this thread say `context` inside the `with`."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


class BatchLoop:
    """A loop over a loader's batches: requests that this thread makes while a batch is used are of that batch.

    Loops may be nested, begin and end in any order, and be left early. A loop that ends gives the thread back to the
    one it began in, at the batch that one is at now; where that is over too, to what was said before it.

    >>> train = BatchLoop()
    >>> train.use(RequestContext(batch=7, loader=1))
    >>> evaluate = BatchLoop()
    >>> evaluate.use(RequestContext(batch=0, loader=2))
    >>> evaluate.leave()
    >>> current_context().batch
    7
    >>> train.leave()
    """

    def __init__(self) -> None:
        self._said: RequestContext | None = None
        self._is_over = False
        said, loop = _current.get(), _loop.get()
        while loop is not None and loop._is_over and loop._said is not said:
            loop = loop._before.loop
        self._before: _Before = _Before(said, loop, loop is not None and loop._said is said).now()

    def use(self, said: RequestContext) -> None:
        """Has requests of this thread say `said` from now on: the loop is at its next batch."""
        self._said = said
        _current.set(said)
        _loop.set(self)

    def leave(self) -> None:
        """The loop is over. Idempotent; from another thread it only says so."""
        self._is_over = True
        before = self._before.now()
        if self._said is not None and _current.get() is self._said:
            outer = before.loop._said if before.loop is not None and before.is_its else None
            _current.set(before.said if outer is None else outer)
            _loop.set(before.loop)
        self._before = before.cut()


class _Before(NamedTuple):
    """What was said when a loop began, the loop that the thread was in, and whether that loop had said it."""

    said: RequestContext
    loop: BatchLoop | None
    is_its: bool

    def now(self) -> _Before:
        """What to go back to: a loop that is over goes back to what was before it."""
        before = self
        while before.is_its and before.loop is not None and before.loop._is_over:
            before = before.loop._before
        return before

    def cut(self) -> _Before:
        """The same for a loop that is over itself. It keeps no other such loop alive, or each epoch would keep the one
        before it."""
        if self.is_its:
            return self
        loop = self.loop
        while loop is not None and loop._is_over:
            loop = loop._before.loop
        return self._replace(loop=loop)


_loop: ContextVar[BatchLoop | None] = ContextVar("gnnsys_batch_loop", default=None)
