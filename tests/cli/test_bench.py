"""`gnnsys bench` as a process that somebody ends."""

from __future__ import annotations

import json
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


TWO_CASES = """
import sys, threading
import gnnsys.bench
from gnnsys.bench.case import OURS, Case, Side, Versus, value
from gnnsys.cli import main

def hangs():
    print("the second", flush=True)
    threading.Event().wait(600)  # it is ended before

def cases(work):
    for name, ours in (("first", lambda: 2.0), ("second", hangs)):
        sides = {OURS: Side(ours), "peer": Side(lambda: 3.0)}
        yield Case(name, value("s"), lambda sides=sides: sides, (Versus(("peer",)),), repeats=1)

gnnsys.bench.load_suite = lambda name: [cases]
sys.exit(main(["bench", "ops", "--json", sys.argv[1]]))
"""


def test_a_bench_that_is_terminated_writes_the_rows_that_it_has(tmp_path: Path):
    with processes() as running:
        number = running.start_code("bench", TWO_CASES, tmp_path / "rows.json")
        running.await_output(number, "the second\n")
        os.kill(running.pid(number), signal.SIGTERM)
        [ended] = running.wait()
    assert ended.returncode == 130 and "interrupted" in ended.stderr, ended
    told = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["name"], row["ours"]) for row in told["rows"]] == [("first", 2.0)]
    assert told["interrupted"] == "second"
