"""Bytes per second that rows can move at on this machine, each measured in some milliseconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_BYTES = 64 << 20
_ROW = 128  # float32 values
_TIMES = 3


@dataclass(frozen=True)
class Rates:
    """`bus`: pinned host memory to the device. `device`: rows gathered in its own memory. `host`: rows gathered in host
    memory by `threads` threads."""

    bus: float
    device: float
    host: float
    threads: int


def measure_rates(device: torch.device, threads: int) -> Rates:
    """Takes a tenth of a second, and 200 MB on each side for that time."""
    num_rows = _BYTES // (4 * _ROW)
    host = torch.empty(num_rows, _ROW, pin_memory=True, device="cpu")
    there = torch.empty(num_rows, _ROW, device=device)
    ids = torch.randperm(num_rows, device="cpu")
    ids_there = ids.to(device)
    bus = _best(device, lambda: there.copy_(host, non_blocking=True))
    on_device = _best(device, lambda: there.index_select(0, ids_there))
    few = ids[: num_rows // 8]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        on_host = 8 * _best(device, lambda: host.index_select(0, few))
    finally:
        torch.set_num_threads(before)
    return Rates(_BYTES / bus, _BYTES / on_device, max(1, threads) * _BYTES / on_host, max(1, threads))


def _best(device: torch.device, call: Callable[[], object]) -> float:
    """Seconds of the fastest of a few calls."""
    seconds = []
    for _ in range(_TIMES):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        call()
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return min(seconds)
