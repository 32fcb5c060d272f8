"""`gnnsys bench samplers`: what each sampler costs in time and in remote rows, and what a model learns from it.

`dgl/...` times every sampler that DGL has as well beside DGL's, `draws/...` LABOR and guided draws beside uniform ones,
`wire/...` counts what LADIES' structure costs between machines.

`planted/...` trains on a planted graph in parts: bytes of remote rows by `remote`, test accuracy by `accuracy`, both
beside uniform draws. `wide ...` is DGS with columns on 512 of them; `classes/...` and `rich/...` are the same on graphs
whose other parts say less and more, `graph/...` and `tuning/...` what was made and chosen before. `sweep ...` is what
parameters do, `real ...` real graphs, and `lab/...` hosts of the lab, by the kernel's counters (needs root).
`explaining/...` is what explaining costs on one machine whose cores are not all in use.
`python -m gnnsys.bench.samplers.curve ROWS.json OUT.svg` draws bytes against accuracy.
"""

from gnnsys.bench.samplers.beside_dgl import beside_dgl
from gnnsys.bench.samplers.draws import guided_draws, labor_draws
from gnnsys.bench.samplers.explaining import explaining
from gnnsys.bench.samplers.lab import lab
from gnnsys.bench.samplers.layer_wise import layer_wise
from gnnsys.bench.samplers.planted import planted
from gnnsys.bench.samplers.real import real
from gnnsys.bench.samplers.wide import graphs, sweeps, wide

BENCHMARKS = [beside_dgl, labor_draws, guided_draws, layer_wise, planted, wide, graphs, sweeps, real, explaining, lab]

__all__ = ["BENCHMARKS"]
