"""`gnnsys bench samplers`: what each sampler costs in time and in remote rows, and what a model learns from it.

`dgl/...` times every sampler that DGL has as well beside DGL's, `draws/...` LABOR and guided draws beside uniform ones.
`planted/...` trains on a planted graph in parts: bytes of remote rows by `remote`, test accuracy by `accuracy`, both
beside uniform draws.
"""

from gnnsys.bench.samplers.beside_dgl import beside_dgl
from gnnsys.bench.samplers.draws import guided_draws, labor_draws
from gnnsys.bench.samplers.planted import planted

BENCHMARKS = [beside_dgl, labor_draws, guided_draws, planted]

__all__ = ["BENCHMARKS"]
