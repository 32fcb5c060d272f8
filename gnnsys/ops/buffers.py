"""Buffers that features are gathered into, used again as soon as nobody can see them any more.

A fresh large buffer costs a page fault per 4 KiB: gathering into used memory is up to three times faster. A buffer is
lent as a numpy view that the tensor's storage owns. When the storage dies (the last tensor, view or saved activation on
it is gone) the view dies with it, and only then does its weak reference give the memory back. So a batch that the user
keeps keeps its memory, for as long as any part of it is reachable.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections import deque

import numpy as np
import torch
from torch import Tensor

_SMALLEST = 1 << 18  # below this malloc reuses memory by itself
_ALIGN = 64


class BufferPool:
    """Lends tensors on pooled memory; keeps at most `max_free` buffers while they are unused.

    Memory comes back from inside destructors, on any thread, perhaps in the middle of `empty`: that takes no lock.
    """

    def __init__(self, max_free: int) -> None:
        self._max_free = max_free
        self._returned: deque[np.ndarray] = deque()
        self._free: list[np.ndarray] = []  # oldest first
        self._lent = 0  # bytes, those included that came back and are not collected yet
        self._lock, self._process = threading.Lock(), os.getpid()

    def __reduce__(self) -> tuple[type[BufferPool], tuple[int]]:
        return BufferPool, (self._max_free,)  # a copy, in another process perhaps, begins with no memory

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised memory, like `torch.empty`."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < _SMALLEST:
            return torch.empty(shape, dtype=dtype, device="cpu")
        memory = self._take(num_bytes)
        if memory is None:
            memory = _aligned(_rounded(num_bytes))
        with self._guard():
            self._lent += memory.nbytes
        lent = memory[:num_bytes]  # a new array object: its life is the life of the tensor's storage
        weakref.finalize(lent, self._returned.append, memory).atexit = False
        return torch.from_numpy(lent).view(dtype).view(shape)

    def held_bytes(self) -> int:
        """Lent, and kept for later use."""
        with self._guard():
            self._collect()
            return self._lent + sum(memory.nbytes for memory in self._free)

    def free_bytes(self) -> int:
        """Kept for later use."""
        with self._guard():
            self._collect()
            return sum(memory.nbytes for memory in self._free)

    def _guard(self) -> threading.Lock:
        """A process that was forked while another thread held the lock has one of its own."""
        if self._process != os.getpid():
            self._lock, self._process = threading.Lock(), os.getpid()
        return self._lock

    def _take(self, num_bytes: int) -> np.ndarray | None:
        """The smallest unused buffer that is large enough, and not wastefully so."""
        with self._guard():
            self._collect()
            fitting = [i for i, memory in enumerate(self._free) if num_bytes <= memory.nbytes <= 2 * num_bytes]
            return self._free.pop(min(fitting, key=lambda i: self._free[i].nbytes)) if fitting else None

    def _collect(self) -> None:
        while self._returned:
            memory = self._returned.popleft()
            self._lent -= memory.nbytes
            self._free.append(memory)
        del self._free[: max(0, len(self._free) - self._max_free)]


def _rounded(num_bytes: int) -> int:
    """The next of eight steps per power of two: batches differ in size by little, and share buffers then."""
    step = 1 << max(0, num_bytes.bit_length() - 4)
    return (num_bytes + step - 1) // step * step


def _aligned(num_bytes: int) -> np.ndarray:
    memory = np.empty(num_bytes + _ALIGN, dtype=np.uint8)
    start = -memory.ctypes.data % _ALIGN
    return memory[start : start + num_bytes]
