"""Mapped files that a GPU reads where they are: every process of a machine shares one copy, the kernel's.

An array that is mapped from a file is mapped once more, shared and for reading alone, which is what CUDA locks without
copying it. Which file an address belongs to is read from /proc: whoever mapped the array need not be asked. Where CUDA
refuses (a file system, a driver that locks no memory for reading alone), the processes of the machine share a copy in
memory (`shared_copy.py`), where there is room for it. Where that is refused too, `why_not` says so, and the caller
takes another way.
"""

from __future__ import annotations

import mmap
import os
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gnnsys.ops import PageLock
from gnnsys.store.memory_budget import MemoryBudget
from gnnsys.store.shared_copy import SharedCopy, share_copy

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
    arrays share, or that are asked for again, are locked once. `lock` locks pages, by default CUDA's way.
    """

    def __init__(
        self, device: torch.device, limit: int | None = None, lock: Callable[..., PageLock] = PageLock
    ) -> None:
        self.device = device
        self.why_not = ""  # the last refusal
        self.why_copied = ""  # the last refusal of a file as it is, where a copy of it is read
        self._lock_pages = lock
        self._copies: dict[str, SharedCopy] = {}  # by path
        self._refused: tuple[int, int] | None = None  # bytes of shared memory that were refused, the least, and why
        self._has_tried = False  # to lock a page of it
        self._limit = int((1 - _KEPT_FREE) * MemoryBudget.of("cpu").left()) if limit is None else limit
        self._locks: list[PageLock] = []
        self._maps: dict[str, mmap.mmap] = {}  # by path
        self._lock = threading.Lock()
        # A file that is unmapped while it is locked leaves its address locked: whatever is mapped there next would be
        # read wrongly. So files that nobody closed are given back by who knows them last, before they are unmapped.
        weakref.finalize(self, _give_back, self._locks, self._maps, self._copies, device).atexit = False
        MemoryBudget.of("cpu").watch(self, "files that a device reads", lambda files: files.nbytes)

    @property
    def nbytes(self) -> int:
        """What is locked now."""
        return sum(lock.bytes for lock in self._locks)

    @property
    def copied_bytes(self) -> int:
        """Of that, what lies in copies of files: memory, but once for all processes of the machine."""
        return sum(len(copy.memory) for copy in list(self._copies.values()))

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
        """Maps and locks a whole file, or a copy of it."""
        try:
            size = os.stat(path).st_size
        except OSError as error:
            self.why_not = f"{path} cannot be read: {error}"
            return False
        if self.nbytes + size > self._limit:
            self.why_not = f"{path} would make {self.nbytes + size:,} locked bytes, {self._limit:,} are allowed"
            return False
        refusal = self._map_file(path, size)
        if refusal and self._map_copy(path, size):
            self.why_copied = refusal
        elif refusal:
            self.why_not = f"{refusal}; nor can a copy be shared: {self.why_not}"
        return path in self._maps

    def _map_file(self, path: str, size: int) -> str:
        """Why it cannot be locked where it is; empty where it is locked."""
        try:
            with open(path, "rb") as file:
                memory = mmap.mmap(file.fileno(), size, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, ValueError) as error:
            return f"{path} cannot be mapped: {error}"
        error_number = self._lock_all(memory, read_only=True)
        if error_number:
            return (
                f"CUDA refuses to lock {path} (error {error_number}): a file system that cannot be mapped, or a limit "
                "of locked memory (ulimit -l)"
            )
        self._maps[path] = memory
        return ""

    def _map_copy(self, path: str, size: int) -> bool:
        if not self._has_tried:  # before a whole file is copied in vain
            self._has_tried = True
            self._try_page()
        if self._refused is not None and size >= self._refused[0]:
            self.why_not = _refusal(self._refused[1])
            return False
        try:
            copy = share_copy(path, int((1 - _KEPT_FREE) * MemoryBudget.of("cpu").left()))
        except (OSError, ValueError) as error:
            self.why_not = str(error)
            return False
        error_number = self._lock_all(copy.memory, read_only=False)
        if error_number:
            copy.close()
            self._refused, self.why_not = (size, error_number), _refusal(error_number)
            return False
        self._maps[path], self._copies[path] = copy.memory, copy
        return True

    def _try_page(self) -> None:
        """Whether CUDA locks shared memory at all."""
        page = mmap.mmap(-1, mmap.PAGESIZE)
        lock = self._lock_pages(_view(page, torch.uint8, 0, 1).data_ptr(), len(page), self.device, read_only=False)
        if lock.error:
            self._refused = 0, lock.error
        lock.close()

    def _lock_all(self, memory: mmap.mmap, *, read_only: bool) -> int:
        """Locks a map piece by piece; 0, or what it was refused for, and then nothing of it is locked."""
        address, held = _view(memory, torch.uint8, 0, 1).data_ptr(), list[PageLock]()
        for first in range(0, len(memory), _PIECE):
            piece = min(_PIECE, len(memory) - first)
            lock = self._lock_pages(address + first, piece, self.device, read_only=read_only)
            if lock.error:
                for other in held:
                    other.close()
                return lock.error
            held.append(lock)
        self._locks += held
        return 0

    def close(self) -> None:
        """Waits until the device reads none of it any more, and gives it back. Views are of no use to it then."""
        with self._lock:
            _give_back(self._locks, self._maps, self._copies, self.device)
            self._refused, self._has_tried = None, False


def _give_back(
    locks: list[PageLock], maps: dict[str, mmap.mmap], copies: dict[str, SharedCopy], device: torch.device
) -> None:
    if device.type == "cuda" and any(lock.is_held for lock in locks):
        torch.cuda.synchronize(device)
    for lock in locks:
        lock.close()
    locks.clear()
    maps.clear()
    for copy in copies.values():
        copy.close()
    copies.clear()


def _refusal(error_number: int) -> str:
    return f"CUDA refuses to lock shared memory (error {error_number}): a limit (ulimit -l), perhaps"


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
