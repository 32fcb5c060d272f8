"""How a job's rank waits for whoever started the job: until a file is there."""

from __future__ import annotations

import time
from pathlib import Path

WAIT_SECONDS = 1800.0  # the launcher's deadline is what ends a job that waits in vain


def await_file(path: Path) -> None:
    """Returns when the file is there; TimeoutError where it does not come."""
    end = time.monotonic() + WAIT_SECONDS
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{path} did not appear within {WAIT_SECONDS:g} s")
        time.sleep(0.01)
