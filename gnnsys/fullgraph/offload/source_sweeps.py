"""Sums over in-neighbours where rows move and most bins read most of them: a piece of rows comes once, for all nodes.

Bins of nodes (`piecewise_sums.py`) bring nearly every row again for each bin of a graph without locality, picked by the
host. Here the sums of all nodes lie on the device while rows go by:

- There: consecutive rows of [core, halo] are a piece. It is copied from where it lies, and added to the sums of every
  node that has edges from it; then the next one. One sweep brings each row once. Bins of the step then read their sums
  on the device. Where the sums of all nodes exceed what a budget leaves for them, nodes are in a few groups, each with
  a sweep of its own.
- Back: the same sweep makes the sums again, unless bins were kept. A bin writes the gradient of its sums over them.
  When a group is done, the gradient of any range of rows is one product with the transposed structure. Where it is
  computed from on the device, the step before asks for that bin by bin (`stays`); else a piece goes down when it is
  made, and what earlier groups and the nodes themselves said comes up with it: the host adds nothing but, of several
  groups, the nodes' own parts.
- Order of addition, the same on every run: a node's edges by piece, inside a piece as they are stored; a row's gradient
  is its own part, then its edges as the transposed structure has them, the last group's first.

A step in sweeps is a barrier: it begins when all rows of its input are there, of other ranks too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from gnnsys.fullgraph.offload.mover import Mover, Pick
from gnnsys.fullgraph.plan.neighbor_sums import NeighborSums, scratch_per_edge, turned_weight
from gnnsys.ops import CSC, native, sum_dtype

_SOURCE_BYTES = 24  # of a row in a piece besides itself: two weights, and where its edges begin
NODE_BYTES = 16  # of a node whose sums lie on the device: what they are multiplied by, as it comes and as it stays


@dataclass(frozen=True, eq=False)
class SweepPiece:
    """Rows first to end of [core, halo], and what in-edges a group's nodes have from them: indptr, indices counted from
    the piece's first row, and weights where there are some."""

    first: int
    end: int
    structure: list[Tensor]


@dataclass(frozen=True, eq=False)
class NodeGroup:
    """Nodes at places first to end, whose sums lie on the device at once.

    `turned` is their structure by source, over all local rows: indptr, indices counted from the group's first node, and
    weights. `ends` is its indptr on the host.
    """

    number: int
    first: int
    end: int
    pieces: list[SweepPiece]
    turned: list[Tensor]
    ends: Tensor

    def __len__(self) -> int:
        return self.end - self.first

    def to(self, place: Callable[[Tensor], Tensor]) -> NodeGroup:
        """With the structure where `place` puts it."""
        pieces = [replace(piece, structure=[*map(place, piece.structure)]) for piece in self.pieces]
        return replace(self, pieces=pieces, turned=[*map(place, self.turned)])


class StructurePlaces:
    """Puts structures on a device, or `pinned` on the host so that they are copied from where they lie; what several
    steps share is put there once."""

    def __init__(self, device: torch.device, pinned: bool) -> None:
        self._device, self._pinned = device, pinned
        self._made: dict[tuple[int, int, torch.dtype], tuple[Tensor, Tensor]] = {}  # with what it was made from

    def __call__(self, tensor: Tensor) -> Tensor:
        key = (tensor.data_ptr(), tensor.numel(), tensor.dtype)
        if key not in self._made:
            made = tensor.pin_memory() if self._pinned else tensor.to(self._device).contiguous()
            self._made[key] = (made, tensor)
        return self._made[key][0]


@dataclass(frozen=True)
class SweepCosts:
    """Bytes of a piece: per row, per edge and per node of its group; `limit` is what one may take, None: as it comes.

    `pull_limit` is the same of the structure through which a bin of the step before pulls its gradient.
    """

    row: int
    edge: int
    node: int
    limit: int | None = None
    pull_limit: int | None = None

    @classmethod
    def of(cls, view: NeighborSums, width: int, dtype: torch.dtype) -> SweepCosts:
        row = width * dtype.itemsize
        edge = view.csc.indices.dtype.itemsize + scratch_per_edge(width, dtype)
        if view.weight is not None:  # as it comes, and as rows are
            edge += view.weight.dtype.itemsize + dtype.itemsize
        return cls(row + _SOURCE_BYTES, edge, view.csc.indptr.dtype.itemsize)


@dataclass(eq=False)
class DeviceSums:
    """The sums of a group's nodes on the device; on the way back each bin's gradient takes their place."""

    group: NodeGroup
    rows: Tensor  # [nodes of the group, width]
    dst_scale: Tensor | None
    bins_left: int

    def of(self, first: int, end: int) -> Tensor:
        """Those of nodes first to end, with a version of their own: autograd shall not count what others write."""
        return self.rows.data[first - self.group.first : end - self.group.first].data


