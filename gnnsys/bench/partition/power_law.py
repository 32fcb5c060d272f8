"""Power-law graphs: ours beside pymetis in both modes and beside DGL's METIS.

Ours starts from the CSC and has what it needs of its symmetric form inside its time and memory; METIS is handed the
symmetric graph. A row counts only if ours is within 1.05 in nodes and in in-edges; METIS, with its weight of
1 + in-degree, balances only their sum.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gnnsys.bench import peers
from gnnsys.bench.case import OURS, Case, Versus
from gnnsys.bench.partition.contest import (
    Contest,
    Figures,
    MetisInput,
    Partitioner,
    cut_share,
    dgl_graph,
    flat_edges,
    imbalance_of,
    without_isolated,
)
from gnnsys.bench.workload import SEED, Workload
from gnnsys.graph import Graph, rmat
from gnnsys.partition import Options, assign_parts

PARTS = 8
METIS = ("pymetis recursive", "pymetis k-way")
DGL = "dgl"
ALLOWED = 1.05


def power_law(workload: Workload) -> Iterator[Case]:
    full = workload.sizes.num_nodes
    for num_nodes, turns in ((full // 5, 3), (full, 1)):
        yield from _cases(f"rmat-{num_nodes // 1000}k", num_nodes, workload.sizes.num_edges * num_nodes // full, turns)
    yield from _nodes_only(f"rmat-{full // 5000}k nodes only", full // 5, workload.sizes.num_edges // 5)


def _cases(name: str, num_nodes: int, num_edges: int, turns: int) -> Iterator[Case]:
    graph = _Lazy(num_nodes, num_edges)
    missing = _missing()
    contest = Contest(lambda: _sides(graph.get(), missing, ["edges"]), turns=turns)

    def counted(read: float, figures: Figures) -> float:
        csc = graph.get().csc()
        nodes = imbalance_of(torch.ones(csc.num_dst), figures.part, PARTS)
        edges = imbalance_of(csc.in_degrees(), figures.part, PARTS)
        if figures is contest.figures(OURS) and max(nodes, edges) > ALLOWED + 1e-9:
            raise RuntimeError(f"ours is not balanced, so nothing counts: nodes {nodes:.3f}, in-edges {edges:.3f}")
        return read

    metis, dgl = Versus(METIS, 4.0), Versus((DGL,), 1.0)
    yield contest.case(f"{name}/time", "s", lambda f: counted(f.seconds, f), (metis, dgl), missing)
    yield contest.case(
        f"{name}/memory", "MB", lambda f: counted(f.peak_bytes / 1e6, f), (Versus(METIS, 3.0), Versus((DGL,))), missing
    )
    cut = (Versus(METIS, 1 / 1.10), Versus((DGL,), 1.0))
    yield contest.case(f"{name}/cut", "% of edges", lambda f: counted(cut_share(graph.get(), f.part), f), cut, missing)
    for label, weight in (("nodes", lambda csc: torch.ones(csc.num_dst)), ("in-edges", lambda csc: csc.in_degrees())):
        yield contest.case(
            f"{name}/balance of {label}",
            "heaviest/mean",
            lambda f, weight=weight: imbalance_of(weight(graph.get().csc()), f.part, PARTS),  # type: ignore[misc]
            (*(Versus((m,)) for m in METIS), Versus((DGL,))),
            missing,
        )


def _nodes_only(name: str, num_nodes: int, num_edges: int) -> Iterator[Case]:
    """The same with node counts alone to balance: hubs may gather in one part, and cuts are much smaller."""
    graph = _Lazy(num_nodes, num_edges)
    missing = _missing()
    contest = Contest(lambda: _sides(graph.get(), missing, []))
    versus = (Versus(METIS, 1 / 1.10), Versus((DGL,), 1.0))
    yield contest.case(f"{name}/cut", "% of edges", lambda f: cut_share(graph.get(), f.part), versus, missing)
    yield contest.case(f"{name}/time", "s", lambda f: f.seconds, (Versus(METIS), Versus((DGL,))), missing)


def _sides(graph: Graph, missing: dict[str, str], balance: list[str]) -> dict[str, Partitioner]:
    csc = graph.csc()
    sides: dict[str, Partitioner] = {OURS: lambda: _ours(graph, balance)}
    if METIS[0] not in missing:
        given = MetisInput.of_edges(*flat_edges(graph), csc.num_dst)
        weight = 1 + csc.in_degrees() if balance else None
        sides[METIS[0]] = lambda: given.partition(PARTS, weight, recursive=True)
        sides[METIS[1]] = lambda: given.partition(PARTS, weight, recursive=False)
    if DGL not in missing:
        import dgl

        theirs = dgl_graph(graph)
        sides[DGL] = lambda: dgl.partition.metis_partition_assignment(theirs, PARTS, balance_edges=bool(balance))
    return sides


def _ours(graph: Graph, balance: list[str]) -> Tensor:
    return assign_parts(graph, PARTS, options=Options(balance=balance)).assignment.subpart["node"]


def _missing() -> dict[str, str]:
    found = peers.missing("pymetis", "dgl")
    return {
        side: found[peer]
        for side, peer in ((METIS[0], "pymetis"), (METIS[1], "pymetis"), (DGL, "dgl"))
        if peer in found
    }


class _Lazy:
    """An RMAT graph without isolated nodes, made when first asked for."""

    def __init__(self, num_nodes: int, num_edges: int) -> None:
        self._size = (num_nodes, num_edges)
        self._graph: Graph | None = None

    def get(self) -> Graph:
        if self._graph is None:
            self._graph = without_isolated(rmat(*self._size, seed=SEED))
        return self._graph
