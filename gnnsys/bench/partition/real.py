"""Real graphs: the cut beside METIS's at the balance METIS reached, and at 1.05 in nodes and in-edges.

For the first, ours gets METIS's single weight, 1 + in-degree, and may not load a part more than METIS did in the mode
with the smaller cut. The second asks for more than METIS gave, and informs. Where METIS cannot run, the first
allows 1.05 of that weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from gnnsys.bench import peers
from gnnsys.bench.case import OURS, Case, Side, Versus, value
from gnnsys.bench.partition.contest import cut_share
from gnnsys.bench.partition.inputs import flat_edges, metis_arrays, run_metis
from gnnsys.bench.workload import FULL, Workload
from gnnsys.graph import Graph, available_datasets, dataset
from gnnsys.ops import degrees
from gnnsys.partition import Constraints, constraints_of, finest_level, multilevel_assignment

PARTS = 8
GRAPHS = (
    "cora",
    "pubmed",
    "amazon_computers",
    "coauthor_cs",
    "tolokers",
    "aifb",
    "dblp_hetero",
    "fb15k237",
    "npm_deps_2016",
    "web_google",
)
METIS = "pymetis, better mode"


def real_graphs(workload: Workload) -> Iterator[Case]:
    names = GRAPHS if workload.sizes.num_nodes >= FULL.num_nodes else GRAPHS[:1]
    missing = dict.fromkeys((METIS,), peers.missing("pymetis")["pymetis"]) if peers.missing("pymetis") else {}
    for name in names:
        if name in available_datasets():
            contest = _Contest(name)
            versus = (Versus((METIS,), 1 / 1.05),)
            yield _case(f"{name}/cut at METIS's balance", contest.at_its_balance, contest, versus, missing)
            yield _case(f"{name}/cut at 1.05 twice", contest.at_both, contest, (Versus((METIS,)),), missing)


def _case(
    name: str, ours: Callable[[], float], contest: _Contest, versus: tuple[Versus, ...], missing: dict[str, str]
) -> Case:
    def sides() -> dict[str, Side]:
        return {OURS: Side(ours)} | ({} if missing else {METIS: Side(lambda: contest.metis[0], foreign=True)})

    return Case(name, value("% of edges"), sides, versus, repeats=1, missing=missing)


class _Contest:
    """One graph and METIS's partition of it, made when first asked for."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._made: tuple[Graph, Tensor] | None = None
        self._metis: tuple[float, int] | None = None

    @property
    def graph(self) -> tuple[Graph, Tensor]:
        """The graph without its features, and the weight of nodes of all types in one numbering."""
        if self._made is None:
            graph = dataset(self._name)
            graph = Graph(
                {t: graph.num_nodes(t) for t in graph.node_types}, {t: graph.csc(t) for t in graph.edge_types}
            )
            self._made = graph, 1 + degrees(flat_edges(graph)[1], sum(map(graph.num_nodes, graph.node_types)))
        return self._made

    @property
    def metis(self) -> tuple[float, int]:
        """The smaller cut of both modes, and the heaviest part of that partition."""
        if self._metis is None:
            graph, weight = self.graph
            xadj, adjncy = metis_arrays(*flat_edges(graph), weight.numel())
            found = []
            for recursive in (True, False):
                given = weight.numpy().astype(xadj.dtype)
                part = torch.from_numpy(run_metis(xadj, adjncy, PARTS, given, recursive=recursive))
                load = torch.zeros(PARTS, dtype=torch.int64).index_add_(0, part.long(), weight)
                found.append((cut_share(graph, part), int(load.max())))
            self._metis = min(found)
        return self._metis

    def at_its_balance(self) -> float:
        _, weight = self.graph
        constraints = Constraints({"1 + in-edges": lambda begin, end: weight[begin:end]}, weight.numel())
        try:
            allowed = torch.tensor([self.metis[1]])
        except Exception:  # its own side says why
            allowed = constraints.limits(PARTS, 0.05)
        return self._cut(constraints, allowed)

    def at_both(self) -> float:
        constraints = constraints_of(self.graph[0], ["edges"])
        return self._cut(constraints, constraints.limits(PARTS, 0.05))

    def _cut(self, constraints: Constraints, limits: Tensor) -> float:
        graph, _ = self.graph
        part, refined = multilevel_assignment(finest_level(graph, constraints), PARTS, limits)
        if refined.excess > 0:
            raise RuntimeError(f"ours is over {limits.tolist()} in {constraints.names}, so nothing counts")
        return cut_share(graph, part)
