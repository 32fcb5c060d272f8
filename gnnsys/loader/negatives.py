"""Negative sampling: which pairs or destinations are drawn beside the positive links of a batch.

Draws are unstructured, as in PyG: a drawn pair may happen to be an edge. Under temporal sampling a negative node exists
at its link's time: it is drawn, exactly, from the nodes whose time is not later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnnsys.loader.schedule import generator
from gnnsys.sampling import SampleKey

_DOMAIN = 0x4E45  # apart from the shuffle and from sampling under the same seed


def negative_stream(key: SampleKey) -> torch.Generator:
    """What a batch's negatives are drawn from: a function of (seed, epoch, batch)."""
    return generator(key.seed, _DOMAIN, key.epoch, key.batch)


@dataclass(frozen=True)
class NegativeSampling:
    """`binary`: ceil(amount * positives) random pairs, label 0. `triplet`: `amount` destinations for each positive.

    `src_weight` and `dst_weight` make a node's chance proportional to its weight: one entry per node by the user's own
    ids, on a graph in parts too (original ids), or the name of an array of the graph, read where it lives.
    """

    mode: str
    amount: int | float = 1
    src_weight: Any = None  # a tensor, list or array [num_nodes], a name, or a source of rows of the graph
    dst_weight: Any = None

    def __post_init__(self) -> None:
        if self.mode not in ("binary", "triplet"):
            raise ValueError(f"neg_sampling: mode must be 'binary' or 'triplet', got {self.mode!r}")
        if not self.amount > 0:
            raise ValueError(f"neg_sampling: amount must be positive, got {self.amount}")
        if self.is_triplet and self.amount != int(self.amount):
            raise ValueError(f"neg_sampling: amount must be a whole number for triplets, got {self.amount}")

    @classmethod
    def cast(cls, value: Any) -> NegativeSampling | None:
        """From what a user writes: None, 'binary', ('triplet', 2), dict(mode=..., amount=...) or PyG's own class."""
        if value is None or isinstance(value, cls):
            return value
        if isinstance(value, str):
            return cls(value)
        if isinstance(value, dict):
            return cls(**value)
        if isinstance(value, (tuple, list)):
            return cls(*value)
        try:
            return cls(getattr(value.mode, "value", value.mode), value.amount, value.src_weight, value.dst_weight)
        except AttributeError:
            raise ValueError(f"neg_sampling must be 'binary', 'triplet' or a dict, got {value!r}") from None

    @property
    def is_triplet(self) -> bool:
        return self.mode == "triplet"

    def count(self, num_positives: int) -> int:
        return math.ceil(num_positives * self.amount)


class NodeDraw:
    """Draws nodes of one type: uniformly or by weight, all of them or those whose time is not later than a limit.

    Nodes are kept in order of time with the running sum of their weights, so that the nodes allowed at a time are a
    prefix and one draw is one binary search.
    """

    def __init__(self, num_nodes: int, weight: Tensor | None, time: Tensor | None, name: str) -> None:
        weight, time = (None if rows is None else rows.cpu() for rows in (weight, time))  # as the generator is
        self._num_nodes = num_nodes
        self._order = None if time is None else torch.argsort(time, stable=True)
        self._time = None if time is None or self._order is None else time[self._order]
        self._running: Tensor | None = None
        if weight is not None:
            self._running = self._running_sum(weight, name)

    def _running_sum(self, weight: Tensor, name: str) -> Tensor:
        if weight.shape != (self._num_nodes,):
            raise ValueError(f"{name} must have one entry per node, {self._num_nodes}, got {tuple(weight.shape)}")
        if not bool((torch.isfinite(weight) & (weight >= 0)).all()) or not float(weight.sum()) > 0:
            raise ValueError(f"{name} must be finite, not negative and not all zero")
        weight = weight.double() if self._order is None else weight.double()[self._order]
        return weight.cumsum(0)

    def draw(self, count: int, stream: torch.Generator, limit: Tensor | None = None) -> Tensor:
        """`count` nodes; the i-th has time <= limit[i % len(limit)] (where none has: the earliest with weight)."""
        if self._time is None or limit is None:
            if self._running is None:
                return torch.randint(self._num_nodes, (count,), generator=stream, device="cpu")
            allowed = torch.full((count,), self._num_nodes, device="cpu")
        else:
            allowed = torch.searchsorted(self._time, limit.contiguous(), right=True)
            allowed = allowed.repeat(-(-count // max(1, limit.numel())))[:count]
        chance = torch.rand(count, generator=stream, dtype=torch.float64, device="cpu")
        first = 0
        if self._running is None:
            place = (chance * allowed).long()
        else:
            total = self._running[(allowed - 1).clamp_(min=0)]
            place = torch.searchsorted(self._running, chance * total, right=True)
            first = int(torch.searchsorted(self._running, 0.0, right=True))  # a node without weight is never drawn
        place = torch.minimum(place, allowed - 1).clamp_(min=first)
        return place if self._order is None else self._order[place]
