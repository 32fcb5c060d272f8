"""The folder that a suite's results are kept in. One process at a time writes it, and it is of one suite.

RESULTS/suite.json           which suite the folder is of
RESULTS/cells/NAME.json      a cell: figures repeat by repeat, or the reason why there are none
RESULTS/logs/NAME.log        what its processes printed
RESULTS/parts/               parts of graphs, shared by cells (elsewhere with `cache`)
RESULTS/lock                 who writes it now
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from gnnsys.bench.matrix.cell import Cell
from gnnsys.bench.matrix.description import Description

_SUITE_KIND = "gnnsys-suite"
_LOCK = "lock"


class ResultFolder:
    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    @contextmanager
    def claimed(cls, path: Path, description: Description) -> Iterator[ResultFolder]:
        """Makes the folder this suite's, for this process alone; ValueError where it is another's."""
        folder = cls(path)
        folder._check(description)  # before anything is written into it
        path.mkdir(parents=True, exist_ok=True)
        with open(path / _LOCK, "a+", encoding="utf-8") as lock:  # free when this process ends, however it ends
            folder._take(lock)
            folder._check(description)  # another process may have been first
            for name in ("cells", "logs"):
                (path / name).mkdir(exist_ok=True)
            if not (path / "suite.json").exists():
                told = {"name": description.name, "digest": description.digest, "told": description.told}
                write_json(path / "suite.json", {"kind": _SUITE_KIND, **told})
            yield folder

    def read(self, cell: Cell) -> dict[str, Any] | None:
        """None where it has not run; a file that is not a cell's is told in one line."""
        path = self._cell_path(cell)
        return read_json(path) if path.exists() else None

    def write(self, cell: Cell, told: dict[str, Any]) -> None:
        write_json(self._cell_path(cell), told)

    def log_path(self, cell: Cell) -> Path:
        return self.path / "logs" / f"{cell.file_name.removesuffix('.json')}.log"

    @property
    def scratch(self) -> Path:
        """For the cell that runs now."""
        made = self.path.resolve() / "running"
        made.mkdir(exist_ok=True)
        return made

    @property
    def parts(self) -> Path:
        return self.path.resolve() / "parts"

    def _cell_path(self, cell: Cell) -> Path:
        return self.path / "cells" / cell.file_name

    def _check(self, description: Description) -> None:
        path = self.path / "suite.json"
        if path.exists():
            known = read_json(path)
            if known.get("kind") != _SUITE_KIND or known.get("digest") != description.digest:
                name = known.get("name")
                whose = f"suite {name!r}" if name != description.name else "another version of it"
                raise ValueError(
                    f"{self.path} has results of {whose}, not of {description.name!r}: give another folder by --out"
                )
        elif self.path.exists() and (not self.path.is_dir() or {entry.name for entry in self.path.iterdir()} - {_LOCK}):
            raise ValueError(f"{self.path} is neither empty nor results of a suite: give another folder by --out")

    def _take(self, lock: TextIO) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            owner = lock.read().strip() or "another process"
            raise ValueError(
                f"{self.path} is being written by {owner}: wait for its end, or give another folder by --out"
            ) from None
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()


def read_json(path: Path) -> dict[str, Any]:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(told, dict):
        raise ValueError(f"{path} is not of a suite")
    return told


def write_json(path: Path, told: dict[str, Any]) -> None:
    """All of it or nothing, also when the run is killed."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(told, indent=1) + "\n")
    os.replace(part, path)
