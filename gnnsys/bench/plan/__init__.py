"""`gnnsys bench plan`: jobs that are simulated before they run, and placements that are chosen by it.

`simulator` has the engine's speed, `theory` what the paper proves, on random jobs, `policies` the ways to share links
beside each other, `planted` bottlenecks that must be named; `paper_rows` placements on the paper's clusters, `searches`
what finds them and how long it takes.
"""

from gnnsys.bench.case import Benchmark
from gnnsys.bench.plan import paper_rows, planted, policies, searches, simulator, theory

BENCHMARKS: list[Benchmark] = [
    benchmark for rows in (simulator, theory, policies, planted, paper_rows, searches) for benchmark in rows.BENCHMARKS
]

__all__ = ["BENCHMARKS"]
