"""Files that an agent receives: written beside their place as they come, and renamed when they are whole.

What a killed transfer leaves, `.NAME.HOST.incoming`, is what the next one goes on from. The host's name keeps hosts
that share a file system out of each other's way.
"""

from __future__ import annotations

import os
import socket
import zlib
from pathlib import Path
from typing import Any

from gnnsys.launch.part_files import MANIFEST, PartFile, checksum, file_problem, is_safe


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
            if (incoming := _incoming(target)).exists():
                begun[name] = [incoming.stat().st_size, checksum(incoming)]
        differs = own.is_file() and checksum(own) != manifest
        return {"whole": whole, "damaged": damaged, "begun": begun, "other_parts": differs}

    def put(self, path: str, name: str, offset: int, data: bytes) -> None:
        """Bytes of a file from `offset` on. Errors are told by `finish`."""
        key = (path, name)
        try:
            if key in self._errors:
                return
            if key not in self._open:
                self._open[key] = self._begin(path, name, offset)
            descriptor, count, crc32 = self._open[key]
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
        os.fsync(descriptor)
        os.close(descriptor)
        if count != bytes:
            raise ValueError(f"{target}: {count} of {bytes} bytes have come")
        if found != crc32:
            _incoming(target).unlink()
            raise ValueError(f"{target} does not match its checksum: a byte was changed on its way, or at its source")
        os.replace(_incoming(target), target)

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1][0])

    def _begin(self, path: str, name: str, offset: int) -> tuple[int, int, int]:
        target = self._target(path, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        incoming = _incoming(target)
        descriptor = os.open(incoming, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.ftruncate(descriptor, offset)
        return descriptor, offset, checksum(incoming)

    def _target(self, path: str, name: str) -> Path:
        if not is_safe(name):
            raise ValueError(f"{name!r} is no file of a part")
        return Path(path) / name


def _incoming(target: Path) -> Path:
    return target.with_name(f".{target.name}.{socket.gethostname()}.incoming")
