"""`gnnsys bench flows`: what order brings on slow links, beside fifo. On hosts of the lab, so it needs root."""

from gnnsys.bench.case import Benchmark
from gnnsys.bench.flows import urgent

BENCHMARKS: list[Benchmark] = [urgent.urgent_behind_bulk]

__all__ = ["BENCHMARKS"]
