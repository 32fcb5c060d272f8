"""From a batch of links to the seeds of a sample, and back to the links' local ids.

One place for both faces (ours and PyG's): positives, then negatives; unique seeds, or one tree per end where trees are
disjoint. All randomness comes from the generator that the caller passes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, Graph, NodeType, did_you_mean, is_source, some
from gnnsys.loader.identity import checksum
from gnnsys.loader.negatives import NegativeSampling, NodeDraw
from gnnsys.sampling import AnyGraph, DistGraph, Sampler, to_device
from gnnsys.seeds import InputIds
from gnnsys.store import read_rows


@dataclass
class Links:
    """Positive links of one batch; ends are node ids of the edge type's two node types."""

    input_id: Tensor  # int64 [num_positives]
    src: Tensor
    dst: Tensor
    label: Tensor | None = None
    time: Tensor | None = None

    def take(self, chosen: Tensor) -> Links:
        label, time = (None if values is None else values[chosen] for values in (self.label, self.time))
        return Links(self.input_id[chosen], self.src[chosen], self.dst[chosen], label, time)


class LinkReader(Protocol):
    """Links to choose a batch's from."""

    def take(self, chosen: Tensor) -> Links: ...


@dataclass
class EdgeInputs:
    """Links that are edges of the graph, known by their ids: their ends are looked up when a batch is made of them."""

    ids: InputIds  # edge ids, or a range of them that is never written out
    ends: Callable[[Tensor], tuple[Tensor, Tensor]]
    label: Tensor | None = None
    time: Tensor | None = None

    def take(self, chosen: Tensor) -> Links:
        label, time = (None if values is None else values[chosen] for values in (self.label, self.time))
        return Links(chosen, *self.ends(self.ids[chosen]), label, time)


@dataclass
class LinkSeeds:
    """What to sample from, and where the links' ends are among the seeds."""

    seeds: dict[NodeType, Tensor]
    seed_time: dict[NodeType, Tensor] | None
    tree: dict[NodeType, Tensor] | None  # one per seed, numbered across types; disjoint only
    link_of_tree: Tensor | None  # int64, the positive link that a tree belongs to
    values: dict[str, Tensor] = field(default_factory=dict)  # edge_label_index, edge_label, ... or src_index, ...

    def owners(self, tree: dict[NodeType, Tensor]) -> dict[NodeType, Tensor]:
        """The positive link of each sampled node, from the tree it was sampled in (PyG's `batch`)."""
        assert self.link_of_tree is not None
        return {node_type: to_device(self.link_of_tree, of.device)[of] for node_type, of in tree.items()}

    def by_type(self, edge_type: EdgeType, input_id: Tensor) -> dict[NodeType | EdgeType, dict[str, Any]]:
        """The values by where they belong: labels to the edge type, triplets to its two node types."""
        out: dict[NodeType | EdgeType, dict[str, Any]] = {edge_type: {"input_id": input_id}}
        if "src_index" not in self.values:
            out[edge_type].update(self.values)
            return out
        src, dst = out.setdefault(edge_type[0], {}), out.setdefault(edge_type[2], {})
        src["src_index"] = self.values["src_index"]
        dst.update({name: self.values[name] for name in ("dst_pos_index", "dst_neg_index")})
        if "seed_time" in self.values:
            src["seed_time"] = dst["seed_time"] = self.values["seed_time"]
        return out


