"""What a process has pushed and not yet heard of: numbered, waited for, and given up where its fate is unknown.

What a shard refuses is raised once, to whoever waits first. What was lost leaves rows that nobody can name, and a gap
that later pushes would wait for: no other is sent until the tables it went to are loaded from a save or dropped.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from gnnsys.comm import Kind, ShardLost, TrainerLost
from gnnsys.store.machines import Machines, ShardReply
from gnnsys.store.pull import Refused
from gnnsys.store.push import Outgoing, PendingPush
from gnnsys.store.push_order import ANSWERED, Numbering
from gnnsys.store.spec import TableSpec

_UNDER_WAY = 64  # pushes to one table that may be
_UNDER_WAY_BYTES = 256 << 20  # of pushes to one machine, and one message more; well below what its server takes


class Outbox:
    """The pushes and steps of one process. `steps` are numbers of next steps, by table and machine. Thread-safe."""

    def __init__(self, machines: Machines, refused: Refused) -> None:
        self._machines, self._refused = machines, refused
        self._numbering = Numbering()
        self._pushes: dict[str, list[PendingPush]] = {}
        self._bytes: dict[int, deque[tuple[str, ShardReply, int]]] = {}  # by machine: table, push, bytes, oldest first
        self._lost: dict[str, Exception] = {}  # by table
        self._lock = threading.RLock()
        self.steps: dict[tuple[int, int], int] = {}

    @property
    def broken_stream(self) -> int | None:
        """The stream of pushes that has a gap; None while nothing was lost."""
        return self._numbering.stream if self._lost else None

    def send(
        self,
        spec: TableSpec,
        kind: Kind,
        messages: Iterable[Outgoing],
        options: dict[str, Any] | None = None,
        timeout: float | None = None,
    ) -> PendingPush:
        """Sends the messages of one push."""
        lost = next((error for error in self._lost.values() if isinstance(error, (ShardLost, TrainerLost))), None)
        if lost is not None:
            raise lost
        if self._lost:
            (first, error), names = next(iter(self._lost.items())), ", ".join(map(repr, self._lost))
            raise RuntimeError(
                f"an earlier push was lost, to table {first!r}, and nobody can say what its rows are: load tables from "
                f"a save, on every rank, or drop them: {names}. {error}"
            ) from error
        answers: list[ShardReply] = []
        ended: list[Callable[[bool], None]] = []
        try:
            for message in messages:
                if message.ended is not None:
                    ended.append(message.ended)
                if kind == Kind.PUSH:  # a step is answered once every rank has made it: nothing waits for that here
                    self._make_room(message.machine)
                with self._lock:  # numbers go out in the order they are given, and only what went out counts
                    self._send_one(spec, kind, message, options, timeout, answers)
        except Exception as error:
            for end in ended:
                end(False)
            if answers:  # one shard has its share and another does not
                self.lose(spec.name, error)
            raise
        return self._note(spec.name, PendingPush(spec, answers, self._refused, self.lose, ended))

    def _send_one(
        self, spec: TableSpec, kind: Kind, message: Outgoing, options: dict[str, Any] | None, timeout: float | None,
        answers: list[ShardReply],
    ) -> None:  # fmt: skip
        machine, arrays = message.machine, message.arrays
        step = (spec.number, machine)
        if message.options:
            options = {**(options or {}), **message.options}
        if kind == Kind.STEP:
            if step not in self.steps:
                raise ValueError(f"table {spec.name!r} was dropped or loaded while this step was being sent")
            options = {**(options or {}), "step": self.steps[step]}
        answered = self._numbering.answered(machine)
        if answered:
            options = {**(options or {}), ANSWERED: answered}
        sequence = self._numbering.next(machine)
        answers.append(self._machines.ask(machine, kind, arrays, options, sequence=sequence, timeout=timeout))
        self._numbering.sent(machine, answers[-1])
        if kind == Kind.STEP:
            self.steps[step] += 1
        else:
            num_bytes = sum(array.nbytes for array in arrays)
            self._bytes.setdefault(machine, deque()).append((spec.name, answers[-1], num_bytes))

    def _make_room(self, machine: int) -> None:
        """Waits for the oldest pushes to a machine while too many bytes are under way; each ends by its deadline."""
        while True:
            with self._lock:
                waiting = self._bytes.get(machine, deque())
                while waiting and waiting[0][1].done():
                    waiting.popleft()
                if sum(num_bytes for _, _, num_bytes in waiting) < _UNDER_WAY_BYTES:
                    return
                name, oldest, _ = waiting[0]
            try:
                oldest.result()
            except ValueError:
                pass  # refused, which whoever waits for it is told
            except Exception as error:  # and none behind it would be applied
                self.lose(name, error)
                raise
            with self._lock:
                if waiting and waiting[0][1] is oldest:
                    waiting.popleft()

    def lose(self, name: str, error: Exception) -> None:
        """Says that the fate of a push to a table is unknown."""
        with self._lock:
            self._lost.setdefault(name, error)

    def recover(self, name: str) -> None:
        """Says that a table's rows are known again; once those of all tables are, pushes begin anew."""
        if self._lost:
            self.settle(*list(self._pushes))  # what waited behind the lost one is lost with it
        with self._lock:
            if self._lost.pop(name, None) is not None and not self._lost:
                self._numbering = Numbering()

    def settle(self, *names: str) -> None:
        """Waits for pushes to tables that are replaced or lost: what they came to no longer matters."""
        for name in names:
            for push in self._pushes.pop(name, ()):
                push.settle()

    def wait(self, *names: str) -> None:
        """Waits for the pushes to tables; raises what was said against one, once, unless its caller has heard it."""
        if not any(map(self._pushes.get, names)):
            return
        with self._lock:
            under_way = [push for name in names for push in self._pushes.get(name, ())]
        untold = [push for push in under_way if push.settle() is not None and not push.is_told]
        with self._lock:
            for name in names:
                self._pushes[name] = [p for p in self._pushes.get(name, []) if p in untold[1:] or p not in under_way]
        if untold:
            untold[0].result()

    def wait_for_all(self) -> None:
        self.wait(*list(self._pushes))

    def forget_steps(self, number: int) -> None:
        """Has a table's steps counted anew."""
        with self._lock:
            for step in [step for step in self.steps if step[0] == number]:
                del self.steps[step]

    def _note(self, name: str, push: PendingPush) -> PendingPush:
        before = self._pushes.get(name, [])
        left = [p for p in before if not p.done() or (p.settle() is not None and not p.is_told)]
        with self._lock:
            came = [p for p in self._pushes.get(name, []) if p not in before]
            self._pushes[name] = [*left, *came, push]
        if len(left) >= _UNDER_WAY and left[0].settle() is not None and not left[0].is_told:
            left[0].result()
        return push
