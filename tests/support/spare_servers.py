"""Graph servers and explaining processes that need not import torch: forked by a rank that has, before it had any
thread, to wait for orders.

Everything that `ServerProcess` does with its child is done with them: pipes, signals, the end of the parent. A rank
that has used up its spare ones starts a fresh process, as every rank of a user does.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gnnsys.session import serve, server_process
from tests.support.nursery import Child, forks_ranks

NAME = "gnnsys.server"  # of a process that serves, at most 15 characters
SPARES = "SPARE_SERVERS"  # how many a rank has, where more than its server and one that follows it
NUM_SPARES = 2
_MOST_DESCRIPTORS = 1000  # that a process has which has just begun


class Spare(Child):
    """A graph server or another process to be, in the words of `subprocess.Popen` that `ServerProcess` uses."""

    def __init__(self, main: Callable[[], int] = serve.main, name: str = NAME) -> None:
        orders, stdin = os.pipe()
        stdout, answers = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.dup2(orders, 0)
            os.dup2(answers, 1)
            os.closerange(3, _MOST_DESCRIPTORS)
            sys.stdin = os.fdopen(0)
            select.select([0], [], [])  # orders, or the end of the rank
            Path("/proc/self/comm").write_text(name)
            os.nice = int  # what tests wait for comes after nobody
            code = main()
            sys.stderr.flush()
            os._exit(code)
        os.close(orders)
        os.close(answers)
        super().__init__(pid)
        self.stdin, self.stdout = os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb")

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def let_go(self) -> None:
        """In a forked child: a server ends when nobody holds its pipe."""
        self.stdin.close()
        self.stdout.close()


def keep_spares() -> None:
    """Has the servers of this process, which has one thread, be spare ones as long as there are any."""
    count = int(os.environ.get(SPARES, NUM_SPARES))
    server_process.subprocess = _starting([Spare() for _ in range(count)], "gnnsys.session.serve")


def keep_spare_explainers(count: int = 1) -> None:
    """The same of its explaining processes, where processes can be forked."""
    from gnnsys.explain import explaining
    from gnnsys.explain import serve as explain

    if forks_ranks():
        spares = [Spare(explain.main, "gnnsys.explain") for _ in range(count)]
        explaining.subprocess = _starting(spares, "gnnsys.explain.serve")


def _starting(spares: list[Spare], module: str) -> Any:
    """What a module takes `subprocess` for."""

    def start(command: Sequence[str], **options: Any) -> Spare | subprocess.Popen[bytes]:
        assert list(command) == [sys.executable, "-m", module]
        return spares.pop(0) if spares else subprocess.Popen(command, **options)

    def let_go() -> None:
        for spare in spares:
            spare.let_go()

    os.register_at_fork(after_in_child=let_go)
    words = ("PIPE", "TimeoutExpired")
    return SimpleNamespace(Popen=start, **{word: getattr(subprocess, word) for word in words})
