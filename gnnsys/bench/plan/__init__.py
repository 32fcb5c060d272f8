"""`gnnsys bench plan`: epochs that are predicted, and placements that are chosen by them (DGTP)."""

from gnnsys.bench.case import Benchmark
from gnnsys.bench.plan import paper_rows, searches

BENCHMARKS: list[Benchmark] = [benchmark for rows in (paper_rows, searches) for benchmark in rows.BENCHMARKS]

__all__ = ["BENCHMARKS"]
