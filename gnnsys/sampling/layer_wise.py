"""Layer-wise samplers: a layer draws `n` nodes for all its destinations together, FastGCN and LADIES.

Both draw with replacement, node u with probability q(u), and keep the edges between what was drawn and the layer:

- FastGCN (Chen, Ma and Xiao 2018, section 3): q(u) is in proportion to the squared norm of column u of the normalised
  adjacency P, P(v, u) = 1 / degree(v) per edge. One q for all layers and batches, made once.
- LADIES (Zou et al. 2019, algorithm 1): the same of the rows of the current layer alone, so what is drawn has edges.

q is made of integers (2^s / degree^2, rounded down, at least 1): their sums are the same in any order, so a graph and
its parts draw the same nodes. Draws look for a number in prefix sums over nodes in the order of original ids.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gnnsys.graph import EdgeType, Graph, NodeType, ids_of
from gnnsys.ops import CSC, IdTable, Neighbors, stream_key
from gnnsys.sampling.neighborhoods import AnyGraph, HopRequest, host_of, neighborhoods
from gnnsys.sampling.sample import Block, Sample
from gnnsys.sampling.sampler import SampleKey, Sampler

_NODES_PER_PIECE = 1 << 14  # whose in-edges are looked at together when q of a whole graph is made


class _Drawn(NamedTuple):
    """What a layer drew."""

    nodes: Tensor  # int64, each once, in the order of original ids
    scale: Tensor  # float64, how often a node was drawn / (n * q(u)): what makes the weighted sum exact


class LayerWiseSampler(Sampler):
    """Samples blocks, `num_nodes[h]` draws for the layer that is h hops from the seeds.

    A layer's nodes are those of the layer before it and what it drew. Every edge has a weight. With `normalize` the
    weights of a node's sampled in-edges add up to one, as LADIES prescribes; without it a weight is
    P(v, u) * times drawn / (n * q(u)), and the sum of weight * row is exact in expectation, with more variance.
    """

    unbiased_for: ClassVar[str] = (
        "with normalize=False in each layer the mean over a node's in-edges, as the sum of edge_weight * row"
    )
    gives = ("edge_weight",)
    takes_links = False

    def __init__(self, graph: AnyGraph, num_nodes: Sequence[int], *, normalize: bool = True) -> None:
        name = type(self).__name__
        if len(graph.node_types) != 1 or len(graph.edge_types) != 1:
            raise ValueError(
                f"{name} needs one node type and one edge type, the graph has {len(graph.node_types)} and "
                f"{len(graph.edge_types)}: use a NeighborSampler or a LaborSampler"
            )
        if not num_nodes or any(int(number) < 1 for number in num_nodes):
            raise ValueError(f"num_nodes must be a positive number of draws for each layer, got {list(num_nodes)}")
        self.graph, self.normalize = graph, normalize
        self.num_nodes = [int(number) for number in num_nodes]
        self.device = host_of(graph, name)
        self._hoods = neighborhoods(graph, device=self.device)
        (self._edge_type,), (self._node_type,) = graph.edge_types, graph.node_types
        self._one = 1 << (62 - max(1, graph.num_edges()).bit_length())  # no sum over edges reaches 2^62

    def options(self) -> dict[str, Any]:
        return {"sampler": type(self).__name__, "num_nodes": self.num_nodes, "normalize": self.normalize}

    def sample(
        self,
        seeds: Mapping[NodeType, Tensor],
        *,
        key: SampleKey,
        seed_time: Mapping[NodeType, Tensor] | None = None,
        tree: Mapping[NodeType, Tensor] | None = None,
        exclude: Mapping[EdgeType, Tensor] | None = None,
    ) -> Sample:
        self.refuse(seed_time=seed_time, tree=tree, exclude=exclude)
        total = self.graph.num_nodes()
        nodes = ids_of(seeds.get(self._node_type, torch.empty(0, dtype=torch.int64, device="cpu")), total, "seeds")
        nodes = nodes.long().cpu()
        if nodes.numel() and not 0 <= int(nodes.min()) <= int(nodes.max()) < total:
            raise ValueError(f"seeds must be in [0, {total}), got {int(nodes.min())} to {int(nodes.max())}")
        table = IdTable(total)
        table.insert_seeds(nodes)
        num_nodes, num_edges = [nodes.numel()], []
        blocks: list[Block] = []
        for hop, number in enumerate(self.num_nodes):
            words = _words(stream_key(key.seed, key.epoch, key.batch, hop), number)
            edges, scale = self._layer(nodes, words)
            num_dst = nodes.numel()
            local, fresh = table.insert(edges.ids.long())
            nodes = torch.cat([nodes, fresh])
            dst = torch.repeat_interleave(edges.indptr.diff(), output_size=local.numel())
            weight = scale if self.normalize else scale / self._degrees(nodes[:num_dst])[dst]
            if self.normalize:
                weight = (
                    weight / torch.zeros(num_dst, dtype=torch.float64, device="cpu").index_add_(0, dst, weight)[dst]
                )
            edge_ids = self._hoods.edge_ids(self._edge_type, edges.positions)
            csc = CSC(edges.indptr, local, nodes.numel(), edge_ids)
            num_src, num_dst_of = {self._node_type: nodes.numel()}, {self._node_type: num_dst}
            weights = {self._edge_type: weight.float()}
            blocks.insert(0, Block({self._edge_type: csc}, num_src, num_dst_of, weights))
            num_nodes.append(fresh.numel())
            num_edges.append(local.numel())
        counts = ({self._node_type: num_nodes}, {self._edge_type: num_edges})
        return Sample({self._node_type: nodes}, {}, {}, {}, *counts, blocks=blocks, by_destination=True)

    @abstractmethod
    def _layer(self, nodes: Tensor, words: np.ndarray) -> tuple[Neighbors, Tensor]:
        """The in-edges of `nodes` that come from what `words` draw, and the `scale` of each edge's source."""

    def _in_edges(self, nodes: Tensor) -> Neighbors:
        seeds = nodes.to(self._hoods.id_dtypes[self._node_type])
        (found,) = self._hoods.sample([HopRequest(self._edge_type, seeds, -1, key=0)])
        return found

    def _degrees(self, nodes: Tensor) -> Tensor:
        if isinstance(self.graph, Graph):
            return self.graph.csc(self._edge_type).in_degrees()[nodes].double()
        return self.graph.in_degrees(nodes, self._edge_type).double()

    def _originals(self, nodes: Tensor) -> Tensor:
        return nodes if isinstance(self.graph, Graph) else self.graph.original_ids(nodes, self._node_type)

    def _share(self, degrees: Tensor) -> Tensor:
        """The integer that stands for 1 / degree^2, for edges into nodes of these degrees."""
        return torch.div(self._one, degrees * degrees, rounding_mode="floor").clamp_(min=1)

    def _kept(self, edges: Neighbors, drawn: _Drawn) -> tuple[Neighbors, Tensor]:
        """Of some in-edges those whose source was drawn."""
        if not drawn.nodes.numel():
            return Neighbors(torch.zeros_like(edges.indptr), edges.ids[:0], edges.positions[:0]), drawn.scale
        chosen = IdTable(self.graph.num_nodes(), drawn.nodes.numel())
        chosen.insert_seeds(drawn.nodes)
        place = chosen.lookup(edges.ids.long())
        inside = (place >= 0).nonzero().view(-1)
        dst = torch.repeat_interleave(edges.indptr.diff(), output_size=edges.ids.numel())
        indptr = torch.zeros_like(edges.indptr)
        torch.cumsum(torch.bincount(dst[inside], minlength=indptr.numel() - 1), 0, out=indptr[1:])
        return Neighbors(indptr, edges.ids[inside], edges.positions[inside]), drawn.scale[place[inside]]


