"""How a process that a nursery has forked moves to a host of the lab: there it need not import torch again.

It enters what `nsenter` enters for a command of the lab, but not the host's control groups. Only a child of whoever
enters has the host's process ids: the process that was forked waits for that child, and ends as it does. Programs as
users start them on hosts are in tests/lab/test_lab.py.
"""

from __future__ import annotations

import ctypes
import os

from gnnsys.lab import Lab

VARIABLE = "LAB_HOST"  # the first process of the host that a forked process is to move to
_SPACES = ("pid", "net", "uts", "ipc", "mnt")


def on_host(lab: Lab, host: int) -> dict[str, str]:
    """What to add to the environment of a process that a nursery is to fork on a host."""
    return {VARIABLE: str(lab._first_pids[host - 1])}


def move(first_pid: int) -> None:
    """Called where a process has one thread and no child yet, so that its children are there too."""
    folder, libc = os.getcwd(), ctypes.CDLL(None, use_errno=True)
    files = [os.open(f"/proc/{first_pid}/ns/{space}", os.O_RDONLY) for space in _SPACES]  # before /proc is another one
    for file in files:
        if libc.setns(file, 0):
            raise OSError(ctypes.get_errno(), "a host of the lab cannot be entered")
        os.close(file)
    os.chdir(folder)
    if pid := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os._exit(code if code >= 0 else 128 - code)
