"""Files of numpy (`.npy`, `.npz`) by whoever wrote them: what a header says is compared with the file's size first.

numpy believes a header: it allocates as much as the shape says, and takes a negative one for "all there is". Here a
header that does not fit the bytes behind it is refused by name, before anything is allocated. Headers of plain numbers
are read here and not by Python's parser, which several threads cannot use at a time before Python 3.11.8 and 3.12.2 (it
then says "recursion depth mismatch"): a shard's threads read many files at once.
"""

from __future__ import annotations

import io
import math
import os
import re
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import numpy as np

from gnnsys.graph.capacity import check_bytes_fit

_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_LENGTH_BYTES = {(1, 0): 2, (2, 0): 4}
_LONGEST = 10_000  # bytes of a header, as with numpy
_SIZE = "(?:0|[1-9][0-9]*)"
_PLAIN = re.compile(  # as numpy.save writes it
    r"\{'descr': '([<>|=]?[?a-zA-Z][0-9]*)', 'fortran_order': (True|False), "
    rf"'shape': \(((?:{_SIZE},|{_SIZE}(?:, {_SIZE})+)?)\), }} *\n"
)
_PIECE = 1 << 20  # bytes read at a time: a stream of an archive makes a copy of what it is asked for
_DEFLATE_RATIO = 1032  # no stream of deflate grows by more
AGAIN = "write it again with numpy.save"
AGAIN_NPZ = "write it again with numpy.savez"
UNREADABLE = (ValueError, OSError, EOFError, RuntimeError, NotImplementedError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True)
class NpyHeader:
    """What an array's header says, found to fit the bytes that follow it."""

    shape: tuple[int, ...]
    dtype: np.dtype
    fortran_order: bool
    offset: int


def read_header(stream: IO[bytes], num_bytes: int) -> NpyHeader:
    """The header of a `.npy` of so many bytes in all; ValueError, without the file's name, where it lies."""
    try:
        version = np.lib.format.read_magic(stream)
        if version not in _READERS:
            raise ValueError(f"it has version {version} of the format, 1.0 and 2.0 are read")
        shape, fortran_order, dtype = _read_rest(stream, version)
    except OSError:
        raise
    except Exception as error:  # a damaged header makes numpy raise this and that, errors of its tokenizer among them
        raise ValueError(f"its header cannot be read: {_first_line(error)}") from error
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which would have to be unpickled: save numbers or text")
    if any(type(size) is not int or size < 0 for size in shape):  # True and False are ints
        raise ValueError(f"its header says shape {list(shape)}, and sizes must be integers >= 0")
    offset = stream.tell()
    said, there = math.prod(shape) * dtype.itemsize, num_bytes - offset
    if said != there:
        raise ValueError(
            f"its header says {dtype} {list(shape)}, {said:,} bytes, and {there:,} follow: it was cut or altered"
        )
    return NpyHeader(shape, dtype, fortran_order, offset)


def _read_rest(stream: IO[bytes], version: tuple[int, int]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, whether columns come first, and dtype, from what follows the version."""
    length_bytes = stream.read(_LENGTH_BYTES[version])
    length = int.from_bytes(length_bytes, "little")
    if length > _LONGEST:
        raise ValueError(f"it says that it has {length:,} bytes")
    header = stream.read(length)
    plain = _PLAIN.fullmatch(header.decode("latin1"))
    if plain is None:  # a dtype with fields, or something that numpy refuses
        return _READERS[version](io.BytesIO(length_bytes + header))
    descr, fortran_order, sizes = plain.groups()
    return tuple(int(size) for size in sizes.split(",") if size), fortran_order == "True", np.dtype(descr)


def read_values(stream: IO[bytes], header: NpyHeader) -> np.ndarray:
    """The array behind a header that was just read."""
    values = np.ndarray(math.prod(header.shape), header.dtype)  # np.empty makes text of no letters one letter wide
    missing = values.view(np.uint8).data if values.nbytes else memoryview(b"")
    while missing:
        count = stream.readinto(missing[:_PIECE])  # type: ignore[attr-defined]
        if not count:
            raise ValueError(f"{len(missing):,} of its bytes are missing")
        missing = missing[count:]
    return values.reshape(header.shape, order="F" if header.fortran_order else "C")


def load_npy(path: Path) -> np.ndarray:
    """The array of a `.npy`, in memory; ValueError names the file and what to do."""
    with _named(path, "a .npy of plain numbers", AGAIN), open(path, "rb") as stream:
        num_bytes = os.fstat(stream.fileno()).st_size
        header = read_header(stream, num_bytes)
        check_bytes_fit(num_bytes, "it")
        return read_values(stream, header)


def map_npy(path: Path) -> np.ndarray:
    """The array of a `.npy`, memory-mapped and private to the process where written to; ValueError as `read_header`."""
    with open(path, "rb") as stream:
        header = read_header(stream, os.fstat(stream.fileno()).st_size)
    order: Literal["C", "F"] = "F" if header.fortran_order else "C"
    if 0 in header.shape or not header.dtype.itemsize:  # nothing to map
        return np.ndarray(header.shape, header.dtype, order=order)
    return np.memmap(path, header.dtype, "c", header.offset, header.shape, order)


def load_npz_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an `.npz` by name, in memory; ValueError names the file, the array and what to do."""
    arrays: dict[str, np.ndarray] = {}
    with _named(path, "an .npz of plain arrays", AGAIN_NPZ), zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        check_bytes_fit(sum(member.file_size for member in members), "all its arrays together")
        for member in members:
            name = member_name(member, arrays)
            with archive.open(member) as stream:
                arrays[name] = read_values(stream, check_member(member, stream))
                stream.read(1)  # compares the checksum, at the end
    return arrays


def member_name(member: zipfile.ZipInfo, known: dict[str, np.ndarray]) -> str:
    name = member.filename.removesuffix(".npy")
    if not member.filename.endswith(".npy"):
        raise ValueError(f"{name} is not an array: its name does not end in .npy")
    if name in known:
        raise ValueError(f"{name} is there twice")
    return name


def check_member(member: zipfile.ZipInfo, stream: IO[bytes]) -> NpyHeader:
    """The header of an array inside an `.npz`; ValueError, naming the array, where it or the archive's own lies."""
    name = member.filename.removesuffix(".npy")
    most = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: _DEFLATE_RATIO}.get(member.compress_type)
    if most is not None and member.file_size > most * member.compress_size:
        sizes = f"{member.compress_size:,} bytes of the file cannot hold {member.file_size:,}"
        raise ValueError(f"{name}: {sizes}: it was cut or altered")
    try:
        return read_header(stream, member.file_size)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def unreadable(
    path: Path, error: BaseException, kind: str = "an .npz of plain arrays", remedy: str = AGAIN_NPZ
) -> ValueError:
    return ValueError(f"{path} cannot be read as {kind}: {_first_line(error)}; {remedy}")


@contextmanager
def _named(path: Path, kind: str, remedy: str) -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of headers that Python 2 wrote
            yield
    except UNREADABLE as error:
        raise unreadable(path, error, kind, remedy) from error


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
