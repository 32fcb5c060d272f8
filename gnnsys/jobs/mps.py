"""Kernels of several processes at once: NVIDIA's multi-process service (MPS), with a daemon of the queue's own.

Without it processes take turns: two of them never run kernels at the same time. The daemon lives in a directory of the
service's folder, so that it serves nobody else's jobs, and ends with the service. One whose service was killed is found
there by the next service: it goes on where it still answers, for jobs may still run under it, and is ended else.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

MPS, SLICES, AUTO = "mps", "slices", "auto"
_PROGRAM = "nvidia-cuda-mps-control"
_SERVER = "nvidia-cuda-mps-server"
_PIPE, _LOG, _LIMIT = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
_LONGEST_PIPE = 80  # bytes of a path: that of a socket may have 107, and the daemon adds names of its own
_START_SECONDS = 20.0  # that the control program has to start a daemon
_COMMAND_SECONDS = 20.0
_PROBE_SECONDS = 60.0
_QUIT_SECONDS = 5  # that clients have to end before the daemon ends their servers
_END_SECONDS = 10.0
_LOOK_EVERY = 0.05
_TAIL = 300  # characters of the daemon's log that an error tells

# A client without torch: a context is made and given back. What it prints says why it could not.
_PROBE = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
device, context, said = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_char_p()
def call(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    if code:
        cuda.cuGetErrorString(code, ctypes.byref(said))
        sys.exit(f"{name} failed with {code}: {(said.value or b'').decode()}")
call("cuInit", 0)
call("cuDeviceGet", ctypes.byref(device), 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
call("cuDevicePrimaryCtxRelease_v2", device)
"""


class MpsUnavailable(ValueError):
    """MPS cannot be had here: why, and what to do, in one line."""


