"""NeighborSampler: a DGL BlockSampler on our kernels, for DGL's graphs and for graphs in parts."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import dgl
import torch
from torch import Tensor

from gnnsys.dgl.feature_names import Names, Prefetched
from gnnsys.dgl.parts import PartsStructure
from gnnsys.dgl.structure import DglStructure
from gnnsys.graph import NodeType
from gnnsys.loader import knows_words
from gnnsys.ops import stream_key
from gnnsys.sampling import Block, DistGraph, SampleKey, Sampler, is_fanout


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
        self._keys: dict[int, Iterator[SampleKey]] = {}  # of the batch that a thread makes, by thread

    @property
    def prefetched(self) -> Prefetched:
        return Prefetched(self.prefetch_node_feats, self.prefetch_labels, self.prefetch_edge_feats)

    def structure(self, g: Any, is_for_loader: bool = False) -> DglStructure | PartsStructure:
        """Our view of a graph. Made again if its edges, their probabilities or the sampler's options changed."""
        known, options = self._structures.get(g), (self.fanouts, self.replace, self._prob, self._mask)
        if isinstance(g, DistGraph):
            parts = known if isinstance(known, PartsStructure) else None
            self._structures[g] = PartsStructure.of(g, *options, parts)
        else:
            view = known if isinstance(known, DglStructure) else None
            self._structures[g] = DglStructure.of(g, *options, view, is_for_loader)
        return self._structures[g]

    def sample(self, g: Any, seed_nodes: Any, exclude_eids: Any = None) -> tuple[Any, Any, list[Any]]:
        """`sample_blocks` with prefetched features: read on access for a DGL graph, at once for a graph in parts."""
        if not isinstance(g, DistGraph):
            return super().sample(g, seed_nodes, exclude_eids)
        result = self.sample_blocks(g, seed_nodes, exclude_eids)
        self.structure(g).fill(result[2], {}, self.prefetched, None)
        return result

    def sample_blocks(self, g: Any, seed_nodes: Any, exclude_eids: Any = None) -> tuple[Any, Any, list[Any]]:
        """(input nodes, output nodes, blocks) of these seeds. Edges of `exclude_eids` are never drawn."""
        structure = self.structure(g)
        sample = self.native(structure).sample(
            structure.by_type(seed_nodes), key=self._key(), exclude=structure.positions(exclude_eids)
        )
        blocks = self.to_dgl(structure, sample.blocks, sample.node)
        for block in blocks:
            structure.attach(block)
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

    @contextmanager
    def drawing(self, key: SampleKey) -> Iterator[None]:
        """Until the context ends, this thread draws by `key` in place of torch's generator. Every draw differs."""
        thread = threading.get_ident()
        self._keys[thread] = (key._replace(seed=stream_key(key.seed, n) if n else key.seed) for n in count())
        try:
            yield
        finally:
            del self._keys[thread]

    def _key(self) -> SampleKey:
        keys = self._keys.get(threading.get_ident())
        return self._fresh_key() if keys is None else next(keys)

    def _fresh_key(self) -> SampleKey:
        """Outside `drawing`."""
        return draw_key()


def check_fanouts(fanouts: Any) -> None:
    """ValueError for what is no list, and for entries that are no fanouts."""
    if isinstance(fanouts, (str, Mapping)) or not hasattr(fanouts, "__iter__"):
        raise ValueError(f"fanouts must be a list with an entry for each layer, got {fanouts!r}: write [{fanouts!r}]")
    for fanout in fanouts:
        if not all(map(is_fanout, fanout.values() if isinstance(fanout, Mapping) else [fanout])):
            raise ValueError(f"fanouts must be -1 (all) or whole numbers >= 0, got {fanout!r}")


def draw_key() -> SampleKey:
    """Of a sample outside our DataLoader: by torch's generator, so that `torch.manual_seed` repeats it."""
    return SampleKey(int(torch.empty((), dtype=torch.int64, device="cpu").random_()))


MultiLayerNeighborSampler = NeighborSampler


class MultiLayerFullNeighborSampler(NeighborSampler):
    """All neighbours, `num_layers` times."""

    def __init__(self, num_layers: int, **kwargs: Any) -> None:
        super().__init__([-1] * num_layers, **kwargs)
