"""PinSAGE's neighbours (Ying et al. 2018): the nodes that random walks from a node visit most often.

They need not be its neighbours in the graph, so their edges have no edge ids; `edge_weight` is how often each was
visited, among those that were taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, NodeType, ids_of
from gnnsys.ops import IdTable, count_visits, stream_key
from gnnsys.sampling.fanouts import is_fanout
from gnnsys.sampling.neighborhoods import AnyGraph, neighborhoods, sampling_device, to_device
from gnnsys.sampling.sample import Sample
from gnnsys.sampling.sampler import SampleKey, Sampler
from gnnsys.sampling.walks import check_walks, walk

_WALKS = 0x504E  # domain of the walks' keys


class PinSAGESampler(Sampler):
    """`num_neighbors[hop]` nodes for each node of a hop: those that `num_walks` walks of `length` steps visit most.

    Before each step a walk goes back with `restart_prob`. Of nodes that are visited equally often those that were
    visited first are taken. For graphs with one node and edge type. Samples are made on `device`, by default where the
    structure is.

    >>> sampler = PinSAGESampler(graph, [10, 5], num_walks=20, length=3)  # doctest: +SKIP
    """

    unbiased_for: ClassVar[str] = ""
    gives = ("edge_weight",)
    takes_links: ClassVar[bool] = False

    def __init__(
        self,
        graph: AnyGraph,
        num_neighbors: list[int],
        *,
        num_walks: int,
        length: int,
        restart_prob: float = 0.5,
        device: torch.device | str | None = None,
    ) -> None:
        if len(graph.node_types) != 1 or len(graph.edge_types) != 1:
            raise ValueError(f"PinSAGESampler is for graphs with one node and edge type, got {graph.edge_types}")
        fits = bool(num_neighbors) and all(is_fanout(taken) and taken >= 1 for taken in num_neighbors)
        if not fits or num_walks < 1 or length < 1:
            raise ValueError(
                f"num_neighbors, num_walks and length must be at least 1, got {num_neighbors}, {num_walks} and {length}"
            )
        check_walks(length, restart_prob)
        self.graph, self.device = graph, sampling_device(graph, device)
        self._fanouts, self._num_walks, self._length = list(num_neighbors), num_walks, length
        self._restart_prob = restart_prob
        self._hoods = neighborhoods(graph, device=self.device)
        (self._node_type,), (self._edge_type,) = graph.node_types, graph.edge_types

    def options(self) -> dict[str, Any]:
        walks = {"num_walks": self._num_walks, "length": self._length, "restart_prob": self._restart_prob}
        return {"num_neighbors": self._fanouts, **walks}

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
        num_nodes = self.graph.num_nodes()
        if self._node_type not in seeds:
            raise ValueError(f"seeds must be given as {{{self._node_type!r}: ids}}, got node types {[*seeds]}")
        given = ids_of(seeds[self._node_type], num_nodes, "seeds").long()
        if given.numel() and not 0 <= int(given.min()) <= int(given.max()) < num_nodes:
            raise ValueError(f"seeds must be in [0, {num_nodes}), got {int(given.min())} to {int(given.max())}")
        frontier = to_device(given, self.device)
        table, nodes, first = IdTable(num_nodes, device=self.device), [frontier], 0
        table.insert_seeds(frontier)
        row, col, weight = [], [], []
        for hop, fanout in enumerate(self._fanouts):
            of_hop = stream_key(key.seed, key.epoch, key.batch, hop, _WALKS)
            visited = self.visited(frontier, fanout, of_hop)
            local, fresh = table.insert(visited.ids)
            row.append(local)
            col.append(visited.root + first)
            weight.append(visited.share(frontier.numel()))
            first += frontier.numel()
            frontier = fresh
            nodes.append(fresh)
        edge_type = self._edge_type
        return Sample(
            {self._node_type: torch.cat(nodes)},
            {edge_type: torch.cat(row)},
            {edge_type: torch.cat(col)},
            {},
            {self._node_type: [ids.numel() for ids in nodes]},
            {edge_type: [local.numel() for local in row]},
            by_destination=True,
            edge_weight={edge_type: torch.cat(weight)},
        )

    def visited(self, nodes: Tensor, most: int, key: int) -> Visited:
        """The `most` nodes that walks from each of `nodes` visit most often, the node itself left out."""
        roots = torch.repeat_interleave(nodes, self._num_walks)
        walks = walk(self._hoods, self._edge_type, roots, self._length, key, self._restart_prob)[:, 1:]
        return most_visited(walks.reshape(nodes.numel(), self._num_walks * self._length), most, without=nodes)


class Visited(NamedTuple):
    """Nodes by the node whose walks found them, the most visited first."""

    root: Tensor  # int64, a place in the nodes that were asked for
    ids: Tensor  # int64
    visits: Tensor  # int64, how many

    def share(self, num_roots: int) -> Tensor:
        """Of the visits from a root to those that were taken, float32. Whole numbers: their sums have any order."""
        count = self.visits.double()
        total = count.new_zeros(num_roots).index_add_(0, self.root, count)
        return (count / total[self.root]).float()


def most_visited(visits: Tensor, most: int, *, without: Tensor | None = None) -> Visited:
    """Of each row of `visits`, int64 [num_roots, num_visits] with -1 for none, the `most` ids that it has most often.

    `without[i]` does not count in row i. Of ids that are there equally often those come first that were seen first.
    """
    count = count_visits if visits.is_cpu else _count_by_sorting
    return Visited(*count(visits, most, without))


def _count_by_sorting(visits: Tensor, most: int, without: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """`count_visits` by torch's own ops, on a device."""
    num_roots, width = visits.shape
    number = torch.arange(num_roots, device=visits.device).repeat_interleave(width)
    flat = visits.reshape(-1)
    counted = flat >= 0 if without is None else (flat >= 0) & (flat != without[number])
    bound = int(flat.max()) + 1 if flat.numel() else 1
    pairs = number[counted] * bound + flat[counted]
    found, which, counts = torch.unique(pairs, return_inverse=True, return_counts=True)
    seen = torch.full_like(found, pairs.numel()).scatter_reduce_(
        0, which, torch.arange(pairs.numel(), device=visits.device), "amin"
    )
    order = torch.argsort(seen)  # then by count, then by root: each sort keeps what the ones before made
    order = order[torch.argsort(counts[order], descending=True, stable=True)]
    root = torch.div(found, bound, rounding_mode="floor")
    order = order[torch.argsort(root[order], stable=True)]
    sizes = torch.bincount(root, minlength=num_roots)
    before = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes, output_size=order.numel())
    order = order[torch.arange(order.numel(), device=visits.device) - before < most]
    return root[order], found[order] % bound, counts[order]
