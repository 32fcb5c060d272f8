"""Batch normalisation with the statistics of the whole graph: two sums over all ranks on the way there, one back.

All rows must be there before one can be normalised, so it is a barrier for the schedule, on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnsys.comm.peers import Peers


class NormPass:
    """One pass through a `nn.BatchNorm1d`, whose parameters and running statistics are used as they are."""

    def __init__(self, norm: Any, peers: Peers) -> None:
        self._norm, self._peers = norm, peers
        self._by_batch = norm.training or norm.running_mean is None

    def forward(self, x: Tensor) -> Tensor:
        norm = self._norm
        with torch.no_grad():
            if self._by_batch:
                count = torch.tensor([len(x)], dtype=torch.float64, device=x.device)
                total = self._sum(torch.cat([x.sum(0, dtype=torch.float64), count]))
                self._count = float(total[-1])
                wide = torch.promote_types(x.dtype, torch.float32)
                mean = (total[:-1] / self._count).to(wide)
                var = self._sum((x - mean).square().sum(0, dtype=torch.float64)) / self._count
                if norm.training and norm.track_running_stats:
                    self._track(mean, var)
                self._mean, self._scale = mean, (var + norm.eps).rsqrt().to(wide)
            else:
                self._mean, self._scale = norm.running_mean, (norm.running_var + norm.eps).rsqrt()
            out = (x - self._mean) * self._scale
            return (out if norm.weight is None else out * norm.weight + norm.bias).to(x.dtype)

    def backward(self, x: Tensor, grad: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The gradient of x and, of this rank's rows alone, those of weight and bias."""
        norm = self._norm
        with torch.no_grad():
            normal = (x - self._mean) * self._scale
            of_bias, of_weight = grad.sum(0), (grad * normal).sum(0)
            scaled = grad if norm.weight is None else grad * norm.weight
            if self._by_batch:
                both = torch.stack([of_bias, of_weight]).to(torch.float64)
                both = (self._sum(both) / self._count).to(normal.dtype)
                if norm.weight is not None:
                    both = both * norm.weight
                scaled = scaled - both[0] - normal * both[1]
            trained = [p for p in norm.parameters() if p.requires_grad]
            grads = [of_weight if p is norm.weight else of_bias for p in trained]
            return (scaled * self._scale).to(x.dtype), grads

    def _sum(self, values: Tensor) -> Tensor:
        here = values.cpu()
        self._peers.all_reduce(here).wait()
        return here.to(values.device)

    def _track(self, mean: Tensor, var: Tensor) -> None:
        norm = self._norm
        norm.num_batches_tracked += 1
        rate = 1.0 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
        unbiased = var * (self._count / max(1.0, self._count - 1))
        norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), rate)
        norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), rate)
