"""The expected share of a sampled batch's input rows that live on another part, without sampling one.

Vertex inclusion, after SALIENT++ (VIP analysis), for the default sampler, which expands a node in the hop after it was
found. Per part, with its seeds S and a batch of B of them at random, over the whole graph in global ids:

    seen_0(v) = new_0(v) = min(1, B / |S|) for seeds v, 0 otherwise
    reach_h(u) = 1 - prod over edges u -> v of (1 - new_{h-1}(v) * min(1, fanout_h / in-degree(v)))
    new_h(u) = (1 - seen_{h-1}(u)) * reach_h(u)        seen_h(u) = seen_{h-1}(u) + new_h(u)

A batch then has sum_u seen_H(u) input rows; those of u outside the part are remote. Draws of different nodes are taken
as independent: exact where every neighbour is taken, close otherwise. Degrees and fanouts count per edge type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnsys.graph import NodeType
from gnnsys.partition.array_pieces import Meter, Progress, column_pieces
from gnnsys.partition.part import Part
from gnnsys.partition.parts_directory import Parts

DEFAULT_FANOUTS = (15, 10, 5)
WORK_LIMIT = 1 << 30  # edges looked at, all hops and parts together; a few seconds
_PIECE = 1 << 20


@dataclass(frozen=True)
class PartBatch:
    """A batch of one part: how many seeds it draws from, and the rows it expects."""

    num_seeds: int
    num_rows: float
    num_remote: float

    @property
    def fraction(self) -> float | None:
        """None where there are no seeds."""
        return self.num_remote / self.num_rows if self.num_rows else None


@dataclass(frozen=True)
class RemoteShare:
    """`fanouts` are the hops that were counted, `num_skipped` those left out because the graph is large."""

    parts: tuple[PartBatch, ...]
    fanouts: tuple[int, ...]
    num_skipped: int
    batch_size: int
    seeds: str

    @property
    def fraction(self) -> float | None:
        """Over all parts, one batch each: ranks make equally many steps."""
        total = sum(part.num_rows for part in self.parts)
        return sum(part.num_remote for part in self.parts) / total if total else None


def expected_remote(
    parts: Parts,
    fanouts: Sequence[int] | None = None,
    *,
    batch_size: int = 1024,
    work_limit: int = WORK_LIMIT,
    progress: Progress | None = None,
) -> RemoteShare:
    """Seeds are a part's train nodes, or all its core nodes where no type has a `train_mask`.

    Hops beyond the first cost one look at every edge per part; without given `fanouts` (15, 10, 5) they are left out
    where that exceeds `work_limit`. Memory: 12 bytes per node.
    """
    hops = tuple(DEFAULT_FANOUTS if fanouts is None else fanouts)
    if not hops or any(isinstance(f, bool) or not isinstance(f, int) or f < -1 for f in hops):
        raise ValueError(f"fanouts must be a whole number per hop, -1 for all neighbours, got {list(hops)}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    num_edges = sum(parts.book.num_ids(t) for t in parts.schema.edge_types)
    num_skipped = 0
    if fanouts is None and num_edges * parts.num_parts * (len(hops) - 1) > work_limit:
        hops, num_skipped = hops[:1], len(hops) - 1
    has_split = any("train_mask" in arrays for arrays in parts.schema.node_data.values())
    meter = Meter(progress, num_edges * (1 + parts.num_parts * (len(hops) - 1)))
    batches = []
    for index in range(parts.num_parts):
        seeds = _seeds(parts.part(index), parts, has_split)
        batches.append(_batch(parts, index, seeds, hops, batch_size, meter))
    return RemoteShare(tuple(batches), hops, num_skipped, batch_size, "train nodes" if has_split else "nodes")


def _seeds(part: Part, parts: Parts, has_split: bool) -> dict[NodeType, Tensor]:
    """bool [num_core] per type."""
    seeds = {}
    for t in parts.schema.node_types:
        mask, num_core = part.node_data[t].get("train_mask"), part.num_core(t)
        if mask is None:
            seeds[t] = torch.full((num_core,), not has_split, device="cpu")
        else:
            seeds[t] = (mask if mask.dim() == 1 else mask[:, 0]).ne(0)
    return seeds


def _batch(
    parts: Parts, index: int, seeds: dict[NodeType, Tensor], fanouts: Sequence[int], batch_size: int, meter: Meter
) -> PartBatch:
    """One part's recurrence: the first hop in the part's own local ids, all others in global ids."""
    num_seeds = sum(int(mask.sum()) for mask in seeds.values())
    if num_seeds == 0:
        return PartBatch(0, 0.0, 0.0)
    part, what = parts.part(index), f"expected batches of part {index}"
    new = {t: mask.float() * min(1.0, batch_size / num_seeds) for t, mask in seeds.items()}
    seen = {t: torch.cat([chance, chance.new_zeros(_num_local(part, t) - len(chance))]) for t, chance in new.items()}
    found = _find(seen, _log_misses(parts, part, new, fanouts[0], meter, what))
    if len(fanouts) == 1:
        return _count(num_seeds, seen, {t: range(part.num_core(t)) for t in seen})
    seen, found = (_to_global(parts, part, chance) for chance in (seen, found))
    for fanout in fanouts[1:]:
        misses = {t: torch.zeros_like(chance) for t, chance in seen.items()}
        for other in map(parts.part, range(parts.num_parts)):
            own = {t: parts.book.part_range(other.index, t) for t in misses}
            here = {t: found[t][own[t].start : own[t].stop] for t in misses}
            if not any(bool(chance.any()) for chance in here.values()):
                meter.advance(sum(len(parts.book.part_range(other.index, t)) for t in parts.schema.edge_types), what)
                continue
            for t, log in _log_misses(parts, other, here, fanout, meter, what).items():
                misses[t][own[t].start : own[t].stop] += log[: len(own[t])]
                misses[t].index_add_(0, _first_hop(other, t), log[len(own[t]) :])
        found = _find(seen, misses)
    return _count(num_seeds, seen, {t: parts.book.part_range(index, t) for t in seen})


def _log_misses(
    parts: Parts, part: Part, new: dict[NodeType, Tensor], fanout: int, meter: Meter, what: str
) -> dict[NodeType, Tensor]:
    """log(1 - reach) of every local node up to the first hop, from the edges of the part's core nodes."""
    logs = {t: torch.zeros(_num_local(part, t), device="cpu") for t in parts.schema.node_types}
    for edge_type in parts.schema.edge_types:
        src, _, dst = edge_type
        csc, num_core = part.csc(edge_type), part.num_core(dst)
        for first, end in column_pieces(csc.indptr[: num_core + 1]):
            begin, stop = int(csc.indptr[first]), int(csc.indptr[end])
            degrees, chance = csc.indptr[first : end + 1].diff(), new[dst][first:end]
            if fanout >= 0:
                chance = chance * (fanout / degrees.clamp(min=1)).clamp_(max=1)
            if bool(chance.any()):
                per_edge = torch.repeat_interleave(torch.log1p(-chance), degrees, output_size=stop - begin)
                logs[src].index_add_(0, csc.indices[begin:stop], per_edge)
            meter.advance(stop - begin, what)
    return logs


