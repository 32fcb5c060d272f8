"""Which files a function reads, as Python's audit events tell, and whether they are still what they were.

`open`, `os.open`, `os.listdir`, `os.scandir` and `sqlite3.connect` are seen, in every thread. A file that a library
opens in C is not.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from importlib.util import source_from_cache
from pathlib import Path
from typing import Any, TypeAlias

FileState: TypeAlias = tuple[int, int, int] | None  # size, time of the last change, inode; None where there is no file

_LISTED = ("os.listdir", "os.scandir")
# O_TMPFILE, which not every system has, opens a folder to make a file without a name there.
_CREATES = (os.O_CREAT, os.O_TRUNC, getattr(os, "O_TMPFILE", os.O_CREAT))
_NOT_FILES = ("/proc/", "/sys/", "/dev/")
_IMPORTS = "<frozen importlib._bootstrap"

_lock = threading.Lock()
_watching: list[dict[str, FileState]] = []  # an audit hook is the process's, and stays: it does nothing without these
_hooks: list[Any] = []


@contextlib.contextmanager
def opened_files() -> Iterator[dict[str, FileState]]:
    """Fills the dict with each file and folder that is opened for reading inside the block, and its state then."""
    with _lock:
        if not _hooks:
            sys.addaudithook(_hear)
            _hooks.append(_hear)
        found: dict[str, FileState] = {}
        _watching.append(found)
    try:
        yield found
    finally:
        with _lock:
            _watching[:] = [each for each in _watching if each is not found]


def state_of(path: str) -> FileState:
    try:
        about = os.stat(path)
    except (OSError, ValueError):
        return None
    return about.st_size, about.st_mtime_ns, about.st_ino


def are_unchanged(files: Iterable[tuple[str, Any]]) -> bool:
    """Whether these files are as they were noted. A state may have been through JSON."""
    return all((None if state is None else tuple(state)) == state_of(path) for path, state in files)


def states_below(path: str | os.PathLike[str]) -> list[tuple[str, FileState]]:
    """A file and its state, or a folder's with all that lie in it, by name. ValueError where nothing is there."""
    start = Path(path).resolve()
    if not start.exists():
        raise ValueError(f"depends: there is no file or folder {str(start)!r}")
    inside = [os.path.join(folder, name) for folder, _, names in os.walk(start) for name in names]
    return [(each, state_of(each)) for each in sorted([str(start), *inside])]


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watching:
        return
    with contextlib.suppress(Exception):  # an audit hook that raises would make the call fail
        if (path := _read_path(event, arguments)) is not None and not path.startswith(_NOT_FILES):
            for found in _watching:
                if path not in found:
                    found[path] = state_of(path)


def _read_path(event: str, arguments: tuple[Any, ...]) -> str | None:
    """The absolute path that an event reads; None for other events, and for a file that is made or written."""
    if event == "open":
        path, _, flags = arguments
        if isinstance(path, int) or flags & os.O_ACCMODE == os.O_WRONLY:
            return None
        if any(flags & made == made for made in _CREATES):
            return None
        name = os.path.abspath(os.fsdecode(path))
        return source_from_cache(name) if name.endswith(".pyc") else name
    if event in _LISTED and not isinstance(arguments[0], int):
        if sys._getframe(2).f_code.co_filename.startswith(_IMPORTS):  # it looks for modules, in all of sys.path
            return None
        return os.path.abspath(os.fsdecode(arguments[0] or "."))
    if event == "sqlite3.connect" and arguments[0] != ":memory:":
        return os.path.abspath(os.fsdecode(arguments[0]))
    return None
