"""A disk without room: errors that name the file, say what was being written, and what to do about it.

What is written goes to a temporary place first, so a second run finds the disk as the first one did.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_REMEDIES = {
    errno.ENOSPC: "free some space, or choose a folder on another disk",
    errno.EDQUOT: "free some of your quota, or choose a folder on another disk",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), or choose a folder on another file system",
}


class NoRoom(OSError):
    """A disk, a quota or a limit on the size of files is spent."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Gives an error of the system the file's name: writing to an open file raises without one."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


@contextmanager
def room_for(what: str, folder: str | os.PathLike[str]) -> Iterator[None]:
    """Around all writing of `what` ("the parts 'out'") below `folder`: turns a full disk into NoRoom with the remedy.

    The block removes what it has written; the error says so.
    """
    try:
        yield
    except NoRoom:
        raise
    except OSError as error:
        if error.errno not in _REMEDIES:
            raise
        free = shutil.disk_usage(_existing(Path(folder))).free
        remedy = (
            f"{_REMEDIES[error.errno]}, and run it again: what was written is removed ({free / 1e6:,.0f} MB free now)"
        )
        text = f"{os.strerror(error.errno)} while writing {what}; {remedy}"
        raise NoRoom(error.errno, text, error.filename or str(folder)) from error


def check_room(num_bytes: int, what: str, folder: str | os.PathLike[str]) -> None:
    """NoRoom where `what` needs more bytes than are free, asked before anything is computed."""
    free = shutil.disk_usage(_existing(Path(folder))).free
    if num_bytes > free:
        need = f"{num_bytes / 1e6:,.0f} MB at least, and {free / 1e6:,.0f} MB are free"
        text = f"{os.strerror(errno.ENOSPC)}: {what} needs {need}; {_REMEDIES[errno.ENOSPC]}"
        raise NoRoom(errno.ENOSPC, text, str(folder))


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    while not folder.is_dir():
        folder = folder.parent
    return folder
