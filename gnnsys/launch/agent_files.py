"""Files that an agent receives: written beside their place as they come, and renamed when they are whole.

What a killed transfer leaves, `.NAME.HOST.incoming`, is what the next one goes on from. The host's name keeps hosts
that share a file system out of each other's way, and a lock on it keeps a second push to the same place out.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import zlib
from pathlib import Path
from typing import Any

from gnnsys.launch.part_files import MANIFEST, PartFile, checksum, file_problem, is_safe

_CHUNK = 1 << 20
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)  # of file systems that are mounted without them


class Receiver:
    """Takes files piece by piece. Pieces of one file come in order; several files may be under way."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], tuple[int, int, int]] = {}  # (path, name) -> descriptor, bytes, CRC-32
        self._errors: dict[tuple[str, str], str] = {}

    def have(self, path: str, files: list[list[Any]], manifest: int) -> dict[str, Any]:
        """What there is of each [name, bytes, crc32]: whole, damaged, or so many bytes of it with their CRC-32.

        `manifest` is the CRC-32 of the sender's. Another one here means other parts.
        """
        folder = Path(path)
        own = folder / MANIFEST
        whole, damaged, begun = [], [], {}
        for name, size, crc32 in files:
            target = self._target(path, name)
            why = file_problem(folder, PartFile(name, size, crc32), verify=True)
            if why is None:
                whole.append(name)
                continue
            if target.exists():
                damaged.append(name)
            if _incoming(target).is_file():
                begun[name] = self._go_on(path, name)
        differs = own.is_file() and checksum(own) != manifest
        return {"whole": whole, "damaged": damaged, "begun": begun, "other_parts": differs}

    def put(self, path: str, name: str, offset: int, data: bytes) -> None:
        """Bytes of a file from `offset` on. Errors are told by `finish`."""
        key = (path, name)
        try:
            if key in self._errors:
                return
            if key not in self._open:
                self._open[key] = (_open_locked(self._target(path, name)), 0, 0)
            descriptor, count, crc32 = self._open[key]
            if offset == 0 and count:  # what was there is not its beginning
                os.ftruncate(descriptor, 0)
                count = crc32 = 0
            if count != offset:
                return
            view = memoryview(data)
            while view:
                view = view[os.pwrite(descriptor, view, offset + len(data) - len(view)) :]
            self._open[key] = descriptor, count + len(data), zlib.crc32(data, crc32)
        except OSError as error:  # disk full, no right to write
            self._errors[key] = str(error)
            if key in self._open:
                os.close(self._open.pop(key)[0])

    def finish(self, path: str, name: str, bytes: int, crc32: int) -> None:
        """The file becomes what it is called, if all has come. An error names it, and what was wrong is removed."""
        target, key = self._target(path, name), (path, name)
        if why := self._errors.pop(key, None):
            raise ValueError(f"{target} cannot be written: {why}")
        descriptor, count, found = self._open.pop(key)
        try:  # the lock is held until it has its name
            os.fsync(descriptor)
            if count != bytes or os.fstat(descriptor).st_size != bytes:
                raise ValueError(f"{target}: {count} of {bytes} bytes have come")
            if found != crc32:
                _incoming(target).unlink()
                why = "a byte was changed on its way, or at its source"
                raise ValueError(f"{target} does not match its checksum: {why}")
            os.replace(_incoming(target), target)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1][0])

    def _go_on(self, path: str, name: str) -> list[int]:
        """Opens what there is of a file: its bytes and their CRC-32, from which the first piece goes on."""
        target = self._target(path, name)
        try:
            descriptor = _open_locked(target)
        except OSError as error:
            raise ValueError(f"{target} cannot be written: {error}") from None
        self._open[path, name] = descriptor, 0, 0
        count = crc32 = 0
        while data := os.pread(descriptor, _CHUNK, count):
            count, crc32 = count + len(data), zlib.crc32(data, crc32)
        self._open[path, name] = descriptor, count, crc32
        return [count, crc32]

    def _target(self, path: str, name: str) -> Path:
        if not is_safe(name):
            raise ValueError(f"{name!r} is no file of a part")
        return Path(path) / name


def _open_locked(target: Path) -> int:
    """Opens what becomes `target`, for nobody else meanwhile. BlockingIOError where another push has it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    incoming = _incoming(target)
    while True:
        descriptor = os.open(incoming, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            _lock(descriptor)
            if _is_at(descriptor, incoming):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # another push has finished it before it was locked


def _lock(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BlockingIOError("another push is under way there: wait for its end") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _incoming(target: Path) -> Path:
    return target.with_name(f".{target.name}.{socket.gethostname()}.incoming")
