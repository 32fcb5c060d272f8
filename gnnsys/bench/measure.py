"""Measuring: sides take turns in one process, so that whatever disturbs the machine disturbs all of them.

Each side is called once to warm up, then all are called in rounds. The figure is the median of a side's rounds.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnnsys.bench.case import Case, Side
from gnnsys.bench.peers import set_threads


@dataclass(frozen=True)
class Rounds:
    """How often: at least `least` rounds, then until `seconds` are spent or `most` are done."""

    least: int = 5
    most: int = 31
    seconds: float = 4.0


def measure(case: Case, rounds: Rounds) -> dict[str, list[float]]:
    """Every side's measurements (seconds or bytes), round by round."""
    sides = case.sides()
    if case.ours not in sides:
        raise RuntimeError(f"case {case.name!r} has no side {case.ours!r}, only {sorted(sides)}")
    num_threads = torch.get_num_threads()
    try:
        warm_up(case, sides)
        return take_turns(case, sides, rounds)
    finally:
        set_threads(num_threads)


def take_turns(case: Case, sides: Mapping[str, Side], rounds: Rounds) -> dict[str, list[float]]:
    probe = {"memory": peak_extra_bytes, "value": returned_value, "score": returned_value}.get(
        case.unit.kind, seconds_of
    )
    least, most = (case.repeats, case.repeats) if case.repeats else (rounds.least, rounds.most)
    samples: dict[str, list[float]] = {name: [] for name in sides}
    start = time.perf_counter()
    for turn in range(most):
        if turn >= least and time.perf_counter() - start > rounds.seconds:
            break
        for name, side in sides.items():
            set_threads(side.threads)
            samples[name].append(probe(side.call))
    return samples


def median(samples: list[float]) -> float:
    return statistics.median(samples)


def warm_up(case: Case, sides: Mapping[str, Side]) -> None:
    """One untimed call of every side; where the case asks for it, all results must equal ours."""
    expected: Any = None
    for name in [case.ours, *(n for n in sides if n != case.ours)]:
        set_threads(sides[name].threads)
        result = sides[name].call()
        if case.agree is None or not isinstance(result, Tensor):
            continue
        if name == case.ours:
            expected = result.clone()
        elif not torch.allclose(result.to(expected.dtype), expected, rtol=case.agree, atol=case.agree):
            worst = float((result - expected).abs().max())
            raise RuntimeError(f"case {case.name!r}: {name} and {case.ours} differ by up to {worst:g}")


def seconds_of(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    result = call()
    elapsed = time.perf_counter() - start
    del result  # freed outside the measurement
    return elapsed


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
