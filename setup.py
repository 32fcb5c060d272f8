"""Builds the native core, csrc/, into abi3 libraries against libtorch's stable ABI.

Everything declarative lives in pyproject.toml; only the extensions are described here. Built once, a library loads
into every torch from 2.10 on and every CPython from 3.10 on. `gnnsys._C` holds the schemas and the CPU kernels,
`gnnsys._cuda` the kernels of csrc/cuda: it is built where torch has CUDA and nvcc is there; the first works without.

TORCH_CUDA_ARCH_LIST chooses the architectures (default "8.0;9.0+PTX"); GNNSYS_CUDA=0 leaves CUDA out, GNNSYS_CUDA=1
insists on it.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from setuptools import Extension, setup
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension, get_cxx_compiler

PRECOMPILED = "common/precompiled.h"
TORCH_2_10 = "0x020a000000000000"
PYTHON_3_10 = "0x030A0000"


def compile_args() -> list[str]:
    args = [
        "-O3",
        "-g0",  # Python's own flags have -g: nine tenths of the library, a third of the time
        "-std=c++17",
        "-Wall",
        "-fvisibility=hidden",
        "-ffp-contract=off",  # weighted draws must round the same on every machine
        "-falign-loops=32",  # loops over rows are a few instructions: where they begin is up to 8% of spmm on Arm
        "-fno-math-errno",  # nobody reads it, and with it a square root is a branch: no loop with one is vectorized
        f"-DTORCH_TARGET_VERSION={TORCH_2_10}",
        f"-DPy_LIMITED_API={PYTHON_3_10}",
    ]
    if sys.platform != "darwin":
        args += ["-fopenmp", "-DGNNSYS_WRAPPED_NEW"]
    return args + sanitizer_args()


def link_args() -> list[str]:
    args = ["-ltorch_cpu"]
    if sys.platform != "darwin":
        args += ["-fopenmp", "-Wl,--wrap=_Znwm"]  # operator new, to csrc/cpu/operator_new.cpp
    return args + sanitizer_args()


def sanitizer_args() -> list[str]:
    """For `make sanitize` (docs/native.md), which builds into a folder of its own."""
    sanitizers = os.environ.get("GNNSYS_SANITIZE")
    if not sanitizers:
        return []
    args = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-fno-wrapv", "-g1", "-O0"]
    return [*args, "-DGNNSYS_LEAST_THREADS=2"] if "thread" in sanitizers.split(",") else args


def has_cuda() -> bool:
    wanted = os.environ.get("GNNSYS_CUDA", "")
    missing = [] if torch.version.cuda else ["a torch with CUDA"]
    nvcc = Path(CUDA_HOME, "bin", "nvcc") if CUDA_HOME else None  # torch takes a folder for it that may be empty
    missing += [] if nvcc is not None and nvcc.exists() else ["nvcc (set CUDA_HOME)"]
    if wanted == "1" and missing:
        raise SystemExit(f"GNNSYS_CUDA=1, but there is no {' and no '.join(missing)}")
    return wanted != "0" and not missing and not sanitizer_args()


def cuda_extension() -> CUDAExtension:
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")
    host = [a for a in compile_args() if a not in ("-fopenmp", "-DGNNSYS_WRAPPED_NEW", "-Wall")]
    plain = [a for a in host if not a.startswith(("-f", "-g"))]
    through = ",".join(a for a in host if a.startswith("-f"))
    return CUDAExtension(
        "gnnsys._cuda",
        sorted(str(p) for p in Path("csrc/cuda").rglob("*") if p.suffix in (".cu", ".cpp")),
        depends=headers,
        include_dirs=[str(Path("csrc").resolve())],
        define_macros=[("USE_CUDA", None)],  # torch's C shim declares the current stream behind it
        extra_compile_args={"cxx": host, "nvcc": [*plain, "-Xcompiler", through, "--expt-relaxed-constexpr"]},
        extra_link_args=["-ltorch_cpu", "-ltorch_cuda"],
        py_limited_api=True,
    )


class BuildNative(BuildExtension):
    """Compiles csrc/common/precompiled.h before the sources of the CPU library, with the flags that they get.

    A compiler that cannot use the result reads the header itself. Ninja is not told what a precompiled header was made
    from: its folder is named by a hash of that, and so every source is compiled again when any of it changes.
    """

    def build_extension(self, ext: Extension) -> None:
        if ext.name == "gnnsys._C":
            self.precompile(ext)
        super().build_extension(ext)

    def precompile(self, ext: Extension) -> None:
        includes = [f"-I{path}" for path in [*ext.include_dirs, *self.compiler.include_dirs]]
        flags = [*self.compiler.compiler_so[1:], *includes, *ext.extra_compile_args["cxx"]]
        command = [*shlex.split(get_cxx_compiler()), "-x", "c++-header", *flags, f"csrc/{PRECOMPILED}"]
        made_from = hashlib.sha256(f"{command} {torch.__version__}".encode())
        for header in sorted(Path("csrc/common").glob("*.h")):
            made_from.update(header.read_bytes())
        folder = Path(self.build_temp, "precompiled").resolve() / made_from.hexdigest()[:16]
        ext.include_dirs.insert(0, str(folder))  # before csrc, which has the header itself
        ext.extra_compile_args["cxx"] += ["-include", PRECOMPILED]
        compiled = folder / f"{PRECOMPILED}.gch"
        if not compiled.exists():
            compiled.parent.mkdir(parents=True, exist_ok=True)
            part = compiled.with_suffix(f".{os.getpid()}.part")
            if subprocess.run([*command, "-o", str(part)]).returncode == 0:  # else sources read the header itself
                part.rename(compiled)
            for other in folder.parent.iterdir():
                if other != folder:
                    shutil.rmtree(other, ignore_errors=True)


def belongs(path: Path) -> bool:
    """To the CPU library."""
    room = path.relative_to("csrc").parts[0]
    return room != "cuda" and (room != "sanitize" or bool(sanitizer_args()))


sources = sorted(str(p) for p in Path("csrc").glob("**/*.cpp") if belongs(p))
headers = sorted(str(p) for p in Path("csrc").rglob("*") if p.suffix in (".h", ".cuh"))

setup(
    ext_modules=[
        CppExtension(
            "gnnsys._C",
            sources,
            depends=headers,
            include_dirs=[str(Path("csrc").resolve())],
            extra_compile_args={"cxx": compile_args()},
            extra_link_args=link_args(),
            py_limited_api=True,
        ),
        *([cuda_extension()] if has_cuda() else []),
    ],
    cmdclass={"build_ext": BuildNative},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
