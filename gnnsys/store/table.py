"""One table in a shard: the rows of the parts this machine serves, and the one lock that orders what changes them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gnnsys.store.optimize import STATES, check_optimizer, make_step
from gnnsys.store.rounds import Contribution, Rounds
from gnnsys.store.rows import PartRows
from gnnsys.store.spec import TableSpec
from gnnsys.store.wire import WIRE_DTYPES


class Table:
    """Reads take no lock; whoever changes rows, saves or drops them holds `lock`."""

    def __init__(self, spec: TableSpec, make_state: Callable[[TableSpec, Sequence[int], float], Table]) -> None:
        self.spec = spec
        self.parts: dict[int, PartRows] = {}
        self.lock = threading.RLock()
        self.init: dict[str, Any] | None = None  # how it was created; None: from files
        self.steps = 0
        self.states: dict[str, Table] = {}
        self.rounds = Rounds(spec.name, self._apply_step)
        self._make_state = make_state

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
            self.rounds.close(ValueError(f"table {self.spec.name!r} was dropped"))
            for rows in self.parts.values():
                if rows.shared is not None:
                    rows.shared.drop()

    def state_tables(self, kind: str, initial: float = 0.0) -> list[Table]:
        """The states an optimizer keeps, made where they are missing."""
        for name in STATES[kind]:
            if name not in self.states:
                spec = self.spec.like(f"{self.spec.name}/{name}", torch.float32)
                self.states[name] = self._make_state(spec, sorted(self.parts), initial)
        return [self.states[name] for name in STATES[kind]]

    def _apply_step(self, contributions: Sequence[Contribution]) -> None:
        optimizer, ranks = contributions[0].optimizer, contributions[0].world_size
        for contribution in contributions:  # all parts, before one is changed: a step is applied whole or not at all
            for part, ids, grads in contribution.items:
                self._check_gradients(contribution.rank, part, ids, grads)
        states = self.state_tables(optimizer["kind"], optimizer.get("initial", 0.0))
        step = make_step(optimizer, self.steps + 1, ranks)
        for part, rows in self.parts.items():
            mine = [(ids, grads) for c in contributions for p, ids, grads in c.items if p == part and ids.numel()]
            if mine:
                step(rows, [s.part(part) for s in states], [ids for ids, _ in mine], [grads for _, grads in mine])
        self.steps += 1

    def _check_gradients(self, rank: int, part: int, ids: Tensor, grads: Tensor) -> None:
        """ValueError where the optimizer's kernels would refuse these."""
        try:
            self.check_push(part, ids, grads)
            if grads.dtype != self.spec.dtype:
                raise ValueError(f"gradients of table {self.spec.name!r} must be {self.spec.dtype}, got {grads.dtype}")
        except ValueError as error:
            raise ValueError(f"rank {rank}: {error}. Nothing of this step was applied") from error
