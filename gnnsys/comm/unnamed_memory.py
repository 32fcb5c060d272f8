"""Memory that processes of one machine share. It has no name anywhere (memfd).

Others open it through the owner's /proc entry, and the kernel frees it with the last process that maps it, however that
ends. A token, which the owner tells to whom it wants, keeps others from taking it for something else. Its size never
changes (it is sealed), so that nobody who maps it can be made to read beyond its end. Whoever opens it holds on to the
owner's process too (pidfd): memory outlives who wrote it, and may be of no use then.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import select
import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

HEADER_BYTES = 64  # magic and token; the other six words are its user's
HEADER_WORDS = HEADER_BYTES // 8
_MAGIC = 0x53594D454D524E47
_FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class UnnamedMemory:
    """`header` are eight words, of which the first two are taken; what follows is read by `view`.

    Made by `create` in the owner, and by `open` in others.
    """

    def __init__(self, memory: mmap.mmap, descriptor: int | None, owner: OwnerProcess | None) -> None:
        self._memory, self._descriptor, self._owner = memory, descriptor, owner
        self.header = self._at(torch.int64, 0, HEADER_WORDS)
        if descriptor is not None:  # for those whom nobody closes
            self._close = weakref.finalize(self, os.close, descriptor)
            self._close.atexit = False

    @classmethod
    def create(cls, what: str, num_bytes: int, *, reserve: bool = False) -> UnnamedMemory:
        """Zeros. Memory is taken as they are touched, or at once (`reserve`); ValueError where it cannot be had."""
        size = HEADER_BYTES + num_bytes
        descriptor = os.memfd_create(f"gnnsys-{what}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _FIXED_SIZE)
            if reserve:
                os.posix_fallocate(descriptor, 0, size)
            memory = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, ValueError, OverflowError) as error:
            os.close(descriptor)
            raise ValueError(f"{size} bytes of shared memory for {what} cannot be had: {error}") from error
        made = cls(memory, descriptor, None)
        made.header[0], made.header[1] = _MAGIC, secrets.randbits(62)
        return made

    @classmethod
    def open(cls, address: Mapping[str, Any], *, writable: bool = False) -> UnnamedMemory | None:
        """The memory at an address that `address()` gave; None where this process cannot reach it."""
        owner = OwnerProcess.of(int(address["pid"]))  # first: what is opened below is then of this very process
        if owner is None:
            return None
        flags = os.O_CLOEXEC | os.O_NONBLOCK  # the number may be a pipe's by now: opening one can wait
        flags |= os.O_RDWR if writable else os.O_RDONLY
        try:
            descriptor = os.open(f"/proc/{int(address['pid'])}/fd/{int(address['fd'])}", flags)
        except OSError:  # another host, another user, another container
            return None
        try:
            size = os.fstat(descriptor).st_size
            if size < HEADER_BYTES or fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _FIXED_SIZE != _FIXED_SIZE:
                return None
            access = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
            memory = mmap.mmap(descriptor, size, mmap.MAP_SHARED, access)
        except (OSError, ValueError):
            return None
        finally:
            os.close(descriptor)
        opened = cls(memory, None, owner)
        return opened if opened.header[:2].tolist() == [_MAGIC, int(address["token"])] else None

    def address(self) -> dict[str, int]:
        """Where another process of this machine finds it."""
        assert self._descriptor is not None, "only the owner has an address to give"
        return {"pid": os.getpid(), "fd": self._descriptor, "token": int(self.header[1])}

    def view(self, dtype: torch.dtype, offset: int, count: int) -> Tensor:
        """`count` values, `offset` bytes behind the header. ValueError where they are not all in there."""
        if offset < 0 or count < 0 or offset + count * dtype.itemsize > self.num_bytes or offset % dtype.itemsize:
            raise ValueError(f"{count} values at byte {offset} are not in a memory of {self.num_bytes} bytes")
        return self._at(dtype, HEADER_BYTES + offset, count)

    def _at(self, dtype: torch.dtype, offset: int, count: int) -> Tensor:
        if count == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a map that is read only: nothing here writes to it
            return torch.frombuffer(self._memory, dtype=dtype, offset=offset, count=count)

    @property
    def num_bytes(self) -> int:
        """Without the header."""
        return len(self._memory) - HEADER_BYTES

    @property
    def is_owned(self) -> bool:
        """Whether this process made it, and has not closed it."""
        return self._descriptor is not None

    @property
    def is_orphaned(self) -> bool:
        """Whether the owner, another process, has ended."""
        return self._owner is not None and self._owner.ended

    def close(self) -> None:
        """By the owner: lets no new ones in; the memory goes when the last one lets go of it. Idempotent."""
        if self._descriptor is not None:
            self._descriptor = None
            self._close()


class OwnerProcess:
    """A process, by a descriptor that stays its own when its number is given to another."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor).atexit = False

    @classmethod
    def of(cls, pid: int) -> OwnerProcess | None:
        """None where there is no such process, or it cannot be watched."""
        try:
            return cls(os.pidfd_open(pid))
        except (OSError, AttributeError, OverflowError):
            return None

    @property
    def ended(self) -> bool:
        look = select.poll()  # a new one: threads may not share it, and `select` has no descriptors beyond 1023
        look.register(self._descriptor, select.POLLIN)
        return bool(look.poll(0))
