"""A quick run has tests of every room, and starts no processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import gnnsys
from tests.support.quick import FILES, STARTS, TESTS, is_quick

ROOT = TESTS.parent


def test_every_room_has_quick_tests_and_every_file_that_is_listed_is_there():
    rooms = {path.parent.name for path in (ROOT / "gnnsys").glob("*/__init__.py")}
    tested = {path.parent.name for path in TESTS.glob("*/test_*.py")}
    assert len(rooms) > 15 and gnnsys.__file__ == str(ROOT / "gnnsys" / "__init__.py")
    assert rooms & tested <= FILES.keys(), "add some of its files to FILES"
    missing = [
        f"{room}/{name}" for room, names in FILES.items() for name in names if not (TESTS / room / name).exists()
    ]
    assert missing == [] and all(FILES.values())


def test_files_that_are_not_listed_are_left_out_and_helpers_are_not():
    assert is_quick(TESTS / "lab" / "test_control_groups.py") and is_quick(TESTS / "ops" / "graphs.py")
    assert is_quick(TESTS / "conftest.py") and not is_quick(TESTS / "lab" / "test_lab.py")
    assert not is_quick(TESTS / "test_package.py")


PROGRAM = """
import os, subprocess, sys, pytest
from tests.support.quick import forbid_processes
forbid_processes()
for start in (lambda: subprocess.run(["true"]), os.fork, lambda: os.posix_spawn("/bin/true", ["true"], {})):
    try:
        start()
    except pytest.skip.Exception as reason:
        print(reason)
"""


def test_whatever_starts_a_process_is_skipped():
    command = [sys.executable, "-c", PROGRAM]
    ended = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.splitlines() == ["starts a process, which a quick run does not"] * 3
    assert {"subprocess.Popen", "os.fork"} < set(STARTS)


def test_a_quick_run_starts_none(request: pytest.FixtureRequest):
    if not request.config.getoption("--quick"):
        pytest.skip("this is no quick run")
    with pytest.raises(pytest.skip.Exception):
        subprocess.run(["true"])
