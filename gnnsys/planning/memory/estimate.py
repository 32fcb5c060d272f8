"""The peak memory of a training job, known before it runs: what it is made of, and when it is reached."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from gnnsys.planning.memory.caching_allocator import DeviceFull
from gnnsys.planning.memory.ledger import GIVEN, MemoryKind, StorageRecord
from gnnsys.planning.memory.loader_batches import (
    FEWEST_DRAWN,
    MOST_DRAWN,
    NUM_EPOCHS,
    LargestBatch,
    batch_size_bytes,
    draw_batches,
    draw_last,
    held_batches,
    largest_batch,
)
from gnnsys.planning.memory.many_steps import MOST_STEPS, ManySteps
from gnnsys.planning.memory.step_pattern import find_pattern
from gnnsys.planning.memory.training_device import TrainingDevice, training_device
from gnnsys.planning.memory.training_job import TrainingJob, make_job

if TYPE_CHECKING:
    from gnnsys.planning.memory.trace import MemoryTrace

_OUTSIDE = "(outside modules)"
_TRACED_OF_LOADER = 6  # steps, of which those behind the second are alike
_UNREPLAYED = 1 / 3  # of what a few steps have reserved: what hundreds may reserve more
TRACED = "traced"


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
    context_bytes: int = 0  # of a process on the device, outside of its allocator
    growing_bytes: int = 0  # of the peak, what is as large as batches are: by how much it grows if they do
    batches: LargestBatch | None = None  # of a sampling loader on a device: how large they become
    late_bytes: int = 0  # of its batches: what is reserved more where their memory comes back late
    replayed_steps: int = 0  # that went through the model of the allocator, beside those traced
    unreplayed_bytes: int = 0  # what many steps may reserve more, where none could be replayed
    how: str = TRACED  # or "probed" by real steps, or "stated" by who knows it
    num_traced: int = 0  # steps; what happens first in a later one is not seen
    is_repeated: bool = True  # whether the last of them did the same to memory
    step_growth: int = 0  # bytes that each of the last ones took more, where they did not

    @property
    def needed_bytes(self) -> int:
        """What must be free for the job to run: of a device the most that its allocator reserves."""
        needed = self.peak_bytes if self.reserved_bytes is None else self.reserved_bytes
        return needed + self.late_bytes + self.more_bytes + self.unreplayed_bytes

    @property
    def more_bytes(self) -> int:
        """What the largest batch of many epochs takes more than those that were counted."""
        return 0 if self.batches is None else int((self.batches.factor - 1) * self.growing_bytes)

    def by_kind(self) -> dict[str, int]:
        total: dict[str, int] = defaultdict(int)
        for share in self.shares:
            total[share.kind] += share.num_bytes
        return {kind.value: total[kind.value] for kind in MemoryKind if total[kind.value]}

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "by_kind": self.by_kind()}

    def _not_seen(self) -> str:
        told = f"traced {self.num_traced} steps; not seen: what happens first in a later one"
        if self.is_repeated:
            return told
        growth = f", and each of the last took {format_bytes(self.step_growth)} more" if self.step_growth else ""
        return f"{told}. Steps were not alike to the end{growth}: a longer run may need more"

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
        lines = [f"peak on {self.device}, {self.how}: {format_bytes(self.peak_bytes)} ({self.peak_bytes:,} bytes)"]
        if self.how == TRACED:
            lines.append(f"reached in step {self.step + 1}, {self.phase}, by {self.op} in {self.module or _OUTSIDE}")
        if self.allocated_bytes is not None and self.reserved_bytes is not None:
            taken, held = format_bytes(self.allocated_bytes), format_bytes(self.reserved_bytes)
            context = f", and a context of {format_bytes(self.context_bytes)}" if self.context_bytes else ""
            lines.append(f"of torch's allocator: {taken} allocated, {held} reserved{context}")
        if self.late_bytes:
            lines.append(f"{format_bytes(self.late_bytes)} more are reserved where batches are given back late")
        if self.unreplayed_bytes:
            more = format_bytes(self.unreplayed_bytes)
            lines.append(f"steps are not alike: {more} more are needed, since many of them may reserve more")
        if self.how != TRACED:
            return "\n".join(lines)
        lines.append(self._not_seen())
        if self.batches is not None:
            each = self.batches
            lines.append(
                f"the largest of {each.num_batches} batches takes {format_bytes(self.more_bytes)} more at most "
                f"(confidence {each.confidence:.0%}, from {each.num_drawn} drawn: {format_bytes(int(each.mean_bytes))} "
                f"+- {each.deviation_bytes / each.mean_bytes:.2%})"
            )
        cells = [[name, *map(_cell, [*sizes, sum(sizes)])] for name, sizes in rows]
        lines += ["", *_aligned([["", *kinds, "sum"], *cells])]
        if self.unknown_workspaces:
            lines.append(f"workspace is not told by: {', '.join(self.unknown_workspaces)}")
        return "\n".join(lines)


def estimate_memory(
    function: Callable[..., Any],
    arguments: Mapping[str, Any] | None = None,
    device: str | TrainingDevice = "cpu",
    num_steps: int | None = None,
) -> JobMemory:
    """Traces the first steps of the job that `function(**arguments)` returns, as `device` would run them.

    Nothing is computed but structure, and nothing of the device is asked for: it need not be there. `num_steps`: how
    many; by default until they do the same to memory, at least 6 and at most 20. The first step makes the optimizer's
    state, so that at least two are traced.
    """
    target = training_device(device)
    return trace_job(function, arguments or {}, target, num_steps).memory


class TracedJob(NamedTuple):
    """A trace, and what it says."""

    trace: MemoryTrace
    memory: JobMemory
    many: ManySteps | None = None  # of a loader's job, where its steps are alike

    def fits(self, capacity: int) -> bool:
        """Whether it runs in so many bytes of its device: an allocator that is full gives back what it keeps free. Of
        a loader's job, whether its batches' memory comes back at once or late."""
        memory = self.memory
        if memory.allocated_bytes is None:
            return memory.needed_bytes <= capacity
        try:
            (self.many or self.trace).replay(capacity - memory.more_bytes - memory.unreplayed_bytes)
            if self.many is not None:
                self.many.replay(capacity - memory.more_bytes, is_late=True)
        except DeviceFull:
            return False
        return True


def trace_job(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    target: TrainingDevice,
    num_steps: int | None = None,
    most_drawn: int = MOST_DRAWN,
    most_steps: int = MOST_STEPS,
) -> TracedJob:
    """What `estimate_memory` is made of. Of a loader so many more steps are traced as it has batches ahead, the
    structure of up to `most_drawn` batches is drawn, and up to `most_steps` steps are replayed."""
    from gnnsys.ops import as_if_on
    from gnnsys.planning.memory.creation_order import CreationOrder
    from gnnsys.planning.memory.trace import loaded_ahead, trace_steps

    if num_steps is not None and num_steps < 2:
        raise ValueError(
            f"num_steps must be at least 2, for the first one makes the optimizer's state, got {num_steps}"
        )
    order = CreationOrder()
    with as_if_on(target.device_type), order:
        job = make_job(function, arguments)
    if job.loader is None or target.device_type == "cpu":
        trace = trace_steps(job, target.device_type, num_steps, target.profile, order)
        return TracedJob(trace, summarise(trace, target))
    loader: Any = job.loader
    num_traced = max(num_steps or 2, held_batches(loader, 0).lead + 2)
    learned_from = max(num_traced, _steps_to_learn_from(loader))
    drawn = draw_batches(loader, most_drawn, fewest=max(FEWEST_DRAWN, learned_from))
    num_traced = learned_from if drawn or num_steps is None else num_traced
    held = held_batches(loader, max((counts.num_edges for counts in drawn), default=0))
    trace = trace_steps(job, target.device_type, num_traced, target.profile, order)
    batches, many = None, None
    if drawn:
        num_batches = NUM_EPOCHS * len(loader)
        pattern = find_pattern(trace.changes, trace.starts, drawn)
        if pattern is not None:
            is_sampled_there = loader.graph.planned_place != "host"
            many = ManySteps(
                trace.given, pattern, drawn, held, loader.planned_workspaces, min(most_steps, num_batches),
                is_sampled_there, len(loader), draw_last(loader),
            )  # fmt: skip
        sizes = batch_size_bytes(drawn, loader.row_bytes())
        batches = largest_batch(sizes, num_traced, num_batches, is_likely=many is not None)
    trace = loaded_ahead(trace, held)
    return TracedJob(trace, summarise(trace, target, batches, many, is_one_of_many=bool(drawn)), many)


def _steps_to_learn_from(loader: Any) -> int:
    """The last batch of an epoch is smaller, and its step may not be like others: of short epochs more are traced."""
    per_epoch = len(loader) if hasattr(loader, "__len__") else 0
    return 2 * _TRACED_OF_LOADER if 1 < per_epoch < _TRACED_OF_LOADER else _TRACED_OF_LOADER


def watched_peak(job: TrainingJob, num_steps: int = 2) -> int:
    """Runs the steps on the CPU for real and tells the most bytes of tensors that are live at a time."""
    from gnnsys.planning.memory.trace import watch_steps

    return watch_steps(job, num_steps).peak()[0]


def summarise(
    trace: MemoryTrace,
    target: TrainingDevice,
    batches: LargestBatch | None = None,
    many: ManySteps | None = None,
    is_one_of_many: bool = False,
) -> JobMemory:
    """What a trace says of its peak; of a device `many` steps say what is allocated and reserved, where they are
    known. Where they are not, and there will be many, more is needed than a few have reserved."""
    peak, at = trace.peak()
    live = trace.live_at(at)
    last = trace.changes[at - 1][0] if at else None
    workspaces = [record.num_bytes for record, _ in trace.changes if record.kind is MemoryKind.WORKSPACE]
    memory = None if target.device_type == "cpu" else (many or trace).replay()
    late = None if many is None else many.replay(is_late=True)
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
        context_bytes=0 if target.profile is None else target.profile.context,
        growing_bytes=_growing_bytes(live, bisect_right(trace.starts, at) - 1),
        batches=batches,
        replayed_steps=0 if many is None else many.num_steps,
        unreplayed_bytes=int(_UNREPLAYED * memory.peak_reserved) if memory and is_one_of_many and not many else 0,
        late_bytes=0 if late is None or memory is None else max(0, late.peak_reserved - memory.peak_reserved),
        num_traced=len(trace.starts),
        is_repeated=trace.is_repeated or many is not None,
        step_growth=trace.growth,
    )


def _shares(live: Sequence[StorageRecord]) -> tuple[MemoryShare, ...]:
    total: dict[tuple[str, str], int] = defaultdict(int)
    for record in live:
        assert record.kind is not None
        total[record.module, record.kind.value] += record.num_bytes
    return tuple(MemoryShare(module, kind, total[module, kind]) for module, kind in sorted(total))


def _growing_bytes(live: Sequence[StorageRecord], step: int) -> int:
    """By how much the peak follows a batch's size. Batches that wait for their steps are not large all at once: of
    independent sizes the squares add up."""
    grown: dict[int, int] = defaultdict(int)
    for record in live:
        if _grows(record):
            grown[record.step if record.op == GIVEN else step] += record.num_bytes
    return int(math.sqrt(sum(each**2 for each in grown.values())))


def _grows(record: StorageRecord) -> bool:
    """Whether a storage is larger where batches are: not weights and their like, nor what was there before."""
    fixed = (MemoryKind.WEIGHTS, MemoryKind.OPTIMIZER, MemoryKind.GRADIENTS)
    return record.kind not in fixed and record.step >= 0 and record.op != "cuBLAS"


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
