"""Gradients that a rank leaves in memory for the server of its own machine: the message of a step says where they lie.

As a message they would be sealed, carried through the kernel and opened again, and a step has as many bytes as a batch
has rows. A rank lends memory for one step, and has it back with the step's answer.

Who reads it trusts nothing in it. Row numbers are copied before they are looked at, gradients are numbers whatever is
written there meanwhile, and the memory's size cannot change.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from gnnsys.comm import Request, UnnamedMemory
from gnnsys.store.message_plan import read_plan
from gnnsys.store.spec import TableSpec

LEAST_BYTES = 1 << 16  # of gradients, below which a message is as good
_ALIGN = 64
_GROW = 1 << 20  # bytes by which a piece of memory is larger than asked for, and a quarter of it
_MOST_FREE = 8
_MOST_BORROWED = 1024
_TAKEN_AWAY = 2  # a word of the memory's header
_PLAN_WIDTH = 4  # part, number of rows, where row numbers and gradients begin

StepItems = list[tuple[int, Tensor, Tensor]]  # part, row numbers in it, gradients


class Lender:
    """The memory that a rank lends, one piece for each step under way. Thread-safe."""

    def __init__(self) -> None:
        self._free: list[UnnamedMemory] = []
        self._lock = threading.Lock()

    def lend(self, num_bytes: int) -> UnnamedMemory | None:
        """Memory for as many bytes; None where there is no more."""
        with self._lock:
            fitting = [memory for memory in self._free if memory.num_bytes >= num_bytes]
            if fitting:
                chosen = min(fitting, key=lambda memory: memory.num_bytes)
                self._free.remove(chosen)
                return chosen
            outgrown = self._free.pop() if self._free else None
        _take_away([outgrown])
        try:
            return UnnamedMemory.create("gradients", num_bytes + num_bytes // 4 + _GROW, reserve=True)
        except ValueError:
            return None

    def take_back(self, memory: UnnamedMemory) -> None:
        """Says that nobody reads it any more."""
        with self._lock:
            if len(self._free) < _MOST_FREE:
                self._free.append(memory)
                return
        _take_away([memory])

    def close(self) -> None:
        """Frees what is not lent. Idempotent."""
        with self._lock:
            free, self._free = self._free, []
        _take_away(free)


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
    """The memory that ranks have lent to a server, mapped once. Thread-safe."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[int, int, int], UnnamedMemory] = OrderedDict()
        self._lock = threading.Lock()

    def reaches(self, address: Any) -> bool:
        """Whether this process can read the memory at an address."""
        try:
            self._find(address)
        except ValueError:
            return False
        return True

    def items(self, request: Request, spec: TableSpec) -> StepItems:
        """What a rank brings to a step of a table; ValueError where the request says nothing that could be."""
        memory = self._find(request.options["memory"])
        found: StepItems = []
        for part, count, ids_at, rows_at in read_plan(request.arrays, _PLAN_WIDTH):
            try:
                ids = memory.view(torch.int64, ids_at, count).clone()  # what is looked at is what is used
                rows = memory.view(torch.float32, rows_at, count * spec.row_size).view(count, *spec.row_shape)
            except ValueError as error:
                raise ValueError(f"malformed request: {error}") from error
            found.append((part, ids, rows))
        return found

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
            if memory is not None:
                self._known.move_to_end(key)
                return memory
            memory = UnnamedMemory.open(address)
            if memory is None:
                raise ValueError(f"the gradients of process {address['pid']} cannot be reached from here")
            for known, lent in list(self._known.items()):
                if lent.header[_TAKEN_AWAY] or lent.is_orphaned:
                    del self._known[known]
            while len(self._known) >= _MOST_BORROWED:
                self._known.popitem(last=False)
            self._known[key] = memory
            return memory


def _take_away(memories: Iterable[UnnamedMemory | None]) -> None:
    """Has whoever mapped them let go of them, when it next maps another."""
    for memory in memories:
        if memory is not None:
            memory.header[_TAKEN_AWAY] = 1
            memory.close()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN
