"""Compiles the C++ tests beside this file into one program, without torch's libraries: its headers alone are used."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
COMPILE_SECONDS = 300
FLAGS = ["-std=c++17", "-O0", "-Wall", "-Werror", "-ffp-contract=off", "-pthread"]
HELPERS = HERE.parents[1] / "csrc" / "common" / "helpers.cpp"
CORE = f"-I{HERE.parents[1] / 'csrc'}"
DEFINES = ["-DGNNSYS_WITHOUT_TORCH", "-DTORCH_TARGET_VERSION=0x020a000000000000"]


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def build_native_tests(binary: Path, extra: list[str] | None = None) -> Path:
    """As one source, so that headers, which take most of the time, are read once. Fails with what the compiler said."""
    from torch.utils.cpp_extension import include_paths

    flags = [*FLAGS, *(extra or []), *DEFINES, CORE, *(f"-isystem{path}" for path in include_paths())]
    source = Path(f"{binary}.cpp")
    source.parent.mkdir(parents=True, exist_ok=True)
    files = [HELPERS, *sorted(HERE.glob("*.cpp"))]  # first, so that tests see what is local to it
    source.write_text("".join(f'#include "{file}"\n' for file in files))
    call([str(source), "-o", str(binary), *flags])
    return binary


def build_planted(library: Path, extra: list[str]) -> Path:
    """Mistakes made on purpose, as a library for ctypes."""
    call(
        [
            str(HERE / "planted" / "planted.cpp"),
            str(HELPERS),
            "-shared",
            "-fPIC",
            "-o",
            str(library),
            *FLAGS,
            *extra,
            *DEFINES,
            CORE,
        ]
    )
    return library


def compile_thrown(folder: Path) -> list[Path]:
    """An op that throws what csrc/cuda throws, as objects for `link_thrown`."""
    from sysconfig import get_path

    from torch.utils.cpp_extension import include_paths

    includes = [CORE, *(f"-isystem{path}" for path in [*include_paths(), get_path("include")])]
    sources = [HERE / "thrown" / "thrown.cpp", HERE.parents[1] / "csrc" / "cuda" / "out_of_memory.cpp"]
    defines = ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DPy_LIMITED_API=0x030A0000"]
    objects = [folder / f"{source.stem}.o" for source in sources]
    for source, target in zip(sources, objects, strict=True):
        call(["-c", "-fPIC", "-fvisibility=hidden", *FLAGS, *defines, *includes, str(source), "-o", str(target)])
    return objects


def link_thrown(objects: list[Path], library: Path, extra: list[str]) -> Path:
    """As a library that torch takes the op from."""
    from torch.utils.cpp_extension import library_paths

    torch = [flag for path in library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    call(["-shared", *extra, *map(str, objects), "-o", str(library), *torch, "-ltorch_cpu"])
    return library


def call(arguments: list[str]) -> None:
    command = [compiler() or "g++", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=COMPILE_SECONDS)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")


def build_counting_malloc(library: Path) -> Path:
    """malloc that counts, as a library to be loaded before all others."""
    call([str(HERE / "counting" / "counting_malloc.cpp"), "-shared", "-fPIC", "-O2", "-o", str(library), *FLAGS[:1]])
    return library
