"""`gnnsys bench jobs`: the memory of training jobs, as it is estimated before they run and as they take it.

On a machine with a GPU jobs run there and torch's counters are read; else they run on the CPU.
"""

from gnnsys.bench.case import Benchmark
from gnnsys.bench.jobs import estimates

BENCHMARKS: list[Benchmark] = [*estimates.BENCHMARKS]

__all__ = ["BENCHMARKS"]
