"""Small things all layers share: initial values as PyG draws them, and the names of reductions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

REDUCTIONS = ("sum", "mean", "max", "min")


def glorot_(tensor: Tensor | None) -> None:
    """Uniform in +-sqrt(6 / (fan_in + fan_out)) of the last two dimensions (Glorot 2010); None is left alone."""
    if tensor is not None:
        bound = math.sqrt(6.0 / (tensor.shape[-2] + tensor.shape[-1]))
        with torch.no_grad():
            tensor.uniform_(-bound, bound)


def zeros_(tensor: Tensor | None) -> None:
    if tensor is not None:
        with torch.no_grad():
            tensor.zero_()


def reduce_name(aggr: str) -> str:
    """PyG's "add" is our "sum"."""
    name = "sum" if aggr == "add" else aggr
    if name not in REDUCTIONS:
        raise ValueError(f"aggr must be one of {', '.join(REDUCTIONS)}, got {aggr!r}")
    return name
