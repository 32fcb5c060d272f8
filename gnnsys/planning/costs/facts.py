"""What this machine is: the names that a profile is kept by, and the sizes of its caches."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
from functools import cache
from pathlib import Path

import torch

from gnnsys.observe import num_usable_cores
from gnnsys.ops import HAS_CUDA_KERNELS, SIMD_LEVEL, WHY_NO_KERNELS
from gnnsys.planning.costs.operators import CostContext
from gnnsys.planning.costs.profile import ProfiledMachine

_CPUS = Path("/sys/devices/system/cpu")
_PACKAGE = Path(__file__).parents[2]
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def gpu_of(device: torch.device | None) -> torch.device | None:
    """A GPU with its number; None for the host. ValueError where our kernels cannot run on it."""
    if device is None or device.type != "cuda":
        return None
    if not HAS_CUDA_KERNELS:
        raise ValueError(f"profiling {device} needs CUDA kernels; {WHY_NO_KERNELS}. Or leave device away")
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


def facts_of(device: torch.device | None, threads: int) -> ProfiledMachine:
    """Of this machine with one GPU, or without."""
    gpu = "" if device is None else torch.cuda.get_device_name(device)
    return ProfiledMachine(
        processor=_processor(),
        cores=num_usable_cores(),
        threads=threads,
        gpu=gpu,
        driver="" if device is None else _driver(),
        torch=torch.__version__,
        build=_build(),
    )


def context_of(device: torch.device | None, threads: int) -> CostContext:
    """Sizes of caches: the system's word for it, and a common one where it has none."""
    common = CostContext()
    core, last = _host_caches()
    gpu = None if device is None else torch.cuda.get_device_properties(device)
    return CostContext(
        threads=threads,
        core_cache=core or common.core_cache,
        last_cache=last or common.last_cache,
        device_cache=common.device_cache if gpu is None else int(gpu.L2_cache_size),
        multiprocessors=1 if gpu is None else int(gpu.multi_processor_count),
        vector_bytes={"avx2": 32, "avx512": 64}.get(SIMD_LEVEL, common.vector_bytes),
    )


def _host_caches(cpus: Path = _CPUS) -> tuple[int, int]:
    """Bytes of one core's own largest cache, and of all last caches of the cores that this process may use."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    own, shared = 0, {}
    for number in usable:
        levels = {}
        for index in (cpus / f"cpu{number}" / "cache").glob("index*"):
            try:
                kind, level = _word(index / "type"), int(_word(index / "level"))
                size, users = _word(index / "size"), _word(index / "shared_cpu_list")
            except (OSError, ValueError):
                continue
            if kind != "Instruction" and size[-1:] in _UNITS:
                levels[level] = (int(size[:-1]) * _UNITS[size[-1]], users)
        if levels:
            last = max(levels)
            shared[last, levels[last][1]] = levels[last][0]
            own = max(own, *(levels[level][0] for level in levels if level < last or last == min(levels)))
    return own, sum(shared.values())


def _word(path: Path) -> str:
    return path.read_text(encoding="ascii").strip()


@cache
def _processor() -> str:
    """The kernel's word for it; on Arm, where it has none, implementer and part."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    found = dict(re.findall(r"^(model name|CPU implementer|CPU part)\s*:\s*(.+?)\s*$", text, re.MULTILINE))
    if "model name" in found:
        return found["model name"]
    return f"{platform.machine()} {found.get('CPU implementer', '')} {found.get('CPU part', '')}".strip()


def _driver() -> str:
    """The kernel module's version; else the newest CUDA that the driver knows."""
    try:
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", _word(Path("/proc/driver/nvidia/version")))
        if found:
            return found[0]
    except OSError:
        pass
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return "unknown"
    return f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"


@cache
def _build() -> str:
    """Of our own native code: its vectors, whether there are CUDA kernels, and what the libraries are."""
    told = hashlib.sha256()
    for library in sorted((*_PACKAGE.glob("_C*"), *_PACKAGE.glob("_cuda*"))):
        told.update(library.name.encode())
        told.update(library.read_bytes())
    return f"{SIMD_LEVEL}{'+cuda' if HAS_CUDA_KERNELS else ''}-{told.hexdigest()[:12]}"
