"""torchrun's agent as it is, but for one thing: its ranks are forked from it, and so need not import torch.

`python -m torch.distributed.run` has nothing else to do with them: they have a session, an environment, output and a
program of their own, and are children that it watches and kills. tests/chaos does the same.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Sequence
from typing import IO, Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler, handlers
from torch.distributed.run import main as torchrun

from tests.support import nursery
from tests.support.spare_servers import keep_spares

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # an agent has handlers for them


class ForkingHandler(SubprocessHandler):
    """Starts a rank by a fork instead of a new interpreter."""

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        return fork_rank(args, env, self._stdout, self._stderr)


def fork_rank(
    command: Sequence[str], environment: dict[str, str], out: IO[str] | None, err: IO[str] | None
) -> nursery.Child:
    """What `subprocess.Popen` does with `python -u [PROGRAM | -m MODULE] ARGUMENTS...`, in a session of its own."""
    python, unbuffered, *given = command
    assert (python, unbuffered) == (sys.executable, "-u"), command
    is_module = given[0] == "-m"
    pid = os.fork()
    if pid:
        return nursery.Child(pid)
    code = 1
    try:
        os.setsid()
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, file in ((1, out), (2, err)):
            if file is not None:
                os.dup2(file.fileno(), number)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = given[1:] if is_module else given
        if environment["LOCAL_RANK"] == "0":
            keep_spares()
        if is_module:
            runpy.run_module(given[1], run_name="__main__", alter_sys=True)
        else:
            nursery.run(given[0])
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        nursery.leave(code)
    raise AssertionError("a process that has left goes on")


def main(arguments: Sequence[str]) -> None:
    handlers.SubprocessHandler = ForkingHandler  # type: ignore[misc]
    torchrun(list(arguments))
