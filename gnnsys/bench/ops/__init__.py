"""`gnnsys bench ops`: the native core, op by op, beside torch, PyG's scatter path, DGL and torch-sparse."""

from gnnsys.bench.case import Benchmark
from gnnsys.bench.ops import attention, rows, spmm, structure

BENCHMARKS: list[Benchmark] = [
    *spmm.BENCHMARKS,
    *attention.BENCHMARKS,
    *rows.BENCHMARKS,
    *structure.BENCHMARKS,
]

__all__ = ["BENCHMARKS"]
