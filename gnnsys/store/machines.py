"""The machines that serve a store's parts, and how a process asks them: one face for shards here and elsewhere.

`Machines` asks one machine: the shard that this process holds itself, by a call, or a machine's server, by a message.
`AllMachines` asks every one of them, to make, load, save or drop a table.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from torch import Tensor

from gnnsys.comm import Client, Kind, RemoteValueError, Reply, Request, ShardLost
from gnnsys.store.incarnation import forgotten
from gnnsys.store.shard import Shard

ORDER_SECONDS = 600.0  # to make, write or read a whole table
_MAKING_SECONDS, _LOOK_SECONDS = 3.0, 0.1  # between the first and the last machine that a rank makes a table on


class Received(Protocol):
    """What comes back: a message, or the reply of a handler that was called."""

    @property
    def arrays(self) -> Sequence[Tensor]: ...

    @property
    def options(self) -> dict[str, Any] | None: ...


class ShardReply(Protocol):
    """A reply that has come or will."""

    def result(self, timeout: float | None = None) -> Received: ...

    def chunks(self) -> Iterator[Received]: ...

    def done(self) -> bool: ...


class _CalledShard:
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


class Machines:
    """`local` is the shard of this process's own machine, where the process holds it itself."""

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

    def num_lanes(self, machine: int) -> int:
        """How many requests to a machine travel at once, each on a connection of its own."""
        return 1 if self._client is None or self.holds(machine) else self._client.lanes

    def ask(
        self, machine: int, kind: int, arrays: Sequence[Tensor] = (), options: dict[str, Any] | None = None, *,
        timeout: float | None = None, priority: int | None = None, sequence: int = 0, batch: int = -1,
        layer: int = -1, path: int | None = None, reply_bytes: int = 0,
    ) -> ShardReply:  # fmt: skip
        """Asks a machine and returns at once; a shard of this process answers in this call.

        `reply_bytes`: see `Client.request`.
        """
        if self.holds(machine):
            wait = self._timeout if timeout is None else timeout
            request = Request.local(
                kind, arrays, options, timeout=wait, sender=self._rank, incarnation=self._incarnation,
                sequence=sequence, batch=batch, layer=layer, priority=priority, path=path,
            )  # fmt: skip
            return _CalledShard(self._handlers[kind](request), wait)
        if self._client is None:
            raise ValueError(f"machine {machine} serves this, and this process was given no client to reach it with")
        return self._client.request(
            machine, kind, arrays, options, timeout=timeout, priority=priority, sequence=sequence, batch=batch,
            layer=layer, path=path, reply_bytes=reply_bytes,
        )  # fmt: skip

    def client_for(self, machine: int) -> Client | None:
        """What reaches a machine by messages; None where this process holds its shard itself, or has no client."""
        return None if self.holds(machine) else self._client


class AllMachines:
    """The machines of `machine_of_part`, in order."""

    def __init__(self, one: Machines, machine_of_part: Sequence[int]) -> None:
        self._one, self._machine_of_part = one, machine_of_part
        self.numbers = sorted(set(machine_of_part))

    def ask(
        self, kind: Kind, arrays: Sequence[Tensor], options: dict[str, Any], *, machines: Sequence[int] | None = None
    ) -> list[Any]:
        """Asks all of them at once, or some, and waits for what each says."""
        replies = []
        for machine in self.numbers if machines is None else machines:
            parts = [part for part, owner in enumerate(self._machine_of_part) if owner == machine]
            extra = {"parts": parts} if kind == Kind.CREATE else {}
            replies.append(self._one.ask(machine, kind, arrays, options | extra, timeout=ORDER_SECONDS))
        return [reply_of(reply) for reply in replies]

    def make(self, name: str, arrays: Sequence[Tensor], options: dict[str, Any]) -> list[Any]:
        """Has every machine make a table. The first machine decides its generation, for all ranks that ask."""
        first, *others = self.numbers
        options = {**options, "generation": secrets.randbits(62)}
        received = self.ask(Kind.CREATE, arrays, options, machines=[first])
        options |= {"generation": received[0].options["generation"], "existed": received[0].options.get("existed")}
        received += self._make_on_others(arrays, options, others)
        if any(r.options["generation"] != options["generation"] for r in received):
            if received[0].options["life"]:  # the others have had it since before this one's life
                raise forgotten(first, received[0].options["life_age"])
            raise ValueError(f"table {name!r} is being dropped or made by another rank at this time: let one do it")
        return received

    def _make_on_others(self, arrays: Sequence[Tensor], options: dict[str, Any], machines: Sequence[int]) -> list[Any]:
        """Retries for a while: a restarted shard refuses a table that the rank which makes it has not sent it yet."""
        until = time.monotonic() + _MAKING_SECONDS
        while True:
            try:
                return self.ask(Kind.CREATE, arrays, options, machines=machines)
            except ShardLost:
                if not options["existed"] or time.monotonic() > until:
                    raise
                time.sleep(_LOOK_SECONDS)


def reply_of(reply: ShardReply) -> Any:
    """What a machine says; its ValueError as one of ours."""
    try:
        return reply.result()
    except RemoteValueError as error:
        raise ValueError(str(error)) from error
