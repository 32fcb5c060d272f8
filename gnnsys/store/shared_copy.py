"""A copy of a file in memory that the processes of a machine share, for files that a device cannot read where they are.

The copy has no name anywhere (memfd), so the kernel frees it with the last process that maps it, however that ends.
Where it is says a note in /dev/shm, which belongs to the user and names the file as it is now: whoever comes first
makes the copy while holding the note's lock, and the others find it. Each process that has it is a line of the note,
until it lets go: whoever comes later finds the copy with any of them. The last one removes the note.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

_CHUNK = 1 << 26  # bytes that are read at once
_SECONDS = 600.0  # to wait for another process that copies
_LEAVE_SECONDS = 5.0  # and for one that has the note, to say that a copy is no longer read here
_LOOK_EVERY = 0.05


class SharedCopy:
    """The bytes of a file, in memory that this process has mapped. `close` lets go of it."""

    def __init__(self, memory: mmap.mmap, descriptor: int) -> None:
        self.memory, self._descriptor = memory, descriptor
        self._note: Path | None = None  # that says where it is

    @property
    def inode(self) -> int:
        """The same for all who share it."""
        return os.fstat(self._descriptor).st_ino

    @property
    def line(self) -> str:
        """Where other processes find it."""
        return f"{os.getpid()} {self._descriptor} {self.inode}"

    def close(self) -> None:
        """Others may go on reading; views that are left keep the memory mapped. Idempotent."""
        if self._descriptor < 0:
            return
        if self._note is not None:
            _leave(self._note, self.line)
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)


def share_copy(path: str, most_bytes: int, seconds: float = _SECONDS) -> SharedCopy:
    """A shared copy of a file, made here if no process has one; OSError or ValueError where it cannot be had.

    `most_bytes` is what a copy that is made here may take.
    """
    about = os.stat(path)
    where = _note_path(path, about)
    try:
        note = _open_locked(where, os.O_CREAT, seconds)
    except TimeoutError:
        raise ValueError(f"another process has copied {path} for {seconds:g} seconds and is not done") from None
    try:
        lines = _lines(note)
        found = next((copy for line in lines if (copy := _open_noted(line, about.st_size)) is not None), None)
        if found is None:
            try:
                found = _copy(path, about.st_size, most_bytes)
            except BaseException:
                where.unlink(missing_ok=True)
                raise
        found._note = where
        _write(note, [*filter(_is_there, lines), found.line])
        return found
    finally:
        os.close(note)  # and its lock


def _leave(where: Path, line: str) -> None:
    """Takes a line out of a note, and the note away with the last one. A line that stays, as another process has the
    note for long, is harmless: whoever reads it looks what is there."""
    try:
        note = _open_locked(where, 0, _LEAVE_SECONDS)
    except (OSError, ValueError):
        return
    try:
        left = [other for other in _lines(note) if other != line and _is_there(other)]
        if left:
            _write(note, left)
        else:
            where.unlink(missing_ok=True)
    finally:
        os.close(note)


def _open_locked(where: Path, flags: int, seconds: float) -> int:
    """A note, with its lock: TimeoutError where another process has it for so long.

    A note may have been removed before its lock was had. Nobody would find what is written to it, so it is opened anew.
    """
    end = time.monotonic() + seconds
    while True:
        note = os.open(where, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
        try:
            if os.fstat(note).st_uid != os.getuid():
                raise ValueError(f"{where} is another user's")
            _lock(note, end)
            if os.path.samestat(os.fstat(note), os.lstat(where)):
                return note
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(note)
            raise
        os.close(note)


def _lines(note: int) -> list[str]:
    return os.pread(note, os.fstat(note).st_size, 0).decode(errors="replace").splitlines()


def _write(note: int, lines: Sequence[str]) -> None:
    os.ftruncate(note, 0)
    os.pwrite(note, "\n".join(lines).encode(), 0)


def _note_path(path: str, about: os.stat_result) -> Path:
    """A file that was written anew is another one."""
    what = f"{os.path.realpath(path)} {about.st_dev} {about.st_ino} {about.st_size} {about.st_mtime_ns}"
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    return Path(folder) / f"gnnsys-{os.getuid()}-{hashlib.sha256(what.encode()).hexdigest()[:24]}"


def _lock(note: int, end: float) -> None:
    while True:
        try:
            return fcntl.flock(note, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                raise TimeoutError from None
            time.sleep(_LOOK_EVERY)


def _is_there(line: str) -> bool:
    """Whether the process that noted it has it still."""
    try:
        pid, number, inode = (int(word) for word in line.split())
        return os.stat(f"/proc/{pid}/fd/{number}").st_ino == inode
    except (ValueError, OSError):
        return False


def _open_noted(line: str, size: int) -> SharedCopy | None:
    """What a process has noted; None where it is gone."""
    if not _is_there(line):
        return None
    pid, number, inode = (int(word) for word in line.split())
    try:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK  # the number may be a pipe's by now
        descriptor = os.open(f"/proc/{pid}/fd/{number}", flags)
    except OSError:
        return None
    try:
        about = os.fstat(descriptor)
        if (about.st_ino, about.st_size) == (inode, size):
            return SharedCopy(_mapped(descriptor, size), descriptor)
    except (ValueError, OSError):
        pass
    os.close(descriptor)
    return None


def _copy(path: str, size: int, most_bytes: int) -> SharedCopy:
    if size > most_bytes:
        raise ValueError(f"a copy of {path} takes {size:,} bytes, {most_bytes:,} are allowed")
    descriptor = os.memfd_create("gnnsys-file", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, size)  # memory that is not there is refused now, and not by a signal later
        memory, done = _mapped(descriptor, size), 0
        with open(path, "rb", buffering=0) as file, memoryview(memory) as whole:
            while done < size:
                with whole[done : done + _CHUNK] as piece:
                    count = file.readinto(piece)
                if not count:
                    raise ValueError(f"{path} ends at byte {done:,}, {size:,} were expected")
                done += count
        return SharedCopy(memory, descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def _mapped(descriptor: int, size: int) -> mmap.mmap:
    """To be read; a device that cannot lock what is read only locks this."""
    return mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
