"""What a job takes, where it cannot be traced: learned from real steps, or stated by who knows it.

A trace ends at a value of rows, or at an operator without shapes. The job is then run for a few steps: on the device
where it is here, else on the CPU with every storage watched, and its events replayed through the device's allocator. A
job that has an argument `batch_size` is run with parts of it, and a line through these is followed:

    bytes = fixed + slope * batch_size        (least squares, neither of them below 0)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from gnnsys.planning.memory.device_events import run_on_device
from gnnsys.planning.memory.estimate import JobMemory, summarise
from gnnsys.planning.memory.step_repeats import FEWEST_STEPS
from gnnsys.planning.memory.training_device import TrainingDevice, training_device
from gnnsys.planning.memory.training_job import make_job

PROBED_ARGUMENT = "batch_size"
_PARTS, _LEAST = (8, 4, 2), 8  # of the batch size; the smallest batch that is run
_SEGMENT = 20 << 20  # of torch's caching allocator
_LEAST_SPREAD = 1.05  # reserved over allocated


class ProbedRun(NamedTuple):
    """Bytes of a real run with batches of `size`; of the CPU all three are those of live tensors."""

    size: int
    peak: int
    allocated: int
    reserved: int


def probe_memory(
    function: Callable[..., Any],
    arguments: Mapping[str, Any] | None = None,
    device: str | TrainingDevice = "cpu",
    num_steps: int = FEWEST_STEPS,
) -> JobMemory:
    """Runs the job for a few steps, with smaller batches where it has an argument for that, and tells its memory."""
    target, given, begun = training_device(device), dict(arguments or {}), time.perf_counter()
    asked = given.get(PROBED_ARGUMENT)
    size = asked if isinstance(asked, int) and not isinstance(asked, bool) else 0
    smaller = [size // part for part in _PARTS] if size >= _LEAST * _PARTS[0] else []
    given_for_each = [{**given, PROBED_ARGUMENT: at} for at in smaller] or [given]
    runs = [_run(function, each, target, num_steps) for each in given_for_each]
    found = [max(1, int(_at(runs, size, what))) for what in ("peak", "allocated", "reserved")]
    if smaller:  # which is reserved in segments: a line through few of them says little
        spread = max(_LEAST_SPREAD, *(run.reserved / max(1, run.allocated) for run in runs))
        found[2] = max(found[2], (math.ceil(found[1] * spread / _SEGMENT) + 1) * _SEGMENT)
    on_device = target.device_type != "cpu"
    return JobMemory(
        device=target.name, peak_bytes=found[0], step=0, phase="", op="", module="", shares=(), workspace_bytes=0,
        unknown_workspaces=(), num_storages=0, seconds=time.perf_counter() - begun,
        allocated_bytes=found[1] if on_device else None, reserved_bytes=found[2] if on_device else None,
        context_bytes=0 if target.profile is None else target.profile.context, how="probed",
    )  # fmt: skip


def stated_memory(num_bytes: int, device: str | TrainingDevice = "cpu") -> JobMemory:
    """The memory of a job as somebody states it.

    >>> stated_memory(6 << 30, "h200").needed_bytes == 6 << 30
    True
    """
    if num_bytes < 1:
        raise ValueError(f"memory must be a number of bytes from 1 on, such as 6g, got {num_bytes}")
    target = training_device(device)
    on_device = target.device_type != "cpu"
    return JobMemory(
        device=target.name, peak_bytes=num_bytes, step=0, phase="", op="", module="", shares=(), workspace_bytes=0,
        unknown_workspaces=(), num_storages=0, seconds=0.0, allocated_bytes=num_bytes if on_device else None,
        reserved_bytes=num_bytes if on_device else None, how="stated",
    )  # fmt: skip


def _run(
    function: Callable[..., Any], arguments: Mapping[str, Any], target: TrainingDevice, num_steps: int
) -> ProbedRun:
    from gnnsys.planning.memory.trace import watch_steps

    size = arguments.get(PROBED_ARGUMENT)
    size = size if isinstance(size, int) else 0
    if target.device_type == "cuda" and torch.cuda.is_available():
        run = run_on_device(function, arguments, num_steps)
        return ProbedRun(size, run.allocated, run.allocated, run.reserved)
    trace = watch_steps(make_job(function, arguments), num_steps)
    found = summarise(trace, target)
    products = (
        0
        if target.profile is None
        else sum((target.profile.product_workspace, target.profile.backward_workspace, target.profile.linear_workspace))
    )
    allocated, reserved = found.allocated_bytes or found.peak_bytes, found.reserved_bytes or found.peak_bytes
    return ProbedRun(size, found.peak_bytes + products, allocated + products, reserved + products)


def _at(runs: Sequence[ProbedRun], size: int, what: str) -> float:
    """The line through what runs of several sizes took, at `size`."""
    values = [float(getattr(run, what)) for run in runs]
    if len(runs) == 1:
        return values[0]
    rows = torch.tensor([[1.0, run.size] for run in runs], dtype=torch.float64, device="cpu")
    took = torch.tensor(values, dtype=torch.float64, device="cpu")
    fixed, slope = torch.linalg.lstsq(rows, took.view(-1, 1)).solution.view(-1).tolist()
    if slope < 0:
        return max(values)
    if fixed < 0:
        fixed, slope = 0.0, float((rows[:, 1] * took).sum() / (rows[:, 1] ** 2).sum())
    return float(max(fixed + slope * size, max(values)))
