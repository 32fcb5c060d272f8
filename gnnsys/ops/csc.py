"""CSC: the one shape in which structure travels, a whole graph's edge type or a single block of a batch.

Column v lists the in-neighbours of v, `indices[indptr[v]:indptr[v+1]]`, in the order of the user's edges.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnsys.ops._library import native


class WholeDegrees(NamedTuple):
    """What each source of a piece of a graph has in the whole: in-edges, and how many of them are self loops."""

    in_degrees: Tensor  # int64 [num_src]
    num_loops: Tensor  # int64 [num_src]


WEIGHT = "edge_weight"  # the argument of layers by which they weigh edges


class WholeWeights(NamedTuple):
    """What the in-edges of each source of a piece weigh in the whole graph, floating point [num_src] each."""

    total: Tensor
    others: Tensor  # the same without self loops
    loop: Tensor  # of its self loop, the last of several; 0 where it has none


@dataclass(frozen=True, eq=False)
class EdgeData:
    """What layers are told of a structure's edges: `rows[name]`, a row per position, is their argument of that name.

    Where there are weights (`WEIGHT`) and the structure is a piece of a graph, `whole` has those of the whole.
    """

    rows: Mapping[str, Tensor]
    whole: WholeWeights | None = None

    def tensors(self) -> list[Tensor]:
        """All there are, as `with_tensors` takes them."""
        return [*self.rows.values(), *(self.whole or ())]

    def with_tensors(self, tensors: Sequence[Tensor]) -> EdgeData:
        """The same of other tensors: moved ones, or those of some of the edges."""
        count = len(self.rows)
        whole = None if self.whole is None else WholeWeights(*tensors[count:])
        return EdgeData(dict(zip(self.rows, tensors[:count], strict=True)), whole)

    def only(self, names: Collection[str]) -> EdgeData | None:
        """Without what is not among `names`; None if nothing is left."""
        rows = {name: rows for name, rows in self.rows.items() if name in names}
        return EdgeData(rows, self.whole if WEIGHT in rows else None) if rows else None

    def piece(self, positions: slice, src: Tensor) -> EdgeData:
        """Of the edges at `positions`, whose sources are `src`."""
        whole = None if self.whole is None else WholeWeights(*(each[src] for each in self.whole))
        return EdgeData({name: rows[positions] for name, rows in self.rows.items()}, whole)


@dataclass(eq=False)
class CSC:
    """In-edges by destination.

    `indptr` int64 [num_dst + 1]; `indices` int32 or int64 [num_edges], values in [0, num_src); `edge_ids` maps a
    position to the user's edge id, None when position and edge id are the same. It may be given as a function, called
    when the ids are first asked for: few users of a block need them, and finding them costs a random read per edge.
    """

    indptr: Tensor
    indices: Tensor
    num_src: int
    _edge_ids: Tensor | Callable[[], Tensor] | None = field(default=None, repr=False)
    _transposed: CSC | None = field(default=None, repr=False)
    _ends: Mapping[int, int] | None = field(default=None, repr=False)  # entries of indptr that the host knows
    whole: WholeDegrees | None = field(default=None, repr=False)  # of a piece whose layers must know the whole
    edge_data: EdgeData | None = field(default=None, repr=False)  # where layers are told of edges through it
    sums: object = field(default=None, repr=False)  # a `SumsOf`, where sums over these edges were made before
    is_replayed: bool = field(default=False, repr=False)  # made by the CUDA graph that uses it, anew in every replay

    @property
    def edge_ids(self) -> Tensor | None:
        if callable(self._edge_ids):
            self._edge_ids = self._edge_ids()
        return self._edge_ids

    @classmethod
    def from_edge_index(
        cls, edge_index: Tensor, num_src: int, num_dst: int | None = None, *, narrow: bool = False
    ) -> CSC:
        """From COO, row 0 source and row 1 destination; stable, so a node's in-edges keep the input's order.

        Edges that come sorted by destination keep their positions: `edge_ids` is None. With `narrow`, int64 ids are
        stored as int32 where both nodes and edges fit.
        """
        check_edge_index(edge_index)
        num_dst = num_src if num_dst is None else num_dst
        src, dst = edge_index[0].contiguous(), edge_index[1].contiguous()
        indptr, indices, edge_ids = native.coo_to_csc(src, dst, num_src, num_dst, narrow)
        return cls(indptr, indices, num_src, edge_ids if edge_ids.numel() else None)

    @classmethod
    def from_sorted(cls, edge_index: Tensor, num_src: int, num_dst: int, ends: Mapping[int, int] | None = None) -> CSC:
        """From int64 COO whose destinations never decrease, which is taken on trust: on a device nobody has to wait.

        `ends` are entries of `indptr` that are known already. Ids are stored as int32 where nodes and edges fit.
        """
        src, dst = edge_index[0], edge_index[1]
        if torch.compiler.is_compiling():
            # No searchsorted: that of inductor (torch 2.11) reads a view from the beginning of its storage, here the
            # sources, and a copy of the view is optimised away. See docs/layers.md, "Under torch.compile".
            indptr = torch.cat([dst.new_zeros(1), native.degrees(dst.contiguous(), num_dst).cumsum(0)])
        else:
            indptr = torch.searchsorted(dst, torch.arange(num_dst + 1, device=dst.device))
        is_narrow = max(num_src, num_dst, dst.numel()) <= torch.iinfo(torch.int32).max
        return cls(indptr, src.to(torch.int32) if is_narrow else src, num_src, _ends=ends)

    def ends(self, sizes: Sequence[int]) -> list[int]:
        """For each of `sizes`, how many edges the first so many destinations have. On a device one wait, or none."""
        if self._ends is not None and all(size in self._ends for size in sizes):
            return [self._ends[size] for size in sizes]
        return self.indptr[torch.tensor(sizes, device=self.indptr.device)].tolist()

    def comes_by_hops(self, num_src: int, num_dst: int) -> bool:
        """Whether whoever made this said that the first `num_dst` nodes have their sources among the first `num_src`.

        What the host knows of a sampled batch's `indptr` is where hops end: a node's in-edges come from the next hop at
        the farthest. False where nothing is known.
        """
        if self._ends is None or num_dst not in self._ends:
            return False
        return num_src >= min((size for size in self._ends if size > num_dst), default=num_dst)

    @property
    def num_dst(self) -> int:
        return self.indptr.numel() - 1

    @property
    def num_edges(self) -> int:
        return self.indices.numel()

    @property
    def device(self) -> torch.device:
        return self.indices.device

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> CSC:
        """The same on another device, with its transpose if that was made; itself if it is there already."""
        if torch.empty(0, device=device).device == self.device:  # "cuda" is the current one of several
            return self
        return self._moved(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> CSC:
        """A copy in page-locked memory, which CUDA kernels read where it is; itself if it is there already."""
        ids = [self._edge_ids] if isinstance(self._edge_ids, Tensor) else []
        if all(t.is_pinned() for t in (self.indptr, self.indices, *ids)):
            return self
        return self._moved(lambda t: t.pin_memory())

    def _moved(self, move: Callable[[Tensor], Tensor]) -> CSC:
        edge_ids = self._edge_ids
        if callable(edge_ids):
            find = edge_ids

            def edge_ids() -> Tensor:  # still only when they are asked for
                return move(find())

        elif edge_ids is not None:
            edge_ids = move(edge_ids)
        turned = None if self._transposed is None else self._transposed._moved(move)
        whole = None if self.whole is None else WholeDegrees(*map(move, self.whole))
        data = None if self.edge_data is None else self.edge_data.with_tensors([*map(move, self.edge_data.tensors())])
        return CSC(move(self.indptr), move(self.indices), self.num_src, edge_ids, turned, whole=whole, edge_data=data)

    def in_degrees(self) -> Tensor:
        """int64 [num_dst]."""
        return self.indptr.diff()

    def dst(self) -> Tensor:
        """The destination of each position, int64 [num_edges]."""
        out = torch.empty(self.num_edges, dtype=torch.int64, device=self.device)
        native.expand_indptr(self.indptr, 0, out)
        return out

    def validate(self) -> CSC:
        """Checks every entry (ValueError); returns self."""
        native.validate_csc(self.indptr, self.indices, self.num_src)
        return self

    def transpose(self) -> CSC:
        """Out-edges by source; `edge_ids` of the result are positions in this CSC. Made once, then kept.

        In pinned memory where this is: a kernel that reads the one there needs the other for the gradient.
        """
        if self._transposed is None:
            if not self.is_replayed:
                refuse_to_capture("the transpose of a CSC", self.indices)
            indptr, indices, positions = native.transpose(self.indptr, self.indices, self.num_src)
            turned = CSC(indptr, indices, self.num_dst, positions)
            self._transposed = turned.pin_memory() if _is_pinned(self.indices) else turned
        return self._transposed


def sorted_structures(
    edges: Sequence[tuple[Tensor, int, int]], all_ends: Sequence[Mapping[int, int] | None]
) -> list[CSC]:
    """`CSC.from_sorted` of many edge_index on a device, each with its numbers of sources and destinations, in one call.

    Their arrays lie one behind the other in memory that all of them share.
    """
    most = torch.iinfo(torch.int32).max
    if any(max(edge_index.shape[1], num_src, num_dst) > most for edge_index, num_src, num_dst in edges):
        return [CSC.from_sorted(*each, ends) for each, ends in zip(edges, all_ends, strict=True)]
    num_dst = [each[2] for each in edges]
    indptr, indices = native.sorted_structures.default([each[0] for each in edges], num_dst)
    starts = indptr.split_with_sizes([size + 1 for size in num_dst])
    members = indices.split_with_sizes([each[0].shape[1] for each in edges])
    return [
        CSC(start, member, each[1], _ends=ends)
        for start, member, each, ends in zip(starts, members, edges, all_ends, strict=True)
    ]


def _is_pinned(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling() and tensor.is_pinned()


def is_captured(*tensors: Tensor) -> bool:
    """Whether work on these is being captured into a CUDA graph."""
    if torch.compiler.is_compiling() or not any(t.is_cuda for t in tensors):
        return False
    return torch.cuda.is_current_stream_capturing()


def refuse_to_capture(what: str, *tensors: Tensor) -> None:
    """What is made of a structure once and then kept must not be made in a capture.

    It may ask the device for sizes, which a capture forbids. What was kept would have its values only after a replay.
    """
    if is_captured(*tensors):
        raise RuntimeError(
            f"{what} cannot be made while a CUDA graph is captured: run the same layers once before the capture, on "
            "the very same CSC object (not an edge_index, whose contents may change from replay to replay), with "
            "gradients if the capture has them, and not in inference_mode"
        )


def check_edge_index(edge_index: Any) -> None:
    """ValueError, with what to write, unless these are edges in PyG's form: a tensor of ints, [2, num_edges]."""
    if not isinstance(edge_index, Tensor):
        remedy = "" if isinstance(edge_index, str) or edge_index is None else ": pass torch.as_tensor(edge_index)"
        raise ValueError(f"edge_index must be a torch.Tensor, got {type(edge_index).__name__}{remedy}")
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        turned = edge_index.dim() == 2 and edge_index.shape[1] == 2
        remedy = ", one edge a row: pass edge_index.t()" if turned else ""
        raise ValueError(f"edge_index must have shape [2, num_edges], got {list(edge_index.shape)}{remedy}")
    if edge_index.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"edge_index must be int64 or int32, got {edge_index.dtype}: pass edge_index.long()")
