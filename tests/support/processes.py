"""How tests run several processes: plain ones or under torchrun, with a deadline, and the failing rank's own words.

Each process is a Python program given as text; its output is kept apart. Where one fails, or the deadline passes, the
test fails with that rank's output. When the block ends, everything that was started is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.nursery import NUM_NURSERIES, Forked, forks_ranks, nurseries

if TYPE_CHECKING:  # who starts no ranks need not wait for torch
    from torch.distributed import TCPStore

ROOT = Path(__file__).resolve().parents[2]
TAIL = 6000
HANGS_AFTER = 180.0  # seconds: what has not come by then does not come, however slow the machine is
AGENT = "import sys; from tests.support.torchrun import main; main(sys.argv[1:])"  # torchrun, whose ranks are forked
PLAIN_AGENT = "import sys; from torch.distributed.run import main; main(sys.argv[1:])"


@dataclass
class Ended:
    """One process that has ended."""

    name: str
    returncode: int
    stdout: str
    stderr: str

    def __str__(self) -> str:
        return f"--- {self.name} ended with {self.returncode}\n{self.stdout[-TAIL:]}\n{self.stderr[-TAIL:]}"


@dataclass
class Running:
    """Processes under way, each the leader of a process group of its own."""

    folder: Path
    processes: list[tuple[str, subprocess.Popen[bytes] | Forked]] = field(default_factory=list)
    store: TCPStore | None = None

    def start(self, name: str, command: Sequence[object], environment: Mapping[str, str] | None = None) -> int:
        """Starts one more; its number in the results, and its pid as `pid(number)`."""
        env = {**clean_environment(), **(environment or {})}
        number = len(self.processes)
        with open(self._file(number, "out"), "wb") as out, open(self._file(number, "err"), "wb") as err:
            process = subprocess.Popen(
                list(map(str, command)),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=env,
                cwd=ROOT,
                start_new_session=True,
            )
        self.processes.append((name, process))
        return number

    def start_rank(self, rank: int, program: Path, arguments: Sequence[object], environment: Mapping[str, str]) -> None:
        """Starts `python program arguments`, from a nursery where there can be one."""
        if forks_ranks():
            self.fork(f"rank {rank}", rank, program, arguments, environment)
        else:
            self.start(f"rank {rank}", [sys.executable, program, *arguments], environment)

    def fork(
        self, name: str, turn: int, program: Path, arguments: Sequence[object], environment: Mapping[str, str]
    ) -> None:
        """Starts `python program arguments` from a nursery: neighbours, by their `turn`, from different ones."""
        number, env = len(self.processes), {**clean_environment(), **environment}
        files = [self._file(number, which) for which in ("out", "err")]
        nursery, texts = nurseries()[turn % NUM_NURSERIES], list(map(str, arguments))
        self.processes.append((name, nursery.start(program, texts, env, *files)))

    def start_code(self, name: str, code: str, *arguments: object, environment: Mapping[str, str] | None = None) -> int:
        """Starts `python -c code arguments`, from a nursery where there can be one; its number in the results."""
        number = len(self.processes)
        program = self.folder / f"{number}.py"
        program.write_text(code)
        if forks_ranks():
            self.fork(name, number, program, arguments, environment or {})
        else:
            self.start(name, [sys.executable, program, *arguments], environment)
        return number

    def store_port(self) -> int:
        """The port of a store that lives here as torchrun's does in its agent: no port has to be chosen in advance."""
        if self.store is None:
            from torch.distributed import TCPStore

            self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return int(self.store.port)

    def pid(self, number: int) -> int:
        return self.processes[number][1].pid

    def output(self, number: int) -> str:
        """What process `number` has printed so far."""
        return self._file(number, "out").read_text(errors="replace")

    def await_output(self, number: int, text: str, timeout: float = HANGS_AFTER, times: int = 1) -> str:
        """Waits until process `number` has printed `text`, so many times; all that it has printed."""
        name, process = self.processes[number]

        def has_printed() -> bool:
            return self.output(number).count(text) >= times

        await_true(lambda: has_printed() or process.poll() is not None, f"{text!r} from {name}", timeout)
        assert has_printed(), f"{name} ended without printing {text!r}\n" + "\n".join(map(str, self._ended()))
        return self.output(number)

    def wait(self, timeout: float = HANGS_AFTER) -> list[Ended]:
        """The results of all, failed or not; fails where one has not ended within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        for _, process in self.processes:
            try:
                process.wait(max(0.01, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                late = [name for name, other in self.processes if other.poll() is None]
                self.kill()
                told = "\n".join(map(str, self._ended()))
                raise AssertionError(f"{', '.join(late)} did not end within {timeout:g} s\n{told}") from None
        return self._ended()

    def kill(self) -> None:
        """Ends every process and whatever it started."""
        for _, process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for _, process in self.processes:
            process.wait(HANGS_AFTER)

    def _ended(self) -> list[Ended]:
        return [
            Ended(
                name,
                process.returncode,
                self._file(number, "out").read_text(errors="replace"),
                self._file(number, "err").read_text(errors="replace"),
            )
            for number, (name, process) in enumerate(self.processes)
        ]

    def _file(self, number: int, which: str) -> Path:
        return self.folder / f"{number}.{which}"


@contextlib.contextmanager
def processes() -> Iterator[Running]:
    """A place to start processes in; whatever still runs at the end of the block is killed."""
    with tempfile.TemporaryDirectory() as folder:
        running = Running(Path(folder))
        try:
            yield running
        finally:
            running.kill()


def run_code(
    code: str, *arguments: object, timeout: float = HANGS_AFTER, environment: Mapping[str, str] | None = None
) -> Ended:
    """What `python -c code arguments` printed and ended with, without the seconds in which it imports torch.

    Not for what a fresh interpreter is needed for: what it imports, how it exits, how much memory it takes.
    """
    with processes() as running:
        running.start_code("the program", code, *arguments, environment=environment)
        return running.wait(timeout)[0]


def module_code(module: str) -> str:
    """Python code that does what `python -m module` does."""
    return f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"


def run_ranks(
    program: str,
    trainers: int | Sequence[int],
    *arguments: object,
    timeout: float = HANGS_AFTER,
    check: bool = True,
    environment: Mapping[str, str] | None = None,
    torchrun: bool = False,
    options: Sequence[str] = (),
) -> list[Ended]:
    """Runs Python code on several ranks; one result per rank, in rank order. With `check`, none may fail.

    `trainers`: ranks on one machine, or a number for each machine (machines to gnnsys, though all are on this host).
    Ranks are launched directly, with the variables and the store that torchrun would give them, from a process that has
    imported torch (tests/support/nursery.py), or under real agents with `torchrun`, one for each machine, which take
    `options` and are forked too.
    """
    counts = [trainers] if isinstance(trainers, int) else list(trainers)
    with processes() as running:
        if torchrun:
            start_agents(running, program, counts, *arguments, environment=environment, options=options)
        else:
            start_ranks(running, program, counts, *arguments, environment=environment)
        ended = running.wait(timeout)
        ranks = read_ranks(running.folder) if torchrun else ended
    if check:
        bad = [rank for rank in ranks if rank.returncode != 0] or [agent for agent in ended if agent.returncode != 0]
        assert not bad, "\n".join(map(str, bad))
        assert len(ranks) == sum(counts), f"{len(ranks)} of {sum(counts)} ranks ran\n" + "\n".join(map(str, ended))
    return ranks


def start_ranks(
    running: Running,
    program: str,
    trainers: Sequence[int],
    *arguments: object,
    environment: Mapping[str, str] | None = None,
    absent: Sequence[int] = (),
) -> None:
    """Starts all ranks but `absent` and returns at once; they are numbered in `running` in rank order."""
    (running.folder / "program.py").write_text(program)
    first = 0
    for machine, count in enumerate(trainers):
        for local_rank in range(count):
            rank = first + local_rank
            variables = {
                "RANK": rank,
                "WORLD_SIZE": sum(trainers),
                "LOCAL_RANK": local_rank,
                "LOCAL_WORLD_SIZE": count,
                "GROUP_RANK": machine,
                "GROUP_WORLD_SIZE": len(trainers),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": running.store_port(),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
            env = {name: str(value) for name, value in variables.items()} | dict(environment or {})
            if rank not in absent:
                running.start_rank(rank, running.folder / "program.py", arguments, env)
        first += count


def start_agents(
    running: Running,
    program: str,
    trainers: Sequence[int],
    *arguments: object,
    environment: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    fresh_ranks: bool = False,
) -> None:
    """Starts a torchrun agent per machine and returns at once; `read_ranks` tells what their ranks printed.

    `fresh_ranks`: each rank and server in an interpreter of its own, as users have them; only agents are forked.
    """
    (running.folder / "program.py").write_text(program)
    script = running.folder / "runner.py"
    script.write_text(_RUNNER.format(folder=str(running.folder)))
    agent = running.folder / "agent.py"
    agent.write_text(PLAIN_AGENT if fresh_ranks else AGENT)
    for machine, count in enumerate(trainers):
        shape = ["--nnodes", len(trainers), "--nproc-per-node", count, "--monitor-interval", "0.1"]
        place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{running.store_port()}", "--rdzv-id", "test"]
        place += ["--rdzv-conf", "is_host=0", "--local-addr", "127.0.0.1"]
        given = [*shape, *place, *options, script, *arguments]
        if forks_ranks():
            running.fork(f"torchrun {machine}", machine, agent, given, environment or {})
        else:
            launcher = [sys.executable, "-m", "torch.distributed.run"]
            running.start(f"torchrun {machine}", [*launcher, *given], environment)


def read_ranks(folder: Path) -> list[Ended]:
    """What the ranks under `start_agents` left: output of each, and -1 where it did not reach its end."""
    ranks = []
    for out in sorted(folder.glob("rank-*.out"), key=lambda file: int(file.stem.split("-")[1])):
        code = out.with_suffix(".code")
        returncode = int(code.read_text()) if code.exists() else -1
        ranks.append(
            Ended(
                out.stem.replace("-", " "),
                returncode,
                out.read_text(errors="replace"),
                out.with_suffix(".err").read_text(errors="replace"),
            )
        )
    return ranks


def await_true(condition: Callable[[], bool], what: str, timeout: float = HANGS_AFTER) -> None:
    """Looks again and again until `condition()` holds; fails, naming `what`, when the time is over."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {timeout:g} s"
        time.sleep(0.02)


