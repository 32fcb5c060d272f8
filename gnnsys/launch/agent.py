"""The agent: one process on each host of a job, told by the launcher over its standard input what to do.

It speaks on its standard output (`messages.py`). When its input closes, or the launcher is silent for too long, it ends
the job of this host and then itself: nothing on a host outlives the launcher. Imports neither torch nor numpy.
"""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gnnsys.launch import agent_checks, agent_files
from gnnsys.launch.agent_measures import AgentMeasures
from gnnsys.launch.line_queue import LineQueue
from gnnsys.launch.local_facts import host_facts, raise_limits
from gnnsys.launch.messages import BANNER, MessageReader, MessageWriter
from gnnsys.launch.network_probe import AgentProbe
from gnnsys.launch.process_keeper import become_subreaper, end_descendants
from gnnsys.launch.programs import program_of
from gnnsys.launch.rank_output import RankOutput
from gnnsys.launch.torchrun import REPORT

PREFIX, LOCK = "gnnsys-launch-", "lock"  # of a job's folder on its host
READ_SECONDS = 10.0  # for the last lines of a job that has ended
LAST_WORDS_SECONDS = 1.0  # for what an agent says before it ends
FIRST_PATIENCE = 60.0  # seconds without a word before the launcher has said how long to wait


def assist_command() -> list[str]:
    """What a host without ranks runs; modules of the working directory come last, as everywhere in this room."""
    call = "from gnnsys.session import run_assistant; sys.exit(run_assistant())"
    return [sys.executable, "-c", f"import sys; sys.path.sort(key=''.__eq__); {call}"]


def torchrun_command(folder: str, grace: float, arguments: list[str]) -> list[str]:
    call = "sys.exit(main(sys.argv[1], float(sys.argv[2]), sys.argv[3:]))"
    return [sys.executable, "-c", program_of("torchrun", call), folder, str(grace), *arguments]


def remove_stale_folders() -> None:
    """Removes what jobs left here that ended with their host: folders whose lock nobody holds."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # of another account, in use, or without a lock yet
            lock = os.open(folder / LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(lock)


def make_folder(launch: str) -> tuple[str, int]:
    """A folder for a job, and its lock: free once this agent and its keeper are gone, whatever ended them."""
    while True:
        folder = tempfile.mkdtemp(prefix=f"{PREFIX}{launch}-")
        lock = os.open(os.path.join(folder, LOCK), os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:
            return folder, lock
        os.close(lock)  # another agent took it for a stale one before it was locked


def await_earlier(launch: str, patience: float) -> None:
    """Waits until nothing is left here of an earlier life of a launch. Whoever keeps one holds its folder's lock."""
    deadline = time.monotonic() + patience
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}{launch}-*"):
        while is_held(folder):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"the job's life before has not ended within {patience:g} s")
            time.sleep(0.05)


