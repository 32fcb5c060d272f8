"""Draws that are steered by a byte per source: typed face of `sample_guided` (cpu/sample_guided.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnsys.ops._library import native
from gnnsys.ops._workspace import Expected, tells_workspace
from gnnsys.ops.csc import CSC
from gnnsys.ops.sampling import Neighbors


def sample_guided(
    csc: CSC,
    seeds: Tensor,
    fanout: int,
    *,
    key: int,
    score: Tensor,
    deviation: float = 0.0,
    proportional: bool = False,
    unbiased: bool = False,
    exclude: Tensor | None = None,
    tree: Tensor | None = None,
    rng_ids: Tensor | None = None,
) -> Neighbors:
    """Up to `fanout` in-edges of each seed (-1: all of them), local ones first, remote ones by their score.

    `score` (uint8, by source): 0 for a source that is local, 1 to 255 for how likely a remote one is to be taken. Of k
    draws min(k, number of local ones) go to local sources, the rest to remote ones, and then ceil(deviation * k) more
    to remote ones, as far as there are any; with `proportional` the uniform split is shifted by as many towards local
    ones instead. Local ones are drawn uniformly, remote ones without replacement in proportion to their scores.

    With `unbiased` edges are taken independently, in these numbers on average; `weight` is then 1 / (probability *
    in-degree), so that the weighted sum over the drawn ones has the mean over all in-neighbours as its expectation.
    """
    indptr, ids, positions, weight = native.sample_guided(
        csc.indptr, csc.indices, seeds, fanout, key, score, deviation, proportional, unbiased, exclude, tree, rng_ids
    )
    return Neighbors(indptr, ids, positions, weight if unbiased else None)


@torch.library.register_fake("gnnsys::sample_guided")
def _(indptr, indices, seeds, fanout, key, score, deviation, proportional, unbiased, exclude, tree, rng_ids):
    size = torch.library.get_ctx().new_dynamic_size()
    weights = indptr.new_empty(size if unbiased else 0, dtype=torch.float32)
    return indptr.new_empty(seeds.shape[0] + 1), indices.new_empty(size), indptr.new_empty(size), weights


_SEEDS_PER_THREAD = 256


@tells_workspace("sample_guided", "cpu")
def _(
    expected: Expected, indptr, indices, seeds, fanout, key, score, deviation, proportional, unbiased, *others
) -> int:  # fmt: skip
    """What shares of the seeds collect, and of a row at a time its places on either side and their keys."""
    taken = expected.num_found
    if taken is None:
        all_of = unbiased or fanout < 0  # each edge by itself: how many come is chance
        taken = expected.taken(seeds.numel(), -1 if all_of else fanout, indices.numel())
    threads, degree = expected.threads(seeds.numel(), _SEEDS_PER_THREAD), expected.degree(indices.numel())
    return 2 * (8 + 4 * unbiased) * taken + threads * degree * (2 * 2 * 4 + (0 if unbiased else 3 * 16))
