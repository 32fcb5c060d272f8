"""Agents on hosts of the lab, job after job, forked on each host from a process that has imported what they need."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gnnsys.lab import Lab
from tests.support.nursery import DEADLINE, Orders
from tests.support.processes import ROOT

AGENT = ROOT / "tests" / "chaos" / "agent.py"
SERVE = "--serve"


class Host(Orders):
    """One host's process. Hosts share files with us, and with them a socket's name, but no network and no pids."""

    def __init__(self, lab: Lab, number: int, environment: Mapping[str, str]) -> None:
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listening:
            path = os.path.join(folder, "orders")
            listening.bind(path)
            listening.listen(1)
            listening.settimeout(DEADLINE)
            self._command = lab.start(number, [sys.executable, str(AGENT), SERVE, path], env=environment)
            try:
                here, _ = listening.accept()
            except TimeoutError:
                raise RuntimeError(f"host {number} forks no agents: {self._command.kill().describe()}") from None
        super().__init__(here)

    def describe_end(self) -> str:
        return f"the process that forks agents has ended: {self._command.kill().describe()}"

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], out: Path) -> int:
        """Starts an agent; its pid on the host. What it says goes to `out`, and to a file beside that."""
        order = {"program": str(AGENT), "arguments": list(arguments), "environment": dict(environment)}
        return self.ask(order | {"out": str(out), "err": str(out.with_suffix(".err"))})

    def close(self) -> None:
        """Kills whatever it started."""
        self._lines.close()
        self._here.close()
        self._command.kill()


class Hosts:
    """All hosts of a lab. After a job that failed they begin afresh: what it left is killed."""

    def __init__(self, lab: Lab, environment: Mapping[str, str]) -> None:
        self._lab, self._environment = lab, {**os.environ, **environment}
        self._hosts: list[Host] = []

    def run(self, arguments: Sequence[str], folder: Path, deadline: float) -> tuple[list[int | None], str]:
        """An agent with these arguments on every host: how each ended (None: not in time), and what all said."""
        if not self._hosts:
            with ThreadPoolExecutor() as pool:  # all import at once
                self._hosts = list(pool.map(lambda n: Host(self._lab, n, self._environment), self._lab.hosts))
        outs = [folder / f"agent-{number}.out" for number in self._lab.hosts]
        end = time.monotonic() + deadline
        pids = [host.start(arguments, self._environment, out) for host, out in zip(self._hosts, outs, strict=True)]
        codes = [
            _collect(host, pid, max(0.1, end - time.monotonic())) for host, pid in zip(self._hosts, pids, strict=True)
        ]
        if any(codes) or None in codes:
            self.close()
        files = [file for out in outs for file in (out, out.with_suffix(".err"))]
        return codes, "\n".join(file.read_text(errors="replace") for file in files)

    def close(self) -> None:
        for host in self._hosts:
            host.close()
        self._hosts = []


def _collect(host: Host, pid: int, seconds: float) -> int | None:
    try:
        return host.ask({"collect": pid}, seconds)
    except TimeoutError:
        return None
