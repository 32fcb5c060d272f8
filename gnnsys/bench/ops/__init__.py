"""`gnnsys bench ops`: the native core, op by op, beside torch, PyG's scatter path, DGL and torch-sparse."""

from gnnsys.bench.case import Benchmark
from gnnsys.bench.ops import attention, beside_work, rows, spmm, structure

BENCHMARKS: list[Benchmark] = [
    *spmm.BENCHMARKS,
    *attention.BENCHMARKS,
    *rows.BENCHMARKS,
    *structure.BENCHMARKS,
    *beside_work.BENCHMARKS,
]

__all__ = ["BENCHMARKS"]
