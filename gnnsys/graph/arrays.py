"""Arrays on disk: one `.npy` each, written in pieces with a running CRC-32 and opened memory-mapped.

A manifest's `files` table names every array with its bytes, checksum, dtype and shape; reading compares them and names
the file that differs. No pickle: an array of Python objects is refused.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnnsys.graph.disk_room import naming
from gnnsys.graph.manifest import MANIFEST
from gnnsys.graph.npy import map_npy

CHUNK_BYTES = 1 << 24
REPLACE = "; copy the directory again from where it is whole, or make it again"

# numpy has none of these: stored as the same bits, and named in the manifest.
_AS_BITS = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
}


class ArrayWriter:
    """Writes arrays under numbers (names are the user's and need not be file names) and remembers what it wrote.

    `files` is the manifest's table. With `subfolder`, arrays go there and are named by it in the table.
    """

    def __init__(self, folder: Path, files: dict[str, dict[str, Any]] | None = None, subfolder: str = "") -> None:
        self.files: dict[str, dict[str, Any]] = {} if files is None else files
        self._folder = folder
        self._prefix = f"{subfolder}/" if subfolder else ""
        self._count = 0

    def add(self, rows: Tensor | None) -> str | None:
        """Writes `rows`, piece by piece where they are not contiguous; None stays None."""
        if rows is None:
            return None
        with self.stream(rows.dtype, rows.shape) as stream:
            for piece in rows.detach().split(chunk_rows(rows)):
                stream.append(piece)
        return stream.name

    def stream(self, dtype: torch.dtype, shape: Sequence[int]) -> ArrayStream:
        """An array of known shape, to be filled with `append` inside a `with` block."""
        name = f"{self._prefix}{self._count:04d}.npy"
        self._count += 1
        return ArrayStream(self._folder / name, name, dtype, shape, self.files)


class ArrayStream:
    """One `.npy` under way; complete, synced and entered in the manifest's table when its block ends."""

    def __init__(
        self, path: Path, name: str, dtype: torch.dtype, shape: Sequence[int], files: dict[str, dict[str, Any]]
    ) -> None:
        self.name, self._path, self._dtype, self._shape, self._files = name, path, dtype, list(shape), files
        self._crc, self._bytes, self._rows = 0, 0, 0

    def __enter__(self) -> ArrayStream:
        self._file = open(self._path, "wb", buffering=0)
        try:
            like = torch.empty(0, dtype=_AS_BITS.get(self._dtype, self._dtype), device="cpu").numpy()
            descr = np.lib.format.dtype_to_descr(like.dtype)
            header = {"descr": descr, "fortran_order": False, "shape": tuple(self._shape)}
            np.lib.format.write_array_header_1_0(self, header)  # type: ignore[arg-type]
        except BaseException:
            self._file.close()
            raise
        return self

    def append(self, rows: Tensor) -> None:
        assert rows.dtype == self._dtype and list(rows.shape[1:]) == self._shape[1:], "rows of another kind"
        self._rows += rows.shape[0]
        stored = rows.detach().contiguous()
        bits = _AS_BITS.get(self._dtype)
        array = (stored.view(bits) if bits else stored).numpy()
        self.write(array.reshape(-1).view(np.uint8).data)

    def write(self, data: bytes | memoryview) -> int:
        """Raw bytes, of the header or of rows."""
        self._crc = zlib.crc32(data, self._crc)
        left = memoryview(data)
        with naming(self._path):
            while len(left):
                left = left[self._file.write(left) :]
        self._bytes += len(data)
        return len(data)

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, _: TracebackType | None) -> None:
        with self._file:
            if kind is not None:
                return
            assert self._rows == self._shape[0], f"{self.name}: {self._rows} rows of {self._shape[0]}"
            with naming(self._path):
                os.fsync(self._file.fileno())  # a full disk may be noticed only here
        self._files[self.name] = {
            "bytes": self._bytes,
            "crc32": self._crc,
            "dtype": dtype_name(self._dtype),
            "shape": self._shape,
        }


