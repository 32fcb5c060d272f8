"""Memory that processes of one machine share. It has no name anywhere (memfd).

Others open it through the owner's /proc entry, and the kernel frees it with the last process that maps it, however that
ends. A token, which the owner tells to whom it wants, keeps others from taking it for something else. Its size never
changes (it is sealed), so that nobody who maps it can be made to read beyond its end. Whoever opens it holds on to the
owner's process too (pidfd): memory outlives who wrote it, and may be of no use then. Memory of one kind is not opened
as another: a server's own is never taken for what a client has lent it.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import secrets
import select
import weakref
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnnsys.comm import this_process

HEADER_BYTES = 64  # magic and token; the other six words are its user's
HEADER_WORDS = HEADER_BYTES // 8
_FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class UnnamedMemory:
    """`header` are eight words, of which the first two are taken; what follows is read by `view`.

    Made by `create` in the owner, and by `open` in others. `what` names the kind of memory.
    """

    def __init__(self, memory: mmap.mmap, descriptor: int | None, owner: OwnerProcess | None) -> None:
        self._descriptor, self._owner, self._pid = descriptor, owner, this_process.pid
        self.header = np.frombuffer(memory, np.int64, HEADER_WORDS)
        self._bytes = np.asarray(_WritableBytes(memory))
        if descriptor is not None:  # for those whom nobody closes
            self._close = weakref.finalize(self, os.close, descriptor)
            self._close.atexit = False

    @classmethod
    def create(cls, what: str, num_bytes: int, *, reserve: bool = False) -> UnnamedMemory:
        """Zeros. Memory is taken as they are touched, or at once (`reserve`); ValueError where it cannot be had."""
        size, descriptor = HEADER_BYTES + num_bytes, None
        try:
            descriptor = os.memfd_create(f"gnnsys-{what}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(descriptor, size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _FIXED_SIZE)
            if reserve:
                os.posix_fallocate(descriptor, 0, size)
            memory = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, AttributeError, ValueError, OverflowError) as error:
            if descriptor is not None:
                os.close(descriptor)
            raise ValueError(f"{size} bytes of shared memory for {what} cannot be had: {error}") from error
        made = cls(memory, descriptor, None)
        made.header[:2] = _magic(what), secrets.randbits(62)
        return made

    @classmethod
    def open(cls, what: str, address: Mapping[str, Any]) -> UnnamedMemory | None:
        """The memory at an address that `address()` gave, read only; None where this process cannot reach it."""
        owner = OwnerProcess.of(int(address["pid"]))  # first: what is opened below is then of this very process
        if owner is None:
            return None
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # the number may be a pipe's by now: opening one can wait
        try:
            descriptor = os.open(f"/proc/{int(address['pid'])}/fd/{int(address['fd'])}", flags)
        except OSError:  # another host, another user, another container
            return None
        try:
            size = os.fstat(descriptor).st_size
            if size < HEADER_BYTES or fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _FIXED_SIZE != _FIXED_SIZE:
                return None
            memory = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, ValueError):
            return None
        finally:
            os.close(descriptor)
        opened = cls(memory, None, owner)
        return opened if opened.header[:2].tolist() == [_magic(what), int(address["token"])] else None

    def address(self) -> dict[str, int]:
        """Where another process of this machine finds it."""
        assert self._descriptor is not None and self.is_owned, "only the owner has an address to give"
        return {"pid": self._pid, "fd": self._descriptor, "token": int(self.header[1])}

    def view(self, dtype: torch.dtype, offset: int, count: int) -> Tensor:
        """`count` values, `offset` bytes behind the header. ValueError where they are not all in there."""
        if offset < 0 or count < 0 or offset + count * dtype.itemsize > self.num_bytes or offset % dtype.itemsize:
            raise ValueError(f"{count} values at byte {offset} are not in a memory of {self.num_bytes} bytes")
        begin = HEADER_BYTES + offset
        return torch.from_numpy(self._bytes[begin : begin + count * dtype.itemsize]).view(dtype)

    @property
    def num_bytes(self) -> int:
        """Without the header."""
        return self._bytes.size - HEADER_BYTES

    @property
    def is_owned(self) -> bool:
        """Whether this process made it, and has not closed it. A forked child has made none of its parent's."""
        return self._descriptor is not None and self._pid == this_process.pid

    @property
    def is_orphaned(self) -> bool:
        """Whether the owner, another process, has ended."""
        return self._owner is not None and self._owner.ended

    def close(self) -> None:
        """By the owner: lets no new ones in; the memory goes when the last one lets go of it. Idempotent."""
        if self._descriptor is not None:
            self._descriptor = None
            self._close()


class _WritableBytes:
    """A map's bytes, for numpy. Torch warns of arrays that are read only; nothing here writes to such a map."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory  # mapped for as long as an array needs it
        read_only = np.frombuffer(memory, np.uint8).__array_interface__
        self.__array_interface__ = {**read_only, "data": (read_only["data"][0], False)}


@cache
def _magic(what: str) -> int:
    digest = hashlib.blake2b(what.encode(), digest_size=8, person=b"gnnsys").digest()
    return int.from_bytes(digest, "little") >> 1


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
