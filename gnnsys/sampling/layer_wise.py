"""Layer-wise samplers: a layer draws `n` nodes for all its destinations together, FastGCN and LADIES.

Both draw with replacement, node u with probability q(u), and keep the edges between what was drawn and the layer:

- FastGCN (Chen, Ma and Xiao 2018, section 3): q(u) is in proportion to the squared norm of column u of the normalised
  adjacency P, P(v, u) = 1 / degree(v) per edge. One q for all layers and batches, made once.
- LADIES (Zou et al. 2019, algorithm 1): the same of the rows of the current layer alone, so what is drawn has edges.

q is made of integers (`layer_shares.py`): their sums are the same in any order, so a graph and its parts draw the same
nodes. Draws look for a number in prefix sums over nodes in the order of original ids.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gnnsys.graph import EdgeType, Graph, NodeType, ids_of
from gnnsys.ops import CSC, IdTable, stream_key
from gnnsys.sampling.edges_within import WithinRequest, inner_edges
from gnnsys.sampling.layer_shares import SUM_END, layer_shares
from gnnsys.sampling.neighborhoods import AnyGraph, host_of, neighborhoods
from gnnsys.sampling.prepared_views import pieces
from gnnsys.sampling.sample import Block, Sample
from gnnsys.sampling.sampler import SampleKey, Sampler

# That parts are asked about at once when q of a whole graph is made: a reply has a deadline, and edges take time.
_NODES_PER_MESSAGE = 1 << 20
_EDGES_PER_MESSAGE = 1 << 24


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
            drawn, degrees = self._draw(nodes, words, hop)
            (edges,) = inner_edges(self.graph, [WithinRequest(self._edge_type, nodes, drawn.nodes)])
            num_dst = nodes.numel()
            local, fresh = table.insert(drawn.nodes[edges.places])
            nodes = torch.cat([nodes, fresh])
            dst = torch.repeat_interleave(edges.indptr.diff(), output_size=local.numel())
            weight = drawn.scale[edges.places]
            if self.normalize:
                divisor = torch.zeros(num_dst, dtype=torch.float64, device="cpu").index_add_(0, dst, weight)
            else:
                divisor = (self._degrees(nodes[:num_dst]) if degrees is None else degrees).double()
            weights = {self._edge_type: (weight / divisor[dst]).float()}
            csc = CSC(edges.indptr, local, nodes.numel(), self._hoods.edge_ids(self._edge_type, edges.positions))
            num_src, num_dst_of = {self._node_type: nodes.numel()}, {self._node_type: num_dst}
            blocks.insert(0, Block({self._edge_type: csc}, num_src, num_dst_of, weights))
            num_nodes.append(fresh.numel())
            num_edges.append(local.numel())
        counts = ({self._node_type: num_nodes}, {self._edge_type: num_edges})
        return Sample({self._node_type: nodes}, {}, {}, {}, *counts, blocks=blocks, by_destination=True)

    @abstractmethod
    def _draw(self, nodes: Tensor, words: np.ndarray, hop: int) -> tuple[_Drawn, Tensor | None]:
        """What `words` draw for a layer of `nodes`, and the in-degrees of these where they came with it."""

    def _degrees(self, nodes: Tensor) -> Tensor:
        if isinstance(self.graph, Graph):
            indptr = self.graph.csc(self._edge_type).indptr
            return indptr[nodes + 1] - indptr[nodes]
        return self.graph.in_degrees(nodes, self._edge_type)


class FastGCNSampler(LayerWiseSampler):
    """FastGCN: q of the whole graph, made once, when the sampler is.

    A process keeps 16 bytes per node. Making q looks at all edges: parts of other machines send their sums, once.
    """

    def __init__(self, graph: AnyGraph, num_nodes: Sequence[int], *, normalize: bool = True) -> None:
        super().__init__(graph, num_nodes, normalize=normalize)
        nodes = torch.arange(graph.num_nodes(), device="cpu")
        sums, originals = torch.zeros_like(nodes), torch.zeros_like(nodes)
        total = 0
        for some in self._askable(nodes):
            found = layer_shares(graph, self._edge_type, some)
            total += int(found.sums.sum())
            if total >= SUM_END:
                raise ValueError("the sums of shares that parts answered add up to 2^62 or more")
            sums.index_add_(0, found.ids, found.sums)
            originals[found.ids] = found.originals
        known = sums.nonzero().view(-1)
        self._ids, self._ends = _by_original(known, originals[known], sums[known])

    def _askable(self, nodes: Tensor) -> Iterator[Tensor]:
        """All of them, as many together as one message may stand for; a node of more edges than that is alone."""
        for some in nodes.split(_NODES_PER_MESSAGE):
            degrees = self._degrees(some)
            for first, end in pieces(degrees, some.numel(), _NODES_PER_MESSAGE, _EDGES_PER_MESSAGE):
                yield some[first:end]

    def _draw(self, nodes: Tensor, words: np.ndarray, hop: int) -> tuple[_Drawn, Tensor | None]:
        return _draw(self._ids, self._ends, words), None


class LadiesSampler(LayerWiseSampler):
    """LADIES: q of the current layer. On parts a layer is two round trips: sums of shares, and edges of the drawn."""

    def _draw(self, nodes: Tensor, words: np.ndarray, hop: int) -> tuple[_Drawn, Tensor | None]:
        shares = layer_shares(self.graph, self._edge_type, nodes, hop=hop)
        return _draw(*_by_original(shares.ids, shares.originals, shares.sums), words), shares.degrees


def _by_original(ids: Tensor, originals: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Sources in the order of original ids, and the prefix sums of their shares."""
    order = originals.argsort()
    return ids[order], sums[order].cumsum(0)


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
