"""The process that keeps a lab: it makes the namespaces, is their parent, and takes everything down when it ends.

    python -I -S keeper.py STATE.json

Uses only the standard library. The namespaces have no names: they exist as long as the first process in them, which
dies with the keeper. A tied keeper ends when its standard input is closed, so a lab ends with the process that made it,
even after kill -9. An untied one ends on SIGTERM. Both remove all processes, control groups and the state folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

sys.path.append(str(Path(__file__).parent))

import control_groups  # the file beside this one: importing the package would import torch

NEW_MOUNTS, NEW_NAMES, NEW_IPC, NEW_PIDS, NEW_NET = 0x00020000, 0x04000000, 0x08000000, 0x20000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)


def main(state_file: Path) -> None:
    state: dict[str, Any] = json.loads(state_file.read_text())
    stop_reader, stop_writer = os.pipe()
    os.set_blocking(stop_writer, False)
    signal.set_wakeup_fd(stop_writer)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # the wakeup pipe reports it
    _call(_libc.prctl, PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    folder = state_file.parent
    started = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]
    state |= {"keeper_pid": os.getpid(), "keeper_start": int(started)}
    _write(state_file, state)
    children: list[int] = []
    try:
        children.append(_start("switch", [], folder, shm=None))
        for name, leaves in state["leaves"].items():
            children.append(_start(name, leaves, folder, state["shm"]))
        state |= {"switch_pid": children[0], "host_pids": children[1:]}
        _write(state_file, state)
        print("ready", flush=True)
        os.close(1)
        select.select([stop_reader, 0] if state["tied"] else [stop_reader], [], [])
    except OSError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    finally:
        take_down(folder, [Path(path) for path in state["groups"]], children)


def take_down(folder: Path, paths: list[Path], children: list[int]) -> None:
    """Kills every child and all processes in its namespaces, then removes control groups and folder."""
    control_groups.kill(paths)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)  # returns when all processes of its namespace are gone
    control_groups.remove(paths)
    shutil.rmtree(folder, ignore_errors=True)


def _start(name: str, leaves: list[str], folder: Path, shm: int | None) -> int:
    """Starts process 1 of a host, in namespaces of its own. Returns its pid, as seen from here, once it is ready."""
    told, tell = os.pipe()  # from us to it: the keeper is its parent now
    heard, say = os.pipe()  # from it to us: its pid, then "ready"
    between = os.fork()
    if between == 0:
        _as_child(lambda: _enter(name, leaves, folder, shm, told, tell, say))
    os.close(told)
    os.close(say)
    with os.fdopen(heard) as reader:
        first = reader.readline()
        os.waitpid(between, 0)
        os.write(tell, b"1") if first.strip().isdigit() else None
        os.close(tell)
        answer = reader.readline()
    if not first.strip().isdigit() or answer != "ready\n":
        raise OSError(f"host {name} did not start: {(first if not first.strip().isdigit() else answer).strip()}")
    return int(first)


def _enter(name: str, leaves: list[str], folder: Path, shm: int | None, told: int, tell: int, say: int) -> None:
    """Runs in the intermediate child: joins the groups, makes the namespaces, and forks their first process."""
    os.close(tell)
    try:
        for leaf in leaves:
            Path(leaf, "cgroup.procs").write_text("0")
        _call(_libc.unshare, NEW_MOUNTS | NEW_NAMES | NEW_IPC | NEW_PIDS | NEW_NET)
        child = os.fork()
    except OSError as error:
        os.write(say, f"{error}\n".encode())
        return
    if child:
        os.write(say, f"{child}\n".encode())  # then ends, and the keeper, as subreaper, becomes its parent
        return
    if os.read(told, 1) != b"1":
        return
    _call(_libc.prctl, PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if shm is not None:
        try:
            _furnish(name, folder, shm)
        except OSError as error:
            os.write(say, f"{error}\n".encode())
            return
    os.write(say, b"ready\n")
    _be_first()


def _furnish(name: str, folder: Path, shm: int) -> None:
    """Gives the host its own name, hosts file, /proc, /sys and /dev/shm."""
    encoded = name.encode()
    _call(_libc.sethostname, encoded, len(encoded))
    with contextlib.suppress(PermissionError):  # out of memory, the kernel should kill a command, not this process
        Path("/proc/self/oom_score_adj").write_text("-1000")
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    aside = folder / "aside"
    aside.mkdir(exist_ok=True)
    _mount("/sys/fs/cgroup", str(aside), None, MS_BIND | MS_REC)
    _mount("sysfs", "/sys", "sysfs", 0)  # shows this namespace's network devices
    _mount(str(aside), "/sys/fs/cgroup", None, MS_BIND | MS_REC)
    _call(_libc.umount2, str(aside).encode(), 2)
    _mount("proc", "/proc", "proc", 0)
    _mount("tmpfs", "/dev/shm", "tmpfs", 0, f"size={shm}")
    _mount(str(folder / "hosts"), "/etc/hosts", None, MS_BIND)


def _be_first() -> NoReturn:
    """The loop of process 1 of a host: reaps orphans until it is killed."""
    os.closerange(0, 256)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        signal.sigwait({signal.SIGCHLD})
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass


def _as_child(work: Any) -> NoReturn:
    """A forked child must never return into its parent's code."""
    try:
        work()
    finally:
        os._exit(0)


def _write(path: Path, state: dict[str, Any]) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(state))
    new.replace(path)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind, data)]
    try:
        _call(_libc.mount, encoded[0], encoded[1], encoded[2], flags, encoded[3])
    except OSError as error:
        raise OSError(error.errno, f"cannot mount {target}: {error.strerror}") from None


def _call(function: Any, *arguments: Any) -> None:
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function.__name__}: {os.strerror(number)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
