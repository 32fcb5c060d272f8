"""Which process this is: its number, and enough to tell it from a later one with the same number."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path

_LOOK_SECONDS = 0.01
_MOST_ROUNDS = 100
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class ProcessIdentity:
    """`start`: clock ticks from boot to its start; `boot`: which boot of the machine that was."""

    pid: int
    start: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """None where there is no such process, or only its remains."""
        found = _stat(pid)
        return None if found is None or found[0] in "ZX" else cls(pid, found[1], _boot())

    def is_running(self) -> bool:
        return ProcessIdentity.of(self.pid) == self

    def is_stopped(self) -> bool:
        """Whether somebody has stopped it (SIGSTOP). One that a debugger holds is not meant."""
        found = _stat(self.pid)
        return found is not None and found == ("T", self.start)

    def go_on(self) -> None:
        """Continues it, and the process group that it leads."""
        for send in (os.kill, os.killpg):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                send(self.pid, signal.SIGCONT)

    def is_another(self) -> bool:
        """Whether the number may be another's by now: after a boot, or where a process has it that began later."""
        found = _stat(self.pid)
        return self.boot != _boot() or (found is not None and found[1] != self.start)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ProcessIdentity:
        return cls(**json.loads(text))

    def end(self, seconds: float, group: bool = False) -> bool:
        """Kills it, and with `group` all of the process group that it leads. Whether it is gone within `seconds`."""
        if self.is_running():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                (os.killpg if group else os.kill)(self.pid, signal.SIGKILL)
        deadline = time.monotonic() + seconds
        while self.is_running():
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_SECONDS)
        return True


def descendants(pid: int) -> list[int]:
    """All that a process has started and that still runs, and what those have: parents first."""
    found = []
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                for child in map(int, file.read_text().split()):
                    if ProcessIdentity.of(child) is not None:
                        found += [child, *descendants(child)]
    return found


def kill_descendants(pid: int) -> None:
    """Those too that have left its process group. What they start meanwhile is found in the next round."""
    for _ in range(_MOST_ROUNDS):
        left = descendants(pid)
        for each in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(each, signal.SIGKILL)
        if not left:
            return


def adopt_orphans() -> None:
    """What this process's children leave behind becomes its own child, so that it can be found and ended."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _stat(pid: int) -> tuple[str, int] | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None
    return fields[0], int(fields[19])


def _boot() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
