"""The launcher's end of an agent: a process here (ssh, or the agent itself) whose input and output are the channel.

Every request has a deadline. A channel that ends, or an agent that is silent for too long, is a `HostLost` that names
the host and the last words of its ssh.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from gnnsys.launch.hosts import Host
from gnnsys.launch.messages import BANNER, MessageReader, MessageWriter, parse
from gnnsys.launch.programs import program_of
from gnnsys.launch.slurm import srun_command

CLOSE_SECONDS = 5.0


class HostLost(Exception):
    """A host cannot be reached, or no longer. `why` is one line."""

    def __init__(self, host: Host, why: str) -> None:
        super().__init__(f"{host.name}: {why}")
        self.host, self.why = host, why


class HostError(Exception):
    """A host's agent could not do what it was asked to."""

    def __init__(self, host: Host, why: str) -> None:
        super().__init__(f"{host.name}: {why}")
        self.host, self.why = host, why


def agent_command(host: Host, ssh: Sequence[str] | None, lost_after: float, connect_timeout: float) -> list[str]:
    """What starts the agent of a host: over ssh (or srun, which takes a host otherwise), or here if `ssh` is None."""
    if ssh is None:
        return [sys.executable, "-c", program_of("agent")]
    program = shlex.join([host.python, "-c", program_of("agent")])
    inside = f"cd {shlex.quote(host.workdir)} && exec {program}"
    if ssh[0] == "srun":
        return srun_command(ssh, host, inside)
    alive = max(1, round(lost_after / 3))
    options = ["BatchMode=yes", f"ConnectTimeout={max(1, round(connect_timeout))}", "ServerAliveCountMax=3"]
    options += [f"ServerAliveInterval={alive}", "ForwardX11=no", "ClearAllForwardings=yes"]
    where = host.address if host.user is None else f"{host.user}@{host.address}"
    flags = [word for option in options for word in ("-o", option)]
    return [*ssh, "-T", *flags, "-p", str(host.port), where, shlex.join(["sh", "-c", inside])]


