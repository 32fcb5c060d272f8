"""A job's allocations as a device really makes them, beside those of its trace: `gnnsys estimate JOB --measure`.

torch records every allocation with its size and the Python code that asked for it. Aligned with the trace they show
what an estimate missed, and after which operator.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from gnnsys.planning.memory.caching_allocator import CachingAllocator
from gnnsys.planning.memory.estimate import JobMemory, format_bytes, trace_job
from gnnsys.planning.memory.training_device import TrainingDevice, training_device
from gnnsys.planning.memory.training_job import make_job, run_steps

if TYPE_CHECKING:
    from gnnsys.planning.memory.trace import MemoryTrace

_MOST_EVENTS = 1_000_000
_LEAST_SHOWN = 64 << 10


class DeviceEvent(NamedTuple):
    """An allocation (or, with `frees`, its end) of `num_bytes` at `address`; `code` is who asked, where Python did. Or
    the end of a segment, which torch gives back."""

    num_bytes: int
    address: int
    stream: int
    frees: bool
    code: str
    is_segment: bool = False


@dataclass(frozen=True)
class DeviceRun:
    """What a real run took, in bytes over what was there before, and its events if they were recorded."""

    allocated: int
    reserved: int
    events: tuple[DeviceEvent, ...] = ()

    def replayed(self) -> CachingAllocator:
        """The same events through the model of the allocator: order, sizes and places of segments are real."""
        memory, blocks = CachingAllocator(), {}
        for event in self.events:
            if event.is_segment:
                memory.release_cached(event.address)
            elif not event.frees:
                blocks[event.address] = memory.allocate(event.num_bytes, event.stream, event.address)
            elif event.address in blocks:
                memory.free(blocks.pop(event.address))
        return memory


@dataclass(frozen=True)
class AllocationDifference:
    """Allocations that only one of the two has: `place` is the traced operator before them, or that made them."""

    num_bytes: int
    is_real: bool
    place: str
    code: str
    count: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class DeviceComparison:
    """An estimate beside a real run. `replayed` are the run's own events through the model of the allocator: what is
    off there is the model's fault, the rest the trace's."""

    estimate: JobMemory
    run: DeviceRun
    replayed: tuple[int, int]  # allocated, reserved
    differences: tuple[AllocationDifference, ...]

    def table(self) -> str:
        lines = []
        told = (
            ("allocated", self.estimate.allocated_bytes, self.run.allocated, self.replayed[0]),
            ("reserved", self.estimate.reserved_bytes, self.run.reserved, self.replayed[1]),
        )
        for what, traced, measured, replayed in told:
            assert traced is not None
            off = 100 * (traced - measured) / max(measured, 1)
            lines.append(
                f"{what}: {format_bytes(traced)} estimated, {format_bytes(measured)} measured ({off:+.2f}%), "
                f"{format_bytes(replayed)} by the model of the allocator from the run's own events"
            )
        return "\n".join([*lines, difference_table(self.differences)])

    def as_json(self) -> dict[str, Any]:
        return {
            "estimate": self.estimate.as_json(),
            "measured": {"allocated": self.run.allocated, "reserved": self.run.reserved},
            "replayed": {"allocated": self.replayed[0], "reserved": self.replayed[1]},
            "differences": [each.as_json() for each in self.differences],
        }


def compare_on_device(
    function: Callable[..., Any],
    arguments: Mapping[str, Any] | None = None,
    device: str | TrainingDevice = "h200",
    num_steps: int = 2,
) -> DeviceComparison:
    """Estimates a job for `device`, runs it on the GPU that is here, and tells what is not the same."""
    target, given = training_device(device), dict(arguments or {})
    if target.device_type == "cpu":
        raise ValueError("a job is measured on a GPU: give its kind, such as --device h200")
    run = run_on_device(function, given, num_steps, records=True)
    traced = trace_job(function, given, target, num_steps, most_steps=num_steps)
    memory = run.replayed()
    found = tuple(differences(traced.trace, run))
    return DeviceComparison(traced.memory, run, (memory.peak_allocated, memory.peak_reserved), found)


def run_on_device(
    function: Callable[..., Any], arguments: Mapping[str, Any], num_steps: int = 2, records: bool = False
) -> DeviceRun:
    """Runs the job on the current CUDA device in this process; caches and cuBLAS's workspaces are given back before."""
    if not torch.cuda.is_available():
        raise ValueError("the job is measured on this machine's GPU, and torch finds none: run it where the GPU is")
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    if records:
        torch.cuda.memory._record_memory_history(
            enabled="all", context="alloc", stacks="python", max_entries=_MOST_EVENTS
        )
    try:
        torch.cuda.reset_peak_memory_stats()
        job = make_job(function, arguments, device="cuda")
        run_steps(job, num_steps)
        torch.cuda.synchronize()
        taken = torch.cuda.max_memory_allocated() - allocated, torch.cuda.max_memory_reserved() - reserved
        events = _events() if records else ()
    finally:
        if records:
            torch.cuda.memory._record_memory_history(enabled=None)
    return DeviceRun(*taken, events)


