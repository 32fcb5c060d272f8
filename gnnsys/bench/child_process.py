"""A child process of a benchmark: `python -m MODULE ARGS`, which prints one line of JSON when it is ready.

It ends when its standard input is closed. The kernel does that even if the benchmark is killed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any

START_SECONDS = 300.0
_END_SECONDS = 10.0


class Child:
    """Starts the process; `answer()` waits for its line, `close()` ends it."""

    def __init__(self, module: str, *args: str, env: dict[str, str] | None = None) -> None:
        paths = os.pathsep.join([str(Path(__file__).resolve().parents[2]), *filter(None, sys.path)])
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths, **(env or {})},
        )
        self._module = module

    @property
    def pid(self) -> int:
        return self._process.pid

    def answer(self, timeout: float = START_SECONDS) -> dict[str, Any]:
        assert self._process.stdout is not None
        source, end, line = self._process.stdout.fileno(), time.monotonic() + timeout, b""
        while not line.endswith(b"\n"):
            left = end - time.monotonic()
            if left <= 0 or not wait([source], left):
                raise RuntimeError(f"{self._module} said nothing within {timeout:g} s")
            piece = os.read(source, 65536)
            if not piece:
                raise RuntimeError(f"{self._module} ended with {self._process.wait(_END_SECONDS)} before it was ready")
            line += piece
        return json.loads(line)

    def tell(self, word: bytes) -> None:
        """Writes to the child's input."""
        assert self._process.stdin is not None
        self._process.stdin.write(word)
        self._process.stdin.flush()

    def end(self) -> None:
        """Asks it to end, without waiting."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def close(self) -> None:
        self.end()
        assert self._process.stdout is not None
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


def answer(value: dict[str, Any], to: int | None = None) -> None:
    """Called in the child: prints its line, to another descriptor where standard output is not for it."""
    line = json.dumps(value) + "\n"
    if to is not None:
        with open(to, "w", closefd=False) as stream:
            stream.write(line)
        return
    sys.stdout.write(line)
    sys.stdout.flush()


def wait_for_end() -> None:
    """Called in the child: returns when the benchmark has closed its input."""
    sys.stdin.buffer.read()
