"""What a layer is given, made plain: a CSC, rows of its sources and destinations, edge rows by position.

Layers take `edges` as a `Block`, a `CSC` or PyG's `edge_index`, `x` as one tensor or a pair (sources, destinations).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from gnnsys.nn.halves import RowWeights
from gnnsys.ops import (
    BY_DESTINATION,
    CSC,
    IN_REPLAYS,
    NOT_KNOWN,
    STRUCTURES,
    SUMMED,
    LateRows,
    MultipliedRows,
    SummedRows,
    check_edge_index,
    degrees,
    device_kind,
    is_captured,
    sorted_structures,
)
from gnnsys.sampling import Block

Edges: TypeAlias = Block | CSC | Tensor
Rows: TypeAlias = Tensor | tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class LayerInputs:
    """`src` [num_src, ...]; `dst` [num_dst, ...] or None; `edge_order` maps a position to the row of an edge tensor;
    `dst_is_first`: destinations are the first sources."""

    csc: CSC
    src: Tensor
    dst: Tensor | None
    edge_order: Tensor | None
    dst_is_first: bool = False

    def edge_rows(self, rows: Tensor, name: str) -> Tensor:
        """A user's edge tensor (in the order of the edges given) by position."""
        if rows.dim() == 0 or rows.shape[0] != self.csc.num_edges:
            raise ValueError(f"{name} has shape {list(rows.shape)}, expected {self.csc.num_edges} rows, one per edge")
        return rows if self.edge_order is None else rows.index_select(0, self.edge_order)

    def made_sums(self, reduce: str) -> Tensor | None:
        """The sums of sources over in-edges, where the loader has made them; `dst` has own rows then."""
        return self.src.sums_for(self.csc, reduce) if isinstance(self.src, SummedRows) else None

    @property
    def waits_on_host(self) -> bool:
        """Whether `host_products` may have something."""
        return isinstance(self.src, MultipliedRows)

    def host_products(self, weights: RowWeights | str) -> tuple[Tensor, ...] | None:
        """Rows of sources times `weights.src`, and of destinations times `weights.own`, where rows are on the host and
        wait to be multiplied there."""
        if not isinstance(self.src, MultipliedRows) or not self.dst_is_first or isinstance(weights, str):
            return None
        counts = (self.csc.num_src, self.csc.num_dst)
        return self.src.times(weights.all, counts[: len(weights.all)])


def resolve(x: Rows, edges: Edges, size: tuple[int, int] | None = None, derives: bool = False) -> LayerInputs:
    """Checks what a layer was given. One tensor for a CSC with fewer destinations is a block's: they come first.

    `size` is PyG's (num_src, num_dst), needed only for an edge_index whose destinations have no rows. A layer that
    `derives` other structures from the edges needs them on the device: a pinned CSC is copied there, once.
    """
    src, dst = x if isinstance(x, tuple) else (x, None)
    has_pair = isinstance(x, tuple)
    if isinstance(edges, Tensor):
        num_dst = _num_dst(src, dst, has_pair, size)
        csc, edge_order = from_edge_index(edges, src.shape[0], num_dst)
    else:
        csc, edge_order = as_csc(edges), None
        if derives and src.is_cuda and not csc.indices.is_cuda and csc.indices.is_pinned():
            csc = _copied(csc, src.device)
    if src.shape[0] != csc.num_src:
        raise ValueError(f"x has {src.shape[0]} rows of sources, but edges has {csc.num_src} sources")
    if not has_pair:
        if csc.num_dst > csc.num_src:
            raise ValueError(f"x must be a pair (sources, destinations): edges is {csc.num_src} x {csc.num_dst}")
        dst = src if csc.num_dst == csc.num_src else _first_rows(src, csc.num_dst)
    elif dst is not None and dst.shape[0] != csc.num_dst:
        raise ValueError(f"x has {dst.shape[0]} rows of destinations, but edges has {csc.num_dst} destinations")
    return LayerInputs(csc, src, dst, edge_order, not has_pair)


def _first_rows(rows: Tensor, count: int) -> Tensor:
    return rows.first_rows(count) if isinstance(rows, LateRows) else rows[:count]


def _copied(csc: CSC, device: torch.device) -> CSC:
    return STRUCTURES.get(lambda: csc.to(device), csc, key=("copy", device))


def as_csc(edges: Block | CSC) -> CSC:
    """The structure of a block with one edge type, or the CSC itself."""
    if isinstance(edges, CSC):
        return edges
    if not isinstance(edges, Block):
        remedy = ": pass torch.as_tensor(edges)" if isinstance(edges, (np.ndarray, list, tuple)) else ""
        raise ValueError(f"edges must be a Block, a CSC or an edge_index tensor, got {type(edges).__name__}{remedy}")
    if len(edges.csc) != 1:
        raise ValueError(f"edges must have one edge type, this block has {list(edges.csc)}: pass block.csc[edge_type]")
    return next(iter(edges.csc.values()))


