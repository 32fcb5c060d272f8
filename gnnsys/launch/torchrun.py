"""torchrun as it is, that also tells which rank failed, with what exit code, and when, to the millisecond.

    python -m gnnsys.launch.torchrun FOLDER GRACE ARGUMENTS-OF-TORCHRUN...

`python -m torch.distributed.run` exits with 1 whatever its ranks ended with, and knows their end to the second. When a
rank fails, the ranks that talked to it fail within milliseconds: only exact times tell who was first. So this process
notes the time whenever a child ends, writes the failures to REPORT in FOLDER, and exits with the code of the first.
The other ranks have GRACE seconds to end after SIGTERM, not torchrun's thirty; what ranks print comes through pipes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from gnnsys.observe import shorten_spinning

REPORT = "failures.json"


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


def heed_grace(grace: float) -> None:
    """torchrun gives ranks thirty seconds between SIGTERM and SIGKILL, and has no option for it."""
    from torch.distributed.elastic.multiprocessing.api import PContext

    close = PContext.close

    def close_within_grace(context: PContext, death_sig: signal.Signals | None = None, timeout: float = 0.0) -> None:
        close(context, death_sig, grace)  # type: ignore[arg-type]

    PContext.close = close_within_grace  # type: ignore[method-assign,assignment]


def main(folder: str, grace: float, arguments: list[str]) -> int:
    times = ExitTimes()
    times.watch()
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch then asks for huge pages (docs/native.md)
    shorten_spinning()
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    from gnnsys.launch.rank_pipes import PipedLogs, RankPipes

    heed_grace(grace)
    config, command, words = config_from_args(parse_args(["--log-dir", folder, *arguments]))
    pipes = RankPipes()
    config.logs_specs = PipedLogs(folder, pipes)
    try:
        elastic_launch(config, command)(*words)
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
        report = Path(folder, REPORT)
        report.with_suffix(".new").write_text(json.dumps(failures))
        os.replace(report.with_suffix(".new"), report)
        code = int(failures[0]["code"])
        return code if code >= 0 else 128 - code
    except SignalException as ended:
        return 128 + int(ended.sigval)
    finally:
        pipes.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2]), sys.argv[3:]))