def differences(trace: MemoryTrace, run: DeviceRun) -> list[AllocationDifference]:
    """What the two do not share, the largest first. Both are sequences of sizes, and are aligned by them."""
    made = [record for record in trace.given if not record.on_host]
    made += [record for record, change in trace.changes if change > 0 and not record.on_host]
    real = [event for event in run.events if not event.frees]
    match = SequenceMatcher(None, [r.num_bytes for r in made], [e.num_bytes for e in real], autojunk=False)
    counts: dict[tuple[int, bool, str, str], int] = {}

    def note(num_bytes: int, is_real: bool, at: int, code: str) -> None:
        record = made[at] if 0 <= at < len(made) else None
        place = "start" if record is None else f"{record.phase.value}, {record.op} in {record.module or '(outside)'}"
        key = num_bytes, is_real, place, code
        counts[key] = counts.get(key, 0) + 1

    for tag, low, high, first, last in match.get_opcodes():
        if tag == "equal":
            continue
        for at in range(low, high):
            note(made[at].num_bytes, False, at, "")
        for event in real[first:last]:
            note(event.num_bytes, True, low - 1, event.code)
    found = [AllocationDifference(*key, count) for key, count in counts.items()]
    return sorted(found, key=lambda each: -each.num_bytes * each.count)


def difference_table(found: Sequence[AllocationDifference], least_bytes: int = _LEAST_SHOWN) -> str:
    """As people read it: what the run has and the trace has not, and the other way around."""
    lines = []
    for each in found:
        if each.num_bytes >= least_bytes:
            side = "only in the run, after" if each.is_real else "only in the trace,"
            code = f" ({each.code})" if each.code else ""
            lines.append(f"{each.count} x {each.num_bytes:,} bytes {side} {each.place}{code}")
    return "\n".join(lines) or f"no allocation of {least_bytes:,} bytes or more differs"


def _events() -> tuple[DeviceEvent, ...]:
    device = torch.cuda.current_device()
    traces = torch.cuda.memory._snapshot(device)["device_traces"]
    chosen = traces[device] if device < len(traces) else traces[0]
    events = []
    for entry in chosen:
        if entry["action"] in ("alloc", "free_completed", "segment_free"):
            frees, is_segment = entry["action"] != "alloc", entry["action"] == "segment_free"
            code = "" if frees else _code(entry.get("frames", ()))
            events.append(DeviceEvent(entry["size"], entry["addr"], entry.get("stream", 0), frees, code, is_segment))
    return tuple(events)


def _code(frames: Sequence[Mapping[str, Any]]) -> str:
    """The innermost places of Python code, without this file's own."""
    told = [f"{frame['name']} ({frame['filename'].rpartition('/')[2]}:{frame['line']})" for frame in frames[:4]]
    return " < ".join(told)
