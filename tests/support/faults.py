"""What goes wrong, on purpose and again: faults that are drawn from a seed, written as a line, and replayed from it.

A fault of a job says what happens (kill, stop) to whom (shard, trainer, leader, of which machine) and when: a moment
that the job announces, or a file that it writes, and so many milliseconds later. It is carried out by the process it
is meant for, so that the moment is the right one on any machine, and it happens once, however often the job restarts.
Disks that are full and files that are damaged are further down, wires that fail in tests/support/wires.py.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes import descendants
from tests.support.spare_servers import NAME

TARGETS = ("shard", "trainer", "leader")  # a leader is the first trainer of a machine; its shard dies with it
_TARGETS_OF = {0: ("leader", "shard"), 1: ("trainer",)}  # whose faults a process carries out, by its local rank
_LOOK_SECONDS = 0.001
_STOP_SECONDS = 5.0


@dataclass(frozen=True)
class Fault:
    """`moment` is a name the job announces ("open", "step:7", "save:10"), or "file:GLOB": once such a file exists.

    >>> Fault.parse("seed=4 what=kill target=shard machine=1 moment=step:7 delay=12").machine
    1
    """

    seed: int
    what: str  # "kill" for good, or "stop" for a few seconds
    target: str
    machine: int
    moment: str
    delay: int  # milliseconds

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in vars(self).items())

    @classmethod
    def parse(cls, line: str) -> Fault:
        values = dict(word.split("=", 1) for word in line.split())
        fault = cls(
            int(values["seed"]), values["what"], values["target"], int(values["machine"]), values["moment"],
            int(values["delay"]),
        )  # fmt: skip
        if fault.what not in ("kill", "stop") or fault.target not in TARGETS:
            raise ValueError(f"{line!r} names no fault: kill or stop one of {', '.join(TARGETS)}")
        return fault


class Injector:
    """Carries out the faults that are meant for this process, or for the shard it started.

    Every process of the job makes one and announces its moments by `reached`. `folder` is common to all of them and
    remembers what has happened.
    """

    def __init__(self, faults: Sequence[Fault], folder: Path, *, machine: int, local_rank: int) -> None:
        mine = _TARGETS_OF.get(local_rank, ())
        self._folder, self._lock = folder, threading.Lock()
        self._faults = [(n, f) for n, f in enumerate(faults) if f.machine == machine and f.target in mine]
        for number, fault in self._faults:
            if fault.moment.startswith("file:"):
                self._later(number, fault)

    def reached(self, moment: str) -> None:
        """The job has come to `moment`: what was to happen then happens, at its delay, in a thread."""
        for number, fault in self._faults:
            if fault.moment == moment:
                self._later(number, fault)

    def _later(self, number: int, fault: Fault) -> None:
        if not has_happened(self._folder, number):
            threading.Thread(target=self._carry_out, args=(number, fault), name="fault", daemon=True).start()

    def _carry_out(self, number: int, fault: Fault) -> None:
        kind, _, pattern = fault.moment.partition(":")
        while kind == "file" and not any(self._folder.glob(pattern)):  # as long as the process lives
            time.sleep(_LOOK_SECONDS)
        time.sleep(fault.delay / 1000)
        with self._lock:
            if has_happened(self._folder, number):
                return
            victim = find_shard(os.getpid()) if fault.target == "shard" else os.getpid()
            if fault.what == "stop":
                stop(victim, _STOP_SECONDS)
            elif victim != os.getpid():
                os.kill(victim, signal.SIGKILL)
            _mark(self._folder, number).touch()  # done; but for one's own death, which nobody can mark afterwards
            if fault.what == "kill" and victim == os.getpid():
                os.kill(victim, signal.SIGKILL)


def has_happened(folder: Path, number: int) -> bool:
    """Whether fault `number` of a job was carried out."""
    return _mark(folder, number).exists()


def find_shard(leader: int) -> int:
    """The process of the graph server that a leader started, or forked (tests/support/spare_servers.py)."""
    for pid in descendants(leader):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if "gnnsys.session.serve" in words or Path(f"/proc/{pid}/comm").read_text().strip() == NAME:
                return pid
    raise AssertionError(f"process {leader} has no graph server")


def stop(pid: int, seconds: float) -> None:
    """Stops a process for a while; somebody else does it, in case it is the caller that is stopped."""
    subprocess.Popen(["sh", "-c", f"kill -STOP {pid}; sleep {seconds}; kill -CONT {pid}"], start_new_session=True)


def _mark(folder: Path, number: int) -> Path:
    return folder / f"fault-{number}.happened"


# Files


def damage(path: Path, seed: int) -> str:
    """Flips one bit of a file, or cuts its end off, as the seed says; a line that says what was done."""
    chance, content = random.Random(seed), bytearray(path.read_bytes())
    if not content:
        raise ValueError(f"{path} is empty: there is nothing to damage")
    if chance.random() < 0.5:
        bit = chance.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        return f"seed={seed} bit {bit} of {path.name} flipped"
    size = chance.randrange(len(content))
    os.truncate(path, size)
    return f"seed={seed} {path.name} cut to {size} of {len(content)} bytes"


# Disks


@contextlib.contextmanager
def small_disk(num_bytes: int) -> Iterator[Path]:
    """A folder with room for so many bytes and no more. Needs root."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", folder], check=True, timeout=30)
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True, timeout=30)


@contextlib.contextmanager
def filled(folder: Path, leave: int = 0) -> Iterator[None]:
    """Fills the disk that `folder` is on but for `leave` bytes, and gives the room back at the end."""
    room = os.statvfs(folder)
    if room.f_bavail * room.f_frsize > 1 << 30:
        raise ValueError(f"{folder} has more than a gigabyte free: fill a small_disk instead")
    ballast = folder / ".ballast"
    try:
        with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        os.truncate(ballast, max(0, ballast.stat().st_size - leave))
        yield
    finally:
        ballast.unlink(missing_ok=True)


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, says that a disk is full."""
    while error is not None:
        if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
