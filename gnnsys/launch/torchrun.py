"""torchrun as it is, that also tells which rank failed, with what exit code, and when, to the millisecond.

    python -m gnnsys.launch.torchrun REPORT ARGUMENTS-OF-TORCHRUN...

`python -m torch.distributed.run` exits with 1 whatever its ranks ended with, and knows their end to the second. When a
rank fails, the ranks that talked to it fail within milliseconds: only exact times tell who was first. So this process
notes the time whenever a child ends, writes the failures to REPORT, and exits with the code of the first.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


class ExitTimes:
    """When each child of this process ended. A child is seen as a zombie before torchrun reaps it."""

    def __init__(self) -> None:
        self.by_pid: dict[int, float] = {}

    def watch(self) -> None:
        signal.signal(signal.SIGCHLD, self._look)

    def _look(self, *_: Any) -> None:
        now, me = time.time(), str(os.getpid()).encode()
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) not in self.by_pid:
                try:
                    state, parent = Path("/proc", name, "stat").read_bytes().rsplit(b")", 1)[1].split()[:2]
                except OSError:
                    continue
                if parent == me and state == b"Z":
                    self.by_pid[int(name)] = now


def main(report: str, arguments: list[str]) -> int:
    times = ExitTimes()
    times.watch()
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch then asks for huge pages (docs/native.md)
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(arguments))
    except ChildFailedError as error:
        failures = [
            {
                "rank": rank,
                "local_rank": failure.local_rank,
                "code": failure.exitcode,
                "time": times.by_pid.get(failure.pid, float(failure.timestamp)),
            }
            for rank, failure in error.failures.items()
        ]
        failures.sort(key=lambda failure: failure["time"])
        Path(f"{report}.new").write_text(json.dumps(failures))
        os.replace(f"{report}.new", report)
        code = int(failures[0]["code"])
        return code if code >= 0 else 128 - code
    except SignalException as ended:
        return 128 + int(ended.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
