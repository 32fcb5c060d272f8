"""torchrun's agent, as its trainers see it: who starts them, ends them, and starts them again.

An agent that is killed leaves its trainers behind. They would train on until something that it held is missed, beside
those of the agent that takes its place. So a session ends its process when the agent has ended: first in the way in
which an agent does, by SIGTERM, and where that is not heeded, by force.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
import time
from pathlib import Path

_log = logging.getLogger(__name__)

_LAUNCHED = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")  # an agent gives them to trainers, and has none
_MOST_SECONDS = 30.0  # that an agent gives a trainer to heed SIGTERM
_LOOK_SECONDS = 1.0  # between looks, on kernels that tell nobody of a process's end


class Agent:
    """The process that launched this one. `watch` has a thread wait for its end; `close` ends the thread.

    `lost_after`: seconds within which this process then has ended too.
    """

    def __init__(self, pid: int, lost_after: float) -> None:
        self.pid = pid
        self._grace = min(lost_after / 2, _MOST_SECONDS)
        self._process = _open(pid)
        self._reader, self._writer = os.pipe()
        self._owner = os.getpid()
        self._thread = threading.Thread(target=self._wait, name="gnnsys-agent-watch", daemon=True)

    @classmethod
    def watch(cls, lost_after: float) -> Agent | None:
        """Begins to watch the agent; None where torchrun has not launched this process, or where it cannot be found."""
        pid = find_agent()
        if pid is None:
            return None
        agent = cls(pid, lost_after)
        agent._thread.start()
        return agent

    def close(self) -> None:
        """Watches no more. Idempotent; in a forked child, which has no such thread, it is nothing."""
        if os.getpid() != self._owner or not self._thread.is_alive():
            return
        with contextlib.suppress(OSError):  # it has just ended
            os.write(self._writer, b"x")
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _wait(self) -> None:
        waiting = select.poll()
        wait: float | None = 1000 * _LOOK_SECONDS
        waiting.register(self._reader, select.POLLIN)
        if self._process is not None:
            waiting.register(self._process, select.POLLIN)
            wait = None
        try:
            while find_agent() == self.pid:  # who has lost its parent has another one
                ready = [descriptor for descriptor, _ in waiting.poll(wait)]
                if self._reader in ready:
                    return
                if self._process in ready:
                    break
        finally:
            for descriptor in (self._reader, self._writer, self._process):
                if descriptor is not None:
                    os.close(descriptor)
        self._end()

    def _end(self) -> None:
        _log.critical(
            "rank %s ends: torchrun's agent on this machine (process %d), which launched it, has ended without ending "
            "it. Start torchrun again; gnnsys.resume() goes on from the last checkpoint",
            os.environ.get("RANK", "?"),
            self.pid,
        )
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(self._grace)
        os._exit(1)


def find_agent() -> int | None:
    """The first process above this one that torchrun has not launched: there may be a shell in between."""
    if not all(name in os.environ for name in _LAUNCHED):
        return None
    pid = os.getppid()
    while pid > 1 and _is_launched(pid):
        pid = _parent_of(pid)
    return pid if pid > 1 else None


def _is_launched(pid: int) -> bool:
    """Whether a process was started with what an agent tells its trainers."""
    try:
        told = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # of another account, or ended
        return False
    return all(f"{name}={os.environ[name]}".encode() in told for name in _LAUNCHED)


def _parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 0


def _open(pid: int) -> int | None:
    """A descriptor that is readable once the process has ended; None where the kernel has none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None
