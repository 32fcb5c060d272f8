"""`gnnsys bench gpu`: kernels, sampling and training on a GPU, beside cuSPARSE, torch, copies and PyG's layers.

A figure in TB/s or GB/s counts the bytes that must be gathered. Kernels are timed by events, what waits for the device
by the clock, everything with cold caches. The graphs are made on the host in seconds.
"""

import torch

from gnnsys.bench.case import Benchmark
from gnnsys.bench.gpu import epoch, fullgraph, parts, rows, samplers, spmm, structure
from gnnsys.ops import HAS_CUDA_KERNELS, WHY_NO_KERNELS

BENCHMARKS: list[Benchmark] = [
    *spmm.BENCHMARKS,
    *structure.BENCHMARKS,
    *samplers.BENCHMARKS,
    *rows.BENCHMARKS,
    *epoch.BENCHMARKS,
    *parts.BENCHMARKS,
    *fullgraph.BENCHMARKS,
]


def check_device() -> None:
    """ValueError where there is nothing to measure."""
    if not torch.cuda.is_available():
        found = f"torch {torch.__version__} finds no CUDA device"
        raise ValueError(f"bench gpu needs a GPU, and {found}: run it on a machine that has one")
    if not HAS_CUDA_KERNELS:
        raise ValueError(f"bench gpu needs gnnsys's CUDA kernels: {WHY_NO_KERNELS}")


__all__ = ["BENCHMARKS", "check_device"]
