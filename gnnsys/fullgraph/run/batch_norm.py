"""Batch normalisation with the statistics of the whole graph: two sums over all ranks on the way there, one back.

All rows must be there before one can be normalised, so it is a barrier for the schedule, on every rank. The sums are
made where rows live, some rows at a time; what follows from them is done bin by bin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gnnsys.comm import Peers


class NormPass:
    """One pass through a `nn.BatchNorm1d`, whose parameters and running statistics are used as they are.

    `begin` comes before `forward`, `begin_back` before `backward`; those two work on any of the rows.
    """

    def __init__(self, norm: Any, peers: Peers | None) -> None:
        self._norm, self._peers = norm, peers
        self._weight, self._bias = norm.weight, norm.bias  # the module may have other ones on the way back
        self._version = _version(norm.weight)
        self._by_batch = norm.training or norm.running_mean is None
        self._means: tuple[Tensor, Tensor] | None = None  # of the gradient, and of its product with normal rows

    @torch.no_grad()
    def begin(self, x: Tensor, bounds: Sequence[int], device: torch.device) -> None:
        """The statistics of all rows, of which x are this rank's, looked at between `bounds`; rows come to `device`."""
        norm = self._norm
        if not self._by_batch:
            self._mean, self._scale = norm.running_mean.clone(), (norm.running_var + norm.eps).rsqrt()
            return
        wide = torch.promote_types(x.dtype, torch.float32)
        count = torch.tensor([len(x)], dtype=torch.float64, device="cpu")
        total = self._sum(torch.cat([_summed(lambda part: part, bounds, x), count]))
        self._count = float(total[-1])
        mean = (total[:-1] / self._count).to(wide)
        at_rows = mean.to(x.device)
        var = self._sum(_summed(lambda part: (part - at_rows).square_(), bounds, x)) / self._count
        if norm.training and norm.track_running_stats:
            self._track(mean, var)
        self._mean, self._scale = mean.to(device), (var + norm.eps).rsqrt().to(device, wide)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        out = self._normal(x)
        out = out if self._weight is None else out.mul_(self._weight)
        return (out if self._bias is None else out.add_(self._bias)).to(x.dtype)

    def check(self) -> None:
        """Raises RuntimeError where the weight, which gradients are multiplied by, was written since `begin`."""
        if _version(self._weight) != self._version:
            raise RuntimeError(
                "the weight of batch normalisation, which backward needs, was written between a pass and its backward: "
                "call optimizer.step() and load_state_dict() after backward()"
            )

    @torch.no_grad()
    def begin_back(
        self, x: Tensor, grad: Tensor, bounds: Sequence[int], trained: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """Sums over all rows' gradients; of this rank's rows alone, those of its parameters that are `trained`."""
        device = self._mean.device
        mean, scale = self._mean.to(x.device), self._scale.to(x.device)
        of_bias = _summed(lambda part: part, bounds, grad)
        of_weight = _summed(lambda part, rows: (rows - mean).mul_(scale).mul_(part), bounds, grad, x)
        if self._by_batch:
            both = (self._sum(torch.stack([of_bias, of_weight])) / self._count).to(device, mean.dtype)
            both = both if self._weight is None else both * self._weight
            self._means = (both[0], both[1])
        return [(of_weight if p is self._weight else of_bias).to(p) for p in trained]

    @torch.no_grad()
    def backward(self, x: Tensor, grad: Tensor) -> Tensor:
        """The gradient of x."""
        scaled = grad if self._weight is None else grad * self._weight
        if self._means is not None:
            scaled = scaled - self._means[0]
            scaled -= self._normal(x).mul_(self._means[1])
        return (scaled * self._scale).to(x.dtype)

    def _normal(self, x: Tensor) -> Tensor:
        return (x - self._mean).mul_(self._scale)

    def _sum(self, here: Tensor) -> Tensor:
        if self._peers is not None:  # else this rank's rows are all
            self._peers.all_reduce(here).wait()
        return here

    def _track(self, mean: Tensor, var: Tensor) -> None:
        norm = self._norm
        norm.num_batches_tracked += 1
        rate = 1.0 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
        unbiased = var * (self._count / max(1.0, self._count - 1))
        norm.running_mean.lerp_(mean.to(norm.running_mean), rate)
        norm.running_var.lerp_(unbiased.to(norm.running_var), rate)


def _version(weight: Tensor | None) -> int:
    return 0 if weight is None or weight.is_inference() else weight._version


def _summed(work: Callable[..., Tensor], bounds: Sequence[int], *rows: Tensor) -> Tensor:
    """The sum of what `work` makes of each row, in float64 on the host; so many rows at a time as between bounds."""
    total = torch.zeros(rows[0].shape[1], dtype=torch.float64, device="cpu")
    for first, end in pairwise(bounds):
        total += work(*(each[first:end] for each in rows)).sum(0, dtype=torch.float64).cpu()
    return total
