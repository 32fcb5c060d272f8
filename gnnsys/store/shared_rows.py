"""Rows in memory that the processes of a machine share: one writer, any number of readers.

The memory has no name anywhere (memfd): a reader opens it through the owner's /proc entry, and the kernel frees it with
the last process that maps it, however that ends. In front of the rows stand the versions that keep a reader from
seeing half a row, and a flag that says the table was dropped. A reader holds on to the owner's process too (pidfd):
rows outlive the shard that kept them, and must not be read then.
"""

from __future__ import annotations

import math
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

from gnnsys.ops import num_versions

_MAGIC = 0x53594D454D524E47
_HEADER = 64  # bytes: magic, token, dropped
_ALIGN = 64


class SharedRows:
    """`rows` and their `versions`, made by `create` in the owner and opened by `open` in others."""

    def __init__(self, memory: mmap.mmap, shape: tuple[int, ...], dtype: torch.dtype, descriptor: int | None) -> None:
        layout = _SharedLayout(shape, dtype)
        self._header = _view(memory, torch.int64, 0, _HEADER // 8)
        self.versions = _view(memory, torch.int32, _HEADER, layout.num_versions)
        self.rows = _view(memory, dtype, layout.rows_at, math.prod(shape)).view(shape)
        self._descriptor = descriptor
        self._owner: OwnerProcess | None = None  # None: this process
        if descriptor is not None:  # for those whom nobody drops
            self._close = weakref.finalize(self, os.close, descriptor)
            self._close.atexit = False

    @classmethod
    def create(cls, shape: tuple[int, ...], dtype: torch.dtype) -> SharedRows:
        """Rows of zeros; memory is taken as they are touched."""
        size = _SharedLayout(shape, dtype).total
        descriptor = os.memfd_create("gnnsys-rows", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
            memory = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, ValueError, OverflowError) as error:
            os.close(descriptor)
            raise ValueError(f"{size} bytes of shared memory for a table cannot be had: {error}") from error
        made = cls(memory, shape, dtype, descriptor)
        made._header[0], made._header[1] = _MAGIC, secrets.randbits(62)
        return made

    @classmethod
    def open(cls, address: Mapping[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> SharedRows | None:
        """The rows at an address that `address()` gave, read only; None where this process cannot reach them."""
        size = _SharedLayout(shape, dtype).total
        owner = OwnerProcess.of(int(address["pid"]))  # first: what is opened below is then of this very process
        if owner is None:
            return None
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # the number may be a pipe's by now: opening one can wait
        try:
            descriptor = os.open(f"/proc/{int(address['pid'])}/fd/{int(address['fd'])}", flags)
        except OSError:  # another host, another user, another container: rows come through the shard instead
            return None
        try:
            if os.fstat(descriptor).st_size != size:
                return None
            memory = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, ValueError):
            return None
        finally:
            os.close(descriptor)
        opened = cls(memory, shape, dtype, None)
        opened._owner = owner
        found = opened._header[:2].tolist()
        return opened if found == [_MAGIC, int(address["token"])] else None

    def address(self) -> dict[str, int]:
        """Where another process of this machine finds the rows."""
        assert self._descriptor is not None, "only the owner has an address to give"
        return {"pid": os.getpid(), "fd": self._descriptor, "token": int(self._header[1])}

    @property
    def dropped(self) -> bool:
        """Whether the owner has dropped the table; the rows stay readable, and are of no use."""
        return bool(self._header[2])

    @property
    def orphaned(self) -> bool:
        """Whether the owner has ended: nobody changes the rows any more, and what they should be nobody knows."""
        return self._owner is not None and self._owner.ended

    def drop(self) -> None:
        """Tells readers and lets no new ones in; the memory goes when the last of them lets go of it."""
        if self._descriptor is not None:
            self._header[2] = 1
            self._descriptor = None
            self._close()

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + self.versions.nbytes + _HEADER


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
        except (OSError, AttributeError):
            return None

    @property
    def ended(self) -> bool:
        look = select.poll()  # a new one: threads may not share it, and `select` has no descriptors beyond 1023
        look.register(self._descriptor, select.POLLIN)
        return bool(look.poll(0))


class _SharedLayout:
    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.num_versions = num_versions(shape[0])
        self.rows_at = -(-(_HEADER + 4 * self.num_versions) // _ALIGN) * _ALIGN
        self.total = self.rows_at + max(1, math.prod(shape) * dtype.itemsize)


def _view(memory: mmap.mmap, dtype: torch.dtype, offset: int, count: int) -> Tensor:
    if count == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a map that is read only: nothing here writes to it
        return torch.frombuffer(memory, dtype=dtype, offset=offset, count=count)
