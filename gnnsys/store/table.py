"""One table in a shard: the rows of the parts this machine serves, and what orders whatever changes them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from gnnsys.store.message_plan import WIRE_DTYPES
from gnnsys.store.part_rows import PartRows
from gnnsys.store.push_order import Held
from gnnsys.store.rounds import Contribution, StepRounds
from gnnsys.store.row_optimizers import STATES, check_optimizer, make_step
from gnnsys.store.spec import TableSpec

_HOLD_SECONDS = 600.0


class Table:
    """Reads take no lock. Whoever changes rows has `lock` for that time, which is short.

    Whoever needs the rows to stay as they are, or to himself, for as long as a disk takes, holds the table (`held`). No
    thread waits for that: what comes meanwhile is parked (`park`), and called when the table is free. An optimizer's
    states share lock and holds of the table they belong to.
    """

    def __init__(
        self, spec: TableSpec, make_state: Callable[[Table, str, float], Table], of: Table | None = None
    ) -> None:
        self.spec = spec
        self.parts: dict[int, PartRows] = {}
        self.lock: threading.RLock = threading.RLock() if of is None else of.lock  # type: ignore[valid-type]
        self.init: dict[str, Any] | None = None  # how it was created; None: from files
        self.step_counts: dict[str, int] = {}  # by kind of optimizer
        self.states: dict[str, Table] = {}
        self.rounds = StepRounds(spec.name, self._apply_step)
        self._make_state = make_state
        self._holds: _Holds = _Holds(self.lock) if of is None else of._holds
        self._is_dropped = False

    @property
    def steps(self) -> int:
        """Steps that were applied, with gradients, by the optimizer that has made the most of them."""
        return max(self.step_counts.values(), default=0)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keeps others from changing the table; the holder may. Waits for a holder before."""
        self.hold(_HOLD_SECONDS)
        try:
            yield
        finally:
            self.release()

    def hold(self, seconds: float) -> None:
        """Holds the table until `release`; ValueError where somebody else does for longer than `seconds`."""
        if not self._holds.begin(seconds):
            raise ValueError(f"table {self.spec.name!r} was being saved, loaded or restored for too long")

    def release(self) -> None:
        self._holds.end()

    def park(self, callback: Callable[[], None]) -> bool:
        """Whether the table is held, and `callback` will be called when it is free."""
        with self.lock:
            return self.is_held and self._holds.park(callback)

    @property
    def is_held(self) -> bool:
        """With `lock`, as long as that is had: whether others must leave the rows alone."""
        return self._holds.is_held and not self._is_dropped

    def part(self, part: int) -> PartRows:
        """The rows of a part; ValueError where another machine has them."""
        rows = self.parts.get(part)
        if rows is None:
            raise ValueError(f"table {self.spec.name!r}: part {part} is not served here, only {sorted(self.parts)}")
        return rows

    def writable_part(self, part: int) -> PartRows:
        """The rows of a part that may change; ValueError for files."""
        rows = self.part(part)
        if not rows.writable:
            raise ValueError(
                f"table {self.spec.name!r} is mapped from the files of the parts and is never written: create a table "
                "of your own with store.create()"
            )
        if rows.dropped:
            raise ValueError(f"table {self.spec.name!r} was dropped")
        return rows

    def check_push(self, part: int, ids: Tensor, rows: Tensor) -> None:
        """ValueError where `push` would refuse these."""
        spec, mine = self.spec, self.writable_part(part)
        if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"ids of table {spec.name!r} must be int32 or int64 [n], got {ids.dtype}")
        floating = rows.dtype in WIRE_DTYPES and spec.dtype in WIRE_DTYPES
        if tuple(rows.shape) != (ids.numel(), *spec.row_shape) or (rows.dtype != spec.dtype and not floating):
            raise ValueError(f"rows do not fit table {spec.name!r}: {rows.dtype} {list(rows.shape)}")
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < mine.rows.shape[0]:
            raise ValueError(f"table {spec.name!r}: part {part} has {mine.rows.shape[0]} rows, not all of the ids")

    def push(self, part: int, ids: Tensor, rows: Tensor, *, add: bool) -> None:
        """Writes or adds rows, in order."""
        with self.lock:
            self.writable_part(part).update(ids, rows, add=add)

    def step(self, contribution: Contribution) -> None:
        """Brings a rank's gradients; the contribution's answer comes when all ranks' have been applied."""
        check_optimizer(contribution.optimizer)
        if self.spec.dtype != torch.float32:
            raise ValueError(f"table {self.spec.name!r} is {self.spec.dtype}; optimizers work on float32 rows")
        with self.lock:
            for part, _, _ in contribution.items:
                self.writable_part(part)
            self.rounds.add(contribution)

    def withdraw(self, contribution: Contribution, waited: float) -> None:
        """Gives up waiting for the other ranks."""
        with self.lock:
            self.rounds.withdraw(contribution, waited)

    def drop(self) -> None:
        """Tells everyone who reads or waits that the table is gone."""
        with self.lock:
            self._is_dropped = True
            self.rounds.close(ValueError(f"table {self.spec.name!r} was dropped"))
            for rows in self.parts.values():
                if rows.shared is not None:
                    rows.shared.drop()
        self._holds.wake()

    def set_steps(self, steps: int, states: Sequence[str]) -> None:
        """Says that the optimizers that keep these states have made so many steps, and no others any."""
        self.step_counts = {kind: steps for kind, of in STATES.items() if {*of} & {*states}}

    def state_tables(self, kind: str, initial: float = 0.0) -> list[Table]:
        """The states an optimizer keeps, made where they are missing."""
        return [self._make_state(self, name, initial) for name in STATES[kind]]

    def _apply_step(self, contributions: Sequence[Contribution]) -> dict[str, Any]:
        """One step of all ranks. Without a gradient of any rank it changes nothing, as with torch's own."""
        optimizer, ranks = contributions[0].optimizer, contributions[0].world_size
        for contribution in contributions:
            if contribution.problem is not None:
                raise ValueError(f"rank {contribution.rank}: {contribution.problem}. Nothing of this step was applied")
        if any(contribution.skip for contribution in contributions):
            return {"skipped": True}
        for contribution in contributions:  # all parts, before one is changed: a step is applied whole or not at all
            for part, ids, grads in contribution.items:
                self._check_gradients(contribution.rank, part, ids, grads)
        if not any(contribution.is_gradient for contribution in contributions):
            return {}
        kind = optimizer["kind"]
        states = self.state_tables(kind, optimizer.get("initial", 0.0))
        count = self.step_counts.get(kind, 0) + 1
        step = make_step(optimizer, count, ranks)
        for part, rows in self.parts.items():
            mine = [(ids, grads) for c in contributions for p, ids, grads in c.items if p == part and ids.numel()]
            if mine:
                step(rows, [s.part(part) for s in states], [ids for ids, _ in mine], [grads for _, grads in mine])
        if states:  # what keeps none does the same in every step
            self.step_counts[kind] = count
        return {}

    def _check_gradients(self, rank: int, part: int, ids: Tensor, grads: Tensor) -> None:
        """ValueError where the optimizer's kernels would refuse these."""
        try:
            self.check_push(part, ids, grads)
            if grads.dtype != self.spec.dtype:
                raise ValueError(f"gradients of table {self.spec.name!r} must be {self.spec.dtype}, got {grads.dtype}")
        except ValueError as error:
            raise ValueError(f"rank {rank}: {error}. Nothing of this step was applied") from error


