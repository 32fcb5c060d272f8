"""NeighborSampler: a DGL BlockSampler on our kernels, for DGL's graphs and for graphs in parts."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import dgl
import torch
from torch import Tensor

from gnnsys.dgl.feature_names import Names, Prefetched
from gnnsys.dgl.parts import PartsStructure
from gnnsys.dgl.structure import DglStructure
from gnnsys.graph import NodeType
from gnnsys.loader import knows_words
from gnnsys.sampling import Block, DistGraph, SampleKey, Sampler


class NeighborSampler(dgl.dataloading.BlockSampler):
    """`dgl.dataloading.NeighborSampler`, argument by argument; `fanouts[i]` belongs to the i-th layer.

    What is drawn for a node depends on (seed, epoch, batch, hop, edge type, node). Without our DataLoader the seed is
    drawn from torch's generator, so `torch.manual_seed` repeats a run.
    """

    @knows_words()
    def __init__(
        self,
        fanouts: Sequence[int | Mapping[Any, int]],
        edge_dir: str = "in",
        prob: str | None = None,
        mask: str | None = None,
        replace: bool = False,
        prefetch_node_feats: Names = None,
        prefetch_labels: Names = None,
        prefetch_edge_feats: Names = None,
        output_device: Any = None,
        fused: bool = True,
    ) -> None:
        super().__init__(prefetch_node_feats, prefetch_labels, prefetch_edge_feats, output_device)
        if edge_dir != "in":
            raise ValueError(f"edge_dir must be 'in', got {edge_dir!r}: sample from dgl.reverse(g) instead")
        if prob is not None and mask is not None:
            raise ValueError("prob and mask exclude each other: multiply the probabilities by the mask")
        check_fanouts(fanouts)
        self.fanouts = list(fanouts)
        self.replace = replace
        self.fused = fused  # DGL's argument: our sampling is always fused
        self._prob = prob
        self._mask = mask
        self._structures: weakref.WeakKeyDictionary[Any, DglStructure | PartsStructure] = weakref.WeakKeyDictionary()

    @property
    def prefetched(self) -> Prefetched:
        return Prefetched(self.prefetch_node_feats, self.prefetch_labels, self.prefetch_edge_feats)

    def structure(self, g: Any) -> DglStructure | PartsStructure:
        """Our view of a graph. Made once, and again if a DGL graph's edges or their probabilities were replaced."""
        known = self._structures.get(g)
        if known is None or not known.is_current(g):
            make = PartsStructure if isinstance(g, DistGraph) else DglStructure
            self._structures[g] = make(g, self.fanouts, self.replace, self._prob, self._mask)
        return self._structures[g]

    def sample(self, g: Any, seed_nodes: Any, exclude_eids: Any = None) -> tuple[Any, Any, list[Any]]:
        """`sample_blocks` with prefetched features: read on access for a DGL graph, at once for a graph in parts."""
        structure = self.structure(g)
        if not isinstance(structure, PartsStructure):
            return super().sample(g, seed_nodes, exclude_eids)
        result = self.sample_blocks(g, seed_nodes, exclude_eids)
        structure.fill(result[2], {}, self.prefetched)
        return result

    def sample_blocks(self, g: Any, seed_nodes: Any, exclude_eids: Any = None) -> tuple[Any, Any, list[Any]]:
        structure = self.structure(g)
        sample = self.native(structure).sample(
            structure.by_type(seed_nodes), key=self._key(), exclude=structure.positions(exclude_eids)
        )
        blocks = self.to_dgl(structure, sample.blocks, sample.node)
        return blocks[0].srcdata[dgl.NID], seed_nodes, blocks

    def to_dgl(
        self, structure: DglStructure | PartsStructure, blocks: list[Block], nodes: dict[NodeType, Tensor]
    ) -> list[Any]:
        """DGL's blocks of ours."""
        return structure.to_dgl(blocks, nodes)

    def native(self, structure: DglStructure | PartsStructure) -> Sampler:
        """What draws for `sample_blocks`."""
        return structure.sampler

    def drawn_by(self, structure: DglStructure | PartsStructure, graph: Any) -> dict[str, Any]:
        """How a `gnnsys.NeighborLoader` of `graph` is told to draw as this does."""
        return {
            "num_neighbors": structure.num_neighbors,
            "replace": self.replace,
            "weight_attr": structure.weight,
            "edge_mask": structure.mask,
            "expand": "frontier",
        }

    def _key(self) -> SampleKey:
        return draw_key()


def check_fanouts(fanouts: Any) -> None:
    """ValueError for what is no list."""
    if isinstance(fanouts, (str, Mapping)) or not hasattr(fanouts, "__iter__"):
        raise ValueError(f"fanouts must be a list with an entry for each layer, got {fanouts!r}: write [{fanouts!r}]")


def draw_key() -> SampleKey:
    """Of a sample outside our DataLoader: by torch's generator, so that `torch.manual_seed` repeats it."""
    return SampleKey(int(torch.empty((), dtype=torch.int64, device="cpu").random_()))


MultiLayerNeighborSampler = NeighborSampler


class MultiLayerFullNeighborSampler(NeighborSampler):
    """All neighbours, `num_layers` times."""

    def __init__(self, num_layers: int, **kwargs: Any) -> None:
        super().__init__([-1] * num_layers, **kwargs)
