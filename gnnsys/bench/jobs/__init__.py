"""`gnnsys bench jobs`: the memory of training jobs, as it is estimated before they run and as they take it; and queues
of jobs under the policies that order them.

On a machine with a GPU jobs run there and torch's counters are read; else they run on the CPU.
"""

from gnnsys.bench.case import Benchmark
from gnnsys.bench.jobs import batches, estimate_times, estimates, queues, replays, sweep

BENCHMARKS: list[Benchmark] = [
    *estimates.BENCHMARKS,
    *estimate_times.BENCHMARKS,
    *batches.BENCHMARKS,
    *replays.BENCHMARKS,
    *queues.BENCHMARKS,
    *sweep.BENCHMARKS,
]

__all__ = ["BENCHMARKS"]
