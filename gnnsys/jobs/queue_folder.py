"""A queue's folder: who may see it, and where things are.

queue.db         the jobs and their states (SQLite with a write-ahead log)
logs/12.log      what job 12 printed
results/12/      losses.json, model.pt, and what its script wrote to result.json
checkpoints/12/  while job 12 is under way
.owner           the service that runs the jobs
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)  # of an OSError: the disk is full
_MODE = 0o700


class QueueFolder:
    """Makes the folder where there is none. One that others can enter is refused: jobs are code that runs as you."""

    def __init__(self, folder: str | os.PathLike[str], is_new: bool = True) -> None:
        self.path = Path(folder).expanduser().absolute()
        if not self.path.exists():
            if not is_new:
                raise ValueError(f"there is no queue {self.path}: gnnsys jobs submit makes one")
            self.path.mkdir(mode=_MODE, parents=True, exist_ok=True)
            self.path.chmod(_MODE)
        if not self.path.is_dir():
            raise ValueError(f"{self.path} is a file: a queue is a folder, name another")
        about = self.path.stat()
        if about.st_uid != os.getuid():
            raise ValueError(f"{self.path} belongs to another user: give --queue a folder of your own")
        if stat.S_IMODE(about.st_mode) & 0o077:
            if any(self.path.iterdir()):
                remedy = (
                    f"chmod 700 {self.path}" if self.database.exists() else "name another, or one that is not there"
                )
                raise ValueError(f"{self.path} is open to other users, who could add jobs that run as you: {remedy}")
            self.path.chmod(_MODE)

    @property
    def database(self) -> Path:
        return self.path / "queue.db"

    def log(self, number: int) -> Path:
        return self.path / "logs" / f"{number}.log"

    def results(self, number: int) -> Path:
        return self.path / "results" / str(number)

    def checkpoints(self, number: int) -> Path:
        return self.path / "checkpoints" / str(number)

    def ending(self, number: int, attempt: int) -> Path:
        """Where the keeper of a script writes how that ended; a service that begins later finds it there."""
        return self.path / "scripts" / f"{number}-{attempt}.json"

    def make_rooms(self) -> None:
        for name in ("logs", "results", "checkpoints", "scripts"):
            (self.path / name).mkdir(mode=_MODE, exist_ok=True)

    def forget(self, number: int, keeps_checkpoints: bool = False) -> None:
        """Removes what is of no use once a job has ended."""
        if not keeps_checkpoints:
            shutil.rmtree(self.checkpoints(number), ignore_errors=True)
        for file in (self.path / "scripts").glob(f"{number}-*.json*"):
            with suppress(OSError):
                file.unlink()


def write_whole(path: Path, text: str) -> None:
    """Readers see all of it or nothing, whenever the writer is killed."""
    path.parent.mkdir(mode=_MODE, parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.half")
    try:
        with open(half, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(half, path)
    except OSError:
        with suppress(OSError):
            half.unlink()
        raise
