"""The launcher: looks at every host, has the group live, and again where it failed and restarts are left.

A restart is that of the whole group, by a fresh torchrun at a fresh port on every host; the script goes on from its
last checkpoint. So no rank meets what the group before it has left, and a host that was lost may come back.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TextIO

from gnnsys.launch.host_group import EXIT_HOST_LOST, EXIT_NOT_STARTED, GroupEnd, HostGroup, LaunchOptions
from gnnsys.launch.hosts import Host
from gnnsys.launch.messages import is_ready
from gnnsys.launch.preflight import Checks

EXIT_NOT_READ = 128 + signal.SIGPIPE  # nobody reads what the job prints
UNREAD_SECONDS = 2.0  # that lines may wait for a reader once the launcher is to end


class Interrupted(KeyboardInterrupt):
    """A signal has asked the launcher to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Launcher:
    """`say(line)` gets what ranks print to stdout and stderr, `tell(line)` what the launcher itself has to tell."""

    def __init__(
        self,
        hosts: Sequence[Host],
        command: Sequence[str],
        checks: Checks,
        options: LaunchOptions,
        *,
        say: Callable[[str, bool], None] | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self._hosts, self._command, self._checks, self._options = list(hosts), list(command), checks, options
        self._printer = Printer()
        self._say, self._tell = say or self._printer.line, tell or self._printer.note
        self._launch = secrets.token_hex(8)  # by which hosts know what is left of an earlier life

    def run(self) -> int:
        """Runs the job to its end; the exit code. When it returns or raises, nothing of the job is left."""
        with interrupts():
            try:
                return self._run()
            except BrokenPipeError:
                return EXIT_NOT_READ

    def _run(self) -> int:
        for life in range(self._options.restarts + 1):
            outcome = self._live(life)
            if outcome.code == 0:
                return 0
            self._explain(outcome)
            if not outcome.may_restart or life == self._options.restarts:
                return outcome.code
            self._tell(f"the group starts again: restart {life + 1} of {self._options.restarts}")
        raise AssertionError("the last life ends the loop")

    def _live(self, life: int) -> GroupEnd:
        group = HostGroup(self._hosts, self._options, self._say, self._launch)
        try:
            patience = self._options.wait_for_hosts if life else 0.0
            verify = self._checks.verify and not life
            ready = group.connect(self._checks, patience, verify=verify, is_restart=life > 0)
            for finding in ready.findings:
                self._tell(f"{'warning: ' if finding.is_warning else ''}{finding}")
            if ready.errors:
                count = len(ready.errors)
                again = " again" if life else ""
                self._tell(f"not started{again}: {count} {'thing is' if count == 1 else 'things are'} wrong, see above")
                return GroupEnd(EXIT_HOST_LOST if life else EXIT_NOT_STARTED, may_restart=False)
            if ready.checkpoint is not None and not life:
                self._tell(f"the job goes on from {self._checks.checkpoints}/{ready.checkpoint}")
            return group.run(ready, self._command)
        except KeyboardInterrupt as error:
            number = error.number if isinstance(error, Interrupted) else int(signal.SIGINT)
            self._printer.patience = UNREAD_SECONDS
            with contextlib.suppress(BrokenPipeError):
                self._tell(f"{signal.Signals(number).name}: ending the job on every host")
                group.stop()
            return GroupEnd(128 + number, may_restart=False)
        finally:  # ends the job as well, where nobody reads what it prints
            group.close()

    def _explain(self, outcome: GroupEnd) -> None:
        if outcome.failure is not None:
            failure = outcome.failure
            for line in outcome.words:
                self._say(f"{failure.host}:{failure.rank} | {line}", True)
            how = f"signal {-failure.code}" if failure.code < 0 else f"exit code {failure.code}"
            last = next((line.strip() for line in reversed(outcome.words) if line.strip()), "it printed nothing")
            self._tell(f"rank {failure.rank} on {failure.host} failed first, with {how}: {last}")
        elif outcome.lost is not None:
            self._tell(f"{outcome.lost}; the job was ended on the other hosts")
        elif outcome.refused is not None:
            self._tell(f"{outcome.refused}; nothing is left of the job on the other hosts")
        elif outcome.may_restart:
            self._tell(f"torchrun ended with {outcome.code} without saying which rank failed: see its lines above")


class Printer:
    """Prints lines of ranks, and notes of the launcher. With a `patience`, seconds, it drops what nobody reads."""

    def __init__(self) -> None:
        self.patience: float | None = None

    def line(self, line: str, is_error: bool) -> None:
        self._print(line, sys.stderr if is_error else sys.stdout)

    def note(self, line: str) -> None:
        self._print(f"gnnsys launch: {line}", sys.stderr)

    def _print(self, line: str, stream: TextIO) -> None:
        """Letters that the stream does not have are written as escapes. BrokenPipeError where nobody reads any more."""
        if self.patience is not None and not is_ready(stream.fileno(), select.POLLOUT, self.patience):
            self.patience = 0.0  # was waited for once
            _forget_buffer(stream)
            return
        encoding = stream.encoding or "utf-8"
        try:
            print(line.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)
        except BrokenPipeError:
            _forget_buffer(stream)
            raise


def _forget_buffer(stream: TextIO) -> None:
    """What is still in its buffer goes nowhere when Python ends, rather than to a pipe that nobody reads."""
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), stream.fileno())


@contextlib.contextmanager
def interrupts() -> Iterator[None]:
    """SIGTERM and SIGHUP end a job as Ctrl-C does; a second signal does not cut the end short.

    A signal that is ignored stays so: nohup is heeded.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: Any) -> NoReturn:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(number)

    found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    before = {number: handler for number, handler in found.items() if handler is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
