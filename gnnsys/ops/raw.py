"""A tensor's values as bytes, to compare, hash or send them."""

from __future__ import annotations

import torch
from torch import Tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """The values as flat uint8: a view where they lie one after the other. Bits are kept, those of a NaN too.

    >>> as_bytes(torch.tensor([1, 2], dtype=torch.int16)).tolist()
    [1, 0, 2, 0]
    """
    flat = tensor.detach().contiguous().reshape(-1)
    # Empty arrays of numpy's may have a stride of 0, which torch does not view as another type.
    return (flat if flat.numel() else flat.new_empty(0)).view(torch.uint8)
