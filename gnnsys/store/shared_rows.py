"""Rows in memory that the processes of a machine share: one writer, any number of readers.

In front of the rows stand the versions that keep a reader from seeing half a row, and a flag that says the table was
dropped. Rows outlive the shard that kept them, and must not be read then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from gnnsys.comm import UnnamedMemory
from gnnsys.ops import num_versions

_KIND = "rows"
_DROPPED = 2  # a word of the memory's header
_ALIGN = 64


class SharedRows:
    """`rows` and their `versions`, made by `create` in the owner and opened by `open` in others."""

    def __init__(self, memory: UnnamedMemory, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        layout = _SharedLayout(shape, dtype)
        self._memory = memory
        self.versions = memory.view(torch.int32, 0, layout.num_versions)
        self.rows = memory.view(dtype, layout.rows_at, math.prod(shape)).view(shape)

    @classmethod
    def create(cls, shape: tuple[int, ...], dtype: torch.dtype) -> SharedRows:
        """Rows of zeros; memory is taken as they are touched."""
        return cls(UnnamedMemory.create(_KIND, _SharedLayout(shape, dtype).total), shape, dtype)

    @classmethod
    def open(cls, address: Mapping[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> SharedRows | None:
        """The rows at an address that `address()` gave, read only; None where this process cannot reach them.

        Then they come through the shard instead.
        """
        memory = UnnamedMemory.open(_KIND, address)
        if memory is None or memory.num_bytes != _SharedLayout(shape, dtype).total:
            return None
        return cls(memory, shape, dtype)

    def address(self) -> dict[str, int]:
        """Where another process of this machine finds the rows."""
        return self._memory.address()

    @property
    def dropped(self) -> bool:
        """Whether the owner has dropped the table; the rows stay readable, and are of no use."""
        return bool(self._memory.header[_DROPPED])

    @property
    def orphaned(self) -> bool:
        """Whether the owner has ended: nobody changes the rows any more, and what they should be nobody knows."""
        return self._memory.is_orphaned

    def drop(self) -> None:
        """Tells readers and lets no new ones in; the memory goes when the last of them lets go of it."""
        if self._memory.is_owned:
            self._memory.header[_DROPPED] = 1
            self._memory.close()

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + self.versions.nbytes + self._memory.header.nbytes


class _SharedLayout:
    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.num_versions = num_versions(shape[0])
        self.rows_at = -(-(4 * self.num_versions) // _ALIGN) * _ALIGN
        self.total = self.rows_at + max(1, math.prod(shape) * dtype.itemsize)