class FastGCNSampler(LayerWiseSampler):
    """FastGCN: q of the whole graph, made once, when the sampler is.

    A process keeps 16 bytes per node. Making q looks at all edges: on parts those of other machines travel once.
    """

    def __init__(self, graph: AnyGraph, num_nodes: Sequence[int], *, normalize: bool = True) -> None:
        super().__init__(graph, num_nodes, normalize=normalize)
        total = graph.num_nodes()
        share = torch.zeros(total, dtype=torch.int64, device="cpu")
        for first in range(0, total, _NODES_PER_PIECE):
            edges = self._in_edges(torch.arange(first, min(first + _NODES_PER_PIECE, total), device="cpu"))
            degrees = edges.indptr.diff()
            share.index_add_(0, edges.ids.long(), self._share(degrees.clamp(min=1)).repeat_interleave(degrees))
        ids = torch.arange(total, device="cpu")
        self._ids = ids if isinstance(graph, Graph) else self._originals(ids).argsort()
        self._ends = share[self._ids].cumsum(0)

    def _layer(self, nodes: Tensor, words: np.ndarray) -> tuple[Neighbors, Tensor]:
        return self._kept(self._in_edges(nodes), _draw(self._ids, self._ends, words))


class LadiesSampler(LayerWiseSampler):
    """LADIES: q of the current layer. On parts a layer is two round trips: its in-edges, and their original ids."""

    def _layer(self, nodes: Tensor, words: np.ndarray) -> tuple[Neighbors, Tensor]:
        edges = self._in_edges(nodes)
        degrees = edges.indptr.diff()
        ids, place = edges.ids.long().unique(return_inverse=True)
        share = torch.zeros(ids.numel(), dtype=torch.int64, device="cpu")
        share.index_add_(0, place, self._share(degrees.clamp(min=1)).repeat_interleave(degrees))
        order = self._originals(ids).argsort()
        return self._kept(edges, _draw(ids[order], share[order].cumsum(0), words))


def _words(key: int, number: int) -> np.ndarray:
    """uint64 [number]. Only who asks for a sample draws, so numpy's own Philox (4x64) will do."""
    words: np.ndarray = np.random.Philox(key=key & 0xFFFFFFFFFFFFFFFF).random_raw(number)
    return words


def _draw(ids: Tensor, ends: Tensor, words: np.ndarray) -> _Drawn:
    """A node per word, `ids[i]` with probability (ends[i] - ends[i - 1]) / ends[-1], exact to 2^-64."""
    if not ids.numel() or int(ends[-1]) == 0:
        return _Drawn(ids[:0], torch.empty(0, dtype=torch.float64, device="cpu"))
    total = int(ends[-1])
    at = torch.searchsorted(ends, torch.from_numpy(_scaled(words, total).view(np.int64)), right=True)
    place, times = at.unique(return_counts=True)
    share = ends[place] - torch.where(place > 0, ends[place - 1], 0)
    return _Drawn(ids[place], times.double() / (words.size * (share.double() / total)))


def _scaled(words: np.ndarray, bound: int) -> np.ndarray:
    """word * bound / 2^64 rounded down: the high half of a 128-bit product, from four of 64 bits."""
    half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    high, low = words >> half, words & mask
    bound_high, bound_low = np.uint64(bound >> 32), np.uint64(bound & 0xFFFFFFFF)
    a, b = high * bound_low, low * bound_high
    carry = (low * bound_low >> half) + (a & mask) + (b & mask)
    return high * bound_high + (a >> half) + (b >> half) + (carry >> half)
