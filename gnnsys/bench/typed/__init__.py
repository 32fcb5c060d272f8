"""`gnnsys bench typed`: layers of typed graphs beside PyG's, forward and backward, what they hold in memory, and an
epoch of RGCN on a graph like MAG beside DGL's.

With a GPU the layers' cases run there as well. `embeddings/...` are rows that are trained where they live, on two hosts
of the lab, beside DistDGL's (needs root). `lab/...` is such a step beside features that are prefetched over slow links,
and what the network alone needs for it (needs root).
"""

from gnnsys.bench.case import Benchmark
from gnnsys.bench.typed import beside_features, embeddings, epoch, layers

BENCHMARKS: list[Benchmark] = [
    *layers.BENCHMARKS, *epoch.BENCHMARKS, *embeddings.BENCHMARKS, beside_features.beside_features,
]  # fmt: skip

__all__ = ["BENCHMARKS"]
