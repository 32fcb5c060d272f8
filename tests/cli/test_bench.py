"""`gnnsys bench` as a process that somebody ends."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

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
    print("it hangs", flush=True)
    threading.Event().wait(600)  # it is ended before

class Closing:
    def __enter__(self): pass
    def __exit__(self, *error): hangs()

HANGS = sys.argv[2]

def cases(work):
    if HANGS == "closing":
        work.enter(Closing())
    for name in ("first", "second"):
        ours = hangs if name == HANGS else lambda: 2.0
        sides = {OURS: Side(ours), "peer": Side(lambda: 3.0)}
        yield Case(name, value("s"), lambda sides=sides: sides, (Versus(("peer",)),), repeats=1)

gnnsys.bench.load_suite = lambda name: [cases]
sys.exit(main(["bench", "ops", "--json", sys.argv[1]]))
"""


@pytest.mark.parametrize(
    ("hangs", "names", "interrupted"),
    [("second", ["first"], "second"), ("closing", ["first", "second"], None), ("first", None, None)],
)
def test_a_bench_that_is_terminated_has_written_the_rows_that_it_has(tmp_path: Path, hangs, names, interrupted):
    """And leaves an earlier file as it is where it has none."""
    (tmp_path / "rows.json").write_text('{"rows": "of before"}')
    with processes() as running:
        number = running.start_code("bench", TWO_CASES, tmp_path / "rows.json", hangs)
        running.await_output(number, "it hangs\n")
        os.kill(running.pid(number), signal.SIGTERM)
        [ended] = running.wait()
    assert ended.returncode == 130 and "interrupted" in ended.stderr, ended
    told = json.loads((tmp_path / "rows.json").read_text())
    if names is None:
        assert told == {"rows": "of before"}
        return
    assert [(row["name"], row["ours"]) for row in told["rows"]] == [(name, 2.0) for name in names]
    assert told.get("interrupted") == interrupted
    assert told["not_run"] == ([f"{interrupted}: interrupted"] if interrupted else [])
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]
