"""Builds the native core, csrc/, into `gnnsys._C`: one abi3 library against libtorch's stable ABI.

Everything declarative lives in pyproject.toml; only the extension is described here. Built once, the library loads
into every torch from 2.10 on and every CPython from 3.10 on.
"""

import os
import sys
from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

TORCH_2_10 = "0x020a000000000000"
PYTHON_3_10 = "0x030A0000"


def compile_args() -> list[str]:
    args = [
        "-O3",
        "-std=c++17",
        "-Wall",
        "-fvisibility=hidden",
        "-ffp-contract=off",  # weighted draws must round the same on every machine
        f"-DTORCH_TARGET_VERSION={TORCH_2_10}",
        f"-DPy_LIMITED_API={PYTHON_3_10}",
    ]
    if sys.platform != "darwin":
        args.append("-fopenmp")
    return args + sanitizer_args()


def link_args() -> list[str]:
    args = ["-ltorch_cpu"]
    if sys.platform != "darwin":
        args.append("-fopenmp")
    return args + sanitizer_args()


def sanitizer_args() -> list[str]:
    """For `make sanitize` (docs/native.md), which builds into a folder of its own."""
    sanitizers = os.environ.get("GNNSYS_SANITIZE")
    if not sanitizers:
        return []
    args = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-fno-wrapv", "-g1", "-O0"]
    return [*args, "-DGNNSYS_STD_THREADS"] if "thread" in sanitizers.split(",") else args


sources = sorted(str(p) for p in Path("csrc").glob("**/*.cpp") if p.parent.name != "sanitize" or sanitizer_args())
headers = sorted(str(p) for p in Path("csrc").glob("**/*.h"))

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
        )
    ],
    cmdclass={"build_ext": BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
