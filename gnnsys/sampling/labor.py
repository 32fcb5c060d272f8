"""LABOR (Balin and Catalyurek, NeurIPS 2023): neighbour sampling in which seeds share what they draw.

Each source u has one random number r_u per batch and hop, and edge u -> v is taken where r_u < k / degree(v). A seed
gets k neighbours in expectation, as with uniform draws, but seeds that share neighbours take the same ones: a batch
has fewer nodes at the same variance.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, Graph, NodeType, edge_type_key
from gnnsys.ops import degrees, normalize_rows, stream_key
from gnnsys.sampling.fanouts import Fanouts
from gnnsys.sampling.labor_rule import MAX_ROUNDS
from gnnsys.sampling.neighbor import NeighborSampler, hop_key
from gnnsys.sampling.neighborhoods import AnyGraph
from gnnsys.sampling.sample import Sample
from gnnsys.sampling.sampler import SampleKey

_EVERY_HOP = -1  # stands for the hop in the key where all hops share their random numbers


@lru_cache(maxsize=256)
def _source_key(node_type: NodeType) -> int:
    return edge_type_key((node_type, "", ""))


class LaborSampler(NeighborSampler):
    """LABOR on a `Graph` or, bit-equal, on a `DistGraph`. `num_neighbors` are expected numbers of neighbours per hop.

    Every edge has a weight: the sum of weight * row over a node's sampled in-edges stands for the mean over all its
    in-edges. The weight is 1 / (degree * probability), which makes that sum exact in expectation (Horvitz-Thompson).
    With `normalize` the weights of a node's in-edges are divided by their sum (Hajek, as DGL does): less variance
    where rows are far from zero, and no longer exact, because a node may draw no neighbour at all.

    `importance_sampling=i` is LABOR-i, on a graph in memory alone: i rounds make sources likelier that many nodes share
    (`labor_importance.py`), for fewer nodes still. A node's neighbours then depend on the others of its batch. Draws
    are on `device`, as those of `NeighborSampler`.

    `layer_dependency` is DGL's: one r_u for all hops of a batch, so that a node which is seen by several is likelier to
    be the same one. Edge types with the same source type always share r_u. Parallel edges are taken together.
    """

    unbiased_for: ClassVar[str] = (
        "in each layer the mean over a node's in-edges, as the sum of edge_weight * row, unless weights are normalized"
    )
    gives = ("edge_weight",)

    def __init__(
        self,
        graph: AnyGraph,
        num_neighbors: Fanouts,
        *,
        importance_sampling: int = 0,
        layer_dependency: bool = False,
        normalize: bool = False,
        disjoint: bool = False,
        expand: Literal["new", "frontier"] = "new",
        device: torch.device | str | None = None,
    ) -> None:
        if not 0 <= importance_sampling <= MAX_ROUNDS:
            raise ValueError(f"importance_sampling must be 0 to {MAX_ROUNDS} rounds, got {importance_sampling}")
        if importance_sampling and not isinstance(graph, Graph):
            raise ValueError("LABOR-i needs the whole graph in one process: pass importance_sampling=0 on parts")
        if importance_sampling and disjoint:
            raise ValueError("LABOR-i is about nodes that trees share, and disjoint trees share none: leave one away")
        self.rule = f"labor-{importance_sampling}"
        super().__init__(graph, num_neighbors, disjoint=disjoint, expand=expand, device=device, rule=self.rule)
        self.layer_dependency, self.normalize = layer_dependency, normalize

    def options(self) -> dict[str, Any]:
        labor = {"rule": self.rule, "layer_dependency": self.layer_dependency, "normalize": self.normalize}
        return super().options() | labor

    def draw_key(self, key: SampleKey, hop: int, edge_type: EdgeType) -> int:
        """By the source type instead of the edge type: r_u is of the source."""
        in_hop = hop_key(key.seed, key.epoch, key.batch, _EVERY_HOP if self.layer_dependency else hop)
        return stream_key(_source_key(edge_type[0]), after=in_hop)

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
        sample = super().sample(seeds, key=key, tree=tree, exclude=exclude)
        if self.normalize:
            _normalize(sample)
        return sample


def _normalize(sample: Sample) -> None:
    """Divides weights by their sum over the edges of a destination."""
    if sample.edge_weight is not None:
        for t, weight in sample.edge_weight.items():
            indptr = torch.zeros(sample.node[t[2]].numel() + 1, dtype=torch.int64, device=weight.device)
            torch.cumsum(degrees(sample.col[t], indptr.numel() - 1), 0, out=indptr[1:])  # edges go by destination
            sample.edge_weight[t] = normalize_rows(indptr, weight)
    for block in sample.blocks:
        assert block.edge_weight is not None
        for t, weight in block.edge_weight.items():
            block.edge_weight[t] = normalize_rows(block.csc[t].indptr, weight)
