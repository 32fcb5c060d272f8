"""Whom a process asks: the shard it holds itself, by a call, or a machine's server, by a message. One face for both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from torch import Tensor

from gnnsys.comm import Client, Reply, Request
from gnnsys.store.shard import Shard


class Received(Protocol):
    """What comes back: a message, or the reply of a handler that was called."""

    @property
    def arrays(self) -> Sequence[Tensor]: ...

    @property
    def options(self) -> dict[str, Any] | None: ...


class Answer(Protocol):
    """A reply that has come or will."""

    def result(self, timeout: float | None = None) -> Received: ...

    def chunks(self) -> Iterator[Received]: ...

    def done(self) -> bool: ...


class _Called:
    """The answer of a handler in this process."""

    def __init__(self, answer: Reply | Iterator[Reply] | Future[Reply], timeout: float) -> None:
        self._answer, self._timeout = answer, timeout

    def result(self, timeout: float | None = None) -> Received:
        if isinstance(self._answer, Future):
            return self._answer.result(self._timeout if timeout is None else timeout)
        assert isinstance(self._answer, Reply), "a reply in chunks is read with chunks()"
        return self._answer

    def chunks(self) -> Iterator[Received]:
        assert isinstance(self._answer, Iterator)
        return self._answer

    def done(self) -> bool:
        return not isinstance(self._answer, Future) or self._answer.done()


class Peers:
    """Asks machines; `local` is the shard of this process's own machine where the process holds it itself."""

    def __init__(self, client: Client | None, local: Shard | None, rank: int, incarnation: int, timeout: float) -> None:
        self._client, self._rank, self._incarnation, self._timeout = client, rank, incarnation, timeout
        self._local = local
        self._handlers = {} if local is None else local.handlers()

    def reaches(self, machine: int) -> bool:
        """Whether this machine can be asked at all."""
        return self.holds(machine) or (self._client is not None and machine in self._client.peers)

    def holds(self, machine: int) -> bool:
        """Whether this process holds the machine's shard itself."""
        return self._local is not None and self._local.machine == machine

    def ask(
        self, machine: int, kind: int, arrays: Sequence[Tensor] = (), options: dict[str, Any] | None = None, *,
        timeout: float | None = None, priority: int = 0, sequence: int = 0, batch: int = -1, layer: int = -1,
        path: int = 0,
    ) -> Answer:  # fmt: skip
        """Asks a machine and returns at once; a shard of this process answers in this call."""
        if self.holds(machine):
            wait = self._timeout if timeout is None else timeout
            request = Request.local(
                kind, arrays, options, timeout=wait, sender=self._rank, incarnation=self._incarnation,
                sequence=sequence, batch=batch, layer=layer,
            )  # fmt: skip
            return _Called(self._handlers[kind](request), wait)
        if self._client is None:
            raise ValueError(f"machine {machine} serves this, and this process was given no client to reach it with")
        return self._client.request(
            machine, kind, arrays, options, timeout=timeout, priority=priority, sequence=sequence, batch=batch,
            layer=layer, path=path,
        )  # fmt: skip
