"""States in files: `torch.save` with a running CRC-32, read back with `weights_only=True`; errors name the file."""

from __future__ import annotations

import io
import os
import zlib
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import numpy as np
import torch
from torch import Tensor

from gnnsys.graph import map_npy


class _Checked(io.RawIOBase):
    """A file that counts bytes and their CRC-32. It keeps an error, whose text would be lost in native code."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.num_bytes, self.crc32 = 0, 0
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            left = memoryview(data).cast("B")
            self.crc32, self.num_bytes = zlib.crc32(left, self.crc32), self.num_bytes + len(left)
            while len(left):
                left = left[self._file.write(left) :]
        except OSError as error:
            self.error = error
            raise
        return memoryview(data).nbytes


def write_state(path: Path, state: Any) -> list[int]:
    """Writes a state and syncs it to disk. Returns size and CRC-32. OSError names the file."""
    with open(path, "wb", buffering=0) as file:
        checked = _Checked(file)
        try:
            torch.save(state, cast(IO[bytes], checked))
            os.fsync(file.fileno())
        except (OSError, RuntimeError) as error:
            cause = checked.error or error
            raise named(cause, path) if isinstance(cause, OSError) else cause from error
    return [checked.num_bytes, checked.crc32]


def read_state(path: Path) -> Any:
    """What `write_state` wrote."""
    return torch.load(path, weights_only=True, map_location="cpu")


def write_array(path: Path, values: Tensor) -> list[int]:
    """Writes an array as `.npy` and syncs it to disk. Returns size and CRC-32. OSError names the file."""
    with open(path, "wb", buffering=0) as file:
        checked = _Checked(file)
        try:
            np.lib.format.write_array(checked, values.numpy(), allow_pickle=False)
            os.fsync(file.fileno())
        except OSError as error:
            raise named(error, path) from error
    return [checked.num_bytes, checked.crc32]


def read_array(path: Path) -> Tensor:
    """What `write_array` wrote, memory-mapped; ValueError where the header says what the file does not have."""
    return torch.from_numpy(np.asarray(map_npy(path)))


def named(error: OSError, path: Path) -> OSError:
    """The same error, with the file in its text."""
    return OSError(error.errno, error.strerror or str(error), str(error.filename or path))