class LinkSeeder:
    """Draws negatives and makes seeds, for links of one edge type.

    On a graph in parts (`names`) negatives are drawn among original ids, and unique seeds stand in their order, so that
    a batch is the one a single process makes; `node_time` and weights of negatives are then by original id too.
    """

    def __init__(
        self,
        num_nodes: tuple[int, int],
        edge_type: EdgeType,
        negatives: NegativeSampling | None,
        disjoint: bool,
        node_time: tuple[Tensor | None, Tensor | None] = (None, None),
        names: DistGraph | None = None,
    ) -> None:
        self._edge_type = edge_type
        self._names = names
        self._negatives = negatives
        self._disjoint = disjoint
        if negatives is not None:
            self._draw_dst = NodeDraw(num_nodes[1], negatives.dst_weight, node_time[1], "neg_sampling: dst_weight")
            if not negatives.is_triplet:
                self._draw_src = NodeDraw(num_nodes[0], negatives.src_weight, node_time[0], "neg_sampling: src_weight")

    @cached_property
    def told_negatives(self) -> dict[str, Any] | None:
        """What negatives are drawn of, as a loader's state says it: weights by a checksum, whatever held them.

        It is of their values as float32, which a list, an array of doubles and a tensor have in common.
        """
        if self._negatives is None:
            return None
        weights = {name: getattr(self._negatives, name) for name in ("src_weight", "dst_weight")}
        told = {name: None if w is None else f"{w.numel()} {checksum(w.float()):08x}" for name, w in weights.items()}
        return {"mode": self._negatives.mode, "amount": self._negatives.amount, **told}

    def __call__(self, links: Links, stream: torch.Generator) -> LinkSeeds:
        num_positives = links.src.numel()
        src, dst = links.src, links.dst
        num_negatives = 0
        if self._negatives is not None:
            num_negatives = self._negatives.count(num_positives)
            src_type, _, dst_type = self._edge_type
            if not self._negatives.is_triplet:
                drawn = self._draw_src.draw(num_negatives, stream, links.time)
                src = torch.cat([src, self._graph_ids(drawn, src_type)])
            drawn = self._draw_dst.draw(num_negatives, stream, links.time)
            dst = torch.cat([dst, self._graph_ids(drawn, dst_type)])
        out, src_at, dst_at = self._place(src, dst, links.time, num_positives)
        if self._negatives is not None and self._negatives.is_triplet:
            out.values = _triplets(src_at, dst_at, num_positives, int(self._negatives.amount))
            if links.time is not None:
                out.values["seed_time"] = links.time
            return out
        out.values["edge_label_index"] = torch.stack([src_at, dst_at])
        if self._negatives is not None:
            positive = torch.ones(num_positives, device="cpu") if links.label is None else links.label
            negative = positive.new_zeros((num_negatives, *positive.shape[1:]))
            out.values["edge_label"] = torch.cat([positive, negative])
        elif links.label is not None:
            out.values["edge_label"] = links.label
        if links.time is not None:
            out.values["edge_label_time"] = _for_each(links.time, src.numel())
        return out

    def _graph_ids(self, drawn: Tensor, node_type: NodeType) -> Tensor:
        return drawn if self._names is None else self._names.global_ids(drawn, node_type)

    def _unique(self, ids: Tensor, node_type: NodeType) -> tuple[Tensor, Tensor]:
        """The ids, each once and ascending by original id, and where each of them went."""
        if self._names is None:
            seeds, at = torch.unique(ids, return_inverse=True)
            return seeds, at
        original, at = torch.unique(self._names.original_ids(ids, node_type), return_inverse=True)
        return torch.empty_like(original).scatter_(0, at, ids), at

    def _place(
        self, src: Tensor, dst: Tensor, time: Tensor | None, num_positives: int
    ) -> tuple[LinkSeeds, Tensor, Tensor]:
        """Seeds, and the local id of every source and destination. The i-th negative belongs to link i % positives."""
        src_type, _, dst_type = self._edge_type
        if not self._disjoint:
            if src_type == dst_type:
                unique, at = self._unique(torch.cat([src, dst]), src_type)
                return LinkSeeds({src_type: unique}, None, None, None), at[: src.numel()], at[src.numel() :]
            (src, src_at), (dst, dst_at) = self._unique(src, src_type), self._unique(dst, dst_type)
            return LinkSeeds({src_type: src, dst_type: dst}, None, None, None), src_at, dst_at
        src_at, dst_at = torch.arange(src.numel(), device="cpu"), torch.arange(dst.numel(), device="cpu")
        trees = torch.arange(src.numel() + dst.numel(), device="cpu")
        link_of_tree = torch.cat([src_at, dst_at]) % max(1, num_positives)
        src_time = None if time is None else _for_each(time, src.numel())
        dst_time = None if time is None else _for_each(time, dst.numel())
        by_type = _join if src_type == dst_type else _apart
        seeds = by_type(self._edge_type, src, dst)
        tree = by_type(self._edge_type, trees[: src.numel()], trees[src.numel() :])
        times = None if src_time is None or dst_time is None else by_type(self._edge_type, src_time, dst_time)
        if src_type == dst_type:
            dst_at = dst_at + src.numel()
        return LinkSeeds(seeds, times, tree, link_of_tree), src_at, dst_at


