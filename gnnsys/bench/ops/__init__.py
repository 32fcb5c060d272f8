"""`gnnsys bench ops`: the native core, op by op, beside torch, PyG's scatter path, DGL and torch-sparse."""

from gnnsys.bench.case import Benchmark
from gnnsys.bench.ops import attention, rows, spmm, structure

BENCHMARKS: list[Benchmark] = [
    spmm.forward,
    spmm.backward,
    spmm.beside_scatter,
    spmm.memory,
    attention.sddmm,
    attention.edge_softmax,
    attention.gat,
    rows.gather,
    structure.sample,
    structure.compact,
    structure.coo_to_csc,
]

__all__ = ["BENCHMARKS"]
