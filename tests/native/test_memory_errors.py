"""What csrc/cuda throws where a device has no memory left arrives as torch.OutOfMemoryError, without a GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.native.build_native import COMPILE_SECONDS, compile_thrown, compiler, link_thrown
from tests.support.processes import run_code

CALLS = """
import ctypes, sys, torch
library = ctypes.CDLL(sys.argv[1])
run_out = torch.ops.gnnsys_thrown.run_out

class Fails(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x * 2)
    backward = staticmethod(lambda ctx, grad: run_out(grad))

x = torch.ones(1, requires_grad=True)
for call in (lambda: run_out(x), lambda: run_out.default(x), lambda: Fails.apply(x).sum().backward()):
    try:
        call()
    except torch.OutOfMemoryError as error:
        print(error)
"""


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    if os.environ.get("GNNSYS_SANITIZER"):
        pytest.skip("the library that throws is not instrumented")
    if compiler() is None or sys.platform == "darwin":
        pytest.skip("there is no C++ compiler, or one without libstdc++")
    return compile_thrown(tmp_path_factory.mktemp("thrown"))


@pytest.mark.parametrize("link", [[], ["-static-libstdc++"]], ids=["shared libstdc++", "a libstdc++ of its own"])
def test_no_device_memory_is_torchs_own_error(objects: list[Path], tmp_path: Path, link: list[str]):
    library = link_thrown(objects, tmp_path / "thrown.so", link)
    done = run_code(CALLS, library, timeout=COMPILE_SECONDS)
    words = (
        "CUDA out of memory: gnnsys::spmm asked for 3221225472 bytes (3.00 GiB) on cuda:1, where 1000 of 2000 bytes "
        "are free. torch says: words of torch"
    )
    assert done.stdout.splitlines() == [words] * 3, done.stdout + done.stderr
