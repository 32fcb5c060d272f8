"""Mapped files that a GPU reads where they are: every process of a machine shares one copy, the kernel's.

An array that is mapped from a file is mapped once more, shared and for reading alone, which is what CUDA locks without
copying it. Which file an address belongs to is read from /proc: whoever mapped the array need not be asked. Where CUDA
refuses (a file system, a limit of locked memory), `why_not` says so, and the caller takes another way.
"""

from __future__ import annotations

import mmap
import os
import threading
import warnings
import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from gnnsys.ops import PageLock
from gnnsys.store.memory_budget import MemoryBudget

_KEPT_FREE = 0.2  # of the machine's free memory: locked pages cannot be given to others
_PIECE = 1 << 30  # bytes that are locked at once


class MappedRange(NamedTuple):
    """A piece of a file in this process's memory."""

    path: str
    first: int  # address
    end: int
    offset: int  # in the file, of `first`


class RegisteredFiles:
    """The files that one device reads for this process. `close` gives them back; so does the process's end.

    `limit` is how many bytes may be locked, by default four fifths of what the machine has free. Files that several
    arrays share, or that are asked for again, are locked once.
    """

    def __init__(self, device: torch.device, limit: int | None = None) -> None:
        self.device = device
        self.why_not = ""  # the last refusal
        self._limit = int((1 - _KEPT_FREE) * MemoryBudget.of("cpu").left()) if limit is None else limit
        self._locks: list[PageLock] = []
        self._maps: dict[str, mmap.mmap] = {}  # by path
        self._lock = threading.Lock()
        # A file that is unmapped while it is locked leaves its address locked: whatever is mapped there next would be
        # read wrongly. So files that nobody closed are given back by who knows them last, before they are unmapped.
        weakref.finalize(self, _give_back, self._locks, self._maps, device).atexit = False
        MemoryBudget.of("cpu").watch(self, "files that a device reads", lambda files: files.nbytes)

    @property
    def nbytes(self) -> int:
        """What is locked now."""
        return sum(lock.bytes for lock in self._locks)

    def view(self, rows: Tensor) -> Tensor | None:
        """The same rows where the device reads them, None where it cannot: `why_not` says why.

        Rows that are not contiguous, or not mapped from a file, cannot be.
        """
        if rows.numel() == 0:
            return rows
        if not rows.is_contiguous():
            self.why_not = "the rows are not contiguous"
            return None
        where = mapped_range(rows.data_ptr())
        if where is None or rows.data_ptr() + rows.nbytes > where.end:
            self.why_not = "the rows are not mapped from a file"
            return None
        with self._lock:
            if where.path not in self._maps and not self._map(where.path):
                return None
            memory = self._maps[where.path]
        offset = where.offset + rows.data_ptr() - where.first
        if offset + rows.nbytes > len(memory):
            self.why_not = f"{where.path} is shorter than the rows that were mapped from it"
            return None
        return _view(memory, rows.dtype, offset, rows.numel()).view(rows.shape)

    def _map(self, path: str) -> bool:
        """Maps and locks a whole file, piece by piece."""
        try:
            size = os.stat(path).st_size
            with open(path, "rb") as file:
                memory = mmap.mmap(file.fileno(), size, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, ValueError) as error:
            self.why_not = f"{path} cannot be mapped: {error}"
            return False
        if self.nbytes + size > self._limit:
            self.why_not = f"{path} would make {self.nbytes + size:,} locked bytes, {self._limit:,} are allowed"
            return False
        address = _view(memory, torch.uint8, 0, 1).data_ptr()
        held: list[PageLock] = []
        for first in range(0, size, _PIECE):
            lock = PageLock(address + first, min(_PIECE, size - first), self.device, read_only=True)
            if lock.error:
                for other in held:
                    other.close()
                self.why_not = (
                    f"CUDA refuses to lock {path} (error {lock.error}): a file system that cannot be mapped, or a "
                    "limit of locked memory (ulimit -l)"
                )
                return False
            held.append(lock)
        self._locks += held
        self._maps[path] = memory
        return True

    def close(self) -> None:
        """Waits until the device reads none of it any more, and gives it back. Views are of no use to it then."""
        with self._lock:
            _give_back(self._locks, self._maps, self.device)


def _give_back(locks: list[PageLock], maps: dict[str, mmap.mmap], device: torch.device) -> None:
    if any(lock.is_held for lock in locks):
        torch.cuda.synchronize(device)
    for lock in locks:
        lock.close()
    locks.clear()
    maps.clear()


def mapped_range(address: int) -> MappedRange | None:
    """What file is mapped at an address, None where it is none."""
    with open("/proc/self/maps", "rb") as maps:
        for line in maps:
            fields = line.split(None, 5)
            first, end = (int(number, 16) for number in fields[0].split(b"-"))
            if first <= address < end:
                path = fields[5].strip() if len(fields) == 6 else b""
                if not path.startswith(b"/") or path.endswith(b" (deleted)"):
                    return None
                return MappedRange(os.fsdecode(path), first, end, int(fields[2], 16))
    return None


def _view(memory: mmap.mmap, dtype: torch.dtype, offset: int, count: int) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a map that is read only: nothing here writes to it
        return torch.frombuffer(memory, dtype=dtype, offset=offset, count=count)
