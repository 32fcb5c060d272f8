"""`gnnsys bench links`: ranks of links among all entities, at the size of FB15k-237's test, beside a plain loop.

`lab/...` is what negatives of each kind cost on two hosts of the lab, beside uniform ones (needs root).
"""

from gnnsys.bench.case import Benchmark
from gnnsys.bench.links import ranking
from gnnsys.bench.links.lab import lab

BENCHMARKS: list[Benchmark] = [*ranking.BENCHMARKS, lab]

__all__ = ["BENCHMARKS"]
