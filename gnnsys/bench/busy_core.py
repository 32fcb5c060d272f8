"""A process that keeps one core busy while the benchmark wants it: `python -m gnnsys.bench.busy_core CORE`."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from gnnsys.bench.child_process import Child, answer

WORK, REST = b"w", b"r"
_LOOK_SECONDS = 1e-3


class BusyCore:
    """The process, beside the benchmark. It rests but for `beside`."""

    def __init__(self) -> None:
        self._child = Child("gnnsys.bench.busy_core", str(max(os.sched_getaffinity(0))))
        self._child.answer()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """The core is busy inside."""
        self._child.tell(WORK)
        try:
            yield
        finally:
            self._child.tell(REST)

    def close(self) -> None:
        self._child.close()

    def __enter__(self) -> BusyCore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def main() -> None:
    """Spins or sleeps as the commands on stdin say. Ends when stdin closes."""
    core, source, works = int(sys.argv[1]), sys.stdin.fileno(), False
    os.sched_setaffinity(0, {core})
    answer({"core": core})
    while True:
        if select.select([source], [], [], 0 if works else None)[0]:
            word = os.read(source, 1)
            if not word:
                return
            works = word == WORK
        until = time.perf_counter() + _LOOK_SECONDS
        while works and time.perf_counter() < until:
            pass


if __name__ == "__main__":
    main()
