"""Workers of pytest-xdist that need not import the tests: forked from a process that has collected them and no more.

Workers that import torch, PyG, DGL and all tests take seven seconds of a processor each. To collect once more what is
imported takes one and a half. pytest-xdist starts workers with a Python of ours, `--tx popen//python=...`:
tests/support/warm_python.py. That gives a fresh interpreter after all where a forked one would not be safe: beside a
GPU, under sanitizers, and where something that was imported has started threads.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import select
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

NEVER = ("GNNSYS_SANITIZER", "GNNSYS_FRESH_WORKERS")  # variables that say so
PYTHON = Path(__file__).with_name("warm_python.py")
MOST_SECONDS = 300  # in which tests are collected
MOST_BYTES = 1 << 16  # of the code that a worker begins with: execnet's has less than a hundred
TEMPLATE = pytest.StashKey[tuple[subprocess.Popen[bytes], socket.socket]]()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    """Starts the process that workers are forked from; it ends with this one."""
    local = [spec for spec in specs if spec.popen and not (spec.python or spec.via or spec.chdir)]
    if not local or not may_fork() or config.pluginmanager.hasplugin("_cov"):  # which must see what is imported
        return
    address = f"gnnsys-workers-{secrets.token_hex(8)}"  # of no file: it is gone when nobody has the socket
    listening, (here, there) = socket.socket(socket.AF_UNIX), socket.socketpair()
    with listening, there:
        listening.bind(f"\0{address}")
        listening.listen()
        files = [listening.fileno(), there.fileno()]
        program = f"import sys; sys.path[:] = {sys.path}; from {__name__} import main; main()"
        template = subprocess.Popen(
            [sys.executable, "-c", program, *map(str, files), *collecting(config)],
            stdin=subprocess.DEVNULL,
            pass_fds=files,
            env={name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"},  # of the controller
        )
    config.stash[TEMPLATE] = template, here  # which is closed when this process ends
    for spec in local:
        spec.python = shlex.join([sys.executable, "-I", "-S", str(PYTHON), address])


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends the process. It would end by itself when this one does."""
    if TEMPLATE in config.stash:
        template, here = config.stash[TEMPLATE]
        here.close()
        try:
            template.wait(10)
        except subprocess.TimeoutExpired:
            template.kill()
            template.wait()


def may_fork() -> bool:
    """What can be said before torch is imported. GNNSYS_FRESH_WORKERS=1 has every worker import its tests."""
    devices = [*Path("/dev").glob("nvidia[0-9]*"), *Path("/dev").glob("kfd")]
    return sys.platform == "linux" and not devices and not any(map(os.environ.get, NEVER))


def collecting(config: pytest.Config) -> list[str]:
    """Arguments of pytest that import what workers import. What these select from it is their own matter."""
    options = ["--collect-only", "-qq", "-p", "no:xdist", "-p", "no:cacheprovider", f"--rootdir={config.rootpath}"]
    options += ["-c", str(config.inipath)] if config.inipath else []
    options += ["--quick"] if config.getoption("quick", False) else []
    return [*options, *config.args]


# The process


def main() -> None:
    listening, controller = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    signal.alarm(MOST_SECONDS)  # ends this process, and workers are fresh ones
    collect(sys.argv[3:])
    signal.alarm(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for those that run tests
    worker = serve(listening, controller)
    if worker is None:
        os._exit(0)  # to take everything apart takes a second
    begin(*worker)


def collect(arguments: list[str]) -> None:
    """Imports tests as pytest does. What goes wrong goes wrong in workers too, and they say so."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        pytest.main(arguments)
        if "torch" in sys.modules:  # what torch imports when something is first compiled, which all workers do
            for name in ("torch._dynamo", "torch._inductor.compile_fx", "torch.testing._internal.optests"):
                with contextlib.suppress(ImportError):
                    importlib.import_module(name)


def is_safe_to_fork() -> bool:
    torch = sys.modules.get("torch")
    has_device = torch is not None and torch.cuda.is_available()  # a driver does not survive a fork
    return not has_device and len(os.listdir("/proc/self/task")) == 1  # a thread would be missing in workers


def serve(listening: socket.socket, controller: socket.socket) -> tuple[str, list[int]] | None:
    """Forks until the controller has ended; returns in each worker, with its code, its input and its outputs."""
    from tests.support.nursery import user_of

    is_safe = is_safe_to_fork()
    pids: dict[socket.socket, int] = {}  # of workers, by who stands for them
    while True:
        for ready in select.select([listening, controller, *pids], [], [])[0]:
            if ready is controller:
                return None
            if ready is listening:
                asking = listening.accept()[0]
                if user_of(asking) != os.getuid():  # the socket is a name, which has no permissions
                    asking.close()
                    continue
                code, files, *_ = socket.recv_fds(asking, MOST_BYTES, 3)
                pid = os.fork() if is_safe and code else None
                if pid == 0:
                    for each in (listening, controller, asking, *pids):
                        each.close()
                    return code.decode(), files
                for file in files:
                    os.close(file)
                if pid is None:
                    asking.close()  # without an answer
                else:
                    pids[asking] = pid
                    asking.sendall(str(pid).encode())
            else:  # has seen its worker end, or was killed
                pid = pids.pop(ready)
                ready.close()
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def begin(code: str, files: list[int]) -> None:
    """Makes a forked process what `python -u -c code` is."""
    from tests.support.nursery import forget_finalizers, leave

    for number, (file, mode) in enumerate(zip(files, "rww", strict=True)):
        os.dup2(file, number)
        os.close(file)
        name = ("stdin", "stdout", "stderr")[number]
        stream = open(number, mode, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    forget_finalizers()
    sys.argv = ["-c"]
    module = sys.modules["__main__"] = ModuleType("__main__")
    try:
        exec(code, module.__dict__)
    except Exception:
        sys.excepthook(*sys.exc_info())
    leave()
