"""Stands for `python` where pytest-xdist starts a worker: has one forked that has imported the tests already.

It hands its input and output to the process of tests/support/forked_workers.py and stays as long as the worker does.
Where none can be forked it becomes the fresh interpreter that it was asked for.

    python -I -S warm_python.py ADDRESS -u -c CODE
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys


def main() -> None:
    address, *arguments = sys.argv[1:]
    with socket.socket(socket.AF_UNIX) as here:
        pid = b""
        with contextlib.suppress(OSError):  # whoever forks has ended
            here.connect(f"\0{address}")
            socket.send_fds(here, [arguments[-1].encode()], [0, 1, 2])
            pid = here.recv(16)
        if not pid:
            os.execv(sys.executable, [sys.executable, *arguments])
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the worker, which this must outlive
        os.close(0)  # only the worker has them: where it ends, pytest-xdist sees that at once
        os.close(1)
        select.select([os.pidfd_open(int(pid))], [], [])


if __name__ == "__main__":
    main()
