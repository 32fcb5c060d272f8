"""torchrun's agent, as its trainers see it: who starts them, ends them, and starts them again.

An agent that is killed leaves its trainers running, beside those of the agent that takes its place. So a session ends
its process when the agent has ended: first by SIGTERM, as an agent would, then by force.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
from collections.abc import Mapping
from pathlib import Path

_log = logging.getLogger(__name__)

_LAUNCHED = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")  # an agent gives them to trainers, and has none
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # one for each trainer: an agent that a trainer started has that trainer's
_MOST_SECONDS = 30.0  # that an agent gives a trainer to heed SIGTERM
_LOOK_SECONDS = 1.0  # between looks, on kernels that tell nobody of a process's end


class TorchrunAgent:
    """The process that launched this one. `watch` has a thread wait for its end; `close` ends the thread.

    `told` is what the agent has told this process, `lost_after` the seconds within which this one then has ended too.
    """

    def __init__(self, pid: int, told: Mapping[str, str], lost_after: float) -> None:
        self.pid = pid
        self._told = told
        self._grace = min(lost_after / 2, _MOST_SECONDS)
        self._process, self._began = _open(pid), _began(pid)
        self._reader, writer = os.pipe()  # the thread closes the reader, and nobody else; `close` the writer
        self._writer = [writer]  # in a list: who pops it has it alone, a handler of signals too
        self._owner = os.getpid()
        self._thread = threading.Thread(target=self._run, name="gnnsys-agent-watch", daemon=True)

    @classmethod
    def watch(cls, lost_after: float) -> TorchrunAgent | None:
        """Begins to watch the agent; None where torchrun has not launched this process, or where it cannot be found."""
        told = what_agents_tell()
        pid = find_agent(told)
        if pid is None:
            return None
        agent = cls(pid, told, lost_after)
        agent._thread.start()
        return agent

    def close(self) -> None:
        """Stops watching; this process is not ended any more. Idempotent; a no-op in a forked child."""
        if os.getpid() != self._owner:
            return
        with contextlib.suppress(IndexError):  # it was taken before
            writer = self._writer.pop()
            os.write(writer, b"x")  # a forked child may have the writer too: that it is closed here tells nothing
            os.close(writer)
            if self._thread is not threading.current_thread():
                self._thread.join(5.0)

    def _run(self) -> None:
        try:
            if self._await_end():
                self._end()
        finally:
            for descriptor in (self._reader, self._process):
                if descriptor is not None:
                    os.close(descriptor)

    def _await_end(self) -> bool:
        """Waits until the agent has ended; False where `close` was called before.

        After the first look it is known by its number and its beginning alone: what is in the environment, and who this
        process's parent is, may change meanwhile.
        """
        waiting = select.poll()
        waiting.register(self._reader, select.POLLIN)
        wait: float | None = 1000 * _LOOK_SECONDS
        if self._process is not None:
            waiting.register(self._process, select.POLLIN)
            wait = None
        has_ended = find_agent(self._told) != self.pid  # before it could be watched
        while not has_ended:
            ready = [descriptor for descriptor, _ in waiting.poll(wait)]
            if self._reader in ready:
                return False
            has_ended = self._process in ready if self._process is not None else _began(self.pid) != self._began
        return True

    def _end(self) -> None:
        _log.critical(
            "rank %s ends: torchrun's agent on this machine (process %d), which launched it, has ended without ending "
            "it. Start torchrun again; gnnsys.resume() goes on from the last checkpoint",
            os.environ.get("RANK", "?"),
            self.pid,
        )
        if self._is_closed(0.0):
            return
        os.kill(os.getpid(), signal.SIGTERM)
        if not self._is_closed(self._grace):  # a process that closes its session is about to end by itself
            os._exit(1)

    def _is_closed(self, seconds: float) -> bool:
        """Whether `close` is called within these seconds."""
        waiting = select.poll()
        waiting.register(self._reader, select.POLLIN)
        return bool(waiting.poll(1000 * seconds))


def what_agents_tell() -> dict[str, str]:
    """What in this process's environment is from an agent."""
    found = {name: os.environ.get(name) for name in (*_LAUNCHED, _ERROR_FILE)}
    return {name: value for name, value in found.items() if value is not None}


def find_agent(told: Mapping[str, str]) -> int | None:
    """The first process above this one that the same agent has not launched: there may be a shell in between."""
    if not all(name in told for name in _LAUNCHED):
        return None
    pid = os.getppid()
    while pid > 1 and _is_launched(pid, told):
        pid = _parent_of(pid)
    return pid if pid > 1 else None


def _is_launched(pid: int, told: Mapping[str, str]) -> bool:
    """Whether a process was started with what an agent has told this one."""
    try:
        known = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # of another account, or ended
        return False
    return all(os.fsencode(f"{name}={value}") in known for name, value in told.items())


def _stat(pid: int) -> list[str]:
    """What the kernel tells of a process, from its state on; nothing of one that is not there."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()
    except OSError:
        return []


def _parent_of(pid: int) -> int:
    stat = _stat(pid)
    return int(stat[1]) if stat else 0


def _began(pid: int) -> str | None:
    """When a process began, in the kernel's ticks; None for one that has ended. Another one may get its number."""
    stat = _stat(pid)
    return stat[19] if stat and stat[0] not in "ZX" else None


def _open(pid: int) -> int | None:
    """A descriptor that is readable once the process has ended; None where the kernel has none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None
