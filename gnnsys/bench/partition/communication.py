"""The communication objective beside METIS's own (objective volume): rows in all, and the busiest part to the mean.

A part's load is the larger of the rows it sends and receives per layer. METIS minimises the sum; nothing evens it out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import torch

from gnnsys.bench.case import Case, Versus
from gnnsys.bench.partition.constraints import within
from gnnsys.bench.partition.contest import (
    COMMUNICATION,
    VOLUME,
    Contest,
    PartitionerFigures,
    imbalance_of,
    without_isolated,
)
from gnnsys.bench.partition.inputs import flat_edges
from gnnsys.bench.workload import FULL, SEED, Workload
from gnnsys.graph import Graph, available_datasets, dataset, rmat
from gnnsys.partition import CommunicationVolume, communication_volume, flat_csc

PARTS = 8
REAL = ("web_google", "npm_deps_2016", "coauthor_cs", "pubmed", "amazon_computers")


def communication(workload: Workload) -> Iterator[Case]:
    num_nodes, num_edges = workload.sizes.num_nodes // 5, workload.sizes.num_edges // 5
    yield from _cases(
        f"rows, rmat-{num_nodes // 1000}k", lambda: without_isolated(rmat(num_nodes, num_edges, seed=SEED))
    )
    if workload.sizes.num_nodes >= FULL.num_nodes:
        for name in REAL:
            if name in available_datasets():
                yield from _cases(f"rows, {name}", lambda name=name: _structure(dataset(name)))  # type: ignore[misc]


def _cases(name: str, make: Callable[[], Graph]) -> Iterator[Case]:
    graph = cache(make)
    contest = Contest(graph, (COMMUNICATION, VOLUME), PARTS, ["edges"])

    def volume(figures: PartitionerFigures) -> CommunicationVolume:
        return communication_volume(flat_csc(graph()), figures.part.int(), PARTS)

    def rows(figures: PartitionerFigures) -> float:
        return float(volume(figures).total)

    def busiest(figures: PartitionerFigures) -> float:
        return volume(figures).imbalance

    def worst(figures: PartitionerFigures) -> float:
        _, dst = flat_edges(graph())
        in_edges = torch.bincount(dst, minlength=figures.part.numel())
        weights = (torch.ones(figures.part.numel()), in_edges)
        return max(imbalance_of(weight, figures.part, PARTS) for weight in weights)

    def case(what: str, unit: str, read: Callable[[PartitionerFigures], float], versus: tuple[Versus, ...]) -> Case:
        return contest.case(f"{name}/{what}", unit, read, versus, ours=COMMUNICATION)

    yield case("in all", "rows", rows, (Versus((VOLUME,), 1 / 1.05),))
    yield case("busiest part", "max/mean", busiest, (Versus((VOLUME,)),))
    yield within(case("busiest within 1.02", "max/mean", busiest, ()), 1.02)
    yield within(case("nodes and in-edges within 1.05", "max/mean", worst, ()), 1.05)
    yield case("time", "s", lambda figures: figures.seconds, (Versus((VOLUME,)),))


def _structure(graph: Graph) -> Graph:
    """Without features: a partitioner has no use for them."""
    return Graph({t: graph.num_nodes(t) for t in graph.node_types}, {t: graph.csc(t) for t in graph.edge_types})
