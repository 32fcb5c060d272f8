"""Keeps one command: starts it, and ends it with everything that it started as soon as nobody holds its input open.

    python -I -S process_keeper.py GRACE FOLDER COMMAND...

An agent runs this beside itself and holds the other end of its standard input. However the agent ends, kill -9
included, the input closes: the command gets SIGTERM, and after GRACE seconds whatever is left of it SIGKILL. As a
subreaper this process is the parent of every orphan below it, so nothing of the command can get out of its sight. Ends
with the command's exit code (128 + N for signal N) once nothing is left. Uses only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LEFTOVER_SECONDS = 5.0  # that processes have to end by themselves once the command has ended
STOPPED_SECONDS = 1.0  # the same where the command was told to end, and they with it
KILL_SECONDS = 10.0  # that the kernel has to end what was killed


def main(grace: float, folder: str, command: list[str]) -> int:
    become_subreaper()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    parent = os.getpid()

    def in_child() -> None:  # torchrun heeds SIGTERM, and ends its ranks, should this process be killed
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=in_child)
    for descriptor in (1, 2):
        os.close(descriptor)  # the output ends with the command
    ended: dict[int, int] = {}
    is_alone, deadline = False, None
    while child.pid not in ended:
        wait = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select([reader] if is_alone else [reader, 0], [], [], wait)
        if reader in ready:
            asked = any(number != signal.SIGCHLD for number in os.read(reader, 1000))
            if asked and deadline is None:
                deadline = _terminate(child.pid, grace)
        if 0 in ready:
            is_alone = not os.read(0, 1000)
            deadline = deadline or _terminate(child.pid, grace)
        if deadline is not None and time.monotonic() >= deadline:
            end_descendants(0.0, ended)
        _reap(ended)
    for pid in descendants() if deadline is not None else ():
        _send(pid, signal.SIGTERM)
    end_descendants(LEFTOVER_SECONDS if deadline is None else STOPPED_SECONDS, ended)
    if is_alone or (select.select([0], [], [], 0.0)[0] and not os.read(0, 1000)):
        shutil.rmtree(folder, ignore_errors=True)  # nobody else will
    code = ended[child.pid]
    return code if code >= 0 else 128 - code


def become_subreaper() -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> list[int]:
    """All processes below this one that have not ended, nearest first."""
    children: dict[int, list[int]] = {}
    dead: set[int] = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, parent = file.read().rsplit(b")", 1)[1].split()[:2]
            except OSError:
                continue  # gone meanwhile
            children.setdefault(int(parent), []).append(int(name))
            if state in (b"Z", b"X"):
                dead.add(int(name))
    me = os.getpid()
    found = [me]
    for pid in found:
        found += [child for child in children.get(pid, ()) if child not in found]
    return [pid for pid in found if pid != me and pid not in dead]


def end_descendants(patience: float, ended: dict[int, int]) -> None:
    """Waits until no process is below this one; after `patience` seconds kills them, those that are new as well.

    Adds the exit codes of its own children to `ended`.
    """
    begin = time.monotonic()
    while True:
        _reap(ended)
        alive, waited = descendants(), time.monotonic() - begin
        if not alive or waited > patience + KILL_SECONDS:
            return
        if waited >= patience:
            for pid in alive:
                _send(pid, signal.SIGKILL)
        time.sleep(0.01)


def _terminate(pid: int, grace: float) -> float:
    _send(pid, signal.SIGTERM)
    return time.monotonic() + grace


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _reap(ended: dict[int, int]) -> None:
    """Reaps every child that has ended, and notes its exit code."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            ended[pid] = os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2], sys.argv[3:]))