@contextmanager
def free(tables: Iterable[Table]) -> Iterator[None]:
    """Has the locks of tables; Held where somebody holds one of them."""
    with ExitStack() as locks:
        for table in sorted({table.spec.number: table for table in tables}.values(), key=lambda t: t.spec.number):
            locks.enter_context(table.lock)
            if table.is_held:
                raise Held(table.park)
        yield


class _Holds:
    """Who holds a table, one at a time, and what waits for its end."""

    def __init__(self, lock: Any) -> None:
        self._changed = threading.Condition(lock)
        self.is_held = False
        self._parked: list[Callable[[], None]] = []

    def begin(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        with self._changed:
            while self.is_held:
                if not self._changed.wait(deadline - time.monotonic()) and self.is_held:
                    return False
            self.is_held = True
            return True

    def end(self) -> None:
        with self._changed:
            self.is_held = False
            self._changed.notify()
        self.wake()

    def park(self, callback: Callable[[], None]) -> bool:
        with self._changed:
            if self.is_held:
                self._parked.append(callback)
            return self.is_held

    def wake(self) -> None:
        """Calls what is parked, in a thread of its own: who ends a hold has other things to do."""
        with self._changed:
            parked, self._parked = self._parked, []

        def call() -> None:
            for callback in parked:
                callback()

        if parked:
            threading.Thread(target=call, name="gnnsys-released", daemon=True).start()
