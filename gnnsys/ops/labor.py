"""LABOR on one CSC: typed faces of sample_labor.*, of labor_importance.*, and of `normalize_rows`."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnsys.ops._library import native
from gnnsys.ops._workspace import Expected, scan_bytes, takes_outputs_only, tells_workspace
from gnnsys.ops.csc import CSC
from gnnsys.ops.sampling import LABOR_ROW_BYTES, Neighbors


def sample_labor(
    csc: CSC,
    seeds: Tensor,
    fanout: int,
    *,
    key: int,
    source_ids: Tensor | None = None,
    exclude: Tensor | None = None,
    tree: Tensor | None = None,
) -> Neighbors:
    """In-edges u -> v of the seeds v with r_u < fanout / degree(v); all of them where fanout is -1.

    r_u is a function of `key`, the source's id (`source_ids[u]`, where sources were relabelled) and the seed's tree, so
    seeds take a neighbour that they share together. `exclude` are positions, ascending, that are neither taken nor
    counted in a degree. Parallel edges are taken together.

    `weight` is 1 / (degree(v) * probability of the edge): the sum of weight * row over a seed's taken edges is, in
    expectation over keys, the mean over all its in-edges. The comparison is of integers, exact to 2^-64. Work:
    O(degree) per seed; on the host a table of 4 bytes per source where seeds have more in-edges than there are sources.
    """
    return Neighbors(
        *native.sample_labor(
            csc.indptr, csc.indices, seeds, csc.num_src, fanout, key, source_ids, exclude, tree
        )
    )  # fmt: skip


def sample_labor_importance(
    csc: CSC, seeds: Tensor, fanout: int, rounds: int, *, key: int, exclude: Tensor | None = None
) -> Neighbors:
    """LABOR-i: `sample_labor` with edges u -> v of probability min(1, c_v * pi_u), pi made by `rounds` rounds.

    c_v gives v the variance that `fanout` uniform draws have; a round sets pi_u to the largest c_v * pi_u of u's edges
    (cpu/labor_importance.cpp). r_u is the same number as in `sample_labor`, cut to 53 bits. Seeds of at most `fanout`
    in-edges take all. Sums are float64, made in one order on every device (common/labor_importance.h). Work: a few
    passes over the seeds' in-edges per round, 8 bytes for each and 24 per source.
    """
    found = native.sample_labor_importance(csc.indptr, csc.indices, seeds, csc.num_src, fanout, rounds, key, exclude)
    return Neighbors(*found)


def source_words(ids: Tensor, *, key: int) -> Tensor:
    """The random numbers that `sample_labor` compares: of each source the 63 high bits, int64, tree 0."""
    return native.source_words(ids.contiguous(), key)


def normalize_rows(indptr: Tensor, weight: Tensor) -> Tensor:
    """Of each row its weights divided by their sum, float32. Sums are made in the order of the row, on every device.

    >>> normalize_rows(torch.tensor([0, 2, 2, 3]), torch.tensor([1.0, 3.0, 5.0]))
    tensor([0.2500, 0.7500, 1.0000])
    """
    return native.normalize_rows(indptr.contiguous(), weight.contiguous())


@torch.library.register_fake("gnnsys::sample_labor")
def _(indptr, indices, seeds, num_src, fanout, key, source_ids, exclude, tree):
    size = torch.library.get_ctx().new_dynamic_size()
    weight = indptr.new_empty(size, dtype=torch.float32)
    return indptr.new_empty(seeds.shape[0] + 1), indices.new_empty(size), indptr.new_empty(size), weight


@torch.library.register_fake("gnnsys::sample_labor_importance")
def _(indptr, indices, seeds, num_src, fanout, rounds, key, exclude):
    size = torch.library.get_ctx().new_dynamic_size()
    weight = indptr.new_empty(size, dtype=torch.float32)
    return indptr.new_empty(seeds.shape[0] + 1), indices.new_empty(size), indptr.new_empty(size), weight


@torch.library.register_fake("gnnsys::source_words")
def _(ids, key):
    return ids.new_empty(ids.shape, dtype=torch.int64)


@torch.library.register_fake("gnnsys::normalize_rows")
def _(indptr, weight):
    return torch.empty_like(weight)


_SEEDS_PER_THREAD = 256
_COLUMNS_PER_THREAD = 64
_COLLECTOR_BYTES = 1 << 15  # of a share of the seeds: words of a block of sources, and segments that wait for them
_DENSE_IDS_PER_EDGE = 4  # sources are numbered by a table where it has at most so many ids per edge


@tells_workspace("sample_labor", "cpu")
def _(expected: Expected, indptr, indices, seeds, num_src, fanout, key, source_ids, exclude, tree) -> int:
    """Half a word per source where edges are many, a weight per seed, and what threads collect. How many edges come is
    chance: all of the seeds' unless `num_found` says it."""
    num_seeds = seeds.numel()
    edges = expected.edges_of(num_seeds, indices.numel())
    taken = edges if expected.num_found is None else expected.num_found
    words = 4 * num_src if fanout > 0 and tree is None and (expected.most_degree is None or edges > num_src) else 0
    return words + 4 * num_seeds + 16 * taken + _COLLECTOR_BYTES * (expected.shares(num_seeds, _SEEDS_PER_THREAD) + 1)


@tells_workspace("sample_labor", "cuda")
def _(expected: Expected, indptr, indices, seeds, num_src, fanout, key, source_ids, exclude, tree) -> int:
    return LABOR_ROW_BYTES * seeds.numel() + 2 * scan_bytes(seeds.numel())


@tells_workspace("sample_labor_importance", "cpu")
def _(expected: Expected, indptr, indices, seeds, num_src, fanout, rounds, key, exclude) -> int:
    """All edges of the seeds with the numbers of their sources; then numbers per source, and which edges are taken."""
    num_seeds = seeds.numel()
    edges = expected.edges_of(num_seeds, indices.numel())
    sources = min(num_src, edges)
    numbering = 4 * num_src if num_src <= _DENSE_IDS_PER_EDGE * edges else 8 * edges + 28 * sources
    row = 2 * 8 * expected.degree(indices.numel()) * expected.threads(num_seeds, _COLUMNS_PER_THREAD)
    drawing = 8 * num_seeds + 16 * sources + max(row, 4 * edges)
    positions = 0 if exclude is None or exclude.numel() == 0 else 16 * edges
    return 16 * (num_seeds + 1) + 4 * edges + positions + 16 * sources + max(numbering + 8 * sources, drawing)


@tells_workspace("sample_labor_importance", "cuda")
def _(expected: Expected, indptr, indices, seeds, num_src, fanout, rounds, key, exclude) -> int:
    """The same, and a hash table that is half full where sources are not numbered by their ids."""
    num_seeds = seeds.numel()
    edges = expected.edges_of(num_seeds, indices.numel())
    by_id = num_src <= _DENSE_IDS_PER_EDGE * edges
    of_sources = 16 * num_src if by_id else (16 + indices.element_size()) * 2 * min(edges, num_src)
    return 24 * (num_seeds + 1) + 4 * edges + of_sources + 2 * scan_bytes(num_seeds)


takes_outputs_only("source_words", "normalize_rows")
