"""HaloPlan: who sends which rows to whom, made once; after it no ids travel.

The plan also fixes the order of a rank's nodes, called places (G3, 4.4.3, step 1): nodes that other ranks need come
first, then the rest, breadth first. Those that others need are grouped by what edges between ranks connect, in the
same order on all ranks, so that a bin waits for few of the peers' bins. Halo rows follow the core rows, by owner and by
place at the owner: whatever range of places a peer has computed, the rows of it that are needed here are one contiguous
range of the halo, and arrive where they belong without being moved again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from gnnsys.comm import Peers
from gnnsys.fullgraph.plan.rank_share import RankShare
from gnnsys.ops import CSC, bfs_order, gather_rows, in_subgraph

ORDERS = ("boundary", "ids")
_ROUNDS = 12  # in which the name of a group of boundary nodes spreads: a path of so many edges is one group


@dataclass(frozen=True, eq=False)
class HaloPlan:
    """What a rank sends and receives for one layer, whatever the width of its rows."""

    rank: int
    order: Tensor  # int64 [num_core]: place k holds own node order[k]
    places: Tensor  # int64 [num_core]: own node i is at place places[i]
    num_boundary: int  # nodes that others need; at the first places with the order "boundary"
    csc: CSC  # a column per place; sources are places, then num_core + row of the halo
    halo: Tensor  # global ids of the halo's rows
    halo_bounds: list[int]  # rows of the halo that rank r owns: halo_bounds[r] to halo_bounds[r + 1]
    owner_places: Tensor  # int64 [num_halo]: the place of each at its owner, ascending per owner
    send_places: list[Tensor]  # per rank, int64: what it needs of this rank's rows, ascending
    _moved: dict[tuple[str, torch.device], Tensor] = field(default_factory=dict, repr=False)

    def order_on(self, device: torch.device) -> Tensor:
        """`order`, brought to a device once."""
        return self._on("order", device)

    def places_on(self, device: torch.device) -> Tensor:
        return self._on("places", device)

    def _on(self, name: str, device: torch.device) -> Tensor:
        if (name, device) not in self._moved:
            self._moved[name, device] = getattr(self, name).to(device)
        return self._moved[name, device]

    @property
    def world_size(self) -> int:
        return len(self.send_places)

    @property
    def num_core(self) -> int:
        return self.order.numel()

    @property
    def num_halo(self) -> int:
        return self.halo.numel()

    @property
    def num_local(self) -> int:
        return self.num_core + self.num_halo

    def rows_to(self) -> list[int]:
        """How many rows go to each rank per exchange: this rank's line of the byte matrix, without the width."""
        return [places.numel() for places in self.send_places]

    def rows_from(self) -> list[int]:
        """How many rows come from each rank per exchange."""
        return [end - first for first, end in pairwise(self.halo_bounds)]


def make_plan(share: RankShare, peers: Peers, order: str = "boundary") -> HaloPlan:
    """Every rank calls it, with its own share. `order` is "boundary" (as above) or "ids" (as the nodes come)."""
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {order!r}")
    first, end = share.first, share.first + share.num_core
    sources = share.csc.indices.long()
    away = sources[(sources < first) | (sources >= end)]
    needed = torch.unique(away)  # ascending, so grouped by owner
    bounds = torch.searchsorted(needed, share.offsets)
    asked = peers.swap([needed[a:b] for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)])
    wanted = [ids - first for ids in asked]  # own nodes, per rank
    is_boundary = torch.zeros(share.num_core, dtype=torch.bool)
    for nodes in wanted:
        is_boundary[nodes] = True
    if order == "boundary":
        groups = _groups(share, peers, needed, wanted)
        listed = _ordered(share, is_boundary, groups)
    else:
        listed = torch.arange(share.num_core)
    places = torch.empty_like(listed)
    places[listed] = torch.arange(share.num_core)
    sizes = bounds.diff().tolist()
    told = peers.swap([places[nodes] for nodes in wanted], sizes)  # in the order in which they were asked for
    by_place = [torch.sort(at) for at in told]
    starts = bounds.tolist()
    halo = torch.cat([needed[a + each.indices] for a, each in zip(starts[:-1], by_place, strict=True)])
    csc = _relabelled(share, listed, places, needed, halo)
    return HaloPlan(
        share.rank, listed, places, int(is_boundary.sum()), csc, halo, starts,
        torch.cat([each.values for each in by_place]), [places[nodes].sort().values for nodes in wanted],
    )  # fmt: skip


def _groups(share: RankShare, peers: Peers, needed: Tensor, wanted: list[Tensor]) -> Tensor:
    """A number per own node, the same for nodes that edges between ranks connect: the least of their keys."""
    dst, sources = share.csc.dst(), share.csc.indices.long()
    is_away = (sources < share.first) | (sources >= share.first + share.num_core)
    dst, at = dst[is_away], torch.searchsorted(needed, sources[is_away])
    ids = torch.arange(share.first, share.first + share.num_core)
    keys = (ids * 0x9E3779B1) % ((1 << 31) - 1)  # spread, so that groups are not sorted by rank
    sizes = torch.searchsorted(needed, share.offsets).diff().tolist()
    for _ in range(_ROUNDS if share.world_size > 1 else 0):
        theirs = torch.cat(peers.swap([keys[nodes] for nodes in wanted], sizes))
        keys = keys.scatter_reduce(0, dst, theirs[at], "amin")
    return keys


def _ordered(share: RankShare, is_boundary: Tensor, groups: Tensor) -> Tensor:
    """Own nodes breadth first; those that others need before the rest, and group by group."""
    csc, first = share.csc, share.first
    own = (csc.indices >= first) & (csc.indices < first + share.num_core)
    counts = torch.zeros(csc.num_edges + 1, dtype=torch.int64)
    torch.cumsum(own, 0, out=counts[1:])
    inside = CSC(counts[csc.indptr], csc.indices[own] - first, share.num_core)
    walk = bfs_order(inside, torch.empty(0, dtype=inside.indices.dtype)).long()
    boundary = walk[is_boundary[walk]]
    boundary = boundary[torch.sort(groups[boundary], stable=True).indices]
    return torch.cat([boundary, walk[~is_boundary[walk]]])


def _relabelled(share: RankShare, listed: Tensor, places: Tensor, needed: Tensor, halo: Tensor) -> CSC:
    """The share's in-edges by place, sources as rows of [core, halo]."""
    mine = in_subgraph(share.csc, listed.to(share.csc.indices.dtype))
    num_local = share.num_core + halo.numel()
    dtype = torch.int32 if num_local <= torch.iinfo(torch.int32).max else torch.int64
    row_of_needed = torch.empty(needed.numel(), dtype=dtype)  # needed is sorted, halo is not
    row_of_needed[torch.searchsorted(needed, halo)] = torch.arange(share.num_core, num_local, dtype=dtype)
    sources = mine.indices.long() - share.first
    is_own = (sources >= 0) & (sources < share.num_core)
    rows = torch.empty(sources.numel(), dtype=dtype)
    rows[is_own] = gather_rows(places.to(dtype), sources[is_own])
    rows[~is_own] = row_of_needed[torch.searchsorted(needed, sources[~is_own] + share.first)]
    return CSC(mine.indptr, rows, num_local)
