"""A job on this machine without torchrun: one process per rank."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence


def run_local_ranks(
    arguments: Sequence[str],
    num_ranks: int,
    seconds: float,
    environment: Mapping[str, str] | None = None,
    *,
    share_machine: bool = False,
) -> list[str]:
    """Runs `python arguments` for every rank and returns what each one printed; RuntimeError where one fails.

    Each is a machine of its own to the others, or all are ranks of one where they `share_machine`. All have
    `environment` beside what this process has, and are killed so many `seconds` after the first was started.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started: list[subprocess.Popen[str]] = []
    deadline = time.monotonic() + seconds
    try:
        for rank in range(num_ranks):
            machines, here = (1, num_ranks) if share_machine else (num_ranks, 1)
            told = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": rank % here, "LOCAL_WORLD_SIZE": here}
            told |= {"GROUP_RANK": rank // here, "GROUP_WORLD_SIZE": machines, "MASTER_PORT": port}
            own = {name: str(number) for name, number in told.items()} | {"MASTER_ADDR": "127.0.0.1"}
            started.append(
                subprocess.Popen(
                    [sys.executable, *arguments],
                    env=os.environ | dict(environment or {}) | own,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        said = [process.communicate(timeout=max(0.0, deadline - time.monotonic()))[0] for process in started]
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()
    if any(process.returncode for process in started):
        raise RuntimeError(f"a rank failed: {[process.returncode for process in started]}")
    return said
