"""`pid`, the number of this process, without a system call: only a fork changes it, and Python tells us of forks."""

from __future__ import annotations

import os

pid = os.getpid()


def _look() -> None:
    global pid
    pid = os.getpid()


os.register_at_fork(after_in_child=_look)
