"""Random walks on one CSC: typed face of `random_walks` (cpu/walks.cpp, cuda/walks.cu)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gnnsys.ops._library import native
from gnnsys.ops.csc import CSC

COIN_SIDES = 1 << 53  # `coin` out of so many
MAX_WALKS = 1 << 24  # at once: what a draw's stream has room for


def random_walks(
    csc: CSC,
    roots: Tensor,
    *,
    step_keys: Sequence[int],
    coin_keys: Sequence[int] = (),
    coin: int = 0,
    original: Tensor | None = None,
) -> Tensor:
    """A walk along in-edges from each root (int64), a step per key: int64 [num_roots, len(step_keys) + 1].

    Walk i steps from node v to what `sample_neighbors` with a fanout of 1, `tree` i and `rng_ids` `original[v]` draws.
    A walk ends at a node without in-edges, and has -1 from there on. With `coin` a walk goes back to its root instead
    of a step where `draw_below(i, COIN_SIDES, key=coin_keys[step]) < coin`, and from nodes without in-edges.

    >>> ring = CSC(torch.tensor([0, 1, 2, 3]), torch.tensor([2, 0, 1]), 3)
    >>> random_walks(ring, torch.tensor([0, 1]), step_keys=[5, 6])
    tensor([[0, 2, 1],
            [1, 0, 2]])
    """
    return native.random_walks(
        csc.indptr, csc.indices, roots.contiguous(), list(step_keys), list(coin_keys), coin, original
    )


@torch.library.register_fake("gnnsys::random_walks")
def _(indptr, indices, roots, step_keys, coin_keys, coin, original):
    return roots.new_empty(roots.shape[0], len(step_keys) + 1)
