"""The levels of a multilevel partitioner: the finest is the graph itself, and what is not worked on is left on disk."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from gnnsys.graph import Graph, RawFile, room_for
from gnnsys.ops import CSC, Level, Neighbors32, both_directions
from gnnsys.partition.adjacency import first_nodes
from gnnsys.partition.constraints import Constraints

_SPILL_FROM = 1 << 26  # a level of fewer bytes stays in memory: it is not worth a file


def finest_level(graph: Graph, constraints: Constraints) -> Level:
    """The graph as it is, nodes of all types in one numbering: per edge type its CSC, which is not copied, and the
    transpose."""
    if constraints.num_nodes > torch.iinfo(torch.int32).max:
        raise ValueError(f"{constraints.num_nodes:,} nodes are too many: at most 2^31 - 1 can be partitioned")
    first = first_nodes(graph)
    lists: list[Neighbors32] = []
    for edge_type in graph.edge_types:
        src, _, dst = edge_type
        lists += both_directions(graph.csc(edge_type), first[src], first[dst])
    return Level(tuple(lists), constraints.weights)


def flat_csc(graph: Graph) -> CSC:
    """One CSC over the nodes of all types in one numbering; the graph's own where it has just one edge type."""
    if len(graph.node_types) == 1 and len(graph.edge_types) == 1:
        return graph.csc()
    first = first_nodes(graph)
    num_nodes = sum(map(graph.num_nodes, graph.node_types))
    pairs = [
        torch.stack([graph.csc(t).indices.int() + first[t[0]], (graph.csc(t).dst() + first[t[2]]).int()])
        for t in graph.edge_types
    ]
    edges = torch.cat(pairs, dim=1) if pairs else torch.empty(2, 0, dtype=torch.int32, device="cpu")
    return CSC.from_edge_index(edges, num_nodes)


class LevelStack:
    """Levels from the finest on; all but the last lie in memory-mapped files, in a folder that vanishes with the stack.

    The graph's own arrays are the caller's and stay where they are; what was made for a level is written out.
    """

    def __init__(self, finest: Level, folder: Path | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix=".gnnsys-levels-", dir=folder)
        self._levels = [finest]
        self.clusters: list[Tensor] = []

    def __enter__(self) -> LevelStack:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, _: TracebackType | None) -> None:
        self._levels.clear()
        self._folder.cleanup()

    def __len__(self) -> int:
        return len(self._levels)

    @property
    def coarsest(self) -> Level:
        return self._levels[-1]

    def push(self, level: Level, clusters: Tensor) -> None:
        """Adds a coarser level; the one before it is put away."""
        if len(self._levels) > 1:
            self._levels[-1] = self._put_away(self._levels[-1], len(self._levels))
        self._levels.append(level)
        self.clusters.append(clusters)

    def pop(self) -> Tensor:
        """Drops the coarsest level and returns the clusters that led to it."""
        self._levels.pop()
        return self.clusters.pop()

    def _put_away(self, level: Level, number: int) -> Level:
        def mapped(name: str, array: Tensor | None) -> Tensor | None:
            if array is None:
                return None
            file = RawFile(Path(self._folder.name) / f"level-{number}-{name}")
            with room_for("temporary files of partitioning", self._folder.name):
                file.append(array)
            return file.map()

        if 8 * level.num_entries < _SPILL_FROM:
            return level
        lists = []
        for i, part in enumerate(level.lists):
            indptr, indices = mapped(f"{i}-indptr", part.indptr), mapped(f"{i}-indices", part.indices)
            assert indptr is not None and indices is not None
            lists.append(part._replace(indptr=indptr, indices=indices, weight=mapped(f"{i}-weight", part.weight)))
        return Level(tuple(lists), level.node_weights)
