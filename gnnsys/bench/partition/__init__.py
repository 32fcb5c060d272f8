"""`gnnsys bench partition`: cut, time and memory beside METIS and DGL, balance, communication, storage and steps."""

from gnnsys.bench.partition.communication import communication
from gnnsys.bench.partition.constraints import clustered_and_typed
from gnnsys.bench.partition.power_law import power_law
from gnnsys.bench.partition.real import real_graphs
from gnnsys.bench.partition.steps import steps

BENCHMARKS = [power_law, real_graphs, clustered_and_typed, communication, steps]

__all__ = ["BENCHMARKS"]
