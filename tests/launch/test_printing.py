"""What the launcher prints: letters that a stream does not have, and a stream that nobody reads any more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tests.launch.test_local import is_alive
from tests.support.processes import HANGS_AFTER, ROOT

TALKS = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    os.write(1, f"{os.getpid()} \\u2192\\n".encode())
    time.sleep(0.05)
"""
LAUNCHES = """
import sys
from gnnsys.launch import Checks, Host, LaunchOptions, Launcher
options = LaunchOptions(ssh=("sh", "-c", f"exec {sys.executable} {sys.argv[2]}"), grace=0.5, connect_timeout=100)
hosts = [Host(name="h1", address="127.0.0.1")]
sys.exit(Launcher(hosts, [sys.argv[1]], Checks(script=sys.argv[1]), options).run())
"""


def test_a_job_whose_lines_nobody_reads_is_ended_whole(tmp_path):
    """As by `| head -1`. The stream has ASCII alone, which is no reason to end a job."""
    script = tmp_path / "talks.py"
    script.write_text(TALKS)
    command = [sys.executable, "-c", LAUNCHES, str(script), str(ROOT / "tests" / "launch" / "plain_agent.py")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "PYTHONIOENCODING": "ascii"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as launcher:
        assert launcher.stdout is not None and launcher.stderr is not None
        host, _, pid, letter = launcher.stdout.readline().split()
        launcher.stdout.close()
        said = launcher.stderr.read()
        assert launcher.wait(HANGS_AFTER) == 128 + signal.SIGPIPE
    assert (host, letter, said) == ("h1", "\\u2192", "")
    assert not is_alive(int(pid)) and not list(tmp_path.glob("gnnsys-launch-*"))
