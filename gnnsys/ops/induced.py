"""Edges among chosen nodes, and numbers drawn by key: typed faces of `edges_within` (induced.*) and `draw_below`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gnnsys.ops._library import native
from gnnsys.ops._workspace import Expected, power_above, scan_bytes, takes_outputs_only, tells_workspace
from gnnsys.ops.csc import CSC


class InnerEdges(NamedTuple):
    """In-edges of a list of destinations that come from a list of sources, destination after destination."""

    indptr: Tensor  # int64 [num_dst + 1]
    places: Tensor  # int64 [num_edges], where in the list the source stands first
    positions: Tensor  # int64 [num_edges], positions in the CSC


def edges_within(
    csc: CSC,
    dst: Tensor,
    src: Tensor,
    *,
    dst_tree: Tensor | None = None,
    src_tree: Tensor | None = None,
    exclude: Tensor | None = None,
) -> InnerEdges:
    """The in-edges of `dst` whose source is in `src`, in the CSC's order; with trees, those inside a tree alone.

    A negative entry of `src` is a place that no edge comes from. `exclude` are positions, ascending, that are left
    out. Every copy of a repeated destination has all its edges, and they come from the first copy of their source.
    Work: the in-degrees of `dst`.

    >>> csc = CSC.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 2]]), 3)
    >>> edges_within(csc, torch.tensor([2, 1]), torch.tensor([2, 0])).places
    tensor([0, 1])
    """
    dst_tree, src_tree = (None if tree is None else tree.contiguous() for tree in (dst_tree, src_tree))
    return InnerEdges(
        *native.edges_within(csc.indptr, csc.indices, dst.contiguous(), dst_tree, src.contiguous(), src_tree, exclude)
    )


def induced_coo(
    csc: CSC,
    dst: Tensor,
    src: Tensor,
    *,
    dst_tree: Tensor | None = None,
    src_tree: Tensor | None = None,
    exclude: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The edges of `edges_within` as (place of the source, place of the destination, edge id), int64 each.

    >>> chain = CSC(torch.tensor([0, 1, 2]), torch.tensor([1, 0]), 2)
    >>> induced_coo(chain, torch.tensor([1, 0]), torch.tensor([1, 0]))
    (tensor([1, 0]), tensor([0, 1]), tensor([1, 0]))
    """
    dst_tree, src_tree = (None if tree is None else tree.contiguous() for tree in (dst_tree, src_tree))
    ids, dst, src = csc.edge_ids, dst.contiguous(), src.contiguous()
    return native.induced_coo(csc.indptr, csc.indices, ids, dst, dst_tree, src, src_tree, exclude)


def draw_below(ids: Tensor, bound: int, *, key: int) -> Tensor:
    """For each id a number in [0, bound), int64: uniform, and a function of `key` and the id alone.

    >>> bool((draw_below(torch.arange(100), 7, key=1) < 7).all())
    True
    """
    return native.draw_below(ids.contiguous(), bound, key)


@torch.library.register_fake("gnnsys::edges_within")
def _(indptr, indices, dst, dst_tree, src, src_tree, exclude):
    size = torch.library.get_ctx().new_dynamic_size()
    return indptr.new_empty(dst.shape[0] + 1), indptr.new_empty(size), indptr.new_empty(size)


@torch.library.register_fake("gnnsys::induced_coo")
def _(indptr, indices, edge_ids, dst, dst_tree, src, src_tree, exclude):
    size = torch.library.get_ctx().new_dynamic_size()
    return indptr.new_empty(size), indptr.new_empty(size), indptr.new_empty(size)


@torch.library.register_fake("gnnsys::draw_below")
def _(ids: Tensor, bound: int, key: int) -> Tensor:
    return ids.new_empty(ids.shape[0], dtype=torch.int64)


_COLUMNS_PER_THREAD = 64
_DENSE_IDS_PER_EDGE = 4  # members are looked up by id where a table of ids has at most so many per edge
_BYTES_PER_ID = 5  # of that table: whether it is a member, and its place


def _inner(expected: Expected, indices, dst, dst_tree, src) -> int:
    """Members by a table of ids and every edge that is looked at, or by a hash table and what was found."""
    edges = expected.edges_of(dst.numel(), indices.numel())
    found = edges if expected.num_found is None else min(expected.num_found, edges)
    shares = expected.shares(dst.numel(), _COLUMNS_PER_THREAD)
    slots = power_above(2 * src.numel(), 64)
    by_hash = 16 * slots + slots // 2 + 2 * 16 * found + 2 * 8 * shares * expected.degree(indices.numel())
    by_id = _BYTES_PER_ID * _DENSE_IDS_PER_EDGE * edges + 1 + 8 * (edges + shares)
    return by_hash if dst_tree is not None else max(by_hash, by_id)


@tells_workspace("edges_within", "cpu")
def _(expected: Expected, indptr, indices, dst, dst_tree, src, src_tree, exclude) -> int:
    return _inner(expected, indices, dst, dst_tree, src)


@tells_workspace("induced_coo", "cpu")
def _(expected: Expected, indptr, indices, edge_ids, dst, dst_tree, src, src_tree, exclude) -> int:
    """Its offsets are no output."""
    return _inner(expected, indices, dst, dst_tree, src) + 8 * (dst.numel() + 1)


@tells_workspace("edges_within", "cuda")
def _(expected: Expected, indptr, indices, dst, dst_tree, src, src_tree, exclude) -> int:
    return 16 * power_above(2 * src.numel(), 2) + 2 * scan_bytes(dst.numel())


takes_outputs_only("draw_below")
