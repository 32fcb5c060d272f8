"""The C++ tests of the native core's data structures run with every other test."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.native.build_native import COMPILE_SECONDS, HERE, build_native_tests, compiler


def test_data_structures_agree_with_their_oracles(tmp_path):
    if os.environ.get("GNNSYS_SANITIZER"):
        pytest.skip("they run under the sanitizer by themselves")
    if compiler() is None:
        pytest.skip("there is no C++ compiler")
    binary = build_native_tests(tmp_path / "tests")
    done = subprocess.run([binary], capture_output=True, text=True, timeout=COMPILE_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith(" 0 failed")
    assert done.stdout.count("ok: ") == sum(path.read_text().count("\nTEST(") for path in HERE.glob("*.cpp"))
