"""Too little host memory is a MemoryError that says how much was asked for, and by which op; the process lives on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from tests.ops.short_of_memory import CASES, ENVIRONMENT

SECONDS = 300
FOREIGN_WORDS = ("DefaultCPUAllocator: can't allocate", "Unable to allocate")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="limits on a process's memory are Linux's")
@pytest.mark.skipif("GNNSYS_SANITIZER" in os.environ, reason="sanitizers map terabytes of address space")
def test_every_op_layer_and_loader_says_what_it_had_no_memory_for_and_works_afterwards():
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.short_of_memory"],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    said = {line["case"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert done.returncode == 0 and list(said) == list(CASES), done.stdout[-2000:] + done.stderr[-4000:]
    for case, line in said.items():
        if case == "NeighborLoader" and any(words in line["message"] for words in FOREIGN_WORDS):
            continue  # of a loader's threads one in torch or numpy came first: it says so in their words
        assert line["error"] == "MemoryError", line
        op = case.split(":")[0]
        named = re.search(r"out of host memory: gnnsys::(\w+) asked for (\d+|more) bytes", line["message"])
        assert named, line
        assert op[0].isupper() or named[1].startswith(op), line  # a layer's ops are its own affair
        assert named[2] == "more" or int(named[2]) >= 4 << 20, line


def test_a_size_that_no_memory_can_hold_is_a_memory_error():
    for num_nodes in (1 << 46, 1 << 61, (1 << 63) - 1):
        with pytest.raises(MemoryError, match=r"gnnsys::degrees asked for"):
            torch.ops.gnnsys.degrees(torch.tensor([0, 1]), num_nodes)


@pytest.mark.skipif("GNNSYS_SANITIZER" in os.environ, reason="an unoptimised build keeps what nobody calls")
def test_the_library_builds_no_stream():
    """Where it carries a libstdc++ of its own, a stream's constructor crashes: csrc/common/shim.h."""
    library = Path(str(import_module("gnnsys._C").__file__)).read_bytes()
    if b"libstdc++.so" not in library:
        pytest.skip("it carries a libstdc++ of its own, streams included")
    assert b"basic_stringstream" not in library and b"basic_ostringstream" not in library