def from_edge_index(edge_index: Tensor, num_src: int, num_dst: int) -> tuple[CSC, Tensor | None]:
    """edge_index as CSC, remembered while the tensor lives and is not written, and the edge at each position."""
    check_edge_index(edge_index)

    def make() -> CSC:
        least_src, least_dst, ends = STRUCTURES.find(edge_index, key=BY_DESTINATION, default=NOT_KNOWN)
        if device_kind(edge_index) != "cuda" or ends is None or num_src < least_src or num_dst < least_dst:
            csc = CSC.from_edge_index(edge_index, num_src, num_dst, narrow=True)
        else:
            csc = CSC.from_sorted(edge_index, num_src, num_dst, ends)
        csc.sums = STRUCTURES.find(edge_index, key=SUMMED)
        return csc

    if is_captured(edge_index):
        replayed = STRUCTURES.find(edge_index, key=IN_REPLAYS, in_replays=True)
        if replayed is not None:
            return replayed.csc(edge_index, num_src, num_dst), None
    csc = STRUCTURES.get(make, edge_index, key=(num_src, num_dst))
    return csc, csc.edge_ids


def make_structures(asked: Sequence[tuple[Tensor, int, int]]) -> None:
    """Makes and remembers, in one call, what `from_edge_index` would make of several edge_index (each with its numbers
    of sources and destinations) one after the other: on a device, of those that are known to come by destination."""
    if torch.compiler.is_compiling() or not any(edge_index.is_cuda for edge_index, _, _ in asked):
        return
    if is_captured(*(edge_index for edge_index, _, _ in asked)):
        return
    missing, all_ends = [], []
    for edge_index, num_src, num_dst in asked:
        if edge_index.is_cuda and STRUCTURES.find(edge_index, key=(num_src, num_dst)) is None:
            least_src, least_dst, ends = STRUCTURES.find(edge_index, key=BY_DESTINATION, default=NOT_KNOWN)
            if ends is not None and num_src >= least_src and num_dst >= least_dst:
                missing.append((edge_index, num_src, num_dst))
                all_ends.append(ends)
    if len(missing) > 1 and len({edge_index.device for edge_index, _, _ in missing}) == 1:
        made = sorted_structures(missing, all_ends)
        for (edge_index, num_src, num_dst), csc in zip(missing, made, strict=True):
            STRUCTURES.put(csc, edge_index, key=(num_src, num_dst))


@dataclass(frozen=True)
class Looped:
    """A graph whose self loops were replaced by exactly one for each of the first `num_loops` nodes."""

    csc: CSC
    others: CSC  # per destination the old positions of its edges that are no self loops: spmm reduces edge rows
    order: Tensor | None  # the edge at each new position, counting the kept ones and then the loops

    @property
    def num_loops(self) -> int:
        return min(self.csc.num_src, self.csc.num_dst)

    def extend(self, edge_rows: Tensor, loop_rows: Tensor) -> Tensor:
        """Edge rows of the new graph from those of the old one and those of the loops."""
        rows = torch.cat([edge_rows.index_select(0, self.others.indices), loop_rows])
        return rows if self.order is None else rows.index_select(0, self.order)


def with_self_loops(csc: CSC) -> Looped:
    """One self loop for every node that is source and destination; remembered for the CSC."""

    def make() -> Looped:
        dst = csc.dst()
        kept = (csc.indices != dst).nonzero().view(-1)
        loops = torch.arange(min(csc.num_src, csc.num_dst), device=dst.device)
        edges = torch.stack([torch.cat([csc.indices[kept].long(), loops]), torch.cat([dst[kept], loops])])
        looped = CSC.from_edge_index(edges, csc.num_src, csc.num_dst, narrow=True)
        others = CSC(_indptr(dst[kept], csc.num_dst), kept, csc.num_edges)
        return Looped(CSC(looped.indptr, looped.indices, csc.num_src), others, looped.edge_ids)

    return STRUCTURES.get(make, csc, key="with self loops")


def self_loops(csc: CSC) -> Tensor:
    """Positions of the edges from a node to itself, int64; remembered for the CSC."""
    return STRUCTURES.get(lambda: (csc.indices == csc.dst()).nonzero().view(-1), csc, key="self loops")


def last_self_loop(csc: CSC) -> Tensor:
    """The position of each destination's last self loop, int64 [num_dst], -1 where it has none; remembered."""

    def make() -> Tensor:
        loops = self_loops(csc)
        none = torch.full((csc.num_dst,), -1, dtype=torch.int64, device=loops.device)
        return none.scatter_reduce(0, csc.indices[loops].long(), loops, "amax")

    return STRUCTURES.get(make, csc, key="last self loop")


def without_self_loops(csc: CSC) -> tuple[CSC, Tensor | None]:
    """The graph without its self loops, and the old positions of what stays (None when there were none)."""
    if self_loops(csc).numel() == 0:
        return csc, None

    def make() -> tuple[CSC, Tensor]:
        dst = csc.dst()
        kept = (csc.indices != dst).nonzero().view(-1)
        return CSC(_indptr(dst[kept], csc.num_dst), csc.indices[kept], csc.num_src), kept

    return STRUCTURES.get(make, csc, key="without self loops")


def _indptr(dst: Tensor, num_dst: int) -> Tensor:
    return torch.cat([dst.new_zeros(1, dtype=torch.int64), degrees(dst, num_dst).cumsum(0)])


def _num_dst(src: Tensor, dst: Tensor | None, has_pair: bool, size: tuple[int, int] | None) -> int:
    if dst is not None:
        return dst.shape[0]
    if size is not None:
        return size[1]
    if has_pair:
        raise ValueError("size=(num_src, num_dst) must be given when x has no rows of destinations")
    return src.shape[0]
