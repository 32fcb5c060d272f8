"""Timing many calls in turns: every round calls each of them once, so a noisy moment of the machine meets all.

What takes less than the clock can tell is called several times. On the host the figure of a call is the mean of the
faster half of its rounds, on a device that of the middle half.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from gnnsys.planning.costs.model import Observation

_LEAST_SECONDS = 2e-3  # of a measurement on the host
_MOST_CALLS = 16  # in one measurement
_ROUNDS, _MOST_ROUNDS = 4, 9  # as many as sizes are chosen for; more where time is left
_GENEROUS = 1.5  # times what all rounds have, as calls in a round need less than those that warm up
_FEWEST = 6  # sizes of an operator that stay, however slow they are
_ON_DEVICE = 3  # measurements of a device in a round: they are short
_MOST_FILLS = 64  # before a call on a device: some milliseconds


@dataclass
class CostProbe:
    """A real call of an operator, with the sizes that it has. `share` is how many calls one `call` makes, at once.

    `device` is where it runs; with `waits` the host's clock is read around it, as the call waits for the device itself.
    """

    operator: str
    sizes: Mapping[str, float]
    call: Callable[[], Any]
    device: torch.device | None = None
    waits: bool = False
    share: int = 1
    seconds: list[float] = field(default_factory=list)
    calls: int = 1  # of a measurement
    fills: int = 2  # before it, on a device: as many as keep the device busy until the whole call is queued

    @property
    def is_device_time(self) -> bool:
        """Whether events are the clock."""
        return self.device is not None and not self.waits


class ProbeTimer:
    """`clock` is the host's. On a device, events are, unless a call waits by itself; its caches are cold then."""

    def __init__(self, device: torch.device | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._flush: torch.Tensor | None = None
        if device is not None:
            cache = int(torch.cuda.get_device_properties(device).L2_cache_size)
            self._flush = torch.empty(max(4 * cache, 256 << 20), dtype=torch.uint8, device=device)

    def once(self, probe: CostProbe) -> float:
        """Seconds of a call."""
        if probe.is_device_time:
            return self._on_device(probe)
        if probe.device is not None:
            torch.cuda.synchronize(probe.device)
        began = self.clock()
        for _ in range(probe.calls):
            probe.call()
        if probe.device is not None:
            torch.cuda.synchronize(probe.device)
        return (self.clock() - began) / (probe.calls * probe.share)

    def _on_device(self, probe: CostProbe) -> float:
        """Fills empty the caches, and keep the device busy while the call is queued behind them.

        Where the device is through with them before the last kernel is queued, it waits for the host, and what was
        measured is the host: more fills, and again.
        """
        assert self._flush is not None
        while True:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            for _ in range(probe.fills):
                self._flush.zero_()
            start.record()
            probe.call()
            end.record()
            has_begun = start.query()
            end.synchronize()
            if not has_begun or probe.fills >= _MOST_FILLS:
                return 1e-3 * start.elapsed_time(end) / probe.share
            probe.fills *= 2


def time_probes(probes: Sequence[CostProbe], deadline: float, timer: ProbeTimer) -> list[Observation]:
    """Calls all in turns until `deadline` (of `time.perf_counter`), at least once.

    Sizes that would take too long are left out first: each operator has its share of the time.
    """
    kept = _warm_up(probes, deadline, timer)
    with _no_collection():
        _take_turns(kept, deadline, timer)
    return [Observation(p.operator, p.sizes, _figure(p.seconds, p.is_device_time)) for p in kept]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without Python's collector, which takes as long as a small call does."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _take_turns(kept: Sequence[CostProbe], deadline: float, timer: ProbeTimer) -> None:
    order, turn, longest = random.Random(0), 0, 0.0
    while turn < _MOST_ROUNDS and (turn == 0 or time.perf_counter() + longest < deadline):
        began = time.perf_counter()
        shuffled = order.sample(kept, len(kept))  # another before it in every round
        for probe in sorted(shuffled, key=lambda probe: probe.device is not None):  # no clock falls while a GPU waits
            probe.call()  # not measured: what came before has left its own code in caches, and its memory to be reused
            probe.seconds += [timer.once(probe) for _ in range(_ON_DEVICE if probe.is_device_time else 1)]
        turn, longest = turn + 1, max(longest, time.perf_counter() - began)


def _figure(seconds: Sequence[float], is_device_time: bool = False) -> float:
    """The mean of the faster half, as what else a host does only ever adds to a call's time. A device does nothing
    else, but has good and bad moments (where a copy starts, where blocks fall): the mean of the middle half.

    Means, and not one of the rounds: where a call takes either of two times, that would be now the one, now the other.
    """
    ordered = sorted(seconds)
    skipped = len(ordered) // 4 if is_device_time else 0
    count = len(ordered) - 2 * skipped if is_device_time else (len(ordered) + 1) // 2
    return max(1e-9, statistics.fmean(ordered[skipped : skipped + count]))


def _warm_up(probes: Sequence[CostProbe], deadline: float, timer: ProbeTimer) -> list[CostProbe]:
    """One call each, from the first to the last: builders give the small ones first. Operators of a device come before
    those of the host, which have what they leave of the time: a device needs little."""
    by_operator: dict[str, list[CostProbe]] = {}
    for probe in probes:
        by_operator.setdefault(probe.operator, []).append(probe)
    left = max(0.0, deadline - time.perf_counter())
    rest = _GENEROUS * left / (1 + _ROUNDS)  # for one round
    kept = []
    for number, some in enumerate(sorted(by_operator.values(), key=lambda some: some[0].device is None)):
        allowed, spent, count = rest / (len(by_operator) - number), 0.0, 0
        for probe in some:
            if spent > allowed and count >= _FEWEST:
                break
            began = time.perf_counter()
            probe.call()  # makes what later calls find: buffers, code, threads
            seconds = timer.once(probe)
            each = max(probe.share * seconds, 1e-7)  # seconds of one `call`
            probe.calls = max(1, min(_MOST_CALLS, int(_LEAST_SECONDS / each))) if not probe.is_device_time else 1
            kept.append(probe)
            spent, count = spent + time.perf_counter() - began + (probe.calls - 1) * each, count + 1
        rest = max(0.0, rest - spent)
    return kept
