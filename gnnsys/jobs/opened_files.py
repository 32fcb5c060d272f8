"""Which files a function reads, as Python's audit events tell, and whether they are still what they were.

`open`, `os.open`, `os.listdir`, `os.scandir` and `sqlite3.connect` are seen, in every thread. A file that a library
opens in C is not. Nor is one opened with `dir_fd`: the event does not name the folder.
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

# Size, mtime, ctime, inode; None where there is no file. Tools that copy files set mtime. None can set ctime.
FileState: TypeAlias = tuple[int, int, int, int] | None

_LISTED = ("os.listdir", "os.scandir")
# O_TMPFILE, which not every system has, opens a folder to make a file without a name there.
_EMPTIES = (os.O_TRUNC, os.O_CREAT | os.O_EXCL, getattr(os, "O_TMPFILE", os.O_TRUNC))
_NOT_FILES = ("/proc/", "/sys/", "/dev/")
_IMPORTS = "<frozen importlib._bootstrap"

_lock = threading.Lock()
_watching: list[dict[str, FileState]] = []  # an audit hook is the process's, and stays: it does nothing without these
_hooks: list[Any] = []
_on_import: dict[tuple[str, str], FileState] = {}  # by the module's file and the file that it read
_is_watching_imports = False


@contextlib.contextmanager
def opened_files() -> Iterator[dict[str, FileState]]:
    """Fills the dict with each file and folder that is opened for reading inside the block, and its state then."""
    found: dict[str, FileState] = {}
    with _lock:
        _begin_to_hear()
        _watching.append(found)
    try:
        yield found
    finally:
        with _lock:
            _watching[:] = [each for each in _watching if each is not found]


def watch_imports() -> None:
    """From now on, notes what modules read while they are imported. Forgets what was noted before."""
    global _is_watching_imports
    with _lock:
        _begin_to_hear()
        _on_import.clear()
        _is_watching_imports = True


def opened_on_import(modules: Iterable[str]) -> list[tuple[str, FileState]]:
    """Files that these modules have read while they were imported, in a process that watches imports."""
    chosen = set(modules)
    return [(path, state) for (module, path), state in list(_on_import.items()) if module in chosen]


def state_of(path: str) -> FileState:
    try:
        about = os.stat(path)
    except (OSError, ValueError):
        return None
    return about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino


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


def _begin_to_hear() -> None:
    if not _hooks:
        sys.addaudithook(_hear)
        _hooks.append(_hear)


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watching and not _is_watching_imports:
        return
    with contextlib.suppress(Exception):  # an audit hook that raises would make the call fail
        if (path := _read_path(event, arguments)) is not None and not path.startswith(_NOT_FILES):
            for found in _watching:
                if path not in found:
                    found[path] = state_of(path)
            if _is_watching_imports and (module := _imported_module()) is not None:
                _on_import.setdefault((module, path), state_of(path))


def _imported_module() -> str | None:
    """The file of the module whose import opens a file. None outside of imports, and for the module's own file."""
    frame = sys._getframe(2)
    if frame.f_code.co_filename.startswith(_IMPORTS):
        return None
    while frame.f_back is not None:
        if frame.f_code.co_name == "<module>" and frame.f_back.f_code.co_filename.startswith(_IMPORTS):
            return frame.f_code.co_filename
        frame = frame.f_back
    return None


def _read_path(event: str, arguments: tuple[Any, ...]) -> str | None:
    """The absolute path that an event reads; None for other events, and for a file that is made or only written."""
    if event == "open":
        path, _, flags = arguments
        if isinstance(path, int) or flags & os.O_ACCMODE == os.O_WRONLY:
            return None
        if any(flags & empty == empty for empty in _EMPTIES):
            return None
        name = os.path.abspath(os.fsdecode(path))
        if flags & os.O_CREAT and not os.path.exists(name):
            return None
        return source_from_cache(name) if name.endswith(".pyc") else name
    if event in _LISTED and not isinstance(arguments[0], int):
        if sys._getframe(2).f_code.co_filename.startswith(_IMPORTS):  # it looks for modules, in all of sys.path
            return None
        return os.path.abspath(os.fsdecode(arguments[0] or "."))
    if event == "sqlite3.connect" and arguments[0] != ":memory:":
        return os.path.abspath(os.fsdecode(arguments[0]))
    return None
