"""Parts of a CSC and orders of its nodes, and the fake kernels of every structure op.

A result that is made of a CSC's edges is a CSC again, whose `edge_ids` are positions in the one it was cut from.
Positions have the dtype of the indices, or int64 where there are too many edges for int32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnnsys.ops._library import native
from gnnsys.ops._workspace import Expected, power_above, scan_bytes, sort_bytes, takes_outputs_only, tells_workspace
from gnnsys.ops.csc import CSC


def degrees(ids: Tensor, num_nodes: int) -> Tensor:
    """How often each of [0, num_nodes) occurs in `ids`, int64: out-degrees are `degrees(csc.indices, csc.num_src)`."""
    return native.degrees(ids.contiguous(), num_nodes)


def expand_indptr(indptr: Tensor, first: int, out: Tensor) -> Tensor:
    """The column of every edge, counted from `first`: `out[e] = first + c` for indptr[c] <= e < indptr[c + 1].

    >>> expand_indptr(torch.tensor([0, 2, 2, 3]), 5, torch.empty(3, dtype=torch.int64))
    tensor([5, 5, 7])
    """
    native.expand_indptr(indptr, first, out)
    return out


def in_subgraph(csc: CSC, nodes: Tensor) -> CSC:
    """All in-edges of `nodes`: column i holds those of nodes[i], sources keep their ids. A node may be listed twice."""
    indptr, neighbors, positions = native.in_subgraph(csc.indptr, csc.indices, nodes.contiguous())
    return CSC(indptr, neighbors, csc.num_src, positions)


def induced_subgraph(csc: CSC, nodes: Tensor, src_nodes: Tensor | None = None) -> CSC:
    """All edges from `src_nodes` (by default `nodes`) to `nodes`; node ids of the result are places in these lists.

    Of a node listed twice, every copy in `nodes` gets all its in-edges, and edges leave its first copy in `src_nodes`:
    all copies of a node compute the same thing.
    """
    sources = nodes if src_nodes is None else src_nodes
    indptr, local, positions = native.induced_subgraph(
        csc.indptr, csc.indices, nodes.contiguous(), None if src_nodes is None else src_nodes.contiguous()
    )
    return CSC(indptr, local, sources.numel(), positions)


def bfs_order(csc: CSC, roots: Tensor) -> Tensor:
    """All nodes, breadth first from `roots` along in-edges; what they do not reach follows from the smallest id on.

    A permutation of [0, num_dst) in the dtype of the indices. Neighbours on the list are close in the graph, which
    is what a cache or a partitioner wants of an order.
    """
    if csc.num_src != csc.num_dst:
        raise ValueError(f"csc must lead from a node type to itself, got {csc.num_src} x {csc.num_dst}")
    if csc.indices.is_cuda or roots.is_cuda:
        raise ValueError("bfs_order runs on the CPU: pass csc.to('cpu') and roots.cpu()")
    return native.bfs_order(csc.indptr, csc.indices, roots.contiguous())


@torch.library.register_fake("gnnsys::coo_to_csc")
def _coo_to_csc(
    src: Tensor, dst: Tensor, num_src: int, num_dst: int, narrow: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.int32 if narrow else src.dtype
    num_ids = torch.library.get_ctx().new_dynamic_size()  # 0 when dst is sorted, otherwise one per edge
    edge_ids = src.new_empty(num_ids, dtype=dtype)
    return src.new_empty(num_dst + 1, dtype=torch.int64), torch.empty_like(src, dtype=dtype), edge_ids


@torch.library.register_fake("gnnsys::transpose")
def _transpose(indptr: Tensor, indices: Tensor, num_src: int) -> tuple[Tensor, Tensor, Tensor]:
    return indptr.new_empty(num_src + 1), torch.empty_like(indices), torch.empty_like(indices)


@torch.library.register_fake("gnnsys::degrees")
def _degrees(ids: Tensor, num_nodes: int) -> Tensor:
    return ids.new_empty(num_nodes, dtype=torch.int64)


@torch.library.register_fake("gnnsys::expand_indptr")
def _expand_indptr(indptr: Tensor, first: int, out: Tensor) -> None:
    return None


@torch.library.register_fake("gnnsys::validate_csc")
def _validate_csc(indptr: Tensor, indices: Tensor, num_src: int) -> None:
    return None


def _part(indptr: Tensor, indices: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    num_edges = torch.library.get_ctx().new_dynamic_size()
    return indptr.new_empty(nodes.shape[0] + 1), indices.new_empty(num_edges), indices.new_empty(num_edges)


@torch.library.register_fake("gnnsys::in_subgraph")
def _in_subgraph(indptr: Tensor, indices: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _part(indptr, indices, nodes)


@torch.library.register_fake("gnnsys::induced_subgraph")
def _induced_subgraph(
    indptr: Tensor, indices: Tensor, nodes: Tensor, src_nodes: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    return _part(indptr, indices, nodes)


@torch.library.register_fake("gnnsys::bfs_order")
def _bfs_order(indptr: Tensor, indices: Tensor, roots: Tensor) -> Tensor:
    return indices.new_empty(indptr.shape[0] - 1)


_SORTED_IN_CACHE = 1 << 20  # bytes of edges and groups that are sorted where they are: csrc/cpu/group.h
_BUCKET_EDGES, _MOST_BUCKETS = 1 << 12, 1 << 10
_EDGES_PER_THREAD = _IDS_PER_THREAD = 1 << 16
_INT32_MAX = 2**31 - 1


def _grouping(expected: Expected, num_edges: int, num_groups: int, narrow: bool) -> int:
    """A record per edge in the order of buckets, and each share's place in each of them."""
    ids, positions = (4, 4 if num_edges <= _INT32_MAX else 8) if narrow else (8, 8)
    if num_edges * (ids + positions) + num_groups * 8 <= _SORTED_IN_CACHE:
        return 0
    record = 12 if positions == 4 else 8 + ids + positions if ids == 8 else 16
    buckets = min(max(num_edges // _BUCKET_EDGES, 1), _MOST_BUCKETS)
    return num_edges * record + 8 * buckets * (expected.shares(num_edges, _EDGES_PER_THREAD) + 1) + 8


def _sorting(num_edges: int, id_bytes: int, narrow: bool, makes_columns: bool) -> int:
    """On a device: keys where ids are none, positions, sorted keys, their order where it is no output, the sort."""
    key = 4 if num_edges <= _INT32_MAX else 8
    arrays = (id_bytes != key) + 2 + (not (narrow and key == 4))
    columns = (4 if narrow else 8) * makes_columns
    return num_edges * (arrays * key + columns) + sort_bytes(num_edges, key)


@tells_workspace("coo_to_csc", "cpu")
def _(expected: Expected, src: Tensor, dst: Tensor, num_src: int, num_dst: int, narrow: bool = False) -> int:
    narrow = src.dtype == torch.int32 or (narrow and max(num_src, src.numel()) <= _INT32_MAX)
    return _grouping(expected, src.numel(), num_dst, narrow)


@tells_workspace("coo_to_csc", "cuda")
def _(expected: Expected, src: Tensor, dst: Tensor, num_src: int, num_dst: int, narrow: bool = False) -> int:
    narrow = src.dtype == torch.int32 or (narrow and max(num_src, src.numel()) <= _INT32_MAX)
    return _sorting(src.numel(), src.itemsize, narrow, False)


@tells_workspace("transpose", "cpu")
def _(expected: Expected, indptr: Tensor, indices: Tensor, num_src: int) -> int:
    narrow = indices.dtype == torch.int32 and indptr.numel() - 1 <= _INT32_MAX
    return _grouping(expected, indices.numel(), num_src, narrow)


@tells_workspace("transpose", "cuda")
def _(expected: Expected, indptr: Tensor, indices: Tensor, num_src: int) -> int:
    narrow = indices.dtype == torch.int32 and indptr.numel() - 1 <= _INT32_MAX
    return _sorting(indices.numel(), indices.itemsize, narrow, True)


@tells_workspace("degrees", "cpu")
def _(expected: Expected, ids: Tensor, num_nodes: int) -> int:
    return 8 * num_nodes * (expected.threads(ids.numel(), max(_IDS_PER_THREAD, num_nodes)) - 1)


@tells_workspace("in_subgraph", "cuda")
def _(expected: Expected, indptr: Tensor, indices: Tensor, nodes: Tensor) -> int:
    return 8 * nodes.numel() + scan_bytes(nodes.numel())


@tells_workspace("induced_subgraph", "cpu")
@tells_workspace("induced_subgraph", "cuda")
def _(
    expected: Expected, indptr: Tensor, indices: Tensor, nodes: Tensor, src_nodes: Tensor | None = None
) -> int:  # fmt: skip
    """A table of (node, place), at most half full; the device scans the columns' counts."""
    num_listed = (nodes if src_nodes is None else src_nodes).numel()
    return 16 * power_above(2 * num_listed, 2) + (scan_bytes(nodes.numel()) if nodes.is_cuda else 0)


@tells_workspace("bfs_order", "cpu")
def _(expected: Expected, indptr: Tensor, indices: Tensor, roots: Tensor) -> int:
    return indptr.numel() // 8 + 8  # a bit per node


takes_outputs_only("expand_indptr", "validate_csc")
takes_outputs_only("degrees", device_types=["cuda"])
takes_outputs_only("in_subgraph", device_types=["cpu"])
