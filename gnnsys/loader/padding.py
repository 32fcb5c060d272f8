"""Batches padded to a few sizes: a training step that is captured in a CUDA graph has one graph per size.

Every hop gets nodes and edges behind its own, so that hops begin at the same places in all batches of a size. Padding
is exact: its edges lead from padding to padding, so sums over real nodes are those of the batch without it, and rows of
padding have no gradient as long as the loss looks at the seeds alone. Its ids repeat one of the batch's, so that rows
are gathered straight to where they belong.

A size is a level. Level 0 fits nearly all batches, as a few of them show when the loader is made; the others are
`growth` times larger or smaller, for batches that do not fit it and for an epoch's last. Which level a batch has
follows from its counts alone: a resumed run has the same sizes.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import fmean, pstdev
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from gnnsys.graph import EDGE, NODE, EdgeType, NodeType
from gnnsys.loader.options import check_count
from gnnsys.loader.sampled import Sampled
from gnnsys.loader.schedule import Schedule, Ticket
from gnnsys.sampling import Sample

Counts: TypeAlias = Sequence[int] | Mapping[Any, Sequence[int]]
SampleStage: TypeAlias = Callable[[Ticket, Tensor], Sampled]

_MULTIPLE = 16  # sizes are multiples of it
_SPREAD = 3.0  # level 0 has room for the average batch and so many standard deviations
_LEVELS = 40  # below level 0; smaller batches have the smallest size
_SHARE = 8  # of a hop's edges, one in so many is commonly padding
_EDGES_PER_NODE = 32  # of padding: one node with all its edges would take a GPU longer than the rest of the batch
_TEMPLATES = 4  # that each loading thread keeps


@dataclass(frozen=True, kw_only=True)
class PadSizes:
    """Sizes that batches are padded to.

    `nodes` (seeds first) and `edges` are the largest numbers per hop that fit level 0, by type where there are several;
    padding comes on top, and no batch has less. By default they are found from `num_samples` batches of the first
    epoch, and small batches have less. Further levels are `growth` times as large as the one before.

    >>> PadSizes(nodes=[1024, 14_000, 120_000], edges=[15_000, 140_000]).growth
    1.125
    """

    nodes: Counts | None = None
    edges: Counts | None = None
    growth: float = 1.125
    num_samples: int = 8

    def __post_init__(self) -> None:
        if (self.nodes is None) != (self.edges is None):
            raise ValueError("PadSizes needs nodes and edges, numbers per hop, or neither of them")
        if not 1 < self.growth <= 4:
            raise ValueError(f"growth must be above 1 and at most 4, such as 1.125, got {self.growth}")
        check_count("num_samples", self.num_samples, 1)


def as_pad_sizes(pad: bool | PadSizes) -> PadSizes | None:
    """What a loader was given as `pad`; None where batches are to stay as they are."""
    if isinstance(pad, PadSizes):
        return pad
    if not isinstance(pad, bool):
        raise ValueError(f"pad must be True, False or gnnsys.loader.PadSizes(...), got {pad!r}")
    return PadSizes() if pad else None


class PaddedShape(NamedTuple):
    """How many nodes and edges a padded batch has per hop, by type; of the nodes, how many are padding at least."""

    nodes: dict[NodeType, list[int]]
    edges: dict[EdgeType, list[int]]
    spare: dict[NodeType, list[int]]

    def key(self) -> tuple[Any, ...]:
        """What two batches of one shape have in common."""
        by_type = [*self.nodes.items(), *self.edges.items()]
        return tuple((t, *per_hop) for t, per_hop in by_type)


class Padding:
    """A sample stage whose batches are padded; `sample` makes those without.

    A batch gets `seed_mask`, bool, true for its seeds and false for padding, as long as `num_sampled_nodes[0]`;
    `batch_size` and `input_id` are those of the seeds alone. Where trees are disjoint, padding is of a tree of its own.
    """

    def __init__(self, sample: SampleStage, schedule: Schedule, options: PadSizes) -> None:
        self._sample = sample
        self._growth = options.growth
        count = min(options.num_samples if options.nodes is None else 1, len(schedule))
        tickets = [schedule.ticket(index * len(schedule) // count) for index in range(count)]
        inputs = {ticket: schedule.inputs(ticket) for ticket in tickets}
        most = max((each.numel() for each in inputs.values()), default=0)  # an epoch's last batch may have fewer
        found = [sample(ticket, each).sample for ticket, each in inputs.items() if each.numel() >= most - 1]
        self._nodes, self._edges = _largest(found)
        self._lowest = -_LEVELS
        if options.nodes is not None and options.edges is not None:
            self._lowest = 0
            self._nodes = _given("nodes", options.nodes, self._nodes, NODE)
            self._edges = _given("edges", options.edges, self._edges, EDGE)
        self._templates = threading.local()  # by thread: each may have a stream of its own

    def __call__(self, ticket: Ticket, chosen: Tensor) -> Sampled:
        sampled = self._sample(ticket, chosen)
        sample, seed_type = sampled.sample, sampled.input_type
        assert isinstance(seed_type, str)
        shape = self._shape(sample, seed_type)
        num_seeds = sample.num_sampled_nodes[seed_type][0]
        tree = None
        if sample.tree is not None:
            tree = {
                t: _padded_ids(of, sample.num_sampled_nodes[t], shape.nodes[t], num_seeds)
                for t, of in sample.tree.items()
            }
        ends = {t: self._padded_edges(t, sample, shape) for t in sample.row}
        padded = replace(
            sample,
            node={t: _padded_ids(ids, sample.num_sampled_nodes[t], shape.nodes[t]) for t, ids in sample.node.items()},
            row={t: both[0] for t, both in ends.items()},
            col={t: both[1] for t, both in ends.items()},
            edge={t: _padded_ids(ids, sample.num_sampled_edges[t], shape.edges[t]) for t, ids in sample.edge.items()},
            num_sampled_nodes=shape.nodes,
            num_sampled_edges=shape.edges,
            tree=tree,
        )
        mask = torch.zeros(shape.nodes[seed_type][0], dtype=torch.bool, device=sample.device)
        mask[:num_seeds] = True
        values = {**sampled.values, seed_type: {**sampled.values.get(seed_type, {}), "seed_mask": mask}}
        return replace(sampled, sample=padded, values=values)

    # -- sizes -------------------------------------------------------------------------------------------------------

    def _shape(self, sample: Sample, seed_type: NodeType) -> PaddedShape:
        nodes, edges = sample.num_sampled_nodes, sample.num_sampled_edges
        by_type = [(c, self._nodes.get(t)) for t, c in nodes.items()] + [
            (c, self._edges.get(t)) for t, c in edges.items()
        ]
        pairs = [pair for counts, base in by_type for pair in zip(counts, base or [0] * len(counts), strict=True)]
        level = self._level([(count, base) for count, base in pairs if base])
        room = iter(self._room(count, base, level) for count, base in pairs)
        node_room = {t: [next(room) for _ in per_hop] for t, per_hop in nodes.items()}
        edge_room = {t: [next(room) for _ in per_hop] for t, per_hop in edges.items()}
        spare = {t: [0] * len(per_hop) for t, per_hop in nodes.items()}
        spare[seed_type][0] = 1
        for (src, _, dst), per_hop in edge_room.items():
            for hop, num_edges in enumerate(per_hop):  # which come from the hop behind
                needed = -(-_common_padding(num_edges) // _EDGES_PER_NODE)
                spare[dst][hop] = max(spare[dst][hop], needed)
                spare[src][hop + 1] = max(spare[src][hop + 1], needed)
        full = {t: [a + _multiple(b) for a, b in zip(node_room[t], spare[t], strict=True)] for t in nodes}
        return PaddedShape(full, edge_room, spare)

    def _level(self, pairs: Sequence[tuple[int, int]]) -> int:
        """The lowest at which every count fits."""
        ratio = max((count / base for count, base in pairs), default=0.0)
        level = max(self._lowest, math.floor(math.log(ratio, self._growth)) - 1) if ratio else self._lowest
        while any(count > self._room(count, base, level) for count, base in pairs):
            level += 1
        return level

    def _room(self, count: int, base: int, level: int) -> int:
        """Where no batch was seen to have any, a batch that does has a size of its own."""
        return _multiple(math.ceil(base * self._growth**level) if base else count)

    # -- edges -------------------------------------------------------------------------------------------------------

    def _padded_edges(self, edge_type: EdgeType, sample: Sample, shape: PaddedShape) -> Tensor:
        """int64 [2, num_edges]: per hop its own edges, renumbered, then those of padding; still by destination."""
        src, _, dst = edge_type
        row, col = sample.row[edge_type], sample.col[edge_type]
        src_counts, dst_counts = sample.num_sampled_nodes[src], sample.num_sampled_nodes[dst]
        first = last = shift = 0
        moved = row
        for count, size in zip(src_counts[:-1], shape.nodes[src][:-1], strict=True):
            last += count  # sources behind this hop are behind its padding
            if size > count:
                moved = torch.add(moved, row >= last, alpha=size - count)
        out, place = self._template(edge_type, shape, row.device).clone(), 0
        for hop, (count, size) in enumerate(
            zip(sample.num_sampled_edges[edge_type], shape.edges[edge_type], strict=True)
        ):
            if count:
                out[0, place : place + count].copy_(moved[first : first + count])
                torch.add(col[first : first + count], shift, out=out[1, place : place + count])
            first, place = first + count, place + size
            shift += shape.nodes[dst][hop] - dst_counts[hop]
        return out

    def _template(self, edge_type: EdgeType, shape: PaddedShape, device: torch.device) -> Tensor:
        """Edges that are all padding; a batch's own are written over the first of each hop."""
        kept: OrderedDict[Any, Tensor] = self._templates.__dict__.setdefault("kept", OrderedDict())
        key = (edge_type, shape.key(), device)
        found = kept.get(key)
        if found is None:
            found = kept[key] = _edges_of_padding(edge_type, shape).to(device)
            while len(kept) > _TEMPLATES * len(shape.edges):
                kept.popitem(last=False)
        kept.move_to_end(key)
        return found


