"""`gnnsys bench execution`: what plans are worth, beside what is done without them.

`loading`, `bus` and `products` have loaders of one graph, `workloads` many graphs and models, `table4` the table of the
paper; `fullgraph` whole graphs; `costs` and `schedules` what is predicted; `refill` what a cache refilled for groups
would spare; `shuffle` what adaptive shuffling learns.
"""

from gnnsys.bench.case import Benchmark
from gnnsys.bench.execution import (
    bus,
    costs,
    fullgraph,
    loading,
    products,
    refill,
    schedules,
    shuffle,
    table4,
    workloads,
)

BENCHMARKS: list[Benchmark] = [
    benchmark
    for rows in (loading, bus, products, costs, fullgraph, schedules, refill, shuffle, table4, workloads)
    for benchmark in rows.BENCHMARKS
]

__all__ = ["BENCHMARKS"]
