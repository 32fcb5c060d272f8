"""A job may take what was set aside for it and no more: past it, the job itself is out of memory, not its neighbours.

On a GPU torch's allocator stops at a fraction of the device. On the CPU the kernel stops at a size of the process's own
memory, with some room for what Python and libraries take beside tensors.
"""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path
from types import TracebackType

import torch

from gnnsys.store import MemoryBudget

_CPU_ROOM = 256 << 20
_STATUS = Path("/proc/self/status")


class MemoryCap:
    """`measured`, after the block: the most bytes that were taken in it."""

    def __init__(self, device: str, num_bytes: int) -> None:
        self._device, self._num_bytes = device, num_bytes
        self._before, self._limits = 0, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        self.measured: int | None = None

    def __enter__(self) -> MemoryCap:
        if self._device != "cpu":
            total = torch.cuda.get_device_properties(self._device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, self._num_bytes / total), self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            MemoryBudget.of(self._device).cap = self._num_bytes
            return self
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        self._before = _status("VmRSS")
        self._limits = resource.getrlimit(resource.RLIMIT_DATA)
        limit = _status("VmData") + self._num_bytes + _CPU_ROOM
        hard = self._limits[1]
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard < 0 else min(limit, hard), hard))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._device != "cpu":
            MemoryBudget.of(self._device).cap = None
            self.measured = torch.cuda.max_memory_reserved(self._device)
            torch.cuda.set_per_process_memory_fraction(1.0, self._device)
            return
        with contextlib.suppress(OSError, ValueError):  # the job has lowered its hard limit: its worker is replaced
            resource.setrlimit(resource.RLIMIT_DATA, self._limits)
        with contextlib.suppress(OSError):  # or how many files it may open
            self.measured = max(0, _status("VmHWM") - self._before)


def allow_mapping(num_bytes: int) -> None:
    """A graph that jobs share is mapped for this one to write to, which the kernel counts: the cap is of other memory.

    Until the end of the cap's block, which puts the limit back.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft != resource.RLIM_INFINITY:
        wanted = soft + num_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard < 0 else min(wanted, hard), hard))


def _status(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    return 0
