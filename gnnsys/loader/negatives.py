"""Negative sampling as users ask for it: pairs or triplets, how many, of which kind.

The names are PyG's. `negative_kinds.py` says what a kind is; the kinds are in `weighted_negatives.py`,
`batch_negatives.py`, `local_negatives.py` and `hard_negatives.py`. A drawn pair may happen to be an edge, as in PyG.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gnnsys.graph import did_you_mean, some
from gnnsys.loader.batch_negatives import InBatchNegatives, JointNegatives
from gnnsys.loader.hard_negatives import ScoredNegatives
from gnnsys.loader.local_negatives import LocalNegatives
from gnnsys.loader.negative_kinds import NegativeKind
from gnnsys.loader.schedule import generator
from gnnsys.loader.weighted_negatives import DegreeNegatives, UniformNegatives
from gnnsys.sampling import SampleKey

_DOMAIN = 0x4E45  # apart from the shuffle and from sampling under the same seed

_NAMED: dict[str, Callable[[], NegativeKind]] = {
    "uniform": UniformNegatives,
    "degree": DegreeNegatives,
    "joint": JointNegatives,
    "in_batch": InBatchNegatives,
    "local": LocalNegatives,
    "local_joint": lambda: JointNegatives(LocalNegatives()),
}


def as_kind(given: Any) -> NegativeKind:
    """The kind that a user means: one of ours, a class of the user's own, or a name; ValueError for anything else."""
    if isinstance(given, NegativeKind):
        return given
    if isinstance(given, str) and given in _NAMED:
        return _NAMED[given]()
    close = did_you_mean(given, list(_NAMED)) if isinstance(given, str) else ""
    raise ValueError(
        f"neg_sampling: kind must be one of {some(list(_NAMED))}, HardNegatives(...), ScoredNegatives(...) or a "
        f"gnnsys.loader.NegativeKind of your own, got {given!r}{close}"
    )


def negative_stream(key: SampleKey) -> torch.Generator:
    """What a batch's negatives are drawn from: a function of (seed, epoch, batch)."""
    return generator(key.seed, _DOMAIN, key.epoch, key.batch)


@dataclass(frozen=True)
class NegativeSampling:
    """`binary`: ceil(amount * positives) random pairs, label 0. `triplet`: `amount` destinations for each positive.

    `src_weight` and `dst_weight` make a node's chance proportional to its weight: one entry per node by the user's own
    ids, on a graph in parts too (original ids), or the name of an array of the graph, read where it lives.

    `kind` is a `NegativeKind` or the name of one: "uniform" (PyG's), "degree", "joint" (one set for the batch),
    "in_batch", "local" (to the part), "local_joint", `HardNegatives(...)`, `ScoredNegatives(...)`. `corrupt` says which
    end of a binary pair is drawn, "src", "dst" or "both"; the other is that of the pair's link. By default both are
    drawn where the kind is uniform, as in PyG, and the destination for all others.

    >>> NegativeSampling("triplet", 16, kind="joint").kind
    JointNegatives(of=UniformNegatives())
    """

    mode: str
    amount: int | float = 1
    src_weight: Any = None  # a tensor, list or array [num_nodes], a name, or a source of rows of the graph
    dst_weight: Any = None
    kind: Any = "uniform"
    corrupt: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", as_kind(self.kind))
        if self.mode not in ("binary", "triplet"):
            raise ValueError(f"neg_sampling: mode must be 'binary' or 'triplet', got {self.mode!r}")
        if not self.amount > 0:
            raise ValueError(f"neg_sampling: amount must be positive, got {self.amount}")
        if self.is_triplet and self.amount != int(self.amount):
            raise ValueError(f"neg_sampling: amount must be a whole number for triplets, got {self.amount}")
        if self.corrupt not in (None, "src", "dst", "both"):
            raise ValueError(f"neg_sampling: corrupt must be 'src', 'dst' or 'both', got {self.corrupt!r}")
        if self.is_triplet and self.corrupt not in (None, "dst"):
            raise ValueError(f"neg_sampling: triplets have other destinations: corrupt={self.corrupt!r} needs 'binary'")
        if self.corrupt == "both" and self.kind.corrupts != "both":
            raise ValueError(f"neg_sampling: {self.kind!r} draws one end of a pair: write corrupt='dst' or 'src'")
        if not self.kind.takes_weights and not (self.src_weight is None and self.dst_weight is None):
            raise ValueError(f"neg_sampling: {self.kind!r} has no use for src_weight and dst_weight: leave them away")
        if isinstance(self.kind, ScoredNegatives) and self.amount > self.kind.pool:
            raise ValueError(f"neg_sampling: amount must be at most the pool, {self.kind.pool}, got {self.amount}")

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
            raise ValueError(
                f"neg_sampling must be 'binary', 'triplet', one of them with an amount, ('binary', 2.0), or a "
                f"NegativeSampling, got {value!r}"
            ) from None

    @property
    def is_triplet(self) -> bool:
        return self.mode == "triplet"

    @property
    def drawn_ends(self) -> tuple[str, ...]:
        """The ends that are drawn, "src" before "dst"."""
        corrupt = self.corrupt or ("dst" if self.is_triplet else self.kind.corrupts)
        return ("src", "dst") if corrupt == "both" else (corrupt,)

    def count(self, num_positives: int) -> int:
        return math.ceil(num_positives * self.amount)
