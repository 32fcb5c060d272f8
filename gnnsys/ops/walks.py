"""Random walks on one CSC, and whom they visit most: typed faces of walks.* and cpu/visits.cpp."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gnnsys.ops._library import native
from gnnsys.ops._workspace import Expected, power_above, takes_outputs_only, tells_workspace
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


def count_visits(visits: Tensor, most: int, without: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row of `visits` [num_roots, num_visits] the `most` ids that it has most often: (row, id, how often).

    Ids below 0 do not count, nor does `without[i]` in row i. Ids that are there equally often come as first seen.

    >>> count_visits(torch.tensor([[4, 2, 2, -1]]), 1)
    (tensor([0]), tensor([2]), tensor([2]))
    """
    return native.most_visited(visits.contiguous(), most, without)


@torch.library.register_fake("gnnsys::random_walks")
def _(indptr, indices, roots, step_keys, coin_keys, coin, original):
    return roots.new_empty(roots.shape[0], len(step_keys) + 1)


@torch.library.register_fake("gnnsys::most_visited")
def _(visits, most, without):
    size = torch.library.get_ctx().new_dynamic_size()
    return visits.new_empty(size), visits.new_empty(size), visits.new_empty(size)


_ROOTS_PER_THREAD = 16


@tells_workspace("most_visited", "cpu")
def _(expected: Expected, visits, most, without) -> int:
    """What threads keep of all roots, and of one root at a time a table of its visits, their ranks and the best."""
    num_roots, num_visits = visits.shape
    best = min(most, num_visits)
    kept = num_roots * best if expected.num_found is None else expected.num_found
    root = 4 * power_above(2 * num_visits, 16) + (16 + 4 + 8) * num_visits + 3 * 16 * best
    return 2 * 16 * kept + 8 * num_roots + expected.threads(num_roots, _ROOTS_PER_THREAD) * root


takes_outputs_only("random_walks")
