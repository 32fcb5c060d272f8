"""Seconds and bytes of a build of the native core, from nothing, on two cores: the table in docs/native.md.

    python csrc/packaging/build_times.py              the CPU library, through setup.py
    python csrc/packaging/build_times.py 8.0 9.0      and the CUDA sources, once for each architecture

CUDA sources are compiled with nvcc alone and linked without torch, so that a torch without CUDA suffices.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
JOBS = 2
CUDA_SOURCES = sorted(p for p in (ROOT / "csrc" / "cuda").rglob("*") if p.suffix in (".cu", ".cpp"))
# As setup.py has them.
NVCC_FLAGS = ["-O3", "-std=c++17", "--expt-relaxed-constexpr", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
NVCC_DEFINES = ["-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020a000000000000", "-DPy_LIMITED_API=0x030A0000"]


def build_cpu(folder: Path) -> Path:
    environment = {**os.environ, "GNNSYS_CUDA": "0", "MAX_JOBS": str(JOBS)}
    command = [sys.executable, "setup.py", "-q", "build_ext", f"--build-temp={folder}/temp", f"--build-lib={folder}"]
    run(command, environment)
    return next(folder.glob("gnnsys/_C*.so"))


def build_cuda(folder: Path, architecture: str) -> Path:
    from torch.utils.cpp_extension import CUDA_HOME, include_paths

    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=f"{CUDA_HOME}/bin")
    if nvcc is None:
        raise SystemExit("there is no nvcc here: set CUDA_HOME")
    number = architecture.replace(".", "")
    code = f"-gencode=arch=compute_{number},code=sm_{number}"
    includes = [f"-I{path}" for path in [ROOT / "csrc", *include_paths(), sysconfig.get_path("include")]]

    def compile_one(source: Path) -> str:
        target = folder / f"{source.name}.o"
        run([nvcc, "-c", "-x", "cu", code, *NVCC_FLAGS, *NVCC_DEFINES, *includes, str(source), "-o", str(target)])
        return str(target)

    with ThreadPoolExecutor(JOBS) as pool:
        objects = list(pool.map(compile_one, CUDA_SOURCES))
    library = folder / "_cuda.so"
    run([nvcc, "-shared", *objects, "-o", str(library)])
    return library


def run(command: list[str], environment: dict[str, str] | None = None) -> None:
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)


def measure(name: str, build: Callable[[Path], Path]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        library = build(Path(folder))
        wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(f"| {name} | {wall:.0f} | {cpu:.0f} | {library.stat().st_size / 1e6:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", help="compute capabilities, such as 8.0")
    architectures = parser.parse_args().architectures
    print("| build | seconds | CPU seconds | MB |\n|---|---|---|---|", flush=True)
    measure("CPU", build_cpu)
    for architecture in architectures:
        measure(f"CUDA {architecture}", lambda folder, a=architecture: build_cuda(folder, a))


if __name__ == "__main__":
    main()
