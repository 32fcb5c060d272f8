"""Instructions that this process executes in user mode: counted by the processor (perf_event_open) where it can.

Virtual machines often have no such counter: then the process is stepped, which is as exact and ten thousand times
slower. Where that is not allowed either the user CPU time stands in. The unit says which it is.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
import sys
import time
from collections.abc import Callable

from gnnsys.bench.stepping import Stepper

HARDWARE, STEPPED, TIMED = "M instr", "M steps", "CPU ms"  # a step is an instruction
UNITS = (HARDWARE, STEPPED, TIMED)

_SYSCALL = {"x86_64": 298, "aarch64": 241}
_HARDWARE, _INSTRUCTIONS = 0, 1
_INHERIT, _EXCLUDE_KERNEL, _EXCLUDE_HV = 1 << 1, 1 << 5, 1 << 6
_SIZE = 112


class Counter:
    """Make it before any thread that is to be counted: they inherit it."""

    def __init__(self, units: tuple[str, ...] = UNITS) -> None:
        self._descriptor = _open() if HARDWARE in units else None
        self._stepper: Stepper | None = None
        if self._descriptor is None and STEPPED in units:
            try:
                self._stepper = Stepper()
            except OSError:
                if TIMED not in units:
                    raise
        self.unit = HARDWARE if self._descriptor is not None else TIMED if self._stepper is None else STEPPED

    def count(self, call: Callable[[], object]) -> tuple[float, float]:
        """What all threads execute while `call` runs in this one, in `unit`, and the seconds that passed."""
        if self._stepper is not None:
            count, seconds = self._stepper.count(call)
            return count / 1e6, seconds
        before, began = self._read(), time.perf_counter()
        call()
        return self._read() - before, time.perf_counter() - began

    def close(self) -> None:
        """Ends what counts; nothing can be counted any more."""
        if self._stepper is not None:
            self._stepper.close()
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _read(self) -> float:
        if self._descriptor is None:
            return 1e3 * resource.getrusage(resource.RUSAGE_SELF).ru_utime
        return struct.unpack("q", os.read(self._descriptor, 8))[0] / 1e6


def best_unit() -> str:
    """What a process of this machine is counted in."""
    counter = Counter()
    counter.close()
    return counter.unit


def _open() -> int | None:
    number = _SYSCALL.get(platform.machine())
    if sys.platform != "linux" or number is None:
        return None
    attributes = struct.pack(
        "IIQQQQQ", _HARDWARE, _SIZE, _INSTRUCTIONS, 0, 0, 0, _INHERIT | _EXCLUDE_KERNEL | _EXCLUDE_HV
    )
    buffer = ctypes.create_string_buffer(attributes.ljust(_SIZE, b"\0"), _SIZE)
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    descriptor = syscall(number, buffer, 0, -1, -1, ctypes.c_ulong(0))
    return None if descriptor < 0 else int(descriptor)
