"""Every storage of a training step, from its first to its last use: what was live when, of what kind, whose it was.

A storage is entered when it is first seen and leaves when torch frees it, which a weak reference tells at that moment.
Its kind is known later: a tensor made in the forward pass is an activation only if it is still there when that ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from gnnsys.ops import AllocationStep
from gnnsys.store import is_shared_memory

GIVEN = "given"  # what made a storage that the trace did not


class MemoryKind(str, Enum):
    """What memory is for. Eq. 7 of CoGNN has weights, outputs, gradients and what lives inside an operator."""

    WEIGHTS = "weights"
    OPTIMIZER = "optimizer state"
    INPUTS = "inputs"
    STRUCTURE = "structure"
    TRANSPOSED = "transposed structure"
    ACTIVATIONS = "activations"
    GRADIENTS = "weight gradients"
    BACKWARD = "output gradients"
    EPHEMERAL = "ephemeral"
    WORKSPACE = "workspace"


class StepPhase(str, Enum):
    """Where in a training step something is made."""

    START = "start"
    BATCH = "batch"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(eq=False, slots=True)
class StorageRecord:
    """One storage. Times count changes of memory; `ends` is None for what outlives the trace."""

    num_bytes: int
    phase: StepPhase
    step: int
    op: str
    module: str
    begins: int
    ends: int | None = None
    kind: MemoryKind | None = None
    ends_phase: tuple[int, StepPhase] | None = None
    is_index: bool = False  # integers with values: structure, where they stay
    is_recomputed: bool = False  # made by a forward pass inside the backward pass
    on_host: bool = False  # not in the device's memory, or not the job's own: a graph that jobs share
    stream: int = 0  # whose pool of the allocator it is of


class StorageLedger:
    """Records storages; `where()` names the module that is at work, `order` numbers what was made before the steps."""

    def __init__(
        self, where: Callable[[], tuple[str, bool]], order: Callable[[torch.UntypedStorage], int] | None = None
    ) -> None:
        self.where, self._order = where, order
        self._live: dict[int, tuple[weakref.ref[Any], StorageRecord]] = {}
        self._changes: list[tuple[StorageRecord, int]] = []
        self._given: list[tuple[StorageRecord, int]] = []
        self.phase, self.step = StepPhase.START, -1

    def enter(self, phase: StepPhase, step: int) -> None:
        self.phase, self.step = phase, step

    def made(self, tensor: Tensor, op: str, is_index: bool = False) -> None:
        """A result of `op`: a new storage, or one that is known (a view, a tensor written in place)."""
        if tensor.layout is not torch.strided:
            for part in parts_of(tensor):
                self.made(part, op, is_index=not part.is_floating_point())
            return
        storage = tensor.untyped_storage()
        if storage._cdata in self._live or storage.nbytes() == 0:
            return
        module, in_forward = self.where()
        record = StorageRecord(storage.nbytes(), self.phase, self.step, op, module, len(self._changes))
        record.is_index, record.is_recomputed = is_index, in_forward and self.phase is StepPhase.BACKWARD
        self._watch(storage, record)
        self._changes.append((record, record.num_bytes))

    def given(
        self, tensor: Tensor, kind: MemoryKind, name: str, is_new: bool = False, num_bytes: int | None = None
    ) -> StorageRecord | None:
        """A tensor that the trace did not make. It was there from the start, unless `is_new`: a batch just loaded.

        `num_bytes` is what a copy of it takes, where it is a view of more.
        """
        if tensor.layout is not torch.strided:
            for part in parts_of(tensor):
                self.given(part, kind, name, is_new)
            return None
        storage = tensor.untyped_storage()
        known = self._live.get(storage._cdata)
        if known is not None or storage.nbytes() == 0:
            return None if known is None else known[1]
        at = len(self._changes) if is_new else -1
        size = storage.nbytes() if num_bytes is None else num_bytes
        record = StorageRecord(size, self.phase, self.step, GIVEN, name, at, kind=kind)
        record.on_host = is_shared_memory(tensor)
        self._watch(storage, record)
        if is_new:
            self._changes.append((record, record.num_bytes))
        else:
            record.phase, record.step = StepPhase.START, -1
            self._given.append((record, 0 if self._order is None else self._order(storage)))
        return record

    def workspace(self, num_bytes: int, op: str) -> Callable[[], None]:
        """What an op holds besides its results; call the result when it ends."""
        module, _ = self.where()
        record = StorageRecord(num_bytes, self.phase, self.step, op, module, len(self._changes))
        record.kind = MemoryKind.WORKSPACE
        self._changes.append((record, num_bytes))
        return lambda: self._free(record)

    def reorder(self, first: int, steps: Sequence[AllocationStep], op: str) -> None:
        """Puts what an op made since change number `first` into its own order, with what it took meanwhile.

        Results without a storage of their own (empty ones) are left out.
        """
        made = self._changes[first:]
        del self._changes[first:]
        taken: dict[int, Callable[[], None]] = {}
        num_outputs = sum(step.output is not None for step in steps)
        for number, step in enumerate(steps):
            if step.takes:
                taken[number] = self.workspace(step.takes, op)
            elif step.output is not None and len(made) == num_outputs:
                self._changes.append(made[step.output])
            elif step.gives is not None and step.gives in taken:
                taken[step.gives]()
        if len(made) != num_outputs:
            self._changes[first:first] = made

    def name(self, tensor: Tensor, kind: MemoryKind, module: str | None = None, on_host: bool = False) -> None:
        """Says what a live tensor turned out to be."""
        if tensor.layout is not torch.strided:
            for part in parts_of(tensor):
                self.name(part, kind, module, on_host)
            return
        found = self._live.get(tensor.untyped_storage()._cdata)
        if found is not None:
            found[1].kind, found[1].on_host = kind, on_host
            found[1].module = found[1].module if module is None else module

    @property
    def num_changes(self) -> int:
        return len(self._changes)

    @property
    def changes(self) -> list[tuple[StorageRecord, int]]:
        """All so far: (storage, bytes more or less)."""
        return self._changes

    def _watch(self, storage: torch.UntypedStorage, record: StorageRecord) -> None:
        key = storage._cdata

        def gone(_: Any) -> None:
            self._live.pop(key, None)
            self._free(record)

        self._live[key] = weakref.ref(storage, gone), record

    def _free(self, record: StorageRecord) -> None:
        record.ends, record.ends_phase = len(self._changes), (self.step, self.phase)
        self._changes.append((record, -record.num_bytes))

    def close(self) -> tuple[list[StorageRecord], list[tuple[StorageRecord, int]]]:
        """(what was there before the first step, changes in their order). Nothing is recorded from now on."""
        self._live.clear()
        for record, _ in self.records():
            record.kind = record.kind or _kind(record)
        return [record for record, _ in sorted(self._given, key=lambda each: each[1])], self._changes

    def records(self) -> Iterator[tuple[StorageRecord, int]]:
        yield from ((record, record.num_bytes) for record, _ in self._given)
        yield from ((record, change) for record, change in self._changes if change > 0)


def parts_of(sparse: Tensor) -> list[Tensor]:
    """The tensors of values and places that a sparse one is made of."""
    if sparse.layout is torch.sparse_coo:
        return [sparse._indices(), sparse._values()]
    by_column = sparse.layout in (torch.sparse_csc, torch.sparse_bsc)
    ends, places = (sparse.ccol_indices, sparse.row_indices) if by_column else (sparse.crow_indices, sparse.col_indices)
    return [ends(), places(), sparse.values()]


def _kind(record: StorageRecord) -> MemoryKind:
    """Of a storage that nobody named: by the phase that made it and whether it outlived that phase."""
    outlives = record.ends_phase != (record.step, record.phase)
    if record.op == "gnnsys::transpose" and outlives:
        return MemoryKind.TRANSPOSED
    if record.is_index and outlives:
        return MemoryKind.STRUCTURE
    if record.phase is StepPhase.BACKWARD:
        return MemoryKind.ACTIVATIONS if record.is_recomputed else MemoryKind.BACKWARD
    return MemoryKind.ACTIVATIONS if outlives and record.phase is StepPhase.FORWARD else MemoryKind.EPHEMERAL
