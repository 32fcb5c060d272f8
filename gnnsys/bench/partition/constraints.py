"""Many constraints at once: clustered train nodes and three node types, where one weight per node cannot do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from gnnsys.bench.case import OURS, Case, Side, Versus
from gnnsys.bench.partition.contest import METIS, Contest, PartitionerFigures, cut_share, imbalance_of
from gnnsys.bench.workload import FULL, Workload
from gnnsys.graph import Graph, typed_graph
from gnnsys.partition import constraints_of

PARTS = 8
BALANCE = ["train", "edges", "ntype"]


def clustered_and_typed(workload: Workload) -> Iterator[Case]:
    """Communities to choose from, a quarter of which is to be trained on: METIS puts them together as it pleases.

    With as many communities as parts there is nothing to choose: each train community must be torn into eight, and what
    that costs in cut is shown without a target.
    """
    num_papers = 40_000 if workload.sizes.num_nodes >= FULL.num_nodes else 3200
    yield from _cases("clustered train, 3 types", num_papers, 32)
    yield from _cases("train communities torn", num_papers, 8)


def _cases(name: str, num_papers: int, num_classes: int) -> Iterator[Case]:
    graph = cache(lambda: clustered(num_papers, num_classes))
    contest = Contest(graph, (OURS, *METIS), PARTS, BALANCE)

    def worst(figures: PartitionerFigures) -> float:
        constraints = constraints_of(graph(), BALANCE)
        return max(imbalance_of(column, figures.part, PARTS) for column in constraints.weights.T)

    def cut(figures: PartitionerFigures) -> float:
        return cut_share(graph(), figures.part)

    promised = num_classes > PARTS
    yield contest.case(f"{name}/worst balance", "max/mean", worst, (Versus(METIS),))
    yield within(contest.case(f"{name}/within 1.05", "max/mean", worst, ()), 1.05)
    yield contest.case(f"{name}/cut", "% of edges", cut, (Versus(METIS, 1 / 1.15 if promised else None),))


def clustered(num_papers: int, num_classes: int) -> Graph:
    """Papers, authors and institutions; the papers of the first quarter of the classes are the ones to train on."""
    graph = typed_graph(num_papers, num_features=1, num_classes=num_classes)
    graph.set_node_data("train_mask", graph.node_data["paper"]["y"] < num_classes // 4, "paper")
    return graph


def within(case: Case, bound: float) -> Case:
    """The same figure beside a fixed bound: a promise without a peer."""
    sides = case.sides
    return replace(case, sides=lambda: {**sides(), "bound": Side(lambda: bound)}, versus=(Versus(("bound",), 1.0),))