def is_held(folder: Path) -> bool:
    try:
        lock = os.open(folder / LOCK, os.O_RDWR)
    except OSError:
        return False  # removed by its keeper, which does so when all has ended
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def read_failures(report: Path) -> list[dict[str, Any]]:
    """What torchrun has said of ranks that failed. A report that a script has spoilt says nothing."""
    try:
        found = json.loads(report.read_bytes())
        return [
            {**{key: int(each[key]) for key in ("rank", "local_rank", "code")}, "time": float(each["time"])}
            for each in found
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return []


class MessageOutbox:
    """What the agent says to the launcher, written by a thread: nobody but lines of the job waits until it is read."""

    def __init__(self, descriptor: int) -> None:
        self._writer = MessageWriter(descriptor, patience=None)  # a dead launcher is noticed by its silence
        self._messages: LineQueue[dict[str, Any] | None] = LineQueue()
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def say(self, **message: Any) -> None:
        self._messages.put(message)

    def say_line(self, rank: int | None, text: str, stream: str) -> None:
        self._messages.put_line({"event": "line", "rank": rank, "text": text, "stream": stream}, len(text))

    def abandon_lines(self) -> None:
        """For a launcher that is gone: lines are dropped from now on."""
        self._messages.close_to_lines()

    @property
    def is_full(self) -> bool:
        return self._messages.is_full

    def close(self) -> None:
        self._messages.put(None)
        self._thread.join(LAST_WORDS_SECONDS)

    def _write(self) -> None:
        while (message := self._messages.get()) is not None:
            try:
                self._writer.write(message)
            except OSError:  # the launcher is gone, which ends the main loop as well
                self.abandon_lines()


class HostJob:
    """torchrun on this host, kept by a process of its own (`process_keeper.py`).

    Nothing is heard of it before `listen`: the launcher waits for the answer to `start`, and no line may stand before.
    """

    def __init__(
        self, arguments: list[str] | None, env: dict[str, str], grace: float, launch: str, outbox: MessageOutbox
    ) -> None:
        self._outbox = outbox
        remove_stale_folders()
        self._folder, lock = make_folder(launch)
        self._report = Path(self._folder, REPORT)
        keeper = [sys.executable, "-I", "-S", str(Path(__file__).with_name("process_keeper.py")), str(grace)]
        command = assist_command() if arguments is None else torchrun_command(self._folder, grace, arguments)
        try:
            self._process = subprocess.Popen(
                [*keeper, self._folder, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **env},
                start_new_session=True,
                pass_fds=[lock],
            )
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(lock)
            raise
        self._lock = lock
        self._readers = [
            threading.Thread(target=self._listen, args=(stream, name), daemon=True)
            for stream, name in ((self._process.stdout, "out"), (self._process.stderr, "err"))
        ]
        self._waiter = threading.Thread(target=self._await_end, daemon=True)

    def listen(self) -> None:
        for thread in (*self._readers, self._waiter):
            if thread.ident is None:
                thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        """Asks it to end, and returns at once: the event `ended` follows."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.close()

    def wait(self) -> None:
        self.listen()  # where the agent ends before its answer is out
        self._waiter.join()

    def _listen(self, stream: Any, name: str) -> None:
        output, decoder = RankOutput(), codecs.getincrementaldecoder("utf-8")("replace")
        with stream:
            while data := os.read(stream.fileno(), 1 << 16):
                for rank, line in output.feed(decoder.decode(data)):
                    self._outbox.say_line(rank, line, name)
        for rank, line in output.close():
            self._outbox.say_line(rank, line, name)

    def _await_end(self) -> None:
        code, failures = 1, []
        try:
            code = self._process.wait()
            code = code if code >= 0 else 128 - code
            end_descendants(0.0, {})  # what the keeper kept is below this process once it was killed itself
            for reader in self._readers:
                reader.join(READ_SECONDS)
                while reader.is_alive() and self._outbox.is_full:  # by whoever reads what the launcher prints
                    reader.join(READ_SECONDS)
            failures = read_failures(self._report)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)
            self._outbox.say(event="ended", code=code, failures=failures)


class Agent:
    """Answers requests until its input ends. Those that take long have a thread each, so that it always answers."""

    def __init__(self, reader: MessageReader, outbox: MessageOutbox) -> None:
        self._reader, self._outbox = reader, outbox
        self._patience = FIRST_PATIENCE
        self._job: HostJob | None = None
        self._ports = agent_checks.Ports()
        self._files = agent_files.Receiver()
        self._probe = AgentProbe()
        self._measures = AgentMeasures()
        self._quick: dict[str, Callable[..., Any]] = {
            "hello": self._hello,
            "ping": lambda: {"time": time.time()},
            "listen": self._ports.listen,
            "close_ports": self._ports.close,
            "listen_probe": self._probe.listen,
            "start": self._start,
            "stop": self._stop,
        }
        self._slow: dict[str, Callable[..., Any]] = {
            "reach": agent_checks.reach,
            "measure_link": self._probe.measure,
            "core_work": self._measures.core_work,
            "listen_rates": self._measures.listen,
            "pull_rates": self._measures.pull,
            "machine_costs": self._measures.costs,
            "find_parts": agent_checks.find_parts,
            "check_parts": agent_checks.check_parts,
            "newest_checkpoint": agent_checks.newest_checkpoint,
            "await_earlier": await_earlier,
            "have": self._files.have,
            "finish": self._files.finish,
        }

    def run(self) -> None:
        self._outbox.say(**BANNER)
        try:
            while (message := self._reader.read(self._patience)) is not None:
                self._answer(message)
        except (EOFError, OSError):
            pass
        finally:
            self._outbox.abandon_lines()
            self._ports.close()
            self._probe.close()
            self._measures.close()
            self._files.close()
            if self._job is not None:
                self._job.stop()
                self._job.wait()
            self._outbox.close()

    def _answer(self, message: dict[str, Any]) -> None:
        do, number = message.pop("do", None), message.pop("id", None)
        if do == "put":  # raw bytes follow; nobody waits for an answer to each of them
            self._files.put(data=self._reader.bytes(int(message.pop("bytes")), self._patience), **message)
        elif do in self._quick:
            had_job = self._job is not None
            self._reply(number, self._quick[do], message)
            if self._job is not None and not had_job:
                self._job.listen()
        elif do in self._slow:
            threading.Thread(target=self._reply, args=(number, self._slow[do], message), daemon=True).start()
        else:
            self._outbox.say(id=number, error=f"this agent does not know {do!r}: use the same gnnsys on every host")

    def _reply(self, number: Any, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
        try:
            answer = function(**arguments)
        except Exception as error:  # told to the launcher, which names the host
            self._outbox.say(id=number, error=f"{type(error).__name__}: {error}")
        else:
            self._outbox.say(id=number, ok=answer)

    def _hello(self, patience: float, script: str | None = None, facts: bool = True) -> dict[str, Any]:
        self._patience = float(patience)
        has_script = script is None or os.path.isfile(script)
        return {**(host_facts() if facts else {}), "has_script": has_script, "pid": os.getpid()}

    def _start(
        self, arguments: list[str] | None, env: dict[str, str], grace: float, launch: str = ""
    ) -> dict[str, int]:
        """`arguments` are torchrun's; None: this host assists."""
        if self._job is not None:
            raise ValueError("this agent has a job already")
        self._job = HostJob(arguments, env, grace, launch, self._outbox)
        return {"pid": self._job.pid}

    def _stop(self) -> None:
        if self._job is not None:
            self._job.stop()


def main() -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the launcher says when to end
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the job, then itself
    become_subreaper()
    raise_limits()
    output = os.dup(1)
    os.dup2(2, 1)  # nobody but this agent writes messages
    Agent(MessageReader(0), MessageOutbox(output)).run()


if __name__ == "__main__":
    main()
