"""Only one job at a time saves to a folder of checkpoints. The file `.owner` names its process. The service of a queue
of jobs owns its folder by the same rule.

A job that finds such a file looks the process up. If it was on this host and is gone, the new job takes over at once.
If it was on a host or in a container where the new job has no machine, only its heartbeat, the file's modification
time, can tell: the new job watches it for LEASE_SECONDS and takes over if it does not change. Clocks of different
hosts are never compared.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

OWNER = ".owner"
BEAT_SECONDS = 5.0
LEASE_SECONDS = 30.0  # a job that cannot be looked up counts as gone after this long without a beat
_LOOK_SECONDS = 0.25
_TRIES = 20
_REFUSAL = (
    "{folder} is where another job that still runs saves its checkpoints ({other}): give each job a folder of its own, "
    "or end that one"
)


@dataclass(frozen=True)
class Process:
    """A job's process: enough to find it, and to tell it from a later process with the same pid."""

    job: str
    host: str
    boot: str
    space: str  # the pid namespace: a container has its own
    pid: int
    start: int  # clock ticks from boot to the start of the process

    @classmethod
    def this(cls, job: str) -> Process:
        with suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            space, (_, start) = os.readlink("/proc/self/ns/pid"), _stat(os.getpid())
            return cls(job, socket.gethostname(), boot, space, os.getpid(), start)
        return cls(job, socket.gethostname(), "", "", os.getpid(), 0)

    def is_same(self, other: Process) -> bool:
        """Whether both are the same process, perhaps of different jobs."""
        return replace(self, job="") == replace(other, job="")

    def runs(self, seen_from: Process) -> bool | None:
        """Whether the process is alive; None if that cannot be seen from the process `seen_from`."""
        if not self.boot or (self.boot, self.space) != (seen_from.boot, seen_from.space):
            return None
        try:
            state, start = _stat(self.pid)
        except OSError:
            return False
        return state not in "ZX" and start == self.start

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host or 'an unknown host'}"


