"""Tests kill processes, not machines: nothing they look at depends on what has reached the disk.

Waiting for it is most of what writing many small files takes, and on a busy disk much more than that.
"""

from __future__ import annotations

import os


def do_not_wait_for_disks() -> None:
    """For this process: `os.fsync` does no more than refuse what is no open file."""

    def check(file: int) -> None:
        os.fstat(file)

    os.fsync = check
