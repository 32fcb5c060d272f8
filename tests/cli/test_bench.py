"""`gnnsys bench` as a process that somebody ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.support.processes import processes

ENDLESS = """
import sys, threading
import gnnsys.bench
from gnnsys.cli import main

def endless(work):
    print(f"works in [{work.folder}]", flush=True)
    threading.Event().wait(600)  # it is ended before
    yield from ()

gnnsys.bench.load_suite = lambda name: [endless]
sys.exit(main(["bench", "ops"]))
"""


def test_a_bench_that_is_terminated_leaves_no_folder_behind():
    with processes() as running:
        number = running.start_code("bench", ENDLESS)
        folder = Path(running.await_output(number, "]\n").split("works in [")[1].split("]")[0])
        assert folder.is_dir()
        os.kill(running.pid(number), signal.SIGTERM)
        [ended] = running.wait()
    assert ended.returncode == 130 and "interrupted" in ended.stderr and not folder.exists(), ended
