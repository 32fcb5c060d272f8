"""Bins: groups of nodes that are computed together (G3, 4.4), and what each one waits for.

A bin is a range of places, so what it computes is a range of rows. The bins of a layer are as many as asked for, of
about equal work, or as large as a budget of bytes for their inputs and outputs lets them be; none holds both nodes that
others need and nodes that nobody else does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from gnnsys.fullgraph.plan.halo import HaloPlan
from gnnsys.ops import CSC, IdTable, WholeDegrees, compact, gather_rows

_BOUNDARY_SHARE = 0.6  # of a number of bins: small ones of what others wait for, large ones of the rest
_STEPS = 256  # in how many steps a part is looked through for where its bins end


class BudgetError(ValueError):
    """Not even the smallest bin fits into a budget."""


@dataclass(frozen=True)
class Packing:
    """How large bins are: a number of them per layer, or nodes per bin, or bytes of rows per bin; by default one. Of a
    number there are fewer where they would have less than `least_nodes`."""

    num_bins: int | None = None
    bin_nodes: int | None = None
    bin_bytes: int | None = None
    least_nodes: int = 1

    def __post_init__(self) -> None:
        given = [name for name in ("num_bins", "bin_nodes", "bin_bytes") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"bins are sized by one of num_bins, bin_nodes and bin_bytes, got {', '.join(given)}")
        for name in (*given, "least_nodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class Costs:
    """Bytes that a bin takes: per source, per node, per edge, and in any case."""

    source: float
    node: float
    edge: float = 0.0
    fixed: float = 0.0


@dataclass(frozen=True, eq=False)
class Bin:
    """Nodes at places first to end that a step computes together, the step's `number`-th bin.

    `src` are rows of [core, halo], own ones first; None: all of them as they are. The input of a model counts as the
    one bin of a step before the first, -1.
    """

    first: int
    end: int
    src: Tensor | None = None
    csc: CSC | None = None  # None for what works row by row
    step: int = 0
    number: int = 0

    def __len__(self) -> int:
        return self.end - self.first

    @property
    def nodes(self) -> slice:
        """Its nodes' places: the rows that it computes."""
        return slice(self.first, self.end)

    def to(self, rows_device: torch.device, device: torch.device) -> Bin:
        """The structure where it is computed on, the picks where rows are picked."""
        src = None if self.src is None else self.src.to(rows_device)
        return replace(self, src=src, csc=None if self.csc is None else self.csc.to(device))

    def inputs(self, rows: Tensor) -> Tensor:
        """Rows of the bin's sources: gathered, or a view where they lie together."""
        if self.csc is None:
            return rows[self.nodes]
        return rows if self.src is None else gather_rows(rows, self.src)


