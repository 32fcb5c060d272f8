"""DGL's PinSAGESampler and RandomWalkNeighborSampler on our kernels: graphs of the nodes that walks visit most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dgl
import torch
from torch import Tensor

from gnnsys.dgl.sampler import draw_key
from gnnsys.graph import as_ids
from gnnsys.loader import knows_words
from gnnsys.ops import CSC, stream_key
from gnnsys.sampling import metapath_walks, most_visited


class RandomWalkNeighborSampler:
    """`dgl.sampling.RandomWalkNeighborSampler`, argument by argument, on a DGL graph in host memory.

    Of nodes that are visited equally often those that were visited first are taken. Walks follow torch's generator.
    """

    @knows_words()
    def __init__(
        self,
        G: Any,
        num_traversals: int,
        termination_prob: float,
        num_random_walks: int,
        num_neighbors: int,
        metapath: Sequence[Any] | None = None,
        weight_column: str = "weights",
    ) -> None:
        if min(num_traversals, num_random_walks, num_neighbors) < 1 or not 0 <= termination_prob <= 1:
            raise ValueError(
                "num_traversals, num_random_walks and num_neighbors must be at least 1 and termination_prob in [0, 1], "
                f"got {num_traversals}, {num_random_walks}, {num_neighbors} and {termination_prob}"
            )
        if metapath is None:
            if len(G.ntypes) > 1 or len(G.etypes) > 1:
                raise ValueError(
                    f"metapath must be given for a graph with several types, such as [{G.etypes[0]!r}, ...]"
                )
            metapath = [G.canonical_etypes[0]]
        steps = [G.to_canonical_etype(name) for name in metapath]
        ends = [(a[2], b[0]) for a, b in zip(steps, [*steps[1:], *steps[:1]], strict=True)]
        if not steps or any(a != b for a, b in ends):
            raise ValueError(f"the metapath must lead from type to type and back to its first, got {steps}")
        self.G, self.ntype, self.metapath = G, steps[0][0], list(metapath)
        self.num_traversals, self.num_random_walks, self.num_neighbors = num_traversals, num_random_walks, num_neighbors
        self.termination_prob, self.weight_column = termination_prob, weight_column
        self._edge_types = steps
        self._edges = _Edges(G, steps)

    def __call__(self, seed_nodes: Any) -> Any:
        """A graph of `ntype` with an edge to each seed from the nodes that its walks visited most, and the counts."""
        if self._edges.index is not self.G._graph:
            self._edges = _Edges(self.G, self._edge_types)
        seeds = as_ids(seed_nodes, self.G.num_nodes(self.ntype), "seed_nodes", "node").long().cpu()
        roots = torch.repeat_interleave(seeds, self.num_random_walks)
        key = stream_key(draw_key().seed)
        visits = metapath_walks(self._edges.steps, roots, self.num_traversals, key=key, stop_prob=self.termination_prob)
        per_seed = visits.view(seeds.numel(), self.num_random_walks * self.num_traversals)
        visited = most_visited(per_seed, self.num_neighbors)
        src, dst = visited.ids.to(self.G.idtype), seeds[visited.root].to(self.G.idtype)
        num_nodes = {self.ntype: self.G.num_nodes(self.ntype)}
        found = dgl.heterograph({(self.ntype, "_E", self.ntype): (src, dst)}, num_nodes, idtype=self.G.idtype)
        found.edata[self.weight_column] = visited.visits.to(self.G.idtype)
        return found


class PinSAGESampler(RandomWalkNeighborSampler):
    """`dgl.sampling.PinSAGESampler`, argument by argument: walks from `ntype` to `other_type` and back."""

    @knows_words()
    def __init__(
        self,
        G: Any,
        ntype: str,
        other_type: str,
        num_traversals: int,
        termination_prob: float,
        num_random_walks: int,
        num_neighbors: int,
        weight_column: str = "weights",
    ) -> None:
        there, back = (
            [t for t in G.canonical_etypes if t[::2] == ends] for ends in ((ntype, other_type), (other_type, ntype))
        )
        if not there or not back:
            raise ValueError(
                f"the graph must have edges from {ntype!r} to {other_type!r} and back, it has {G.canonical_etypes}"
            )
        metapath = [there[0], back[0]]
        walks = (num_traversals, termination_prob, num_random_walks, num_neighbors)
        super().__init__(G, *walks, metapath=metapath, weight_column=weight_column)


class _Edges:
    """A copy of the edges that walks go along, a `CSC` for each step, and the DGL index that they were copied from."""

    def __init__(self, G: Any, edge_types: Sequence[Any]) -> None:
        self.index = G._graph  # DGL replaces it when edges are added or removed
        self.steps = [_out_edges(G, edge_type) for edge_type in edge_types]


def _out_edges(G: Any, edge_type: Any) -> CSC:
    """Destinations by source."""
    src, dst = G.edges(etype=edge_type)
    ends: tuple[Tensor, Tensor] = dst.cpu().long(), src.cpu().long()
    return CSC.from_edge_index(torch.stack(ends), G.num_nodes(edge_type[2]), G.num_nodes(edge_type[0]), narrow=True)
