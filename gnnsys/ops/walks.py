"""Random walks on one CSC, and whom they visit most: typed faces of cpu/walks.cpp."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gnnsys.ops._library import native
from gnnsys.ops.csc import CSC


def csc_walks(
    csc: CSC, roots: Tensor, keys: Sequence[int], *, coin_keys: Sequence[int] = (), coin: int = 0, coin_bound: int = 1
) -> Tensor:
    """A step per key from each root, along in-edges: int64 [num_roots, num_steps + 1], column 0 the roots.

    Walk i draws at a node what `sample_neighbors(..., 1, key=keys[step], tree=i)` draws. At a node without in-edges it
    ends, which -1 says. With a `coin` it begins again there, and before each step where
    `draw_below(i, coin_bound, key=coin_keys[step])` is below `coin`; that takes the place of the step.

    >>> loop = CSC(torch.tensor([0, 1, 2]), torch.tensor([1, 0]), 2)
    >>> csc_walks(loop, torch.tensor([0]), [5, 6])
    tensor([[0, 1, 0]])
    """
    return native.random_walks(
        csc.indptr, csc.indices, roots.contiguous(), list(keys), list(coin_keys), coin, coin_bound
    )


def count_visits(visits: Tensor, most: int, without: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row of `visits` [num_roots, num_visits] the `most` ids that it has most often: (row, id, how often).

    Ids below 0 do not count, nor does `without[i]` in row i. Ids that are there equally often come as first seen.

    >>> count_visits(torch.tensor([[4, 2, 2, -1]]), 1)
    (tensor([0]), tensor([2]), tensor([2]))
    """
    return native.most_visited(visits.contiguous(), most, without)


@torch.library.register_fake("gnnsys::random_walks")
def _(indptr, indices, roots, keys, coin_keys, coin, coin_bound):
    return roots.new_empty(roots.shape[0], len(keys) + 1)


@torch.library.register_fake("gnnsys::most_visited")
def _(visits, most, without):
    size = torch.library.get_ctx().new_dynamic_size()
    return visits.new_empty(size), visits.new_empty(size), visits.new_empty(size)
