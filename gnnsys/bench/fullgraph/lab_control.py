"""How a job in the lab changes the lab: rank 0 prints a request; the harness carries it out and answers in a file.

Only the job knows when links should get slower and when counters should be read; only the harness can do it.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from pathlib import Path
from typing import Any

from gnnsys.lab import Lab

ASK = "lab-ask"
WAIT_SECONDS = 120.0  # for the harness, which has a thread for nothing else


class LabClient:
    """The job's side: `LabClient(folder).ask(rate="20mbit", cpu=0.45)` returns what the hosts have used so far."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._number = folder, 0

    def ask(self, **what: Any) -> dict[str, Any]:
        """Sets `rate` and `cpu`, if given, for every host; None is no limit."""
        self._number += 1
        path = _answer(self._folder, self._number)
        print(ASK, self._number, json.dumps(what), flush=True)
        end = time.monotonic() + WAIT_SECONDS
        while not path.exists():
            if time.monotonic() > end:
                raise TimeoutError(f"{path} did not appear within {WAIT_SECONDS:g} s: is this a job of the lab?")
            time.sleep(0.005)
        answer: dict[str, Any] = json.loads(path.read_text())
        if "error" in answer:
            raise RuntimeError(f"the lab could not do {what}: {answer['error']}")
        return answer


class LabService:
    """The harness's side: gets every line that the job prints, and carries out requests in a thread."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self._lab, self._folder = lab, folder
        for old in folder.glob("answer-*.json"):
            old.unlink()
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._thread = threading.Thread(target=self._serve, name="lab-service", daemon=True)
        self._thread.start()

    def hear(self, line: str) -> None:
        if line.startswith(ASK):
            self._lines.put(line)

    def close(self) -> None:
        self._lines.put(None)
        self._thread.join(60.0)

    def _serve(self) -> None:
        while (line := self._lines.get()) is not None:
            _, number, text = line.split(maxsplit=2)
            try:
                answer = self._follow(json.loads(text))
            except Exception as error:  # raised by `ask` in the job
                answer = {"error": f"{type(error).__name__}: {error}"}
            path = _answer(self._folder, int(number))
            new = path.with_suffix(".new")
            new.write_text(json.dumps(answer))
            new.replace(path)

    def _follow(self, what: dict[str, Any]) -> dict[str, Any]:
        if "rate" in what:
            self._lab.set_rate(what["rate"])
        if "cpu" in what:
            self._lab.set_cpu(what["cpu"])
        traffic = self._lab.bytes()
        return {
            "bytes_in": [traffic[host].bytes_in for host in self._lab.hosts],
            "bytes_out": [traffic[host].bytes_out for host in self._lab.hosts],
            "cpu_seconds": [self._lab.usage(host).cpu_seconds for host in self._lab.hosts],
        }


def _answer(folder: Path, number: int) -> Path:
    return folder / f"answer-{number}.json"
