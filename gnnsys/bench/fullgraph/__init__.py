"""`gnnsys bench fullgraph`: full-graph training across hosts of the lab, schedule by schedule and beside its bounds.

Needs root, and minutes. `--cache` keeps graph and parts for other runs.
"""

from gnnsys.bench.fullgraph.cases import BENCHMARKS

__all__ = ["BENCHMARKS"]