def _largest(samples: Sequence[Sample]) -> tuple[dict[NodeType, list[int]], dict[EdgeType, list[int]]]:
    """Counts that nearly no batch exceeds, by those of a few."""

    def over(counts: Sequence[Mapping[Any, list[int]]]) -> dict[Any, list[int]]:
        types = counts[0] if counts else {}
        return {t: [_likely_most(hop) for hop in zip(*(each[t] for each in counts), strict=True)] for t in types}

    return over([s.num_sampled_nodes for s in samples]), over([s.num_sampled_edges for s in samples])


def _likely_most(counts: Sequence[int]) -> int:
    return max(*counts, math.ceil(fmean(counts) + _SPREAD * pstdev(counts)), 0)


def _given(name: str, given: Counts, found: Mapping[Any, list[int]], only: Any) -> dict[Any, list[int]]:
    """A user's own counts; `found` is what a batch has."""
    by_type = dict(given) if isinstance(given, Mapping) else {only: given}
    shape = {t: len(counts) for t, counts in found.items()}
    if found and {t: len(counts) for t, counts in by_type.items()} != shape:
        wanted = next(iter(shape.values())) if set(shape) == {only} else shape
        raise ValueError(f"PadSizes.{name} must have a number for each hop, here {wanted}, got {given!r}")
    return {t: [check_count(f"PadSizes.{name}", count, 0) for count in counts] for t, counts in by_type.items()}


