"""Small things all layers share: initial values as PyG draws them, and the names of reductions."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

REDUCTIONS = ("sum", "mean", "max", "min")


def glorot_(tensor: Tensor | None) -> None:
    """Uniform in +-sqrt(6 / (fan_in + fan_out)) of the last two dimensions (Glorot 2010).

    None is left alone, and so is what has no size yet.
    """
    if tensor is not None and not is_lazy(tensor):
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


def linear(in_channels: int, out_channels: int, bias: bool = True, glorot: bool = False) -> nn.Linear:
    """A linear layer. `in_channels` of -1 are, as in PyG, those of the first rows it is given.

    `glorot` says how such a layer draws its weight then; the layer that has it draws those of the others.
    """
    if in_channels == -1:
        return _LazyLinear(out_channels, bias, glorot)
    if in_channels < 0:
        raise ValueError(f"in_channels must be positive, or -1 for those of the first rows given, got {in_channels}")
    return nn.Linear(in_channels, out_channels, bias)


def narrows(dense: nn.Linear) -> bool:
    """Whether a linear layer makes rows narrower."""
    return dense.out_features < dense.in_features


class _LazyLinear(nn.LazyLinear):
    """Becomes an nn.Linear when it is first called."""

    cls_to_become = nn.Linear  # type: ignore[assignment]

    def __init__(self, out_channels: int, bias: bool, glorot: bool) -> None:
        self._is_glorot = False  # torch's constructor calls reset_parameters
        super().__init__(out_channels, bias)
        self._is_glorot = glorot

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self._is_glorot:
            glorot_(self.weight)
