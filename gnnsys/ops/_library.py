"""Loads the native core and hands out its ops.

Importing this module registers `torch.ops.gnnsys.*`; every typed function in this room goes through `native`.
"""

from __future__ import annotations

import importlib
import platform
from typing import Any

import torch

try:
    plain: Any = importlib.import_module("gnnsys._C")  # what is called without torch
except ImportError as error:  # pragma: no cover - only on a broken installation
    raise ImportError(
        "gnnsys was imported without its native core (gnnsys._C). Install it with `pip install .` in the repository, "
        f"or `python setup.py build_ext --inplace` for development. The loader said: {error}"
    ) from error

HAS_CUDA_KERNELS = False
WHY_NO_KERNELS = "this torch has no CUDA"
if torch.version.cuda is not None:  # a library with CUDA kernels beside a torch without CUDA is left alone
    try:
        importlib.import_module("gnnsys._cuda")
        HAS_CUDA_KERNELS = True
    except ModuleNotFoundError:  # everything but device="cuda" works
        WHY_NO_KERNELS = "gnnsys was built without nvcc or without a torch that has CUDA: install it again"
    except ImportError as error:
        WHY_NO_KERNELS = f"gnnsys's CUDA kernels cannot be loaded: {error}"

native = torch.ops.gnnsys

_NAMES = {16: "sse2", 32: "avx2", 64: "avx512"} if platform.machine() in ("x86_64", "AMD64") else {16: "neon"}
SIMD_LEVEL = _NAMES[native.simd_bytes()]
"""The vectors of the processor that row kernels use: the widest there are, or what GNNSYS_SIMD says."""
