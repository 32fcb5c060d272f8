"""Sizes of batches of a graph that is only described: so many nodes and edges, the latter between any two nodes.

Real graphs have nodes that many edges begin at. Their batches meet them again and again, and have fewer rows than this
says: sample a few where there is a graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from gnnsys.planning.execution.rules import BatchSizes


def expected_sizes(num_nodes: float, num_edges: float, fanouts: Sequence[int], batch_size: int) -> BatchSizes:
    """A batch of `batch_size` seeds. A fanout of -1 takes all in-edges.

    >>> round(expected_sizes(2_449_029, 123_718_280, [15, 10, 5], 1024).layers[0].sources, -4)
    760000.0
    """
    if not (num_nodes >= 1 and num_edges >= 0 and fanouts and batch_size >= 1):
        raise ValueError("a batch needs nodes, fanouts and seeds")
    degree = num_edges / num_nodes
    seeds = float(min(batch_size, num_nodes))
    nodes, edges, known = [seeds], [], seeds
    for fanout in fanouts:
        drawn = nodes[-1] * _drawn(degree, fanout)
        new = (num_nodes - known) * -math.expm1(-drawn / num_nodes)
        nodes.append(new)
        edges.append(drawn)
        known += new
    return replace(BatchSizes.of_hops(nodes, edges), num_nodes=num_nodes)


def _drawn(degree: float, fanout: int) -> float:
    """The mean of min(fanout, d) for in-degrees d of random edges (Poisson): the sum over j < fanout of P(d > j)."""
    if fanout < 0:
        return degree
    above, probability, total = 1.0, math.exp(-degree), 0.0
    for j in range(fanout):
        above -= probability
        total += max(0.0, above)
        probability *= degree / (j + 1)
    return total
