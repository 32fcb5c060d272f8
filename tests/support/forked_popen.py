"""`subprocess.Popen([python, "-m", MODULE, ...])` with both pipes, from a nursery: torch need not be imported again.

For tests of what is done with a graph server or a benchmark's child, of which others start a fresh one. `-c CODE` is
run in the same way.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.support.nursery import Forked, forks_ranks, nurseries
from tests.support.processes import clean_environment, module_code


class ForkedPopen(Forked):
    """In the words of `subprocess.Popen` that `ServerProcess` and `Child` use."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, err: str = os.devnull, **_: object
    ) -> None:
        python, option, given, *arguments = command
        assert python == sys.executable and option in ("-m", "-c"), command
        self._folder = tempfile.TemporaryDirectory()
        into, out, program = (Path(self._folder.name) / name for name in ("in", "out", "program.py"))
        for pipe in (into, out):
            os.mkfifo(pipe)
        code = module_code(given) if option == "-m" else given
        # A server ends where its parent is not the one that it is told of. What tests wait for comes after nobody.
        program.write_text(f"import os; os.getppid = lambda: {os.getpid()}; os.nice = int\n{code}")
        self.stdin = os.fdopen(os.open(into, os.O_RDWR), "wb")  # without waiting for who reads, as for writing alone
        reading = os.open(out, os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(reading, True)
        self.stdout = os.fdopen(reading, "rb")
        nursery = nurseries()[0]
        order = {"program": str(program), "arguments": arguments, "environment": dict(env or clean_environment())}
        super().__init__(nursery, nursery.ask(order | {"in": str(into), "out": str(out), "err": err}))

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@contextmanager
def forking(*modules: ModuleType) -> Iterator[None]:
    """Has modules that use `subprocess.Popen` fork, where a nursery can."""
    words = {name: getattr(subprocess, name) for name in ("PIPE", "TimeoutExpired")}
    with pytest.MonkeyPatch.context() as patch:
        for module in modules if forks_ranks() else ():
            given: Any = SimpleNamespace(Popen=ForkedPopen, **words)
            patch.setattr(module, "subprocess", given)
        yield
