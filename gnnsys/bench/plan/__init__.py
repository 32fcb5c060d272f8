"""`gnnsys bench plan`: jobs that are simulated before they run, and placements that are chosen by it.

`simulator` has the engine's speed, `theory` what the paper proves, on random jobs, `policies` the ways to share links
beside each other, `planted` bottlenecks that must be named; `paper_rows` placements on the paper's clusters, `searches`
what finds them and how long it takes; `on_paper` clusters that are not here; `lab` epochs that were predicted, beside
runs on the lab, `lab_dist` those of `gnnsys bench dist`, `lab_samplers` trainers whose batches others make; `pacing`
paced replies beside plain TCP there.
"""

from gnnsys.bench.case import Benchmark
from gnnsys.bench.plan import (
    lab,
    lab_dist,
    lab_samplers,
    on_paper,
    pacing,
    paper_rows,
    planted,
    policies,
    searches,
    simulator,
    theory,
)

_SIMULATED = (simulator, theory, policies, planted, paper_rows, searches, on_paper)
BENCHMARKS: list[Benchmark] = [
    benchmark for rows in (*_SIMULATED, lab, lab_dist, lab_samplers, pacing) for benchmark in rows.BENCHMARKS
]

__all__ = ["BENCHMARKS"]
