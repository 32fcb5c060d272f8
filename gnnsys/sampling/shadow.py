"""shaDow (Zeng et al. 2021): a small subgraph around each seed, cut off from the others, of any depth of model.

The nodes are those that neighbour sampling finds; the edges are all edges of the graph among the nodes of one seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, NodeType
from gnnsys.sampling.fanouts import Fanouts
from gnnsys.sampling.induced import induced_edges, with_edges
from gnnsys.sampling.neighbor import NeighborSampler
from gnnsys.sampling.neighborhoods import AnyGraph
from gnnsys.sampling.sample import Sample
from gnnsys.sampling.sampler import SampleKey, Sampler


class ShadowSampler(Sampler):
    """Samples `num_neighbors` hop by hop around each seed, and takes every edge among what it found for that seed.

    With `disjoint=False` all seeds of a batch share one subgraph, as in DGL's ShaDowKHopSampler,
    which expands all nodes that were seen in every hop, `expand="frontier"`.

    >>> loader = gnnsys.NeighborLoader(graph, sampler=ShadowSampler(graph, [10, 5]), batch_size=64)  # doctest: +SKIP
    """

    unbiased_for: ClassVar[str] = ""

    def __init__(
        self,
        graph: AnyGraph,
        num_neighbors: Fanouts,
        *,
        disjoint: bool = True,
        replace: bool = False,
        weight: str | None = None,
        expand: Literal["new", "frontier"] = "new",
        device: torch.device | str | None = None,
    ) -> None:
        self._nodes = NeighborSampler(
            graph, num_neighbors, disjoint=disjoint, replace=replace, weight=weight, expand=expand, device=device
        )
        self.graph, self.device = graph, self._nodes.device

    def options(self) -> dict[str, Any]:
        return self._nodes.options() | {"subgraph_type": "induced"}

    def check_current(self) -> None:
        self._nodes.check_current()

    def find_edges(self, edge_type: EdgeType, src: Tensor, dst: Tensor) -> Tensor:
        return self._nodes.find_edges(edge_type, src, dst)

    def begin_find_edges(self, edge_type: EdgeType, src: Tensor, dst: Tensor) -> Callable[[], Tensor]:
        return self._nodes.begin_find_edges(edge_type, src, dst)

    def sample(
        self,
        seeds: Mapping[NodeType, Tensor],
        *,
        key: SampleKey,
        seed_time: Mapping[NodeType, Tensor] | None = None,
        tree: Mapping[NodeType, Tensor] | None = None,
        exclude: Mapping[EdgeType, Tensor] | None = None,
    ) -> Sample:
        self.refuse(seed_time=seed_time)
        found = self._nodes.sample(seeds, key=key, tree=tree, exclude=exclude)
        row, col, edge = induced_edges(self.graph, found.node, self.graph.edge_types, found.tree, exclude)
        return with_edges(found, row, col, edge)
