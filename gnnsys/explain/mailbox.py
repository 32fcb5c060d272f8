"""One message in memory that two processes share: one writes, others read the newest, and nobody waits.

Two slots take turns. A message is written into the one that is not the newest: first the slot's number is cleared, then
comes the message, its size and its checksum, then its number, and last the number of the newest. A reader that meets a
message in the making sees another number or a wrong checksum, and has nothing this time. A writer that is killed in the
middle leaves the message before. The memory has no name (memfd): others open it through the owner's /proc entry.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import weakref
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnnsys.comm import DTYPE_OF, export_array

_MAGIC = 0x5847414D4E4E4731
_HEADER = 64  # bytes: magic, token, capacity, number of the newest message, whether it was closed
_SLOT_HEADER = 64  # bytes: number, size, checksum
_ENTRY = 8 * 2  # of an array: dtype, number of entries
_MOST_ARRAYS = 64
_TRIES = 3


class Mailbox:
    """`write` and `read` lists of one-dimensional arrays; messages are numbered from 1. `torn` counts failed reads.

    `descriptor` is the owner's. Others opened the file at `where`, which had the number `inode` then.
    """

    def __init__(
        self, memory: mmap.mmap, capacity: int, descriptor: int | None, where: str = "", inode: int = 0
    ) -> None:
        self.capacity, self._memory, self._descriptor = capacity, memory, descriptor
        self._where, self._inode = where, inode
        self._numbers = torch.frombuffer(memory, dtype=torch.int64, count=_HEADER // 8)
        self._slots = [
            torch.frombuffer(memory, dtype=torch.int64, count=_SLOT_HEADER // 8, offset=self._slot_at(slot))
            for slot in range(2)
        ]
        self.torn = 0
        self._let_go = None if descriptor is None else weakref.finalize(self, os.close, descriptor)
        if self._let_go is not None:
            self._let_go.atexit = False

    @classmethod
    def create(cls, capacity: int) -> Mailbox:
        """Room for messages of `capacity` bytes, as `message_bytes` counts them."""
        capacity = -(-capacity // 64) * 64
        size = _HEADER + 2 * (_SLOT_HEADER + capacity)
        descriptor = os.memfd_create("gnnsys-mailbox", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
            memory = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, ValueError, OverflowError) as error:
            os.close(descriptor)
            raise ValueError(f"{size} bytes of shared memory for a mailbox cannot be had: {error}") from error
        made = cls(memory, capacity, descriptor)
        made._numbers[:3] = torch.tensor([_MAGIC, secrets.randbits(62), capacity], device="cpu")
        return made

    @classmethod
    def open(cls, address: Mapping[str, Any]) -> Mailbox:
        """The mailbox at an address that `address()` gave; ValueError where this process cannot reach it."""
        where = f"/proc/{int(address['pid'])}/fd/{int(address['fd'])}"
        try:
            descriptor = os.open(where, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise ValueError(f"the mailbox of process {address['pid']} cannot be reached: {error}") from error
        capacity = int(address["capacity"])
        size = _HEADER + 2 * (_SLOT_HEADER + capacity)
        try:
            told = os.fstat(descriptor)
            if told.st_size != size:
                raise ValueError(f"{where} is no mailbox of {capacity} bytes")
            memory = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(descriptor)
        opened = cls(memory, capacity, None, where, told.st_ino)
        if opened._numbers[:2].tolist() != [_MAGIC, int(address["token"])]:
            raise ValueError(f"{where} is another mailbox than the one that was meant")
        if opened._is_closed:
            raise ValueError(f"the mailbox of process {address['pid']} is closed")
        return opened

    def close(self) -> None:
        """Done by the owner: nobody opens it any more, and who did can tell. Messages can be read on. Idempotent."""
        assert self._let_go is not None, "only the owner closes a mailbox"
        self._numbers[4] = 1
        self._let_go()

    @property
    def is_left(self) -> bool:
        """Whether the owner has closed it, or has ended without doing so: then no message follows."""
        if self._is_closed or self._descriptor is not None:
            return self._is_closed
        try:
            return os.stat(self._where).st_ino != self._inode
        except OSError:
            return True

    @property
    def _is_closed(self) -> bool:
        return bool(self._numbers[4])

    def address(self) -> dict[str, int]:
        """Where another process of this machine finds it."""
        assert self._descriptor is not None, "only the owner has an address to give"
        token = int(self._numbers[1])
        return {"pid": os.getpid(), "fd": self._descriptor, "token": token, "capacity": self.capacity}

    @property
    def newest(self) -> int:
        """The number of the newest message; 0: none was written."""
        return int(self._numbers[3])

    @property
    def nbytes(self) -> int:
        return len(self._memory)

    def write(self, arrays: Sequence[Tensor]) -> int:
        """Writes a message, which is the newest from then on; its number. One process writes, in one thread."""
        size = message_bytes(arrays)
        if size > self.capacity:
            raise ValueError(f"a message of {size} bytes does not fit a mailbox of {self.capacity}")
        number = self.newest + 1
        slot, at = self._slots[number % 2], self._slot_at(number % 2) + _SLOT_HEADER
        slot[0] = 0
        begin, entries = at + 8 + _ENTRY * len(arrays), [len(arrays)]
        for array in arrays:
            code, data = export_array(array)
            entries += [code, array.numel()]
            self._memory[begin : begin + array.nbytes] = (
                data if isinstance(data, bytes) else data.reshape(-1).view(np.uint8).data
            )
            begin += array.nbytes + -array.nbytes % 8
        self._memory[at : at + 8 * len(entries)] = bytes((ctypes.c_int64 * len(entries))(*entries))
        with memoryview(self._memory) as memory:
            slot[1], slot[2] = size, zlib.crc32(memory[at : at + size])
        slot[0] = number
        self._numbers[3] = number
        return number

    def read(self, back: int = 0, *, copy: bool = True) -> tuple[int, list[Tensor]] | None:
        """The newest message, or the one `back` before it, and its number, copied; None where there is none, or it is
        being written over. Without a copy arrays are those of the mailbox: for messages that none is written after."""
        for _ in range(_TRIES):
            number = self.newest - back
            if number <= 0:
                return None
            slot, at = self._slots[number % 2], self._slot_at(number % 2) + _SLOT_HEADER
            size, checksum = int(slot[1]), int(slot[2])
            if int(slot[0]) != number or not 8 <= size <= self.capacity:
                continue
            with memoryview(self._memory) as memory, memory[at : at + size] as message:
                copied = bytearray(message) if copy else None
                is_whole = int(slot[0]) == number and zlib.crc32(message if copied is None else copied) == checksum
            if is_whole:
                return number, _arrays_in(self._memory, at, size) if copied is None else _arrays_in(copied, 0, size)
        self.torn += 1
        return None

    def _slot_at(self, slot: int) -> int:
        return _HEADER + slot * (_SLOT_HEADER + self.capacity)


def message_bytes(arrays: Sequence[Tensor]) -> int:
    """What a message takes in a mailbox."""
    if len(arrays) > _MOST_ARRAYS:
        raise ValueError(f"a message has at most {_MOST_ARRAYS} arrays, got {len(arrays)}")
    return 8 + _ENTRY * len(arrays) + sum(array.nbytes + -array.nbytes % 8 for array in arrays)


def _arrays_in(data: bytearray | mmap.mmap, begin: int, num_bytes: int) -> list[Tensor]:
    """The arrays of a message, views of `data`; ValueError for what `write` does not write."""
    numbers = torch.frombuffer(data, dtype=torch.int64, count=num_bytes // 8, offset=begin)
    count = int(numbers[0])
    if not 0 <= count <= _MOST_ARRAYS or 8 + _ENTRY * count > num_bytes:
        raise ValueError(f"a message says that it has {count} arrays")
    at, arrays = 8 + _ENTRY * count, []
    for code, entries in numbers[1 : 1 + 2 * count].view(-1, 2).tolist():
        dtype, itemsize = DTYPE_OF.get(code, (None, 0))
        size = entries * itemsize
        if dtype is None or not 0 <= size <= num_bytes - at:
            raise ValueError(f"a message has no room for {entries} entries of dtype {code}")
        empty = torch.empty(0, dtype=dtype, device="cpu")
        arrays.append(torch.frombuffer(data, dtype=dtype, count=entries, offset=begin + at) if size else empty)
        at += size + -size % 8
    return arrays
