"""Ranks of tests that begin in milliseconds: forked from a process that has imported torch and gnnsys, and did no more.

Such a rank is what `python program.py` makes of it: a session of its own, its own environment, arguments and output,
`__main__`, threads and exit functions that are waited for; only the interpreter is not taken apart after success. There
are two nurseries, so that neighbouring ranks hash strings differently, as processes do that were started one by one.
All workers of a run have the same two: importing everything takes seconds.
torchrun's agents come from here too, and fork their ranks (tests/support/torchrun.py). As users have them, each in a
fresh process, ranks and servers are in tests/session/test_torchrun_agent.py, and agents in tests/lab/test_lab.py.
`python -m tests.support.nursery FD` is the process.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import gc
import importlib
import json
import os
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.support.disk import do_not_wait_for_disks
from tests.support.huge_pages import use_huge_pages

ROOT = Path(__file__).resolve().parents[2]
NUM_NURSERIES = 2
DEADLINE = 300.0  # seconds for its imports, on a machine that is far too busy


class Child:
    """A process that was forked, in the words of `subprocess.Popen`. It stays a zombie until asked for its end."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._handle, self._lock = os.pidfd_open(pid), threading.Lock()

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not self._has_ended(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        with self._lock:
            if self.returncode is None:
                self.returncode = self._collect()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._handle, number)

    def _has_ended(self, timeout: float | None) -> bool:
        return bool(wait([self._handle], timeout))  # unlike select, it takes numbers above 1023

    def _collect(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Forked(Child):
    """One that a nursery forked, whose child it is."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        super().__init__(pid)
        self._nursery = nursery

    def _collect(self) -> int:
        os.close(self._handle)
        return self._nursery.ask({"collect": self.pid})


class Orders:
    """Where `serve` is heard: the other end of its socket."""

    def __init__(self, here: socket.socket) -> None:
        self._here, self._lines, self._lock = here, here.makefile("r"), threading.Lock()

    def ask(self, order: dict[str, Any], timeout: float = DEADLINE) -> int:
        with self._lock:
            self._here.settimeout(timeout)
            self._here.sendall(json.dumps(order).encode() + b"\n")
            answer = self._lines.readline()
        assert answer, self.describe_end()
        return int(answer)

    def describe_end(self) -> str:
        return "the process that forks has ended"


class Nursery(Orders):
    """Where such processes come from; it ends with the last process that has one of its name.

    The first to ask for the name starts it. What others ask meanwhile waits in its socket.
    """

    def __init__(self, name: str, environment: Mapping[str, str]) -> None:
        self.name = name
        self._process: subprocess.Popen[bytes] | None = None
        address = f"\0{name}"  # of no file: it is gone when nobody has the socket
        with socket.socket(socket.AF_UNIX) as listening:
            try:
                listening.bind(address)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                listening.listen()
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "tests.support.nursery", str(listening.fileno())],
                    stdin=subprocess.DEVNULL,
                    env=dict(environment),
                    cwd=ROOT,
                    pass_fds=[listening.fileno()],
                    start_new_session=True,
                )
            super().__init__(_connect(address))

    def start(
        self, program: Path, arguments: Sequence[str], environment: Mapping[str, str], out: Path, err: Path
    ) -> Forked:
        """Runs a Python file; what it prints goes to `out` and `err`."""
        order = {"program": str(program), "arguments": list(arguments), "environment": dict(environment)}
        return Forked(self, self.ask(order | {"out": str(out), "err": str(err)}))

    def describe_end(self) -> str:
        if self._process is None:
            return f"the nursery {self.name}, which another process has started, has ended"
        return f"the nursery (process {self._process.pid}) ended with {self._process.poll()}"


def _connect(address: str) -> socket.socket:
    """Whoever has bound the address listens in a moment."""
    deadline = time.monotonic() + DEADLINE
    while True:
        here = socket.socket(socket.AF_UNIX)
        try:
            here.connect(address)
            return here
        except ConnectionRefusedError:
            here.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def forks_ranks() -> bool:
    """Not under sanitizers, which look at whole processes, nor beside a GPU, whose driver does not survive a fork."""
    import torch

    return not os.environ.get("GNNSYS_SANITIZER") and not torch.cuda.is_available()


@functools.cache
def nurseries() -> tuple[Nursery, ...]:
    """Those of this run, made when they are first asked for."""
    from tests.support.processes import clean_environment

    run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or secrets.token_hex(8)
    return tuple(Nursery(f"gnnsys-nursery-{run}-{number}", clean_environment()) for number in range(NUM_NURSERIES))


# The process


def main() -> None:
    gc.disable()  # imports make next to no garbage
    import_everything()
    gc.freeze()  # or each rank would copy all of it to look through it for garbage
    gc.enable()
    forget_finalizers()
    do_not_wait_for_disks()
    use_huge_pages()
    program = serve(socket.socket(fileno=int(sys.argv[1])))["program"]
    if first_pid := os.environ.get("LAB_HOST"):
        from tests.support.lab_host import move

        move(int(first_pid))
    if os.environ.get("LOCAL_RANK") == "0":
        from tests.support.spare_servers import keep_spares

        keep_spares()
    try:
        run(program)
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    leave()


def import_everything() -> None:
    importlib.import_module("torch._dynamo")  # what the first optimizer of a process loads
    importlib.import_module("torch.distributed.run")  # torchrun, which may be an agent of this process
    importlib.import_module("encodings.idna")  # what sockets load for the first name of a host
    name_methods_quickly()
    importlib.import_module("tests.support.spare_servers")

    import gnnsys
    import gnnsys.nn
    import gnnsys.session.graph_server

    for name in gnnsys.__all__:
        getattr(gnnsys, name)


def name_methods_quickly() -> None:
    """Has agents not look through the sources of all modules for the name of a method, at each event of a rendezvous.

    That takes a second of every agent, and nobody reads it.
    """
    rendezvous: Any = importlib.import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name


def forget_finalizers() -> None:
    """Has ranks not take apart at their ends what was imported here: torch's libraries of ops take 50 ms each time."""
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False


def serve(listening: socket.socket) -> dict[str, Any]:
    """Forks until nobody is left who asks; returns in each forked process, with what it was asked to be.

    Who asks waits for the answer, so there is never a second line to read.
    """
    asking = {listening.accept()[0]}
    while asking:
        for orders in select.select([listening, *asking], [], [])[0]:
            if orders is listening:
                asking.add(listening.accept()[0])
                continue
            if user_of(orders) != os.getuid():  # the socket is a name, which has no permissions
                asking.remove(orders)
                orders.close()
                continue
            line = read_line(orders)
            if not line:
                asking.remove(orders)
                orders.close()
                continue
            order = json.loads(line)
            if "collect" in order:
                answer = os.waitstatus_to_exitcode(os.waitpid(order["collect"], 0)[1])
            elif (answer := fork([listening, *asking], order)) == 0:
                return order
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # who asked has ended
                orders.sendall(f"{answer}\n".encode())
    sys.exit()


def user_of(connection: socket.socket) -> int:
    """Who is at the other end."""
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)


