"""`gnnsys bench dist`: training across hosts of the lab, beside its bounds and DistDGL on the same graph and model.

Needs root, and minutes: a job per kind of parts, several phases in each. `--cache` keeps graph and parts for other runs.
"""

from gnnsys.bench.dist.cases import BENCHMARKS

__all__ = ["BENCHMARKS"]
