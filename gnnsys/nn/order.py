"""Which half of a linear layer comes first: transform(aggregate(x)) and aggregate(transform(x)) are equal in value.

The cheaper order is a function of shapes and the kind of device alone, so a layer computes the same way every time it
sees the same shapes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnnsys.ops import CSC, device_kind

# Multiply-adds done in the time in which spmm moves one element: 0.45 ns / 0.11 ns on a Neoverse-N1; on an H200 30
# float32 ones a picosecond against 4 TB/s, rounded to a power of two.
MACS_PER_GATHER = {"cpu": 4, "cuda": 32}


def transform_first(csc: CSC, x: Tensor, out_channels: int) -> bool:
    """Whether the dense half should come first.

    Dense work is one multiply-add per (row, input, output): over sources when it comes first, over destinations when
    last. Sparse work is one element per edge and channel: outputs or inputs. In training both double, except that rows
    which need no gradient (a first layer's) spare the backward pass of an aggregation done on them.
    """
    in_channels = x.shape[-1]
    gather = MACS_PER_GATHER.get(device_kind(x), MACS_PER_GATHER["cuda"])
    dense_first = csc.num_src * in_channels * out_channels
    dense_last = csc.num_dst * in_channels * out_channels
    passes_last = 2 if torch.is_grad_enabled() and x.requires_grad else 1
    passes_first = 2 if torch.is_grad_enabled() else 1
    first = passes_first * (dense_first + gather * csc.num_edges * out_channels)
    last = passes_first * dense_last + passes_last * gather * csc.num_edges * in_channels
    return first < last