def _multiple(count: int) -> int:
    return -(-count // _MULTIPLE) * _MULTIPLE


def _common_padding(num_edges: int) -> int:
    return -(-num_edges // _SHARE)


def _padded_ids(ids: Tensor, counts: Sequence[int], sizes: Sequence[int], filler: int | None = None) -> Tensor:
    """Per hop its own ids, then the filler: by default the first of all, or 0."""
    repeats = filler is None and ids.numel() > 0
    out = ids[:1].expand(sum(sizes)).clone() if repeats else ids.new_full((sum(sizes),), filler or 0)
    first = place = 0
    for count, size in zip(counts, sizes, strict=True):
        if count:
            out[place : place + count].copy_(ids[first : first + count])
        first, place = first + count, place + size
    return out


def _edges_of_padding(edge_type: EdgeType, shape: PaddedShape) -> Tensor:
    """Edges among the last nodes of each hop, which are padding in every batch of this shape.

    A batch uses the last of each hop's, mostly fewer than one in eight: those are spread over all nodes of padding, the
    others lead to the first of them.
    """
    src, _, dst = edge_type
    ends = {t: list(accumulate(shape.nodes[t])) for t in (src, dst)}
    rows, cols = [], []
    for hop, num_edges in enumerate(shape.edges[edge_type]):
        steps = torch.arange(num_edges, device="cpu")
        targets, sources, common = shape.spare[dst][hop], shape.spare[src][hop + 1], _common_padding(num_edges)
        behind = (steps - (num_edges - common)).clamp(min=0)
        rows.append(ends[src][hop + 1] - max(sources, 1) + steps % max(sources, 1))
        cols.append(ends[dst][hop] - targets + behind * targets // max(common, 1))
    return (
        torch.stack([torch.cat(rows), torch.cat(cols)]) if rows else torch.empty(2, 0, dtype=torch.int64, device="cpu")
    )
