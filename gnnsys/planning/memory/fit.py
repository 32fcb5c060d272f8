"""The largest value of an argument, such as a batch size, with which a job fits a given amount of memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gnnsys.planning.memory.estimate import JobMemory, format_bytes, trace_job
from gnnsys.planning.memory.training_device import TrainingDevice, training_device

_START, _MOST = 64, 1 << 40
DRAWN = 24  # batches of a sampling loader whose structure is drawn for each value
STEPS = 300  # that are replayed for each


@dataclass(frozen=True)
class ArgumentFit:
    """`value` fits and `too_large` does not. None where the search ended at the most that was asked for, or where a
    larger value takes no more: a batch has all input nodes then."""

    argument: str
    value: int
    too_large: int | None
    memory: JobMemory
    capacity: int
    num_estimates: int


def fit_argument(
    function: Callable[..., Any],
    argument: str,
    arguments: Mapping[str, Any] | None = None,
    device: str | TrainingDevice = "cpu",
    capacity: int | None = None,
    num_steps: int = 2,
    most: int = _MOST,
) -> ArgumentFit:
    """Doubles the argument from what it is given as (else 64) while the job fits, then halves the interval.

    It stops where the interval is under 1% of the value: batches of one size differ by more. `capacity` in bytes is
    that of the device by default. Memory is taken to grow with the argument.
    """
    target = training_device(device)
    limit = capacity
    if limit is None and target.capacity is not None:  # the process's context is not torch's to give
        limit = target.capacity - (0 if target.profile is None else target.profile.context)
    if limit is None:
        raise ValueError(f"the capacity of {target.name} is not known: give --memory, such as --memory 16g")
    given = dict(arguments or {})
    start = given.get(argument, _START)
    if not isinstance(start, int) or isinstance(start, bool) or start < 1:
        raise ValueError(f"{argument} must be a number from 1 on to be fitted, got {start!r}")
    asked: dict[int, JobMemory] = {}

    def fits(value: int) -> bool:
        traced = trace_job(function, {**given, argument: value}, target, num_steps, DRAWN, STEPS)
        asked[value] = traced.memory
        return traced.fits(limit)

    low, high = 0, min(start, most)
    while fits(high):
        if high == most:
            return ArgumentFit(argument, high, None, asked[high], limit, len(asked))
        if low and asked[high].peak_bytes == asked[low].peak_bytes:
            if len({memory.peak_bytes for memory in asked.values()}) > 1:
                return ArgumentFit(argument, low, None, asked[low], limit, len(asked))
            raise ValueError(
                f"memory does not grow with {argument}: {format_bytes(asked[high].peak_bytes)} at {low} and at {high}. "
                "Fit another argument, or give the loader more input nodes"
            )
        low, high = high, min(_next_above(asked, low, high, limit), most)
    while high - low > max(1, low // 100):
        middle = (low + high) // 2 if len(asked) % 2 else _between(asked, low, high, limit)
        low, high = (middle, high) if fits(middle) else (low, middle)
    if low == 0:
        raise ValueError(
            f"the job takes {format_bytes(asked[high].needed_bytes)} with {argument}={high}, and only "
            f"{format_bytes(limit)} are there: make the model smaller"
        )
    return ArgumentFit(argument, low, high, asked[low], limit, len(asked))


def _next_above(asked: Mapping[int, JobMemory], low: int, high: int, limit: int) -> int:
    """Twice as much, or where a line through the last two sizes reaches the limit."""
    if low == 0:
        return 2 * high
    slope = (asked[high].peak_bytes - asked[low].peak_bytes) / (high - low)
    reached = high + (limit - asked[high].needed_bytes) / slope if slope > 0 else 0
    return max(2 * high, int(1.02 * reached))


def _between(asked: Mapping[int, JobMemory], low: int, high: int, limit: int) -> int:
    """Where a line between the two reaches the limit, inside of the interval."""
    if low == 0:
        return max(1, high // 2)
    least, most = asked[low].needed_bytes, asked[high].needed_bytes
    at = low + (high - low) * (limit - least) // max(most - least, 1)
    return min(max(at, low + 1), high - 1)
