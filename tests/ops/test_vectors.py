"""Row kernels give the same bits by every kind of vectors that the processor has, and GNNSYS_SIMD chooses one."""

import json
import os
import subprocess
import sys

import pytest

from gnnsys.cli.commands.info import native_core
from gnnsys.ops import SIMD_LEVEL
from tests.ops.row_digests import make_digests

LEVELS = ["sse2", "avx2", "avx512"]


def run(level: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"GNNSYS_SIMD": level, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.skipif(SIMD_LEVEL == "neon", reason="this processor has one kind of vectors")
@pytest.mark.parametrize("level", LEVELS)
def test_every_kind_of_vectors_gives_the_same_bits(level):
    if level not in LEVELS[: LEVELS.index(SIMD_LEVEL) + 1]:
        pytest.skip(f"this processor has no {level}")
    done = run(level, "-m", "tests.ops.row_digests")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == make_digests()


def test_a_kind_that_the_processor_has_not_is_refused_with_those_it_has():
    done = run("mmx", "-c", "import gnnsys.ops")
    assert done.returncode != 0
    assert f"GNNSYS_SIMD is mmx; this processor has {'neon' if SIMD_LEVEL == 'neon' else 'sse2'}" in done.stderr


def test_the_kind_in_use_can_be_named():
    assert native_core().endswith(f"({SIMD_LEVEL})")
