"""Gradients that a rank leaves in memory for the server of its own machine: the message of a step says where they lie.

As a message they would be sealed, carried through the kernel and opened again, and a step has as many bytes as a batch
has rows. A rank lends memory for one step, and has it back when the step was applied. Where that is not sure, somebody
may still read it: it is then taken away, which says so in its header, and never written again.

Who reads it trusts nothing in it. Row numbers are copied before they are looked at, gradients are numbers whatever is
written there meanwhile, and the memory's size cannot change.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnnsys.comm import Request, UnnamedMemory
from gnnsys.store.capacity import pieces_of_lent_memory
from gnnsys.store.message_plan import read_plan
from gnnsys.store.rounds import Contribution
from gnnsys.store.table import Table

LEAST_BYTES = 1 << 16  # of gradients, below which a message is as good
_ALIGN = 64
_GROW = 1 << 20  # bytes by which a piece of memory is larger than asked for, and a quarter of it
_MOST_FREE = 8
_SWEEP_SECONDS = 10.0  # after which a server looks for memory that it need not keep
_KIND = "gradients"
_TAKEN_AWAY = 2  # a word of the memory's header
_PLAN_WIDTH = 4  # part, number of rows, where row numbers and gradients begin

StepItems = list[tuple[int, Tensor, Tensor]]  # part, row numbers in it, gradients


class Unreachable(ValueError):
    """A server cannot read the memory that a rank has lent it."""

    def __init__(self, pid: int) -> None:
        super().__init__(f"the gradients of process {pid} cannot be reached from here")


class Lender:
    """The memory that a rank lends to its machine's server, one piece for each step under way. Thread-safe.

    `is_read`: whether that server has said that it can read it. A forked child lends nothing.
    """

    def __init__(self) -> None:
        self.is_read = False
        self._free: list[UnnamedMemory] = []
        self._is_closed = False
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def lend(self, num_bytes: int) -> UnnamedMemory | None:
        """Memory for as many bytes; None where there is no more."""
        if not self._is_of_this_process:
            return None
        with self._lock:
            if self._is_closed:
                return None
            fitting = [memory for memory in self._free if memory.num_bytes >= num_bytes]
            if fitting:
                chosen = min(fitting, key=lambda memory: memory.num_bytes)
                self._free.remove(chosen)
                return chosen
            outgrown = [self._free.pop()] if self._free else []
        _take_away(outgrown)
        try:
            made = UnnamedMemory.create(_KIND, num_bytes + num_bytes // 4 + _GROW, reserve=True)
        except ValueError:
            return None
        weakref.finalize(made, _note_taken_away, made.header, self._pid).atexit = False  # where nobody ends its step
        return made

    def take_back(self, memory: UnnamedMemory, ok: bool = True) -> None:
        """Says that the step it was lent for has ended; `ok`: that it was applied, and nobody reads it any more."""
        if not self._is_of_this_process:
            return
        with self._lock:
            if ok and not self._is_closed and len(self._free) < _MOST_FREE:
                self._free.append(memory)
                return
        _take_away([memory])

    @contextmanager
    def probe(self, asks: bool) -> Iterator[dict[str, Any]]:
        """What a request says beside other things that `asks` a server whether it can read this process's memory."""
        memory, is_answered = self.lend(1) if asks else None, False
        try:
            yield {} if memory is None else {"memory": memory.address()}
            is_answered = True
        finally:
            if memory is not None:
                self.take_back(memory, is_answered)

    def close(self) -> None:
        """Frees what is not lent, and lends no more: what is lent is taken away when its step ends. Idempotent."""
        if not self._is_of_this_process:
            return
        with self._lock:
            self._is_closed = True
            free, self._free = self._free, []
        _take_away(free)

    def note_refusal(self, error: str) -> None:
        """`is_read` no longer, where the server's error is that it cannot read what this process has lent."""
        self.is_read = self.is_read and str(Unreachable(self._pid)) not in error

    @property
    def _is_of_this_process(self) -> bool:
        """Before the lock: a child may have been forked while another thread had it."""
        return os.getpid() == self._pid


