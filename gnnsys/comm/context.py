"""Whose traffic a message is: the batch and the loader it belongs to, its priority and its path.

The loader says it once, around a stage, and every request that the stage makes in this thread carries it: those of the
graph, of the tables, and of a user's own sampler. So no function in between has to pass it on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

MAX_LOADER = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What the header of a request says besides what is asked. The defaults say nothing.

    `batch` is the batch number: the position counted across epochs, -1 where the message belongs to no batch. `loader`
    tells the loaders of a process apart, 0 is none. A server answers smaller `priority` first. `path` is the number of
    a route, for a policy that chooses between several. None: the client's own, which is 0 unless `gnnsys.open` was
    given another.

    >>> with use_context(RequestContext(batch=7, loader=1)):
    ...     current_context().batch
    7
    """

    batch: int = -1
    loader: int = 0
    priority: int | None = None
    path: int | None = None

    def __post_init__(self) -> None:
        limits = {"batch": (-1, 1 << 62), "loader": (0, MAX_LOADER), "priority": (-(1 << 31), (1 << 31) - 1)}
        for name, (low, high) in (limits | {"path": (0, (1 << 32) - 1)}).items():
            value = getattr(self, name)
            if value is None and name in ("priority", "path"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ValueError(f"{name} must be a whole number from {low} to {high}, got {value!r}")

    def outside(self) -> RequestContext:
        """The same where it belongs to no batch and no loader, else nothing: their loop may have ended meanwhile."""
        return self if self.batch < 0 and not self.loader else RequestContext()

    def at(self, batch: int) -> RequestContext:
        """The same for another batch; a negative number is none."""
        return replace(self, batch=max(-1, batch))


def first_given(*values: int | None) -> int:
    """The first that is not None; 0 where nobody gave one."""
    return next((value for value in values if value is not None), 0)


_NOTHING = RequestContext()
_current: ContextVar[RequestContext] = ContextVar("gnnsys_request_context", default=_NOTHING)


def current_context() -> RequestContext:
    """What requests of this thread say now."""
    return _current.get()


def set_context(context: RequestContext) -> RequestContext:
    """Has requests of this thread say `context` from now on; returns what they said before."""
    before = _current.get()
    _current.set(context)
    return before


@contextmanager
def use_context(context: RequestContext) -> Iterator[None]:
    """Requests of this thread say `context` inside the `with`."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)