def _find(seen: dict[NodeType, Tensor], misses: dict[NodeType, Tensor]) -> dict[NodeType, Tensor]:
    """One step of the recurrence: adds what is new to `seen`, in place, and returns it."""
    new = {t: torch.expm1(log).neg_().mul_(1 - seen[t]).clamp_(0, 1) for t, log in misses.items()}
    for t, chance in new.items():
        seen[t].add_(chance).clamp_(max=1)
    return new


def _to_global(parts: Parts, part: Part, local: dict[NodeType, Tensor]) -> dict[NodeType, Tensor]:
    spread = {}
    for t, chance in local.items():
        own = parts.book.part_range(part.index, t)
        spread[t] = torch.zeros(parts.book.num_ids(t), device="cpu")
        spread[t][own.start : own.stop] = chance[: len(own)]
        spread[t].index_copy_(0, _first_hop(part, t).long(), chance[len(own) :])
    return spread


def _count(num_seeds: int, seen: dict[NodeType, Tensor], own: dict[NodeType, range]) -> PartBatch:
    rows = sum(_sum(chance) for chance in seen.values())
    local = sum(_sum(chance[own[t].start : own[t].stop]) for t, chance in seen.items())
    return PartBatch(num_seeds, rows, max(0.0, rows - local))


def _sum(chance: Tensor) -> float:
    return sum(float(piece.double().sum()) for piece in chance.split(_PIECE))


def _num_local(part: Part, node_type: NodeType) -> int:
    """Core nodes and the first hop of the halo: all that edges of core nodes name."""
    return part.hops(node_type)[1]


def _first_hop(part: Part, node_type: NodeType) -> Tensor:
    hops = part.hops(node_type)
    return part.halo(node_type)[: hops[1] - hops[0]]