def shared_memory() -> set[str]:
    """What has a name in shared memory."""
    return {entry.name for entry in Path("/dev/shm").iterdir()}


def await_shared_memory_freed(before: set[str]) -> None:
    """Fails where something new stays: tests beside this one may have some for a moment."""
    await_true(lambda: shared_memory() <= before, "the end of shared memory")


def descendants(pid: int) -> list[int]:
    """Process ids of all children, and theirs."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1]) == pid:
                found += [int(folder.name), *descendants(int(folder.name))]
    return found


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


_RUNNER = """
import atexit, os, runpy, sys
base = os.path.join({folder!r}, "rank-" + os.environ["RANK"])
code = -1
def note():
    with open(base + ".code", "w") as file:
        file.write(str(code))
for stream, end in ((sys.stdout, ".out"), (sys.stderr, ".err")):
    file = os.open(base + end, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(file, stream.fileno())
    os.close(file)
note()
atexit.register(note)  # the first to be registered is the last to be called
try:
    runpy.run_path(os.path.join({folder!r}, "program.py"), run_name="__main__")
    code = 0
except SystemExit as error:
    code = error.code if isinstance(error.code, int) else int(error.code is not None)
    raise
except BaseException:
    code = 1
    raise
"""


def clean_environment() -> dict[str, str]:
    """This environment without a launcher's variables, so that a test under torchrun starts afresh too."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "GNNSYS_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(launcher)}
    path = [str(ROOT), *filter(None, [env.get("PYTHONPATH")])]
    return env | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
