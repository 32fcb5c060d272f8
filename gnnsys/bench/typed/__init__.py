"""`gnnsys bench typed`: layers of typed graphs beside PyG's, forward and backward, what they hold in memory, and an
epoch of RGCN on a graph like MAG beside DGL's.

With a GPU the layers' cases run there as well.
"""

from gnnsys.bench.case import Benchmark
from gnnsys.bench.typed import epoch, layers

BENCHMARKS: list[Benchmark] = [*layers.BENCHMARKS, *epoch.BENCHMARKS]

__all__ = ["BENCHMARKS"]
