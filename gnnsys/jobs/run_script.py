"""The keeper of a script: `python -m gnnsys.jobs.run_script`. It outlives the service, and leaves a file that says how
the script ended, so that a service that begins later knows.

It begins only when it is told to: a service that is killed before it has written down who runs the job has not started
it. It imports no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

from gnnsys.jobs.process_identity import adopt_orphans, descendants, kill_descendants
from gnnsys.jobs.queue_folder import write_whole

_LOOK_SECONDS = 0.1
_DEVICE_SECONDS = 1.0
_ASK_SECONDS = 10.0
_LEFT_SECONDS = 2.0  # for what a script has left running, to end by itself
_PR_SET_PDEATHSIG = 1


def main() -> int:
    orders = json.loads(sys.stdin.buffer.readline() or b"{}")
    if not orders:
        return 1  # the service has gone, or has changed its mind
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # for the script, whose end is to be written down
    signal.signal(signal.SIGINT, lambda number, frame: None)
    script = Path(orders["command"][0])
    command = [sys.executable, *orders["command"]] if script.suffix == ".py" else orders["command"]
    libc = ctypes.CDLL(None, use_errno=True)
    adopt_orphans()
    ending = {}
    try:
        log = os.open(orders["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        process = subprocess.Popen(
            command, cwd=orders["folder"], env=os.environ | orders["environment"], stdin=subprocess.DEVNULL,
            stdout=log, stderr=log, preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
        )  # fmt: skip
    except (OSError, ValueError) as error:  # ValueError: a word has half a character, or a NUL
        ending = {"code": 127, "error": f"{command[0]} cannot be started: {error}", "measured": None}
    else:
        is_host = orders["device"] == "cpu"
        most = 0
        while process.poll() is None:
            most = max(most, (_group_bytes if is_host else _device_bytes)(os.getpid()))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_SECONDS if is_host else _DEVICE_SECONDS)
        if is_host:
            most = max(most, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10)
        ending = {"code": process.returncode, "error": "", "measured": most or None}
    while True:
        try:
            write_whole(Path(orders["ending"]), json.dumps(ending))
            break
        except OSError:  # the disk is full: what is known is kept here until it is not
            time.sleep(_LOOK_SECONDS)
    with contextlib.suppress(OSError):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(os.getpid(), signal.SIGTERM)  # what the script has left running
    _end_leftovers()
    return 0


def _end_leftovers() -> None:
    """What has not ended when it was asked to, or has left the group."""
    until = time.monotonic() + _LEFT_SECONDS
    while descendants(os.getpid()) and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)
    kill_descendants(os.getpid())


def _group_bytes(group: int) -> int:
    """Resident bytes of all processes of a group but its leader."""
    total, page = 0, resource.getpagesize()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            if int(fields[2]) == group and int(folder.name) != group:
                total += int(fields[21]) * page
    return total


def _device_bytes(group: int) -> int:
    """Bytes of the device that a group has, by the driver; 0 where it does not say."""
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    total = 0
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        told = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_SECONDS, check=True).stdout
        for line in told.splitlines():
            pid, megabytes = line.split(",")
            with contextlib.suppress(OSError, ValueError):
                if os.getpgid(int(pid)) == group:
                    total += int(megabytes) << 20
    return total


if __name__ == "__main__":
    sys.exit(main())