class MpsDaemon:
    """One daemon in `folder`. `start` adopts the one that is there already where it answers.

    `program` is the control program, found on PATH by default; `probe` says why clients cannot be served, or None.
    """

    def __init__(
        self, folder: Path | str, program: str = _PROGRAM, probe: Callable[[MpsDaemon], str | None] | None = None
    ) -> None:
        self.folder = Path(folder)
        self._program, self._probe = program, probe or _probe
        self._pipe, self._log = self.folder / "pipe", self.folder / "log"
        self.was_adopted = False

    def start(self) -> MpsDaemon:
        """Starts the daemon and sees that it serves. MpsUnavailable where it does not; nothing is left then."""
        if shutil.which(self._program) is None:
            raise MpsUnavailable(
                f"MPS needs {self._program}, which is not on PATH: install the utilities of NVIDIA's driver "
                "(nvidia-compute-utils), or share the device by time slices"
            )
        self._make_folders()
        self.was_adopted = self.is_alive()
        if not self.was_adopted:
            self._end_processes()
            self._start()
        why = self._probe(self)
        if why is not None:
            said = self._end_of_log()
            self.close()
            raise MpsUnavailable(f"MPS does not serve here: {why}{said}: share the device by time slices")
        return self

    def environment(self, memory: int | None = None, device: int = 0) -> dict[str, str]:
        """What makes a process a client. `memory`: bytes of the device that it may take, rounded up to MB: its own,
        and the graphs that it maps. It is read when the process makes its context."""
        found = {_PIPE: str(self._pipe), _LOG: str(self._log)}
        if memory is not None:
            if memory < 1:
                raise ValueError(f"memory must be a positive number of bytes, got {memory}")
            found[_LIMIT] = f"{device}={-(-memory // (1 << 20))}M"
        return found

    def is_alive(self) -> bool:
        """Whether the daemon answers."""
        try:
            self.servers()
        except (OSError, RuntimeError, ValueError):
            return False
        return True

    def servers(self) -> list[int]:
        """Processes that hold the device for clients; none before the first client came."""
        return _numbers(self.command("get_server_list"))

    def clients(self) -> dict[int, int]:
        """The server of each client, by the client's pid."""
        return {
            client: server
            for server in self.servers()
            for client in _numbers(self.command(f"get_client_list {server}"))
        }

    def terminate_client(self, pid: int) -> bool:
        """Ends a client's work on the device, so that it can be killed without harm to others. False where it has
        none. The process itself lives on, with an error from CUDA: send it a signal after this."""
        server = self.clients().get(pid)
        if server is None:
            return False
        self.command(f"terminate_client {server} {pid}")
        return True

    def command(self, line: str, timeout: float = _COMMAND_SECONDS) -> str:
        """What the control program answers. RuntimeError where it says that something is wrong, or nothing in time."""
        try:
            ended = subprocess.run(
                [self._program],
                input=line + "\n",
                capture_output=True,
                text=True,
                timeout=timeout,
                env={**os.environ, **self.environment()},
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the daemon of MPS does not answer {line!r} within {timeout:g} s") from None
        if ended.returncode != 0:
            raise RuntimeError(f"the daemon of MPS refuses {line!r}: {_first_line(ended.stderr or ended.stdout)}")
        return ended.stdout

    def close(self) -> None:
        """Ends the daemon and its servers, clients or not. Idempotent."""
        if self._processes() or self.is_alive():
            with contextlib.suppress(OSError, RuntimeError):
                self.command(f"quit -t {_QUIT_SECONDS}", _QUIT_SECONDS + _COMMAND_SECONDS)
        self._end_processes()
        link = self.folder / "pipe-at"
        if link.is_symlink():
            shutil.rmtree(link.resolve(), ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- its processes -----------------------------------------------------------------------------------------------

    def _make_folders(self) -> None:
        """The pipe's directory is in the folder; where that has a long path, a link in the folder says where it is."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        link, self._pipe = self.folder / "pipe-at", self.folder / "pipe"
        if link.is_symlink() and link.resolve().is_dir():
            self._pipe = link.resolve()
        elif len(os.fsencode(self._pipe.absolute())) > _LONGEST_PIPE:
            link.unlink(missing_ok=True)
            self._pipe = Path(tempfile.mkdtemp(prefix="gnnsys-mps-"))
            link.symlink_to(self._pipe)
        self._pipe, self._log = self._pipe.absolute(), self._log.absolute()
        for each in (self._pipe, self._log):
            each.mkdir(mode=0o700, exist_ok=True)

    def _start(self) -> None:
        try:
            started = subprocess.run(
                [self._program, "-d"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=_START_SECONDS,
                env={**os.environ, **self.environment()},
                start_new_session=True,  # Ctrl-C is for the service, which then ends it
                check=False,
            )
        except subprocess.TimeoutExpired:
            self.close()
            raise MpsUnavailable(
                f"{self._program} has not started a daemon within {_START_SECONDS:g} s: share the device by time slices"
            ) from None
        end = time.monotonic() + _COMMAND_SECONDS
        while started.returncode == 0 and time.monotonic() < end:
            if self.is_alive():
                return
            time.sleep(_LOOK_EVERY)
        said = _first_line(started.stdout) or "it does not answer"
        log = self._end_of_log()
        self.close()
        raise MpsUnavailable(f"{self._program} does not start: {said}{log}: share the device by time slices")

    def _processes(self) -> list[int]:
        """The daemon and its servers: programs of these names whose environment has our directory."""
        wanted, found = f"{_PIPE}={self._pipe}".encode(), []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                names = {os.path.basename(word.decode(errors="replace")) for word in words[:2]}
                if names & {os.path.basename(self._program), _SERVER} and wanted in (
                    entry / "environ"
                ).read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return [pid for pid in found if pid != os.getpid()]

    def _end_processes(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in self._processes():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            end = time.monotonic() + _END_SECONDS
            while self._processes() and time.monotonic() < end:
                time.sleep(_LOOK_EVERY)
            if not self._processes():
                return

    def _end_of_log(self) -> str:
        """The last words of the daemon's log, for an error; nothing where there is none."""
        texts = []
        for name in ("server.log", "control.log"):
            with contextlib.suppress(OSError):
                lines = (self._log / name).read_text(errors="replace").strip().splitlines()
                texts += lines[-1:]
        return f" ({'; '.join(texts)[-_TAIL:]})" if texts else ""


class DeviceSharing:
    """How processes share a device: by MPS, or by time slices where `mps` is None. `said` tells it in one line."""

    def __init__(self, said: str, mps: MpsDaemon | None = None) -> None:
        self.said, self.mps = said, mps

    def environment(self, memory: int | None = None, device: int = 0) -> dict[str, str]:
        """For a process that is to share the device, with at most so many bytes of it. Nothing under time slices."""
        return {} if self.mps is None else self.mps.environment(memory, device)

    def terminate_client(self, pid: int) -> bool:
        """See `MpsDaemon.terminate_client`. False where there is none, or where the daemon does not answer: the process
        can be killed then."""
        if self.mps is None:
            return False
        try:
            return self.mps.terminate_client(pid)
        except (OSError, RuntimeError):
            return False

    def is_alive(self) -> bool:
        """Whether processes can still share the device so."""
        return self.mps is None or self.mps.is_alive()

    def restart(self) -> None:
        """Ends the daemon and starts another, after an error that took all clients along."""
        if self.mps is not None:
            self.mps.close()
            self.mps.start()

    def close(self) -> None:
        if self.mps is not None:
            self.mps.close()


def check_sharing(wanted: str) -> None:
    """ValueError where this is no way to share a device."""
    if wanted not in (MPS, SLICES, AUTO):
        raise ValueError(f"sharing must be {MPS!r}, {SLICES!r} or {AUTO!r}, got {wanted!r}")


def start_sharing(folder: Path | str, wanted: str = AUTO, *, program: str = _PROGRAM) -> DeviceSharing:
    """Shares the device of a service as `wanted` says: "mps", "slices", or "auto" for MPS where it can be had.

    `folder` is the service's own. ValueError where MPS is wanted and cannot be had.
    """
    check_sharing(wanted)
    daemon = MpsDaemon(Path(folder) / "mps", program)
    if wanted == SLICES:
        return DeviceSharing("jobs share the device by time slices, as was asked for")
    try:
        daemon.start()
    except MpsUnavailable as error:
        if wanted == MPS:
            raise
        return DeviceSharing(f"jobs share the device by time slices, for {error}")
    adopted = ", whose daemon of an earlier service goes on" if daemon.was_adopted else ""
    return DeviceSharing(f"jobs share the device by MPS{adopted}", daemon)


def _probe(daemon: MpsDaemon) -> str | None:
    """Why a client is not served, in the driver's words; None where one is."""
    try:
        ended = subprocess.run(
            [sys.executable, "-c", _PROBE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            env={**os.environ, **daemon.environment()},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"a client was not served within {_PROBE_SECONDS:g} s"
    return None if ended.returncode == 0 else _last_line(ended.stderr) or f"a client ended with {ended.returncode}"


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split() if word.isdigit()]


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