class AgentChannel:
    """One host's agent. `heard(host, message)` is called, by a thread, with every event; `None` when it is lost.

    A thread tells the agent four times in `lost_after` seconds that the launcher lives, and is answered.
    """

    def __init__(
        self,
        host: Host,
        command: Sequence[str],
        heard: Callable[[Host, dict[str, Any] | None], None],
        *,
        lost_after: float = 60.0,
    ) -> None:
        self.host, self._heard, self._lost_after = host, heard, lost_after
        self._asked: dict[int, Future[Any]] = {}
        self._numbers, self._lock = itertools.count(1), threading.Lock()
        self._noise: deque[str] = deque(maxlen=20)
        self._is_open, self._has_banner = True, threading.Event()
        self._last_heard, self._is_delivering = time.monotonic(), False
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # a terminal's Ctrl-C is for the launcher alone
            )
        except OSError as error:
            raise HostLost(host, f"{command[0]} cannot be run: {error.strerror}") from None
        assert self._process.stdin and self._process.stdout
        self._writer = MessageWriter(self._process.stdin.fileno(), patience=lost_after)
        self._errors = threading.Thread(target=self._read_errors, daemon=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._closing = threading.Event()
        self._heart = threading.Thread(target=self._beat, daemon=True)
        self._errors.start()
        self._reader.start()
        self._heart.start()

    def ask(self, do: str, **arguments: Any) -> Future[Any]:
        """Sends a request; its answer comes as the future's result."""
        future: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            if not self._is_open:
                raise HostLost(self.host, self._why())
            self._asked[number] = future
        self.tell(do=do, id=number, **arguments)
        return future

    def tell(self, data: bytes | memoryview = b"", **message: Any) -> None:
        """Sends what is not answered."""
        try:
            self._writer.write(message, data)
        except TimeoutError as error:
            raise HostLost(self.host, str(error)) from None
        except (OSError, ValueError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE_SECONDS)
            self._errors.join(CLOSE_SECONDS)
            raise HostLost(self.host, self._why()) from None

    def result(self, future: Future[Any], timeout: float) -> Any:
        """The answer to a request. HostLost where the host is gone or late, HostError where it says what is wrong."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                return future.result(max(0.0, min(self._lost_after / 4, deadline - time.monotonic())))
            except FutureTimeout:
                if self.silent_for > self._lost_after:
                    raise HostLost(self.host, f"it has been silent for {self.silent_for:.0f} s") from None
                if time.monotonic() >= deadline:
                    raise HostLost(self.host, f"no answer within {timeout:g} s") from None

    def cut(self) -> None:
        """Ends ssh at once, from any thread: the channel is lost, and to be closed. The agent ends by itself."""
        if self._process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)  # it has a session of its own

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Ends the agent with what it has started. Idempotent."""
        assert self._process.stdin and self._process.stdout
        self._closing.set()
        self._heart.join(CLOSE_SECONDS)
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(CLOSE_SECONDS)
        self._reader.join(CLOSE_SECONDS)
        self._errors.join(CLOSE_SECONDS)

    def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            messages = MessageReader(self._process.stdout.fileno())
            while not self._has_banner.is_set():
                line = messages.line() or b""
                if self._is_banner(line):
                    self._has_banner.set()
                else:
                    self._noise.append(line.decode(errors="replace"))
            while message := messages.read():
                self._is_delivering = True
                self._deliver(message)  # may wait for whoever reads what the job prints
                self._last_heard, self._is_delivering = time.monotonic(), False
        except (EOFError, OSError):
            pass
        except ValueError as error:
            self._noise.append(str(error))
        self._process.stdout.close()
        self._lose()

    def _is_banner(self, line: bytes) -> bool:
        try:
            return parse(line) == BANNER
        except ValueError:
            return False

    def _deliver(self, message: dict[str, Any]) -> None:
        if "event" in message:
            self._heard(self.host, message)
            return
        with self._lock:
            future = self._asked.pop(message.get("id", 0), None)
        if future is None:
            return
        if "error" in message:
            future.set_exception(HostError(self.host, str(message["error"])))
        else:
            future.set_result(message.get("ok"))

    def _lose(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_SECONDS)
        self._errors.join(1.0)
        with self._lock:
            self._is_open = False
            waiting, self._asked = list(self._asked.values()), {}
        for future in waiting:
            future.set_exception(HostLost(self.host, self._why()))
        self._heard(self.host, None)

    def _beat(self) -> None:
        with contextlib.suppress(HostLost):  # told by the reader
            while not self._closing.wait(self._lost_after / 4):
                self.tell(do="ping")

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            for line in stream:
                self._noise.append(line.decode(errors="replace").rstrip())

    def _why(self) -> str:
        code = self._process.poll()
        said = [line for line in self._noise if line.strip()]
        last = said[-1].strip() if said else f"its channel ended with {code}"
        if "No module named" in last and "gnnsys" in last:
            where = f"{self.host.python} in {self.host.workdir}"
            return f"there is no gnnsys for {where}: install it there, or set python or workdir for this host"
        if not self._has_banner.is_set() and code in (126, 127):
            return f"{last}: set python for this host, {self.host.python} is not there"
        if not self._has_banner.is_set() and "cd:" in last:
            return f"{last}: set workdir for this host"
        if self._has_banner.is_set():
            return f"lost: its connection ended ({last})" if said else "lost: its connection ended"
        return f"cannot be reached: {last}"

    @property
    def silent_for(self) -> float:
        """Seconds since the agent has said anything. None while something that it has said waits to be heard."""
        return 0.0 if self._is_delivering else time.monotonic() - self._last_heard

    @property
    def is_open(self) -> bool:
        return self._is_open

    @property
    def pid(self) -> int:
        return self._process.pid
