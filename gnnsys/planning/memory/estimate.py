"""The peak memory of a training job, known before it runs: what it is made of, and when it is reached."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from gnnsys.planning.memory.ledger import MemoryKind, StorageRecord
from gnnsys.planning.memory.training_device import TrainingDevice, training_device
from gnnsys.planning.memory.training_job import TrainingJob, make_job

if TYPE_CHECKING:
    from gnnsys.planning.memory.trace import MemoryTrace

_OUTSIDE = "(outside modules)"


@dataclass(frozen=True)
class MemoryShare:
    """Bytes of one kind that belong to one module, when memory is at its peak."""

    module: str
    kind: str
    num_bytes: int


@dataclass(frozen=True)
class JobMemory:
    """What a job takes at its peak on a device. `shares` add up to `peak_bytes`."""

    device: str
    peak_bytes: int
    step: int
    phase: str
    op: str
    module: str
    shares: tuple[MemoryShare, ...]
    workspace_bytes: int  # the most that a native op holds beside its results, in the peak where it is the device's
    unknown_workspaces: tuple[str, ...]
    num_storages: int
    seconds: float
    allocated_bytes: int | None = None  # of a device, by the model of its allocator: blocks that are taken
    reserved_bytes: int | None = None  # and what it has asked of the device, which other jobs cannot have

    @property
    def needed_bytes(self) -> int:
        """What must be free for the job to run: of a device what its allocator reserves."""
        return self.peak_bytes if self.reserved_bytes is None else self.reserved_bytes

    def by_kind(self) -> dict[str, int]:
        total: dict[str, int] = defaultdict(int)
        for share in self.shares:
            total[share.kind] += share.num_bytes
        return {kind.value: total[kind.value] for kind in MemoryKind if total[kind.value]}

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "by_kind": self.by_kind()}

    def table(self, most_modules: int = 20) -> str:
        """Kinds as columns, modules as rows, the largest first; and where the peak is."""
        kinds = list(self.by_kind())
        modules: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for share in self.shares:
            modules[share.module or _OUTSIDE][share.kind] += share.num_bytes
        order = sorted(modules, key=lambda name: -sum(modules[name].values()))
        rows = [(name, [modules[name][kind] for kind in kinds]) for name in order[:most_modules]]
        if order[most_modules:]:
            rest = [sum(modules[name][kind] for name in order[most_modules:]) for kind in kinds]
            rows.append((f"({len(order) - most_modules} more)", rest))
        rows.append(("all", [sum(modules[name][kind] for name in order) for kind in kinds]))
        lines = [f"peak on {self.device}: {format_bytes(self.peak_bytes)} ({self.peak_bytes:,} bytes)"]
        lines.append(f"reached in step {self.step + 1}, {self.phase}, by {self.op} in {self.module or _OUTSIDE}")
        if self.allocated_bytes is not None and self.reserved_bytes is not None:
            taken, held = format_bytes(self.allocated_bytes), format_bytes(self.reserved_bytes)
            lines.append(f"of torch's allocator: {taken} allocated, {held} reserved (and the CUDA context)")
        cells = [[name, *map(_cell, [*sizes, sum(sizes)])] for name, sizes in rows]
        lines += ["", *_aligned([["", *kinds, "sum"], *cells])]
        if self.unknown_workspaces:
            lines.append(f"workspace is not told by: {', '.join(self.unknown_workspaces)}")
        return "\n".join(lines)


def estimate_memory(
    function: Callable[..., Any],
    arguments: Mapping[str, Any] | None = None,
    device: str | TrainingDevice = "cpu",
    num_steps: int = 2,
) -> JobMemory:
    """Traces the first steps of the job that `function(**arguments)` returns, as `device` would run them.

    Nothing is computed but structure, and nothing of the device is asked for: it need not be there. The first step
    makes the optimizer's state, so that at least two are traced.
    """
    from gnnsys.planning.memory.trace import trace_steps

    target = training_device(device)
    if num_steps < 2:
        raise ValueError(
            f"num_steps must be at least 2, for the first one makes the optimizer's state, got {num_steps}"
        )
    job = make_job(function, arguments or {})
    trace = trace_steps(job, target.device_type, num_steps, target.matmul_workspace)
    return summarise(trace, target)


def watched_peak(job: TrainingJob, num_steps: int = 2) -> int:
    """Runs the steps on the CPU for real and tells the most bytes of tensors that are live at a time."""
    from gnnsys.planning.memory.trace import watch_steps

    return watch_steps(job, num_steps).peak()[0]


def summarise(trace: MemoryTrace, target: TrainingDevice) -> JobMemory:
    """What a trace says of its peak."""
    peak, at = trace.peak()
    live = trace.live_at(at)
    last = trace.changes[at - 1][0] if at else None
    workspaces = [record.num_bytes for record, _ in trace.changes if record.kind is MemoryKind.WORKSPACE]
    memory = None if target.device_type == "cpu" else trace.replay()
    return JobMemory(
        device=target.name,
        peak_bytes=peak,
        step=max(last.step, 0) if last else 0,
        phase=last.phase.value if last else "start",
        op=last.op if last else "given",
        module=last.module if last else "",
        shares=_shares(live),
        workspace_bytes=max([trace.most_scratch, *workspaces]),
        unknown_workspaces=trace.unknown_workspaces,
        num_storages=len(trace.given) + sum(change > 0 for _, change in trace.changes),
        seconds=trace.seconds,
        allocated_bytes=None if memory is None else memory.peak_allocated,
        reserved_bytes=None if memory is None else memory.peak_reserved,
    )


def _shares(live: Sequence[StorageRecord]) -> tuple[MemoryShare, ...]:
    total: dict[tuple[str, str], int] = defaultdict(int)
    for record in live:
        assert record.kind is not None
        total[record.module, record.kind.value] += record.num_bytes
    return tuple(MemoryShare(module, kind, total[module, kind]) for module, kind in sorted(total))


def format_bytes(num_bytes: int) -> str:
    """As people read it: 1.50 GiB."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} bytes"


def _cell(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes else "-"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
