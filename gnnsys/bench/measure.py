"""Measuring: sides take turns in one process, so that whatever disturbs the machine disturbs all of them.

Each side is called once to warm up, then all are called in rounds. The figure is the median of a side's rounds.
What runs on a GPU finds its caches cold: its inputs are never there from the round before.
"""

from __future__ import annotations

import ctypes
import gc
import re
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnnsys.bench.case import Case, Clock, Refused, Side
from gnnsys.bench.peers import set_threads

_REASON_CHARS = 200
_FLUSH_BYTES = 1 << 30  # several times a GPU's cache, and 0.3 ms of writing: longer than an op takes to be queued


@dataclass(frozen=True)
class RoundLimits:
    """How often: at least `least` rounds, then until `seconds` are spent or `most` are done."""

    least: int = 5
    most: int = 31
    seconds: float = 4.0


@dataclass(frozen=True)
class Measured:
    """Every side's measurements (seconds or bytes), round by round; and why a foreign side has none."""

    samples: dict[str, list[float]]
    refused: dict[str, str] = field(default_factory=dict)


def measure(case: Case, rounds: RoundLimits) -> Measured:
    """Runs all sides in turns. The device's memory is given back at the end."""
    try:
        return _measure(case, rounds)
    finally:
        if torch.cuda.is_initialized():
            gc.collect()
            torch.cuda.empty_cache()


def _measure(case: Case, rounds: RoundLimits) -> Measured:
    sides = dict(case.sides())
    if case.ours not in sides:
        raise RuntimeError(f"case {case.name!r} has no side {case.ours!r}, only {sorted(sides)}")
    num_threads = torch.get_num_threads()
    try:
        refused = warm_up(case, sides)
        return take_turns(case, sides, rounds, refused)
    finally:
        set_threads(num_threads)


def take_turns(case: Case, sides: Mapping[str, Side], rounds: RoundLimits, refused: dict[str, str]) -> Measured:
    probes = {"memory": peak_extra_bytes, "value": returned_value, "score": returned_value}
    least, most = (case.repeats, case.repeats) if case.repeats else (rounds.least, rounds.most)
    samples: dict[str, list[float]] = {name: [] for name in sides if name not in refused}
    start = time.perf_counter()
    for turn in range(most):
        if turn >= least and time.perf_counter() - start > rounds.seconds:
            break
        for name in list(samples):
            side = sides[name]
            set_threads(side.threads)
            probe = probes.get(case.unit.kind) or clock(side.clock)
            measured, reason = _attempt(case, name, side, lambda probe=probe, side=side: probe(side.call))  # type: ignore[misc]
            if reason:  # in a later round, such as for want of memory: no figure from half of its rounds
                refused[name] = reason
                del samples[name]
            else:
                samples[name].append(measured)
    return Measured(samples, refused)


def _attempt(case: Case, name: str, side: Side, call: Callable[[], Any]) -> tuple[Any, str | None]:
    """What `call` returns; or, where a foreign side raises, None and the reason."""
    try:
        return call(), None
    except Exception as error:
        if not side.foreign or name == case.ours:
            raise
        reason = reason_of(error)
    gc.collect()  # what only the error held
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return None, reason


def reason_of(error: Exception) -> str:
    """One line: the kind of error and the first line of its text, without what natives put in front of it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, Refused):
        return lines[0] if lines else "it cannot do this"
    first = re.sub(r"^\[\d\d:\d\d:\d\d\] ", "", lines[0]) if lines else ""
    kind = "out of memory" if isinstance(error, (MemoryError, torch.OutOfMemoryError)) else type(error).__name__
    return f"{kind}: {first[:_REASON_CHARS]}" if first else kind


def median(samples: list[float]) -> float:
    return statistics.median(samples)


def warm_up(case: Case, sides: Mapping[str, Side]) -> dict[str, str]:
    """One untimed call of every side; where the case asks for it, all results must equal ours.

    Returns the foreign sides that cannot do it, with the reasons.
    """
    expected: Any = None
    refused: dict[str, str] = {}
    for name in [case.ours, *(n for n in sides if n != case.ours)]:
        set_threads(sides[name].threads)
        result, reason = _attempt(case, name, sides[name], sides[name].call)
        if reason:
            refused[name] = reason
        if reason or case.agree is None or not isinstance(result, Tensor):
            continue
        if name == case.ours:
            expected = result.clone()
        elif not (apart := _distance(result, expected)) <= case.agree:
            raise RuntimeError(f"case {case.name!r}: {name} and {case.ours} are {apart:g} of the result apart")
    return refused


def _distance(result: Tensor, expected: Tensor) -> float:
    """The norm of the difference over that of the result: rows that add up to little may differ by much of it."""
    if result.shape != expected.shape:
        return float("inf")
    if not expected.is_floating_point():
        return 0.0 if torch.equal(result.to(expected.dtype), expected) else float("inf")
    apart, whole = (
        torch.linalg.vector_norm(t, dtype=torch.float64) for t in (result.to(expected.dtype) - expected, expected)
    )
    return float(apart / whole.clamp(min=1e-30))


def seconds_of(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    result = call()
    elapsed = time.perf_counter() - start
    del result  # freed outside the measurement
    return elapsed


def clock(kind: Clock) -> Callable[[Callable[[], Any]], float]:
    """What times a call. Without a GPU there is but the processor's time."""
    if kind == "host" or not torch.cuda.is_available():
        return seconds_of
    return device_seconds_of if kind == "device" else synced_seconds_of


def device_seconds_of(call: Callable[[], Any]) -> float:
    """Between events on the current stream, the call being queued before the first of them has happened."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    _flush_device()
    start.record()
    result = call()
    end.record()
    end.synchronize()
    del result
    return start.elapsed_time(end) * 1e-3


def synced_seconds_of(call: Callable[[], Any]) -> float:
    _flush_device()
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    elapsed = time.perf_counter() - start
    del result
    return elapsed


def _flush_device() -> None:
    """Fills the GPU's caches with something else, and keeps it busy while the host queues what comes next."""
    torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda").zero_()


def returned_value(call: Callable[[], Any]) -> float:
    return float(call())


def peak_extra_bytes(call: Callable[[], Any]) -> float:
    """By how much the process's resident memory peaks above where it stood (Linux: the kernel's high-water mark)."""
    gc.collect()
    _return_free_memory()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to the current size
    before = _status_bytes("VmRSS")
    result = call()
    peak = _status_bytes("VmHWM")
    del result
    return max(float(peak - before), 0.0)


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def _return_free_memory() -> None:
    """Gives freed heap pages back, so that a side cannot hide its memory in what another one left behind."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