def read_line(orders: socket.socket) -> bytes:
    """What is asked; nothing where nobody asks any more."""
    line = b""
    with contextlib.suppress(ConnectionResetError):
        while not line.endswith(b"\n") and (more := orders.recv(1 << 16)):
            line += more
    return line if line.endswith(b"\n") else b""


def fork(sockets: Sequence[socket.socket], order: dict[str, Any]) -> int:
    """Returns in both processes, as `os.fork` does, when the new one has settled."""
    assert len(os.listdir("/proc/self/task")) == 1, "a thread of this process would be missing in its children"
    seen, settled = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(seen)
        for each in sockets:
            each.close()
        settle(order)
        os.close(settled)
        return 0
    os.close(settled)
    os.read(seen, 1)  # nothing, once it has settled: whoever knows its pid may kill its group
    os.close(seen)
    return pid


def settle(order: dict[str, Any]) -> None:
    """Makes a forked process look like a fresh one."""
    import numpy as np

    os.setsid()
    flags = {
        "in": os.O_RDONLY,
        "out": os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
        "err": os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
    }
    for number, name in enumerate(flags):
        if name not in order:
            continue
        file = os.open(order[name], flags[name], 0o600)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(order["environment"])
    np.random.seed()
    sys.argv = [order["program"], *order["arguments"]]
    sys.path[0] = str(Path(order["program"]).parent)


def run(program: str) -> None:
    """What `python program` does."""
    module = sys.modules["__main__"] = ModuleType("__main__")
    module.__file__ = program
    exec(compile(Path(program).read_text(), program, "exec"), module.__dict__)


def leave(code: int = 0) -> None:
    """Ends as an interpreter does, but for destroying thousands of modules, which takes seconds."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