def piece_cuts(csc: CSC, num_nodes: int, costs: SweepCosts, num_pieces: int, num_core: int) -> list[int] | None:
    """Where pieces of rows begin, and the end of the last; None where not even one row fits. No piece has rows of the
    core and of the halo. `num_nodes` are those of the largest group; without a limit there are about `num_pieces`."""
    num_rows = csc.num_src
    ends = [0, num_core, num_rows] if 0 < num_core < num_rows else [0, num_rows]
    if costs.limit is None:
        each = max(1, -(-num_rows // num_pieces))
        return [0, *(at for first, end in pairwise(ends) for at in (*range(first + each, end, each), end))]
    limit = costs.limit - costs.node * (num_nodes + 1)
    degrees = torch.bincount(csc.indices.long(), minlength=num_rows)  # of all groups: no fewer than one has
    spent = torch.arange(1, num_rows + 1) * costs.row + degrees.cumsum(0) * costs.edge  # up to and with each row
    cuts = [0]
    for end in ends[1:]:
        while cuts[-1] < end:
            first = cuts[-1]
            before = int(spent[first - 1]) if first else 0
            found = int(torch.searchsorted(spent, max(0, limit) + before, right=True))
            if found <= first:
                return None
            cuts.append(min(found, end))
    return cuts


def make_groups(view: NeighborSums, bounds: Sequence[int], cuts: Sequence[int]) -> list[NodeGroup]:
    """The groups of nodes between bounds, each with the pieces between cuts. Structures are where the view's is."""
    groups = []
    for number, (first, end) in enumerate(pairwise(bounds)):
        csc, weight = view.csc, view.weight
        if (first, end) != (0, csc.num_dst):
            positions = slice(int(csc.indptr[first]), int(csc.indptr[end]))
            weight = None if weight is None else weight[positions]
            indptr = csc.indptr[first : end + 1] - csc.indptr[first]
            csc = CSC(indptr, csc.indices[positions], csc.num_src)
        pieces = [_piece(csc, weight, *rows) for rows in pairwise(cuts)]
        turned = csc.transpose()
        parts = [turned.indptr, turned.indices, *([] if weight is None else [turned_weight(csc, weight)])]
        groups.append(NodeGroup(number, first, end, pieces, parts, turned.indptr))
    return groups


def _piece(csc: CSC, weight: Tensor | None, first: int, end: int) -> SweepPiece:
    """The in-edges from rows first to end, in their order."""
    weights = [] if weight is None else [weight]
    if (first, end) == (0, csc.num_src):
        return SweepPiece(first, end, [csc.indptr, csc.indices, *weights])
    is_here = (csc.indices >= first) & (csc.indices < end)
    count = torch.cat([torch.zeros(1, dtype=torch.int64), is_here.cumsum(0)])
    structure = [count[csc.indptr], csc.indices[is_here] - first, *(each[is_here] for each in weights)]
    return SweepPiece(first, end, structure)


@dataclass(frozen=True, eq=False)
class SourceSweeps:
    """A step in sweeps. `view`, on the host, says how sums are weighted; `group_of` is the group of each bin.

    `stays`: gradients of sums stay on the device until the step before has pulled what it needs of them.
    `swept_bytes` and `binned_bytes` are what it brings on the way there, and what bins would have brought, or more.
    """

    view: NeighborSums
    groups: list[NodeGroup]
    group_of: list[int]
    costs: SweepCosts
    brings_structure: bool
    stays: bool
    swept_bytes: int = 0
    binned_bytes: int = 0
    _num_bins: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._num_bins.extend(self.group_of.count(group.number) for group in self.groups)

    def describe(self) -> str:
        """What it does, and what bins would have brought."""
        num_pieces = len(self.groups[0].pieces)
        return (
            f"all rows in {num_pieces} pieces, once for each of {len(self.groups)} groups of nodes: "
            f"{self.swept_bytes:,} bytes in, where bins bring {self.binned_bytes:,} or more"
        )

    def sums(
        self, mover: Mover, group: NodeGroup, rows: Tensor, scale: Tensor | None, device: torch.device
    ) -> DeviceSums:
        """A sweep: the sums of a group's nodes. With `scale`, [rows, 1], each row counts so many times."""
        src_scale, dst_scale = self.view.scales(rows.dtype)
        scales = [each for each in (src_scale, scale) if each is not None]
        out = torch.zeros(len(group), rows.shape[1], dtype=rows.dtype, device=device)
        found = DeviceSums(group, out, None, self._num_bins[group.number])
        if dst_scale is not None:
            mover.load(group, [Pick(dst_scale, slice(group.first, group.end))])
            load = mover.take(group)
            found.dst_scale = load.tensors[0].clone()
            mover.send_back([], _nothing, [load])
        brought = [
            [*(Pick(each, slice(piece.first, piece.end)) for each in (rows, *scales)), *self._picks(piece.structure)]
            for piece in group.pieces
        ]
        for number, tensors in self._in_turn(mover, group, brought):
            given, *rest = tensors
            indptr, indices, weight = self._structure(group.pieces[number].structure, rest, out.dtype)
            with torch.no_grad():
                native.spmm_add(
                    indptr, indices, None, given, weight, _product(rest, sum_dtype(out.dtype)), found.dst_scale, out
                )
        return found

    def pull(self, mover: Mover, sums: DeviceSums, first: int, end: int, into: Tensor) -> None:
        """Adds the gradient of rows first to end, from those of a group's sums, to `into`, on the device."""
        for low, high, indptr, indices, weight, scale in self._turned(mover, sums, first, end):
            with torch.no_grad():
                native.spmm_add(
                    indptr, indices, None, sums.rows, weight, sums.dst_scale, scale, into[low - first : high - first]
                )

    def settle(self, mover: Mover, sums: DeviceSums, grads: Tensor, first: int, has_part: bool) -> None:
        """Brings the gradients of rows from `first` on down to `grads`, piece by piece, from those of a group's sums.

        `has_part` says that `grads` has something of the core's rows already, which is added to; of several groups,
        that it has of all.
        """
        group, rows = sums.group, sums.rows
        ranges = [(piece.first, piece.end) for piece in group.pieces if piece.first >= first]
        for low, high in ranges:
            is_added = len(self.groups) > 1 or (has_part and high <= self.view.csc.num_dst)
            if is_added:
                mover.load((group, "part", low), [Pick(grads, slice(low, high))])
                load = mover.take((group, "part", low))
                loads, into = [load], load.tensors[0]
            else:
                loads, into = [], torch.zeros(high - low, rows.shape[1], dtype=rows.dtype, device=rows.device)
            self.pull(mover, sums, low, high, into)
            mover.send_back([into], _nothing, loads, into=[grads[low:high]])
            del into
            mover.finish(keep=1)

    def _turned(
        self, mover: Mover, sums: DeviceSums, first: int, end: int
    ) -> Iterator[tuple[int, int, Tensor, Tensor, Tensor | None, Tensor | None]]:
        """The structure by source of rows first to end, in order and in pieces where it is brought: the rows of each,
        indptr, indices, weights of edges and of rows."""
        group, dtype = sums.group, sums.rows.dtype
        ranges = self._pull_ranges(group, first, end)
        src_scale = self.view.scales(dtype)[0]
        brought = []
        for low, high, a, b in ranges:
            structure = [group.turned[0][low : high + 1], *(each[a:b] for each in group.turned[1:])]
            scales = [] if src_scale is None else [Pick(src_scale, slice(low, high))]
            brought.append([*scales, *self._picks(structure)])
        for number, tensors in self._in_turn(mover, (group, first), brought):
            low, high, a, b = ranges[number]
            rest = list(tensors)
            structure = [group.turned[0][low : high + 1], *(each[a:b] for each in group.turned[1:])]
            indptr, indices, weight = self._structure(structure, rest, dtype)
            yield low, high, (indptr - a).clamp_(0, b - a), indices, weight, _product(rest, sum_dtype(dtype))

    def _pull_ranges(self, group: NodeGroup, first: int, end: int) -> list[tuple[int, int, int, int]]:
        """Rows and edges of each piece of the structure by source; the edges of one row may be in several."""
        ends, limit = group.ends, self.costs.pull_limit
        a, b = int(ends[first]), int(ends[end])
        row = _SOURCE_BYTES + 2 * ends.dtype.itemsize
        if limit is None or (end - first) * row + (b - a) * self.costs.edge <= limit:
            return [(first, end, a, b)]
        out: list[tuple[int, int, int, int]] = []
        num_rows, num_edges = max(1, limit // 2 // row), max(1, limit // 2 // self.costs.edge)
        low = first
        while low < end:
            until = int(torch.searchsorted(ends, int(ends[low]) + num_edges, right=True)) - 1
            high = min(max(until, low + 1), low + num_rows, end)
            a, b = int(ends[low]), int(ends[high])
            out += [(low, high, at, min(at + num_edges, b)) for at in range(a, b, num_edges)] or [(low, high, a, b)]
            low = high
        return out

    def _in_turn(
        self, mover: Mover, key: object, brought: Sequence[Sequence[Pick]]
    ) -> Iterator[tuple[int, list[Tensor]]]:
        """Brings pieces, one while another is read."""
        if brought:
            mover.load((key, 0), brought[0])
        for number in range(len(brought)):
            load = mover.take((key, number))
            yield number, load.tensors
            mover.send_back([], _nothing, [load])
            del load
            if number + 1 < len(brought):
                mover.finish(keep=1)
                mover.load((key, number + 1), brought[number + 1])

    def _picks(self, structure: Sequence[Tensor]) -> list[Pick]:
        return [Pick(each) for each in structure] if self.brings_structure else []

    def _structure(
        self, structure: Sequence[Tensor], came: list[Tensor], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Indptr, indices and weights of edges, which are taken off the end of what came, if they came."""
        parts = list(structure)
        if self.brings_structure:
            parts = came[-len(parts) :]
            del came[-len(parts) :]
        indptr, indices, *weights = parts
        return indptr, indices, weights[0].to(dtype) if weights else None


def _product(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    """Of weights of rows, [rows] or [rows, 1]."""
    out: Tensor | None = None
    for weight in weights:
        flat = weight.reshape(-1).to(dtype)
        out = flat if out is None else out * flat
    return out


def _nothing(came: Sequence[Tensor]) -> None:
    pass
