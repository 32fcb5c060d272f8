"""CoGNN's five queues of twenty jobs each (V-A.2), in the published order, and what its Table V says of them.

A job is a kind of model, a graph of Table IV by its letters, and a number of layers: `GCN:OV10`.
"""

from __future__ import annotations

import random
import re
from typing import NamedTuple

from gnnsys.bench.jobs.table_four import GRAPHS, GraphSize

KINDS = {"GCN": "GCN", "SAGE": "GraphSAGE", "GAT": "GAT", "GIN": "GIN"}  # as the paper calls them: our and PyG's names
PUBLISHED_ORDERS = {
    "GCN": "OV10 YS10 CR10 PB6 PB8 CR8 CT10 PR4 CT6 SB10 PB4 PB10 CR4 CR6 PR8 CT8 DD10 PR6 PR10 CT4",
    "SAGE": "OV10 YS10 CR7 PR10 CR10 CT10 PR9 CT8 SB10 CT9 PB8 CR8 PR8 PB7 CT7 PR7 DD10 CR9 PB9 PB10",
    "GAT": "AM8 TW10 PB4 PB10 PR8 PB6 CR4 CR8 SB10 CT6 PR10 CT8 PR9 CT4 PB8 CT10 PR7 CR6 DD10 CR10",
    "GIN": "OV8 TW10 CR8 PB10 PR8 CR6 CT8 SB10 CT4 PR10 PR6 CT10 CR7 AT10 CT6 CT9 PR7 PB8 CR9 CT7",
    "Mix": "GAT:AM8 GCN:OV10 GCN:CT4 GAT:PB6 GCN:CR6 SAGE:CT8 GAT:CR4 GAT:CR8 GCN:SB10 GCN:CT6 GCN:PB6 GAT:PR8 "
    "GIN:CT10 SAGE:PB10 GAT:PR6 GCN:CR8 GCN:PR8 GIN:CR10 GAT:DD10 GAT:PB4",
}
NUM_RANDOM_ORDERS = 5
_JOB = re.compile(r"(?:(?P<kind>[A-Z]+):)?(?P<graph>[A-Z]{2})(?P<layers>\d+)")


class QueuedTask(NamedTuple):
    """A job of a queue."""

    kind: str
    graph: str
    layers: int

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.graph}{self.layers}"

    @property
    def size(self) -> GraphSize:
        return GRAPHS[self.graph]


class MethodFigures(NamedTuple):
    """What Table V says of a method, in minutes on a V100, by queue."""

    makespan: dict[str, float]
    completion: dict[str, float]
    queueing: dict[str, float]


def _minutes(*figures: tuple[float, ...]) -> MethodFigures:
    return MethodFigures(*(dict(zip(PUBLISHED_ORDERS, each, strict=True)) for each in figures))


TABLE_FIVE = {
    "Default": _minutes(
        (12.14, 11.57, 18.40, 19.10, 15.02),
        (7.47, 7.04, 10.47, 14.20, 8.86),
        (6.86, 6.46, 9.55, 13.25, 8.11),
    ),
    "MPS": _minutes(
        (4.26, 10.55, 44.00, 23.12, 44.69),
        (3.27, 8.05, 39.47, 20.24, 40.96),
        (2.89, 7.02, 35.21, 18.21, 36.74),
    ),
    "PipeSwitch": _minutes(
        (3.54, 3.53, 7.02, 11.67, 6.07),
        (2.89, 2.87, 4.93, 10.56, 4.34),
        (2.71, 2.69, 4.58, 9.97, 4.04),
    ),
    "Base": _minutes(
        (3.41, 3.40, 6.54, 11.85, 6.04),
        (2.81, 2.78, 4.52, 10.56, 4.17),
        (2.62, 2.59, 4.13, 9.92, 3.83),
    ),
    "LMCF": _minutes(
        (3.43, 3.45, 6.88, 11.55, 5.65),
        (0.56, 0.57, 1.86, 1.33, 1.15),
        (0.34, 0.35, 1.38, 0.67, 0.80),
    ),
    "BMC": _minutes(
        (3.47, 3.29, 6.40, 13.76, 5.46),
        (2.86, 2.73, 4.62, 11.38, 4.33),
        (2.67, 2.54, 4.24, 10.67, 4.01),
    ),
}


def published(queue: str) -> list[QueuedTask]:
    """The jobs of a queue, in the authors' order."""
    tasks = []
    for word in PUBLISHED_ORDERS[queue].split():
        found = _JOB.fullmatch(word)
        assert found is not None, word
        tasks.append(QueuedTask(found["kind"] or queue, found["graph"], int(found["layers"])))
    return tasks


def random_orders(queue: str, count: int = NUM_RANDOM_ORDERS) -> list[list[QueuedTask]]:
    """The same jobs shuffled, the same way every time."""
    orders = []
    for seed in range(count):
        tasks = published(queue)
        random.Random(seed).shuffle(tasks)
        orders.append(tasks)
    return orders