class StepWriter:
    """Writes the gradients of one step into lent memory, and the plan that says where they are."""

    def __init__(self, memory: UnnamedMemory) -> None:
        self._memory, self._at = memory, 0
        self._plan: list[tuple[int, int, int, int]] = []

    @staticmethod
    def num_bytes(shapes: Iterable[tuple[int, int]]) -> int:
        """What rows of so many bytes take with their numbers, for every (rows, bytes of one)."""
        return sum(_aligned(8 * count) + _aligned(count * row_bytes) for count, row_bytes in shapes)

    def add(self, part: int, ids: Tensor, row_shape: tuple[int, ...]) -> Tensor:
        """Room for the gradients of these rows, to be written by the caller."""
        count, ids_at = ids.numel(), self._at
        self._memory.view(torch.int64, ids_at, count).copy_(ids)
        rows_at = ids_at + _aligned(8 * count)
        rows = self._memory.view(torch.float32, rows_at, count * math.prod(row_shape))
        self._at = rows_at + _aligned(rows.nbytes)
        self._plan.append((part, count, ids_at, rows_at))
        return rows.view(count, *row_shape)

    def plan(self) -> Tensor:
        return torch.tensor(self._plan, dtype=torch.int64, device="cpu").view(-1, _PLAN_WIDTH)


class Borrowed:
    """The memory that ranks have lent to a server, mapped once. Thread-safe.

    `call_later(seconds, callback)` is for sweeps: memory goes soon after its rank has taken it away, or has ended.
    """

    def __init__(self, call_later: Callable[[float, Callable[[], None]], None]) -> None:
        self._call_later = call_later
        self._known: OrderedDict[tuple[int, int, int], UnnamedMemory] = OrderedDict()
        self._most = pieces_of_lent_memory()
        self._is_sweeping = False
        self._lock = threading.Lock()

    def reaches(self, address: Any) -> bool:
        """Whether this process can read the memory at an address."""
        try:
            self._find(address)
        except ValueError:
            return False
        return True

    def bring(self, new: Contribution, request: Request, table: Table) -> None:
        """Adds what a rank brings to a step. Where it cannot be reached every rank is told, and none waits for it."""
        try:
            new.items = self.items(request, table)
        except Unreachable as error:
            new.problem = new.problem or str(error)

    def items(self, request: Request, table: Table) -> StepItems:
        """What a rank brings to a step of a table; ValueError where the request says nothing that could be.

        All of it is checked before anything is copied: no more than what the rank has lent.
        """
        memory, spec = self._find(request.options["memory"]), table.spec
        plan = read_plan(request.arrays, _PLAN_WIDTH)
        row_bytes = 8 + spec.row_size * torch.float32.itemsize
        if sum(count for _, count, _, _ in plan) * row_bytes > memory.num_bytes:
            raise ValueError(f"malformed request: its rows are not in a memory of {memory.num_bytes} bytes")
        found: StepItems = []
        for part, count, ids_at, rows_at in plan:
            table.writable_part(part)
            try:
                ids = memory.view(torch.int64, ids_at, count)
                rows = memory.view(torch.float32, rows_at, count * spec.row_size).view(count, *spec.row_shape)
            except ValueError as error:
                raise ValueError(f"malformed request: {error}") from error
            found.append((part, ids, rows))
        return [(part, ids.clone(), rows) for part, ids, rows in found]  # row numbers that are looked at are those used

    def sweep(self) -> None:
        """Lets go of what was taken away, or left by ranks that have ended; again later, while some is kept."""
        with self._lock:
            self._drop_unneeded()
            again = self._is_sweeping = bool(self._known)
        if again:
            self._call_later(_SWEEP_SECONDS, self.sweep)

    def close(self) -> None:
        """Lets go of all of it."""
        with self._lock:
            self._known.clear()

    def _find(self, address: Any) -> UnnamedMemory:
        if not isinstance(address, Mapping) or not all(type(address.get(key)) is int for key in ("pid", "fd", "token")):
            raise ValueError("malformed request: memory is named by pid, fd and token")
        key = address["pid"], address["fd"], address["token"]
        with self._lock:
            memory = self._known.get(key)
            if memory is None:
                memory = UnnamedMemory.open(_KIND, address)
                if memory is None:
                    raise Unreachable(address["pid"])
                self._drop_unneeded()
                while len(self._known) >= self._most:
                    self._known.popitem(last=False)
                self._known[key] = memory
            self._known.move_to_end(key)
            is_first, self._is_sweeping = not self._is_sweeping, True
        if is_first:
            self._call_later(_SWEEP_SECONDS, self.sweep)
        return memory

    def _drop_unneeded(self) -> None:
        for key, lent in list(self._known.items()):
            if lent.header[_TAKEN_AWAY] or lent.is_orphaned:
                del self._known[key]


def _take_away(memories: Iterable[UnnamedMemory]) -> None:
    """Has whoever mapped them let go of them; who reads one at this time reads on."""
    for memory in memories:
        if memory.is_owned:
            memory.header[_TAKEN_AWAY] = 1
            memory.close()


def _note_taken_away(header: np.ndarray[Any, np.dtype[np.int64]], pid: int) -> None:
    if os.getpid() == pid:
        header[_TAKEN_AWAY] = 1


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN
