"""Power-law graphs: ours beside pymetis in both modes and beside DGL's METIS.

Ours starts from the CSC and has what it needs of its symmetric form inside its time and memory; METIS is handed the
symmetric graph. A row counts only if ours is within 1.05 in nodes and in in-edges; METIS, with its weight of
1 + in-degree, balances only their sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from gnnsys.bench.case import OURS, Case, Versus
from gnnsys.bench.partition.contest import (
    DGL,
    METIS,
    Contest,
    PartitionerFigures,
    cut_share,
    imbalance_of,
    without_isolated,
)
from gnnsys.bench.workload import SEED, Workload
from gnnsys.graph import Graph, rmat

PARTS = 8
ALLOWED = 1.05


def power_law(workload: Workload) -> Iterator[Case]:
    full = workload.sizes.num_nodes
    for num_nodes, turns in ((full // 5, 3), (full, 1)):
        yield from _cases(f"rmat-{num_nodes // 1000}k", num_nodes, workload.sizes.num_edges * num_nodes // full, turns)
    yield from _nodes_only(f"rmat-{full // 5000}k nodes only", full // 5, workload.sizes.num_edges // 5)


def _cases(name: str, num_nodes: int, num_edges: int, turns: int) -> Iterator[Case]:
    graph = cache(lambda: without_isolated(rmat(num_nodes, num_edges, seed=SEED)))
    contest = Contest(graph, (OURS, *METIS, DGL), PARTS, ["edges"], turns=turns)

    def nodes(figures: PartitionerFigures) -> float:
        return imbalance_of(torch.ones(graph().num_nodes()), figures.part, PARTS)

    def in_edges(figures: PartitionerFigures) -> float:
        return imbalance_of(_in_degrees(graph()), figures.part, PARTS)

    def counted(figure: float, figures: PartitionerFigures) -> float:
        if figures.side == OURS and max(nodes(figures), in_edges(figures)) > ALLOWED + 1e-9:
            raise RuntimeError(
                f"ours is not balanced, so nothing counts: {nodes(figures):.3f}, {in_edges(figures):.3f}"
            )
        return figure

    def seconds(figures: PartitionerFigures) -> float:
        return counted(figures.seconds, figures)

    def memory(figures: PartitionerFigures) -> float:
        return counted(figures.peak_bytes / 1e6, figures)

    def cut(figures: PartitionerFigures) -> float:
        return counted(cut_share(graph(), figures.part), figures)

    each = tuple(Versus((side,)) for side in (*METIS, DGL))
    each_mode = tuple(Versus((mode,), 4.0) for mode in METIS)
    yield contest.case(f"{name}/time", "s", seconds, (*each_mode, Versus((DGL,), 1.0)))
    yield contest.case(f"{name}/memory", "MB", memory, (Versus(METIS, 3.0), Versus((DGL,))))
    yield contest.case(f"{name}/cut", "% of edges", cut, (Versus(METIS, 1 / 1.10), Versus((DGL,), 1.0)))
    yield contest.case(f"{name}/balance of nodes", "max/mean", nodes, each)
    yield contest.case(f"{name}/balance of in-edges", "max/mean", in_edges, each)


def _nodes_only(name: str, num_nodes: int, num_edges: int) -> Iterator[Case]:
    """The same with node counts alone to balance: hubs may gather in one part, and cuts are much smaller."""
    graph = cache(lambda: without_isolated(rmat(num_nodes, num_edges, seed=SEED)))
    contest = Contest(graph, (OURS, *METIS, DGL), PARTS, [])

    def cut(figures: PartitionerFigures) -> float:
        return cut_share(graph(), figures.part)

    yield contest.case(f"{name}/cut", "% of edges", cut, (Versus(METIS, 1 / 1.10), Versus((DGL,), 1.0)))
    yield contest.case(f"{name}/time", "s", lambda f: f.seconds, (Versus(METIS), Versus((DGL,))))


def _in_degrees(graph: Graph) -> Tensor:
    return graph.csc().in_degrees()
