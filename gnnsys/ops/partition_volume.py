"""Rows that travel between parts: counted, reduced and evened out. The typed face of csrc/cpu/partition/volume*.cpp.

Definitions and the searches' objectives are in `gnnsys.partition.communication`, which is what others use.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gnnsys.ops._library import native
from gnnsys.ops.csc import CSC

REFINE_STOPPED = ("converged", "out of work")
EVEN_OUT_STOPPED = ("balanced", "no improvement", "out of work")


class VolumeSearch(NamedTuple):
    """An assignment, the rows each part sends and receives under it (int64 [2, num_parts]), and how it was found."""

    part: Tensor
    loads: Tensor
    num_moves: int
    num_swaps: int
    stopped: str


def traffic_matrix(csc: CSC, part: Tensor, num_parts: int) -> Tensor:
    """int64 [num_parts, num_parts]: rows of part p that part q needs at [p, q]; nothing on the diagonal."""
    return native.communication_volume(csc.indptr, csc.indices, part, num_parts)


def volume_changes(csc: CSC, part: Tensor, num_parts: int) -> Tensor:
    """int64 [num_nodes, num_parts]: by how much the volume would grow if that node alone went to that part."""
    return native.volume_changes(csc.indptr, csc.indices, part, num_parts)


def refine_volume(csc: CSC, part: Tensor, num_parts: int, weights: Tensor, limits: Tensor, key: int) -> VolumeSearch:
    """Fewer rows in total. `part` int32 [num_nodes], `weights` int64 [C, num_nodes], `limits` int64 [C, num_parts]."""
    result = native.refine_volume(csc.indptr, csc.indices, part, num_parts, weights, limits, key)
    return _searched(result, REFINE_STOPPED)


def even_out_volume(
    csc: CSC, part: Tensor, num_parts: int, weights: Tensor, limits: Tensor, *, tolerance: float, slack: float, key: int
) -> VolumeSearch:
    """A smaller largest load, at no more than (1 + slack) of the volume; done when loads agree to `tolerance`."""
    result = native.even_out(csc.indptr, csc.indices, part, num_parts, weights, limits, tolerance, slack, key)
    return _searched(result, EVEN_OUT_STOPPED)


def _searched(result: tuple[Tensor, Tensor, Tensor], reasons: tuple[str, ...]) -> VolumeSearch:
    part, loads, stats = result
    num_moves, num_swaps, stopped = stats.tolist()
    return VolumeSearch(part, loads, num_moves, num_swaps, reasons[stopped])


@torch.library.register_fake("gnnsys::communication_volume")
def _communication_volume(indptr: Tensor, indices: Tensor, part: Tensor, num_parts: int) -> Tensor:
    return indptr.new_empty(num_parts, num_parts)


@torch.library.register_fake("gnnsys::volume_changes")
def _volume_changes(indptr: Tensor, indices: Tensor, part: Tensor, num_parts: int) -> Tensor:
    return indptr.new_empty(part.shape[0], num_parts)


@torch.library.register_fake("gnnsys::refine_volume")
@torch.library.register_fake("gnnsys::even_out")
def _search(
    indptr: Tensor, indices: Tensor, part: Tensor, num_parts: int, *args: object
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(part), indptr.new_empty(2, num_parts), indptr.new_empty(3)