class ArrayReader:
    """Maps the files a manifest names, after comparing them with it. Maps are private to the process where written to.

    With `verify` a file is read once and compared with its checksum; without, sizes alone are compared.
    """

    def __init__(self, folder: Path, files: dict[str, Any], verify: bool) -> None:
        self._folder, self._files, self._verify = folder, files, verify

    def path(self, name: str) -> Path:
        """Where the array is; ValueError for a name or a link that leads out of its folder (which may be a link)."""
        steps = name.split("/") if isinstance(name, str) else [""]
        if any(step in ("", ".", "..") or os.path.basename(step) != step for step in steps):
            raise ValueError(f"{self._folder / MANIFEST} names {name!r}, which is not a file of this directory")
        file = self._folder / name
        depth = min(1, len(steps) - 1)  # of its home: the folder of a part, or of all
        inside = accumulate(steps[depth:], os.path.join, initial=os.path.join(self._folder, *steps[:depth]))
        home = next(inside)
        if any(map(os.path.islink, inside)) and not file.resolve().is_relative_to(Path(home).resolve()):
            raise ValueError(f"{file} is a link that leads out of its folder: put the file itself there")
        return file

    def array(self, name: str, dtype: torch.dtype | None = None, shape: Sequence[int] | None = None) -> Tensor:
        """The array; where `dtype` or `shape` is given, ValueError unless the file has it."""
        file = self.path(name)
        entry = self._files[name]
        self._compare(file, entry)
        stored = dtype_named(entry["dtype"])
        if stored is None:
            raise ValueError(f"{self._folder / MANIFEST}: {name} has unknown dtype {entry['dtype']!r}")
        rows = _map(file)
        bits = _AS_BITS.get(stored, stored)
        if rows.dtype != bits or list(rows.shape) != entry.get("shape", list(rows.shape)):
            found = f"{rows.dtype} {list(rows.shape)}"
            raise ValueError(f"{file} holds {found}, {MANIFEST} says {entry}: it was altered{REPLACE}")
        rows = rows.view(stored)
        if (dtype or stored) != stored or list(rows.shape if shape is None else shape) != list(rows.shape):
            raise ValueError(f"{file} holds {stored} {list(rows.shape)}, expected {dtype or stored} {shape}")
        return rows

    def _compare(self, file: Path, entry: dict[str, Any]) -> None:
        if not file.is_file():
            raise ValueError(f"{file} is missing{REPLACE}")
        size = file.stat().st_size
        if size != entry["bytes"]:
            raise ValueError(
                f"{file} has {size} bytes, {MANIFEST} says {entry['bytes']}: it was cut or altered{REPLACE}"
            )
        if self._verify and file_checksum(file) != entry["crc32"]:
            raise ValueError(f"{file} does not match its checksum: it was altered{REPLACE}")


def _map(file: Path) -> Tensor:
    try:
        array = map_npy(file)
        if array.ndim > 1 and array.size and not array.flags.c_contiguous:
            raise ValueError("its header says Fortran order, which is never written here: it was altered")
        return torch.from_numpy(np.asarray(array))
    except (ValueError, TypeError) as error:  # a lying header; numbers that torch does not have
        raise ValueError(f"{file} is not an array of ours: {error}{REPLACE}") from error


def file_checksum(file: Path) -> int:
    value = 0
    with open(file, "rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return value


def chunk_rows(rows: Tensor) -> int:
    """How many of these rows make one piece of work: about CHUNK_BYTES, at least one."""
    return max(1, CHUNK_BYTES // max(1, rows.element_size() * math.prod(rows.shape[1:])))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_named(name: Any) -> torch.dtype | None:
    """The dtype a manifest names, None where there is none of that name."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    return dtype if isinstance(dtype, torch.dtype) else None
