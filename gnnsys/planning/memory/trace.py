"""Traces training steps on fake rows, or watches real ones: both give the same list of changes of memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gnnsys.ops import as_if_on
from gnnsys.planning.memory.caching_allocator import CachingAllocator
from gnnsys.planning.memory.creation_order import CreationOrder
from gnnsys.planning.memory.device_profile import DeviceProfile
from gnnsys.planning.memory.device_rules import as_on_device, choose_foreach
from gnnsys.planning.memory.fake_rows import FakeRows, StorageWatch
from gnnsys.planning.memory.given_tensors import copied_bytes, given_tensors
from gnnsys.planning.memory.inside_operators import InsideOperators
from gnnsys.planning.memory.ledger import GIVEN, MemoryKind, StepPhase, StorageLedger, StorageRecord
from gnnsys.planning.memory.loader_batches import HeldBatches, placed_tensors
from gnnsys.planning.memory.module_names import ModuleNames
from gnnsys.planning.memory.onednn_scratch import ONEDNN
from gnnsys.planning.memory.step_repeats import FEWEST_STEPS, MOST_STEPS_TRACED, Changes, repeats, step_growth
from gnnsys.planning.memory.training_job import TrainingJob, run_steps


@dataclass(frozen=True)
class MemoryTrace:
    """What was there at the start, and every change after it, in order: (storage, bytes more or less)."""

    given: list[StorageRecord]
    changes: list[tuple[StorageRecord, int]]
    seconds: float
    unknown_workspaces: tuple[str, ...] = ()
    starts: list[int] = field(default_factory=list)  # of each step: the first of its changes
    most_scratch: int = 0  # of a native op on the CPU, beside its results and outside of the peak
    is_repeated: bool = True  # whether the last steps did the same to memory
    growth: int = 0  # bytes more in each of the last steps, where they did not

    @property
    def start_bytes(self) -> int:
        return sum(record.num_bytes for record in self.given if not record.on_host)

    def peak(self) -> tuple[int, int]:
        """(bytes, the number of changes after which they are live)."""
        live = most = self.start_bytes
        at = 0
        for index, (record, change) in enumerate(self.changes):
            if not record.on_host:
                live += change
                if live > most:
                    most, at = live, index + 1
        return most, at

    def replay(self, capacity: int | None = None) -> CachingAllocator:
        """All of it through a model of the allocator of devices; DeviceFull where `capacity` is too little."""
        memory = CachingAllocator(capacity)
        placed = [record for record in self.given if not record.on_host]
        blocks = {id(record): memory.allocate(record.num_bytes, record.stream) for record in placed}
        for record, change in self.changes:
            if record.on_host:
                continue
            if change > 0:
                blocks[id(record)] = memory.allocate(record.num_bytes, record.stream)
            else:
                memory.free(blocks.pop(id(record)))
        return memory

    def live_at(self, at: int) -> list[StorageRecord]:
        """The storages that are there after `at` changes."""
        live = {id(record): record for record in self.given}
        for record, change in self.changes[:at]:
            if change > 0:
                live[id(record)] = record
            else:
                live.pop(id(record), None)
        return [record for record in live.values() if not record.on_host]


def trace_steps(
    job: TrainingJob,
    device_type: str = "cpu",
    num_steps: int | None = None,
    profile: DeviceProfile | None = None,
    order: CreationOrder | None = None,
) -> MemoryTrace:
    """Traces steps of a job whose tensors are on the CPU, as a device of that type would run them: `num_steps`, or as
    many as it takes until they repeat.

    `profile` tells what the device takes beside tensors, `order` in which order the job's were made. The job is used
    up: its gradients and its optimizer's state are fake afterwards.
    """
    names = ModuleNames(job.model)
    ledger = StorageLedger(names.here, None if order is None else order.number)
    inside = InsideOperators(ledger, device_type, profile)
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(as_if_on(device_type))
        if device_type != "cpu":
            choose_foreach(job.optimizer)
        mode = FakeRows(ledger, inside.before, inside.told_ops)
        contexts = lambda: _step_context(mode, device_type)  # noqa: E731
        given, changes, starts, seconds = _run(job, ledger, names, contexts, num_steps, device_type)
    is_repeated = _repeats(job, changes, [*starts, len(changes)])
    growth = 0 if is_repeated else step_growth(changes, [*starts, len(changes)])
    return MemoryTrace(
        given, changes, seconds, tuple(sorted(inside.unknown)), starts, inside.most_scratch, is_repeated, growth
    )


def _repeats(job: TrainingJob, changes: Changes, bounds: Sequence[int]) -> bool:
    return repeats(changes, bounds, same_sizes=job.loader is None)


def loaded_ahead(trace: MemoryTrace, held: HeldBatches) -> MemoryTrace:
    """The same trace, where batches are there `held.lead` steps before their own, in the pool of the loader's stream.

    What a thread takes while it samples is gone before its batch has rows: it counts by what it is more than these.
    """
    changes, starts = trace.changes, trace.starts
    loaded: list[list[tuple[StorageRecord, int]]] = []
    rest = []
    for low, high in pairwise([*starts, len(changes)]):
        loaded.append([each for each in changes[low:high] if each[1] > 0 and each[0].op == GIVEN])
        rest.append([each for each in changes[low:high] if not (each[1] > 0 and each[0].op == GIVEN)])
    for record, _ in chain.from_iterable(loaded):
        record.stream = 1
    out, begins = changes[: starts[0]], []
    more = held.making * max(0, held.sampling_bytes - sum(change for _, change in loaded[0]))
    if more:
        scratch = StorageRecord(more, StepPhase.BATCH, 0, "gnnsys::sample_hops", "loader", len(out))
        scratch.kind, scratch.stream = MemoryKind.WORKSPACE, 1
        out.append((scratch, more))
    for step, own in enumerate(rest):
        begins.append(len(out))
        last = step + held.lead + 1
        out += chain.from_iterable(loaded[:last] if step == 0 else loaded[last - 1 : last])
        out += own
    return replace(trace, changes=out, starts=begins)


def watch_steps(job: TrainingJob, num_steps: int = 2) -> MemoryTrace:
    """The same of a real run: operators do their work, and each storage they make is recorded."""
    names = ModuleNames(job.model)
    ledger = StorageLedger(names.here)
    mode = StorageWatch(ledger, InsideOperators(ledger, "cpu", None).before, ONEDNN)
    given, changes, starts, seconds = _run(job, ledger, names, lambda: mode, num_steps, "cpu")
    return MemoryTrace(given, changes, seconds, (), starts)


@contextmanager
def _step_context(mode: TorchDispatchMode, device_type: str) -> Iterator[None]:
    with as_on_device(device_type), mode:
        yield


def _run(
    job: TrainingJob,
    ledger: StorageLedger,
    names: ModuleNames,
    contexts: Callable[[], Any],
    num_steps: int | None,
    device_type: str,
) -> tuple[list[StorageRecord], list[tuple[StorageRecord, int]], list[int], float]:
    begun, starts = time.perf_counter(), []
    _enter_weights(job, ledger, device_type)
    if job.loader is None:
        for tensor, kind, name in given_tensors({"x": job.rows, "edge_index": job.edge_index}, "graph"):
            ledger.given(tensor, kind, name)
    elif device_type != "cpu":
        for tensor, name in placed_tensors(job.loader):
            is_structure = not tensor.dtype.is_floating_point and name.startswith("graph.")
            record = ledger.given(tensor, MemoryKind.STRUCTURE if is_structure else MemoryKind.INPUTS, name)
            if record is not None and name.startswith("copy."):
                record.stream = 1  # a loading thread makes it

    def enter(phase: StepPhase, step: int, batch: Any) -> None:
        if phase is StepPhase.BATCH:
            _name_state(job, ledger, device_type)
            starts.append(ledger.num_changes)
        ledger.enter(phase, step)
        if phase is StepPhase.BATCH and job.loader is not None:
            found = list(given_tensors(batch))
            copied = {} if device_type == "cpu" else copied_bytes(tensor for tensor, _, _ in found)
            for tensor, kind, name in found:
                ledger.given(tensor, kind, name, True, copied.get(tensor.untyped_storage()._cdata))
        elif phase is StepPhase.OPTIMIZER:
            for name, parameter in job.model.named_parameters():
                if parameter.grad is not None:
                    ledger.name(parameter.grad, MemoryKind.GRADIENTS, _module_of(name))

    def is_enough() -> bool:
        bounds = [*starts, ledger.num_changes]
        return num_steps is None and len(starts) >= FEWEST_STEPS and _repeats(job, ledger.changes, bounds)

    with names.watched(), _without_collection():
        run_steps(job, num_steps or MOST_STEPS_TRACED, enter, contexts, is_enough)
    _name_state(job, ledger, device_type)
    given, changes = ledger.close()
    return given, changes, starts, time.perf_counter() - begun


@contextmanager
def _without_collection() -> Iterator[None]:
    """Cycles are not collected during the steps: when that happens depends on the whole process."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _enter_weights(job: TrainingJob, ledger: StorageLedger, device_type: str) -> None:
    for name, tensor in [*job.model.named_parameters(), *job.model.named_buffers()]:
        ledger.given(tensor, MemoryKind.WEIGHTS, _module_of(name))
        if tensor.grad is not None:
            ledger.given(tensor.grad, MemoryKind.GRADIENTS, _module_of(name))
    _name_state(job, ledger, device_type, enters=True)


def _name_state(job: TrainingJob, ledger: StorageLedger, device_type: str, enters: bool = False) -> None:
    owner = {parameter: _module_of(name) for name, parameter in job.model.named_parameters()}
    for group in job.optimizer.param_groups:
        on_host = device_type != "cpu" and not group.get("capturable") and not group.get("fused")
        for parameter in group["params"]:
            for key, value in job.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    name = owner.get(parameter, "")
                    if enters:
                        ledger.given(value, MemoryKind.OPTIMIZER, name)
                    ledger.name(value, MemoryKind.OPTIMIZER, name, on_host=on_host and key == "step")


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]