def _for_each(time: Tensor, count: int) -> Tensor:
    return time.repeat(-(-count // max(1, time.numel())))[:count]


def _join(edge_type: EdgeType, src: Tensor, dst: Tensor) -> dict[NodeType, Tensor]:
    return {edge_type[0]: torch.cat([src, dst])}


def _apart(edge_type: EdgeType, src: Tensor, dst: Tensor) -> dict[NodeType, Tensor]:
    return {edge_type[0]: src, edge_type[2]: dst}


def _triplets(src_at: Tensor, dst_at: Tensor, num_positives: int, amount: int) -> dict[str, Tensor]:
    negative = dst_at[num_positives:].view(amount, num_positives).t()
    return {
        "src_index": src_at,
        "dst_pos_index": dst_at[:num_positives],
        "dst_neg_index": negative.squeeze(1) if amount == 1 else negative.contiguous(),
    }


def supervision_edges(
    sampler: Sampler, edge_type: EdgeType, src: Tensor, dst: Tensor, reverse: EdgeType | None
) -> dict[EdgeType, Tensor]:
    """Where the links, and their reverses, are among the sampler's edges: what a batch must not see of them."""
    if reverse == edge_type:
        return {edge_type: sampler.find_edges(edge_type, torch.cat([src, dst]), torch.cat([dst, src]))}
    found = {edge_type: sampler.find_edges(edge_type, src, dst)}
    if reverse is not None:
        found[reverse] = sampler.find_edges(reverse, dst, src)
    return found


def make_seeder(
    graph: AnyGraph, edge_type: EdgeType, negatives: NegativeSampling | None, disjoint: bool, time_attr: str | None
) -> LinkSeeder:
    """The seeder of a graph's links; negatives of temporal links need the times of all their nodes."""
    src, _, dst = edge_type
    sizes = graph.num_nodes(src), graph.num_nodes(dst)
    names = None if isinstance(graph, Graph) else graph
    if negatives is None:
        return LinkSeeder(sizes, edge_type, None, disjoint, names=names)
    times = [graph.node_data[t].get(time_attr) if time_attr else None for t in (src, dst)]
    src_time, dst_time = (
        None if rows is None else _by_original(graph, t, rows) for t, rows in zip((src, dst), times, strict=True)
    )
    negatives = replace(
        negatives,
        src_weight=None if negatives.is_triplet else _weights(graph, src, negatives.src_weight, "src_weight"),
        dst_weight=_weights(graph, dst, negatives.dst_weight, "dst_weight"),
    )
    return LinkSeeder(sizes, edge_type, negatives, disjoint, (src_time, dst_time), names)


def _weights(graph: AnyGraph, node_type: NodeType, given: Any, name: str) -> Tensor | None:
    """The weights of all nodes of a type, in the order of the user's own ids; named ones are read where they live."""
    if given is None:
        return None
    if isinstance(given, str):
        arrays = graph.node_data[node_type]
        if given not in arrays:
            raise ValueError(
                f"neg_sampling: {name}: nodes of type {node_type!r} have no array {given!r}, only "
                f"{some(arrays, near=given)}{did_you_mean(given, arrays)}"
            )
        weight = _by_original(graph, node_type, arrays[given])
    elif is_source(given):
        weight = _by_original(graph, node_type, given)
    else:
        weight = torch.as_tensor(given, device="cpu")
    return weight.reshape(-1) if weight.dim() == 2 and weight.shape[1] == 1 else weight


def _by_original(graph: AnyGraph, node_type: NodeType, rows: Any) -> Tensor:
    """Rows of all nodes in the order of the user's own ids."""
    if isinstance(graph, Graph) and isinstance(rows, Tensor):
        return rows
    num_nodes = graph.num_nodes(node_type)
    if rows.shape[0] != num_nodes:
        raise ValueError(f"neg_sampling: rows of {node_type!r} must be {num_nodes}, one per node, got {rows.shape[0]}")
    ids = torch.arange(num_nodes, device="cpu")
    return read_rows([(rows, ids if isinstance(graph, Graph) else graph.global_ids(ids, node_type))])[0]


def check_labels(negatives: NegativeSampling | None, label: Any) -> Any:
    """The labels as loaders keep them: with drawn negatives 0 means negative, so classes that start at 0 move up."""
    if label is None or negatives is None:
        return label
    if negatives.is_triplet:
        raise ValueError(
            "edge_label must be None for triplet negative sampling: src_index, dst_pos_index and dst_neg_index of the "
            "batch tell positives from negatives"
        )
    return label + 1 if label.numel() and int(label.min()) == 0 else label