def bin_bounds(plan: HaloPlan, packing: Packing, costs: Costs, has_edges: bool) -> list[int]:
    """Where the bins of a layer begin, and the end of the last."""
    ends = [0, plan.num_boundary, plan.num_core] if 0 < plan.num_boundary < plan.num_core else [0, plan.num_core]
    if plan.num_core == 0:
        return [0]
    if packing == Packing():
        return [0, plan.num_core]
    bounds = [0]
    for first, end in pairwise(ends):
        if packing.bin_nodes is not None:
            bounds += [*range(first + packing.bin_nodes, end, packing.bin_nodes), end]
        elif packing.num_bins is not None:
            whole = len(ends) == 2
            share = 1.0 if whole else _BOUNDARY_SHARE if first == 0 else 1 - _BOUNDARY_SHARE
            count = min(round(packing.num_bins * share), (end - first) // packing.least_nodes)
            bounds += _equal_work(plan.csc, first, end, max(1, count))
        else:
            assert packing.bin_bytes is not None
            bounds += _within(plan.csc, first, end, packing.bin_bytes, costs, has_edges)
    return sorted(set(bounds))


def _equal_work(csc: CSC, first: int, end: int, count: int) -> list[int]:
    """Ends of bins of places first to end, so many, alike in edges and nodes together."""
    work = csc.indptr + torch.arange(csc.num_dst + 1)
    here, count = int(work[end] - work[first]), min(count, end - first)
    aims = int(work[first]) + torch.arange(1, count) * here // count
    inner = torch.searchsorted(work, aims).clamp_(first, end)
    return [*inner.tolist(), end]


def _within(csc: CSC, first: int, end: int, limit: int, costs: Costs, has_edges: bool) -> list[int]:
    """Ends of bins that cost no more than a limit."""
    if not has_edges:
        each = int((limit - costs.fixed) // max(1.0, costs.source + costs.node))
        if each < 1:
            raise BudgetError(
                f"one node takes {costs.fixed + costs.source + costs.node:,.0f} bytes in this layer, and memory_budget "
                f"or bin_bytes leaves {limit:,} for a bin: raise it"
            )
        return [*range(first + each, end, each), end]
    bounds, at = [], first
    while at < end:
        at = _end_of_bin(csc, at, end, max(1, (end - first) // _STEPS), limit, costs)
        bounds.append(at)
    return bounds


def _end_of_bin(csc: CSC, first: int, end: int, step: int, limit: int, costs: Costs) -> int:
    """The end of the largest bin from `first` on within a limit: in steps, the last of them halved until it fits."""
    table, num_src, at = IdTable(csc.num_src), 0, first
    while at < end:
        until = min(at + step, end)
        own = torch.arange(at, until, dtype=csc.indices.dtype, device=csc.indices.device)
        seen = torch.cat([own, csc.indices[int(csc.indptr[at]) : int(csc.indptr[until])]])
        known = table.lookup(seen)
        more = int(torch.unique(seen[known < 0]).numel())
        num_edges = int(csc.indptr[until] - csc.indptr[first])
        cost = costs.fixed + (num_src + more) * costs.source + (until - first) * costs.node + num_edges * costs.edge
        if cost > limit and until == first + 1:
            raise BudgetError(
                f"a node with {num_edges:,} in-edges takes {cost:,.0f} bytes by itself, and memory_budget or bin_bytes "
                f"leaves {limit:,} for a bin: raise it, or use layers that aggregate by sums (our SAGEConv with mean "
                "or sum, GCNConv, GINConv), whose inputs need not be there at once as those of others do"
            )
        if cost > limit:
            if step == 1:
                return at
            step //= 2
            continue
        table.insert(seen)
        num_src, at = num_src + more, until
    return at


def make_bins(csc: CSC | None, bounds: Sequence[int], whole: WholeDegrees | None, step: int = 0) -> list[Bin]:
    """The bins of a step between bounds, with the structure of each; `whole` are degrees of all local rows."""
    if csc is None:
        return [Bin(first, end, step=step, number=n) for n, (first, end) in enumerate(pairwise(bounds))]
    if list(bounds) == [0, csc.num_dst]:  # all in one: nothing has to be gathered
        return [Bin(0, bounds[1], None, replace(csc, whole=whole), step)]
    bins = []
    for number, (first, end) in enumerate(pairwise(bounds)):
        positions = slice(int(csc.indptr[first]), int(csc.indptr[end]))
        own = torch.arange(first, end, dtype=csc.indices.dtype, device=csc.indices.device)
        (src,), (local,) = compact([own], [csc.indices[positions]], [0])
        piece = WholeDegrees(*(each[src.long()] for each in whole)) if whole is not None else None
        data = csc.edge_data.piece(positions, src.long()) if csc.edge_data is not None else None
        indptr, indices = csc.indptr[first : end + 1] - csc.indptr[first], local.to(csc.indices.dtype)
        structure = CSC(indptr, indices, src.numel(), whole=piece, edge_data=data)
        bins.append(Bin(first, end, src, structure, step, number))
    return bins


@dataclass(frozen=True, eq=False)
class Chunk:
    """Rows of the halo that come in one message: first to end of a step's input, from a bin of `peer`.

    It is the step's `number`-th chunk, and `peer_bin` the number that the bin has at the peer.
    """

    step: int
    number: int
    peer: int
    peer_bin: int
    first: int
    end: int


def halo_chunks(plan: HaloPlan, bounds_of: Sequence[Sequence[int]], step: int) -> list[Chunk]:
    """What the halo is made of when every rank sends a bin's rows when it has them: by peer, then by bin."""
    chunks: list[Chunk] = []
    for peer, bounds in enumerate(bounds_of):
        a, b = plan.halo_bounds[peer], plan.halo_bounds[peer + 1]
        cuts = (a + torch.searchsorted(plan.owner_places[a:b], torch.tensor(bounds))).tolist()
        for peer_bin, (first, end) in enumerate(pairwise(cuts)):
            if end > first:
                chunks.append(Chunk(step, len(chunks), peer, peer_bin, first, end))
    return chunks


def sent_rows(plan: HaloPlan, bounds: Sequence[int]) -> list[list[tuple[int, Tensor]]]:
    """Per bin what to send: (rank, places of the rows, counted from the bin's first)."""
    out: list[list[tuple[int, Tensor]]] = [[] for _ in range(len(bounds) - 1)]
    for peer, places in enumerate(plan.send_places):
        cuts = torch.searchsorted(places, torch.tensor(bounds)).tolist()
        for number, (first, end) in enumerate(pairwise(cuts)):
            if end > first:
                out[number].append((peer, places[first:end] - bounds[number]))
    return out


def waits_for(
    sources: Sequence[Tensor], num_core: int, before: Sequence[Bin], chunks: Sequence[Chunk]
) -> list[tuple[list[Bin], list[Chunk]]]:
    """Per bin, given the local rows it reads: those bins of the layer before, and those chunks, that have them."""
    starts = torch.tensor([chunk.first + num_core for chunk in chunks], dtype=torch.int64)
    cuts = torch.tensor([each.end for each in before], dtype=torch.int64)
    num_rows = num_core + (chunks[-1].end if chunks else 0)
    out = []
    for rows in sources:
        is_read = torch.zeros(num_rows, dtype=torch.bool)  # a mark per row: sorting the rows of all edges takes longer
        is_read[rows.cpu()] = True
        own, away = is_read[:num_core].nonzero().view(-1), is_read[num_core:].nonzero().view(-1) + num_core
        local = torch.unique_consecutive(torch.bucketize(own, cuts, right=True)).tolist()
        remote = torch.unique_consecutive(torch.bucketize(away, starts, right=True) - 1).tolist() if chunks else []
        out.append(([before[number] for number in local], [chunks[number] for number in remote]))
    return out
