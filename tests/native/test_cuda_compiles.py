"""Where nvcc is, with or without a GPU, every CUDA source compiles, so that none rots on machines without one.

To PTX and unoptimised: nvcc then reads host and device code in full, and takes three seconds a file instead of thirty.
What has compiled is not compiled again in the same checkout (`pytest --cache-clear` forgets it) while it, every header,
the compiler and torch are the same. All sources take minutes: `make check-all` compiles them, `make test` one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.native.build_native import COMPILE_SECONDS

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(p for p in (ROOT / "csrc" / "cuda").rglob("*") if p.suffix in (".cu", ".cpp"))
FLAGS = ["-x", "cu", "-ptx", "-arch=compute_80", "-Xcicc", "-O0", "-std=c++17", "--expt-relaxed-constexpr"]
ONE = ROOT / "csrc" / "cuda" / "degrees.cu"  # a short source with device code, host code and torch's headers
COMPILED = "gnnsys/cuda_compiled"  # where the cache of pytest has what compiled
DEFINES = ["-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020a000000000000", "-DPy_LIMITED_API=0x030A0000"]


def nvcc() -> str | None:
    from torch.utils.cpp_extension import CUDA_HOME

    return shutil.which("nvcc") or (shutil.which("nvcc", path=f"{CUDA_HOME}/bin") if CUDA_HOME else None)


def fingerprints(compiler: str) -> dict[str, str]:
    """Of every source, with all that its compilation reads."""
    import torch

    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=COMPILE_SECONDS).stdout
    common = hashlib.sha256(f"{version} {torch.__version__} {FLAGS} {DEFINES}".encode())
    for header in sorted(p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".h", ".cuh")):
        common.update(str(header.relative_to(ROOT)).encode() + b"\0" + header.read_bytes())
    found = {}
    for source in SOURCES:
        own = common.copy()
        own.update(b"\0" + source.read_bytes())
        found[source.name] = own.hexdigest()
    return found


def said_by_compiler(compiler: str, source: Path, folder: Path) -> str:
    """Nothing where the source compiles."""
    from sysconfig import get_path

    from torch.utils.cpp_extension import include_paths

    includes = [f"-I{ROOT / 'csrc'}", *(f"-I{path}" for path in [*include_paths(), get_path("include")])]
    target = folder / f"{source.name}.ptx"
    command = [compiler, *FLAGS, *DEFINES, *includes, str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS)
    compiles = done.returncode == 0 and target.exists()
    return "" if compiles else f"{source.relative_to(ROOT)}:\n{done.stdout}{done.stderr}"


def nvcc_or_skip() -> str:
    if os.environ.get("GNNSYS_SANITIZER"):
        pytest.skip("sanitizers look at code that runs")
    compiler = nvcc()
    if compiler is None:
        pytest.skip("there is no nvcc here")
    return compiler


def test_a_cuda_source_compiles(tmp_path: Path):
    assert ONE in SOURCES
    assert said_by_compiler(nvcc_or_skip(), ONE, tmp_path) == ""


@pytest.mark.long
def test_every_cuda_source_compiles(tmp_path: Path, request: pytest.FixtureRequest):
    compiler = nvcc_or_skip()
    assert SOURCES
    cache, prints = getattr(request.config, "cache", None), fingerprints(compiler)  # -p no:cacheprovider: None
    compiled = cache.get(COMPILED, {}) if cache else {}
    sources = [source for source in SOURCES if compiled.get(source.name) != prints[source.name]]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        complaints = list(pool.map(lambda source: said_by_compiler(compiler, source, tmp_path), sources))
    failed = {source.name for source, complaint in zip(sources, complaints, strict=True) if complaint}
    if cache:
        cache.set(COMPILED, {name: value for name, value in prints.items() if name not in failed})
    assert not failed, "\n".join(filter(None, complaints))


def test_a_source_is_compiled_again_when_it_or_any_header_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module, folder = "tests.native.test_cuda_compiles", tmp_path / "csrc" / "cuda"
    folder.mkdir(parents=True)
    source, other, header = (folder / name for name in ("a.cu", "b.cu", "c.cuh"))
    for file in (source, other, header):
        file.write_text("1")
    monkeypatch.setattr(f"{module}.ROOT", tmp_path)
    monkeypatch.setattr(f"{module}.SOURCES", [source, other])
    before = fingerprints("true")
    assert fingerprints("true") == before
    source.write_text("2")
    changed = fingerprints("true")
    assert changed["a.cu"] != before["a.cu"] and changed["b.cu"] == before["b.cu"]
    header.write_text("2")
    assert not set(fingerprints("true").values()) & {*before.values(), *changed.values()}
    monkeypatch.setattr(f"{module}.FLAGS", [])
    assert not set(fingerprints("true").values()) & {*before.values(), *changed.values()}


def test_a_source_that_does_not_compile_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    compiler = nvcc_or_skip()
    source = tmp_path / "broken.cu"
    source.write_text("__global__ void kernel(int* p) {}\nvoid launch() { kernel<<<1, 1>>>(nullptr, 2); }\n")
    monkeypatch.setattr("tests.native.test_cuda_compiles.ROOT", tmp_path)
    assert "too many arguments" in said_by_compiler(compiler, source, tmp_path)
