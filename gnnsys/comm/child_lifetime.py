"""What ties a child process to the trainer that started it: it ends when its input closes, or with its parent.

Used by the graph server and the explaining process of a machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Called in the child: a second belt beside the pipe, which forked children of a dead trainer may still hold open.

    It ends with the thread that started it, which must be one that stays.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)


def close_in_forks(pipes: list[Any]) -> None:
    """Called in the parent: every process that it forks closes its copy of `pipes`, and so keeps no child alive.

    Clear the list once the pipes are closed here.
    """
    os.register_at_fork(after_in_child=lambda: _close_all(pipes))


def _close_all(pipes: list[Any]) -> None:
    for pipe in pipes:
        with contextlib.suppress(OSError, ValueError):
            pipe.close()
