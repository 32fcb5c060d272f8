"""Instructions that this process has executed in user mode, counted by the processor (perf_event_open).

Virtual machines often have no such counter: then the user CPU time stands in, and the unit says so.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
import sys

_SYSCALL = {"x86_64": 298, "aarch64": 241}
_HARDWARE, _INSTRUCTIONS = 0, 1
_INHERIT, _EXCLUDE_KERNEL, _EXCLUDE_HV = 1 << 1, 1 << 5, 1 << 6
_SIZE = 112


class Counter:
    """Make it before any thread that is to be counted: they inherit it. `read()` only ever grows."""

    def __init__(self) -> None:
        self._descriptor = _open()
        self.unit = "CPU ms" if self._descriptor is None else "M instructions"

    def read(self) -> float:
        """So far, in `unit`."""
        if self._descriptor is None:
            return 1e3 * resource.getrusage(resource.RUSAGE_SELF).ru_utime
        return struct.unpack("q", os.read(self._descriptor, 8))[0] / 1e6


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
