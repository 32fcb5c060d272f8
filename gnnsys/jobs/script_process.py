"""A script job's process, seen from the service: one that this service started, or one that it found running."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gnnsys
from gnnsys.jobs.job_record import JobRecord
from gnnsys.jobs.job_spec import JOB_VARIABLES, MOST_RESULT_BYTES
from gnnsys.jobs.process_identity import ProcessIdentity, descendants, kill_descendants
from gnnsys.jobs.queue_folder import QueueFolder

_GONE_SECONDS = 10.0


@dataclass(frozen=True)
class ScriptEnding:
    """`code` None: its keeper was killed, and nobody knows."""

    code: int | None
    error: str
    measured: int | None
    result: Mapping[str, Any]


class ScriptProcess:
    """The keeper of a script (`gnnsys.jobs.run_script`), which leads the group of all processes that it starts."""

    def __init__(self, identity: ProcessIdentity, process: subprocess.Popen[bytes] | None = None) -> None:
        self.identity, self._process = identity, process

    @classmethod
    def start(cls, environment: Mapping[str, str] | None = None) -> ScriptProcess:
        """The keeper, which waits for `run`. `environment`: beside this process's own."""
        package = str(Path(gnnsys.__file__).resolve().parents[1])
        path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        process = subprocess.Popen(
            [sys.executable, "-m", "gnnsys.jobs.run_script"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**os.environ, **(environment or {}), "PYTHONPATH": path},
            start_new_session=True,
        )
        identity = ProcessIdentity.of(process.pid)
        if identity is None:
            raise OSError(f"process {process.pid}, which was to keep a script, has ended at once")
        return cls(identity, process)

    def run(self, folder: QueueFolder, job: JobRecord, attempt: int, device: str, memory: int) -> None:
        """Has it begin, now that the database says so."""
        assert self._process is not None and self._process.stdin is not None
        results = folder.results(job.number)
        try:
            results.mkdir(mode=0o700, parents=True, exist_ok=True)
            (results / "result.json").unlink(missing_ok=True)  # of an attempt that was cut
        except OSError:  # the disk is full: it is lost, and runs again
            self.abandon()
            return
        told = {
            "GNNSYS_JOB_NUMBER": str(job.number),
            "GNNSYS_JOB_SEED": str(job.spec.seed),
            "GNNSYS_JOB_RESULT": str(results / "result.json"),
            "GNNSYS_JOB_CHECKPOINTS": str(folder.checkpoints(job.number)),
            "GNNSYS_JOB_DEVICE": device,
            JOB_VARIABLES: json.dumps(sorted(job.spec.environment)),
        }
        if device != "cpu":
            told["GNNSYS_MEMORY_CAP"] = f"{device}={memory}"
        orders = {
            "command": [job.spec.target, *job.spec.words],
            "folder": job.spec.folder,
            "device": device,
            "environment": {**job.spec.environment, **told},
            "log": str(folder.log(job.number)),
            "ending": str(folder.ending(job.number, attempt)),
        }
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(orders).encode() + b"\n")
            self._process.stdin.close()

    def ending(self, folder: QueueFolder, number: int, attempt: int) -> ScriptEnding | None:
        """How it ended; None while it runs."""
        if self._process is not None:
            self._process.poll()  # collects it
        is_running = self.identity.is_running()
        file = folder.ending(number, attempt)
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            if is_running:
                return None
            self._end_group()
            return ScriptEnding(None, "", None, {})
        result, problem = read_result(folder.results(number) / "result.json")
        return ScriptEnding(int(values["code"]), values["error"] or problem, values["measured"], result)

    def stopped(self) -> ProcessIdentity | None:
        """The keeper, the script, or a process that it started, if one of them is stopped."""
        started = [ProcessIdentity.of(pid) for pid in descendants(self.identity.pid)]
        return next((each for each in (self.identity, *started) if each is not None and each.is_stopped()), None)

    def terminate(self) -> None:
        """Asks the script, and all that it started, to end."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.identity.is_running():
                os.killpg(self.identity.pid, signal.SIGTERM)
                os.killpg(self.identity.pid, signal.SIGCONT)  # one that is stopped would never hear of it

    def kill(self) -> None:
        if self.identity.is_running():
            kill_descendants(self.identity.pid)
        self.identity.end(_GONE_SECONDS, group=True)
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_GONE_SECONDS)

    def abandon(self) -> None:
        """One that was not told to run ends by itself."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_GONE_SECONDS)

    def _end_group(self) -> None:
        """The keeper is gone: what is left of its group ends too, before the job runs again."""
        if self.identity.is_another():
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.identity.pid, signal.SIGKILL)


def read_result(path: Path) -> tuple[dict[str, Any], str]:
    """What a script has written as its result, and what is wrong with it."""
    try:
        if path.stat().st_size > MOST_RESULT_BYTES:
            return {}, f"{path} has more than {MOST_RESULT_BYTES} bytes: a result is a small object of JSON"
        found = json.loads(path.read_text(encoding="utf-8"), parse_constant=str)  # NaN is text, as in all results
    except FileNotFoundError:
        return {}, ""
    except (OSError, ValueError, RecursionError) as error:
        return {}, f"{path} is not JSON: {error}"
    return (found, "") if isinstance(found, dict) else ({}, f"{path} must be an object of JSON, {{...}}")
