"""A forked worker runs tests as a fresh one does, can be killed and replaced, and is a fresh one where it must be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import forked_workers
from tests.support.processes import HANGS_AFTER, ROOT, alive, await_true, clean_environment

pytest.importorskip("xdist")
pytestmark = pytest.mark.skipif(not forked_workers.may_fork(), reason="workers are not forked here")

TESTS = """
import json, os, signal, sys, threading
if "WITH_THREAD" in os.environ:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
imported_by = os.getpid()

def tell():
    process = {"files": sorted(os.listdir("/proc/self/fd")), "argv": sys.argv, "path": sys.path[1:],
        "main": sorted(name for name in vars(sys.modules["__main__"]) if not name.startswith("__")),
        "interrupts": signal.getsignal(signal.SIGINT) is signal.default_int_handler}
    told = {"pid": os.getpid(), "parent": os.getppid(), "imported by": imported_by, "process": process}
    with open(os.environ["TOLD"], "a") as file:
        print(json.dumps(told), file=file)

def test_first():
    tell()

def test_dies():
    assert "WITH_THREAD" in os.environ or os.kill(os.getpid(), signal.SIGKILL)

def test_last():
    tell()
    assert False, "said by the worker"
"""


def command_in(folder: Path) -> list[str | Path]:
    return [sys.executable, "-m", "pytest", "-p", forked_workers.__name__, "-n", "1", "--rootdir", folder, folder]


def run(folder: Path, **environment: str) -> tuple[str, list[dict[str, Any]]]:
    """What pytest has printed, and what its workers have told."""
    (folder / "test_told.py").write_text(TESTS)
    ended = subprocess.run(
        command_in(folder),
        env={**clean_environment(), "TOLD": str(folder / "told"), **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANGS_AFTER,
    )
    assert ended.stderr == "" and ended.returncode == 1, ended.stdout + ended.stderr
    return ended.stdout, [json.loads(line) for line in (folder / "told").read_text().splitlines()]


@pytest.fixture(scope="module")
def forked(tmp_path_factory):
    return run(tmp_path_factory.mktemp("forked"))


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    return run(tmp_path_factory.mktemp("fresh"), WITH_THREAD="yes")


def test_workers_are_forked_from_what_has_imported_tests_and_one_that_is_killed_is_replaced(forked):
    printed, told = forked
    assert "2 failed, 1 passed" in printed and "crashed while running" in printed and "said by the worker" in printed
    template, workers = told[0]["imported by"], [each["pid"] for each in told]
    assert [each["imported by"] for each in told] == [each["parent"] for each in told] == [template, template]
    assert len({template, *workers}) == 3
    await_true(lambda: not any(map(alive, [template, *workers])), "the end of all of them")


def test_workers_are_fresh_where_a_thread_was_started(fresh):
    printed, told = fresh
    assert "1 failed, 2 passed" in printed and "said by the worker" in printed
    assert {each["imported by"] for each in told} == {each["pid"] for each in told} and len(told) == 2


def test_a_forked_worker_has_the_files_names_and_handlers_of_a_fresh_one(forked, fresh):
    for each, other in zip(forked[1], fresh[1], strict=True):
        assert each["process"] == other["process"] and each["process"]["interrupts"]


INTERRUPTED = """
import os, time, pytest

@pytest.fixture
def told():
    yield open(os.environ["TOLD"], "a", buffering=1)
    time.sleep(0.3)  # what ends a worker at once is faster
    print("torn down", file=open(os.environ["TOLD"], "a"))

def test_waits(told):
    print(os.getpid(), os.getppid(), file=told)
    time.sleep(1000)
"""


def test_an_interrupt_lets_fixtures_end_and_leaves_nothing(tmp_path):
    (tmp_path / "test_waits.py").write_text(INTERRUPTED)
    told = tmp_path / "told"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        forked_workers.__name__,
        "-n",
        "1",
        "--rootdir",
        tmp_path,
        tmp_path,
    ]
    running = subprocess.Popen(
        command, env={**clean_environment(), "TOLD": str(told)}, cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    with running:
        await_true(lambda: told.exists() and "\n" in told.read_text(), "the test to begin")
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does
        running.communicate(timeout=HANGS_AFTER)
    (pids, *ended) = told.read_text().splitlines()
    assert ended == ["torn down"]
    await_true(lambda: not any(alive(int(pid)) for pid in pids.split()), "the end of the worker and its template")


@pytest.mark.parametrize("where", ["ssh", "python", "via", "chdir", "under a sanitizer"])
def test_workers_elsewhere_and_those_of_another_python_stay_what_they_are(where, monkeypatch):
    if where == "under a sanitizer":
        monkeypatch.setenv("GNNSYS_SANITIZER", "address")
    spec = SimpleNamespace(popen=where != "ssh", python=None, via=None, chdir=None)
    if hasattr(spec, where):
        setattr(spec, where, "given")
    before = vars(spec).copy()
    forked_workers.pytest_xdist_setupnodes(SimpleNamespace(), [spec])
    assert vars(spec) == before
