"""Parts of a CSC and orders of its nodes, and the fake kernels of every structure op.

A result that is made of a CSC's edges is a CSC again, whose `edge_ids` are positions in the one it was cut from.
Positions have the dtype of the indices, or int64 where there are too many edges for int32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnnsys.ops._library import native


def degrees(ids: Tensor, num_nodes: int) -> Tensor:
    """How often each of [0, num_nodes) occurs in `ids`, int64: out-degrees are `degrees(csc.indices, csc.num_src)`."""
    return native.degrees(ids.contiguous(), num_nodes)


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


@torch.library.register_fake("gnnsys::validate_csc")
def _validate_csc(indptr: Tensor, indices: Tensor, num_src: int) -> None:
    return None