class FolderLock:
    """A job's lock on a folder, on one machine, from its first save to its end. `job` is the same on all machines.

    `refusal` is what another job is told, with {folder} and {other}. With `is_strict` another job of this same process
    is another one too.
    """

    def __init__(self, folder: Path, job: str, refusal: str = _REFUSAL, is_strict: bool = False) -> None:
        self._refusal, self._is_strict = refusal, is_strict
        self._folder, self._path, self._this = folder, folder / OWNER, Process.this(job)
        self._seen: tuple[Process, int, float] | None = None  # another job's process, its beat, when first seen
        self._dead: list[Process] = []  # known to be gone, from machines that can look them up
        self._file: int | None = None  # descriptor of our `.owner`, where the heartbeat goes
        self._ended = threading.Event()
        self._lock = threading.Lock()

    def dead(self) -> dict[str, Any] | None:
        """The process in the file, if this machine knows that it has ended. Other machines `learn` it from here."""
        found, _ = self._read()
        return asdict(found) if found is not None and found.runs(self._this) is False else None

    def learn(self, dead: Iterable[Mapping[str, Any] | None]) -> None:
        """Processes that are known to be gone: `other` does not wait for a beat of these."""
        self._dead += [Process(**named) for named in dead if named is not None]

    def other(self) -> str | None:
        """The other job that saves to the folder, as text; None without one. May wait for another host's next beat."""
        while True:
            found, beat = self._read()
            if found is None or self._is_ours(found):
                return None
            runs = found.runs(self._this)
            if runs is None:
                runs = False if found in self._dead else self._has_beaten(found, beat)
            if runs is not None:
                return f"{found}, job {found.job[:8]}" if runs else None
            time.sleep(_LOOK_SECONDS)

    def take(self) -> None:
        """Takes the lock. ValueError if another job that still runs has it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for _ in range(_TRIES):
            other = self.other()
            if other is not None:
                raise ValueError(self._refusal.format(folder=self._folder, other=other))
            found, _ = self._read()
            if found is not None and self._is_ours(found):
                return
            if found is not None:
                self._remove(found)
            if self._create():
                return
        raise ValueError(f"{self._folder}: several jobs begin to save to it at once, give each a folder of its own")

    def close(self) -> None:
        """Releases the lock. Idempotent. Does nothing in a forked child, which does not own it."""
        self._ended.set()
        with self._lock:
            if self._file is None or os.getpid() != self._this.pid:
                return
            self._file = None
            self._close_file()
        with suppress(OSError):
            if self._read()[0] == self._this:
                self._path.unlink()

    # -- the file of another job ------------------------------------------------------------------------------------

    def _is_ours(self, found: Process) -> bool:
        return found.job == self._this.job or (not self._is_strict and found.is_same(self._this))

    def _has_beaten(self, found: Process, beat: int) -> bool | None:
        """Whether the file's time has changed since it was first seen; None if it is too early to tell."""
        now, seen = time.monotonic(), self._seen
        if seen is None or seen[0] != found:
            self._seen = found, beat, now
            return None
        if seen[1] != beat:
            self._seen = found, beat, now
            return True
        return False if now - seen[2] >= LEASE_SECONDS else None

    def _read(self) -> tuple[Process | None, int]:
        """The process in the file and the time of its last beat. Opened each time: NFS caches times until then."""
        try:
            with open(self._path, encoding="utf-8") as file:
                beat = os.fstat(file.fileno()).st_mtime_ns
                text = file.read(1 << 16)
        except FileNotFoundError:
            return None, 0
        try:
            return Process(**json.loads(text)), beat
        except (ValueError, TypeError):  # half written, or of another version: only its beat can tell
            return Process("", "", "", "", 0, 0), beat

    # -- our own file -----------------------------------------------------------------------------------------------

    def _create(self) -> bool:
        """Creates the file and starts the heartbeat. False if another job was faster."""
        whole = self._folder / f".gone-owner-{secrets.token_hex(6)}"
        flags, text = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, json.dumps(asdict(self._this)).encode()
        try:
            with open(whole, "wb") as file:
                file.write(text)
            try:
                os.link(whole, self._path)  # atomic: readers see the whole file or none
                made = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
            except FileExistsError:
                return False
            except OSError:  # a file system without links
                made = os.open(self._path, flags, 0o644)
                os.write(made, text)
        except FileExistsError:
            return False
        finally:
            with suppress(OSError):
                whole.unlink()
        self._file, self._close_file = made, weakref.finalize(self, os.close, made)
        self._close_file.atexit = False
        beat = threading.Thread(target=_beat, args=(weakref.ref(self), self._ended), name="gnnsys-owner", daemon=True)
        beat.start()
        return True

    def _remove(self, dead: Process) -> None:
        """Removes the file of a dead job. If another job has replaced it in the meantime, puts that one back."""
        gone = self._folder / f".gone-owner-{secrets.token_hex(6)}"
        try:
            os.rename(self._path, gone)
            if json.loads(gone.read_text(encoding="utf-8")) != asdict(dead):
                os.link(gone, self._path)
        except (OSError, ValueError):
            pass
        with suppress(OSError):
            gone.unlink()

    def beat(self) -> None:
        """Updates the time of the file that this job created, even if it was renamed since."""
        with self._lock, suppress(OSError):
            if self._file is not None:
                os.utime(self._file)


def _beat(reference: weakref.ref[FolderLock], ended: threading.Event) -> None:
    """The heartbeat thread. Holds only a weak reference, so a lock that nobody closed ends with its saver."""
    while not ended.wait(BEAT_SECONDS):
        lock = reference()
        if lock is None:
            return
        lock.beat()
        del lock


def _stat(pid: int) -> tuple[str, int]:
    """State and start of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return fields[0], int(fields[19])
