"""sample_labor and sample_labor_importance against their definitions, in Python and edge by edge, and what is exact in
expectation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from gnnsys.ops import (
    CSC,
    normalize_rows,
    sample_labor,
    sample_labor_importance,
    sample_neighbors,
    source_words,
    stream_key,
)
from tests.ops.test_sampling import random_csc, star
from tests.support.grid import grid


def philox(counter: tuple[int, int, int, int], key: int) -> tuple[int, ...]:
    """Philox4x32-10, as the paper (Salmon et al. 2011) writes it down."""
    k0, k1 = key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF
    c = list(counter)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k1, a & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return tuple(c)


def word(source: int, tree: int, key: int) -> int:
    low, high, *_ = philox((source & 0xFFFFFFFF, source >> 32, tree, 0), key & 0xFFFFFFFFFFFFFFFF)
    return high << 32 | low


def by_definition(csc: CSC, seeds: Tensor, fanout: int, key: int, source_ids=None, exclude=None, tree=None):
    """(counts, positions, weights), every edge looked at by itself."""
    counts, positions, weights = [], [], []
    excluded = set() if exclude is None else set(exclude.tolist())
    for i, v in enumerate(seeds.tolist()):
        candidates = [p for p in range(int(csc.indptr[v]), int(csc.indptr[v + 1])) if p not in excluded]
        degree, before = len(candidates), len(positions)
        for p in candidates:
            u = int(csc.indices[p])
            u = u if source_ids is None else int(source_ids[u])
            r = word(u, 0 if tree is None else int(tree[i]), key)
            if fanout < 0 or degree <= fanout or r * degree < fanout << 64:
                positions.append(p)
                weights.append(1.0 / (degree if fanout < 0 else min(degree, fanout)))
        if fanout == 0:
            del positions[before:], weights[before:]
        counts.append(len(positions) - before)
    return counts, positions, weights


@grid(fanout=[0, 1, 3, 15, 100, -1], dtype=[torch.int32, torch.int64])
def test_edges_are_taken_where_the_word_of_their_source_is_small(fanout: int, dtype: torch.dtype) -> None:
    csc = random_csc(120, 3000, dtype)
    seeds = torch.randperm(120).to(dtype)
    found = sample_labor(csc, seeds, fanout, key=-5)
    counts, positions, weights = by_definition(csc, seeds, fanout, -5)
    assert found.indptr.diff().tolist() == counts and found.positions.tolist() == positions
    assert found.weight.dtype == torch.float32 and torch.equal(found.weight, torch.tensor(weights).float())
    assert found.ids.dtype == dtype and torch.equal(found.ids, csc.indices[found.positions])


@grid(
    source_dtype=[None, torch.int32, torch.int64],
    excluded=[False, True],
    trees=[False, True],
)
def test_original_ids_exclusions_and_trees_mean_what_they_say(source_dtype, excluded: bool, trees: bool) -> None:
    g = torch.Generator().manual_seed(7)
    csc = random_csc(90, 2500, torch.int32)
    seeds = torch.randint(0, 90, (60,), generator=g, dtype=torch.int32)
    ids = None
    if source_dtype is not None:
        ids = torch.randperm(90, generator=g).to(source_dtype) + (1 << 40 if source_dtype == torch.int64 else 0)
    exclude = torch.randperm(2500, generator=g)[:400].sort().values if excluded else None
    tree = torch.randint(0, 1 << 24, (60,), generator=g) if trees else None
    found = sample_labor(csc, seeds, 6, key=99, source_ids=ids, exclude=exclude, tree=tree)
    counts, positions, weights = by_definition(csc, seeds, 6, 99, ids, exclude, tree)
    assert found.indptr.diff().tolist() == counts and found.positions.tolist() == positions
    assert torch.equal(found.weight, torch.tensor(weights).float())


def test_whether_the_words_of_all_sources_are_made_changes_nothing() -> None:
    """They are where seeds have more in-edges than there are sources: a seed alone gets what it gets among others."""
    csc = random_csc(300, 9000)
    sparse = CSC(csc.indptr, csc.indices, 100_000)  # sources enough for words to be made edge by edge
    seeds = torch.randperm(300)
    ids = torch.randperm(100_000)
    for source_ids in (None, ids):
        found = sample_labor(csc, seeds, 7, key=3, source_ids=source_ids)
        other = sample_labor(sparse, seeds, 7, key=3, source_ids=source_ids)
        assert all(torch.equal(a, b) for a, b in zip(found, other, strict=True))
        for i in range(0, 300, 37):
            alone = sample_labor(csc, seeds[i : i + 1], 7, key=3, source_ids=source_ids)
            begin, end = found.indptr[i : i + 2].tolist()
            assert torch.equal(alone.positions, found.positions[begin:end])


def test_words_of_sources_are_those_that_are_compared() -> None:
    for ids in (torch.arange(1500), torch.arange(1500, dtype=torch.int32), torch.arange(40) + (1 << 50)):
        assert source_words(ids, key=-9).tolist() == [word(u, 0, -9) >> 1 for u in ids.tolist()]


def test_threads_change_nothing() -> None:
    csc = random_csc(5000, 200_000)
    seeds = torch.randperm(5000)
    threads = torch.get_num_threads()
    try:
        found = []
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            found.append(sample_labor(csc, seeds, 7, key=3))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, found[0], strict=True))


def test_the_weighted_sum_is_the_mean_over_all_in_edges_in_expectation() -> None:
    csc = random_csc(200, 6000)
    seeds = torch.arange(200)
    rows = torch.randn(200, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1
    degree = csc.in_degrees().double()
    seeds = seeds[degree > 0]
    exact = torch.zeros(200, dtype=torch.float64).index_add_(0, csc.dst(), rows[csc.indices]) / degree.clamp(min=1)
    sums = []
    for number in range(2000):
        found = sample_labor(csc, seeds, 5, key=stream_key(1, number))
        owner = torch.repeat_interleave(torch.arange(seeds.numel()), found.indptr.diff())
        got = torch.zeros(seeds.numel(), dtype=torch.float64)
        sums.append(got.index_add_(0, owner, found.weight.double() * rows[found.ids]))
    sums = torch.stack(sums)
    error = (sums.mean(0) - exact[seeds]).abs()
    sampled = csc.in_degrees()[seeds] > 5
    assert int(sampled.sum()) > 50
    # One of a hundred seeds may be beyond four standard errors: their mean is held to four, each of them to five.
    scores = error[sampled] / (sums[:, sampled].std(0) / 2000**0.5)
    assert float(scores.max()) < 5
    joint = sums[:, sampled].mean(1) - exact[seeds][sampled].mean()
    assert abs(float(joint.mean())) < 4 * float(joint.std()) / 2000**0.5
    assert bool((error[~sampled] < 1e-6).all())


def test_a_seed_gets_the_fanout_in_expectation_and_all_sources_are_as_likely() -> None:
    taken = np.zeros(40)
    for key in range(2000):
        taken[sample_labor(star(40), torch.tensor([0]), 8, key=stream_key(key)).ids.numpy()] += 1
    share, error = 8 / 40, (8 / 40 * 32 / 40 / 2000) ** 0.5
    assert abs(taken.mean() / 2000 - share) < 4 * error / 40**0.5
    assert np.abs(taken / 2000 - share).max() < 5 * error


def test_seeds_that_share_their_neighbours_take_the_same_ones() -> None:
    columns = torch.arange(60, dtype=torch.int64).repeat(50)
    csc = CSC(torch.arange(0, 3001, 60), columns, 60)
    seeds = torch.arange(50)
    labor = sample_labor(csc, seeds, 6, key=1).ids.unique().numel()
    uniform = sample_neighbors(csc, seeds, 6, key=1).ids.unique().numel()
    assert labor <= 15 and uniform == 60


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fanout": -2}, "fanout must be -1"),
        ({"exclude": torch.tensor([3, 3])}, "ascending order"),
        ({"tree": torch.tensor([0])}, "tree must have 2 entries"),
        ({"source_ids": torch.arange(3)}, "source_ids must have an id for each of 30 sources"),
        ({"seeds": torch.tensor([0, 99])}, r"seeds must be in \[0, 30\)"),
        ({"seeds": torch.tensor([0, 1], dtype=torch.int32)}, "dtype of indices"),
    ],
)
def test_bad_arguments_are_refused(options, message: str) -> None:
    arguments = {"seeds": torch.tensor([0, 1]), "fanout": 1} | options
    with pytest.raises(ValueError, match=message):
        sample_labor(random_csc(30, 600), arguments.pop("seeds"), arguments.pop("fanout"), key=0, **arguments)


def test_rows_are_divided_by_their_sum_in_order() -> None:
    g = torch.Generator().manual_seed(1)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randint(0, 300, (500,), generator=g).cumsum(0)])
    weight = torch.rand(int(indptr[-1]), generator=g) * 10.0 ** torch.randint(-4, 4, (int(indptr[-1]),), generator=g)
    found = normalize_rows(indptr, weight)
    for begin, end in zip(indptr.tolist(), indptr[1:].tolist(), strict=False):
        total = np.float32(0)
        for value in weight[begin:end].numpy():
            total = np.float32(total + value)
        assert np.array_equal(found[begin:end].numpy(), weight[begin:end].numpy() / total)
    with pytest.raises(ValueError, match="indptr must run from 0"):
        normalize_rows(indptr, weight[:-1])
    with pytest.raises(ValueError, match="never decrease"):
        normalize_rows(torch.tensor([0, 2, 1, 3]), torch.ones(3))


def test_probabilities_that_hardly_change_any_more_end_all_the_same() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):  # rounding made sums go back and forth for ever from about 20 rounds on
        edges = torch.randint(0, 51, (2, 565), generator=generator)
        csc = CSC.from_edge_index(edges, 51)
        found = sample_labor_importance(csc, torch.arange(51), 5, 30, key=1)
        assert found.weight is not None and bool((found.weight > 0).all())


def sum_in_order(values: list[float]) -> float:
    """As csrc/common/labor_importance.h has it: blocks of 256, and four sums of each."""
    total = 0.0
    for begin in range(0, len(values), 256):
        block, sums = values[begin : begin + 256], [0.0] * 4
        whole = len(block) - len(block) % 4
        for e, value in enumerate(block):
            sums[e % 4 if e < whole else 0] += value
        total += (sums[0] + sums[1]) + (sums[2] + sums[3])
    return total


def solved(inverse: list[float], fanout: int) -> float:
    """c with sum over edges of 1 / min(1, c * pi) = degree^2 / fanout: certain edges leave the sum until no more do."""
    target, c, before = float(len(inverse)) ** 2 / fanout, 0.0, -1
    while True:
        certain = sum(value < c for value in inverse)
        if certain <= before or certain == len(inverse):
            return c
        before, c = certain, sum_in_order([0.0 if value < c else value for value in inverse]) / (target - certain)


def by_importance(csc: CSC, seeds: Tensor, fanout: int, rounds: int, key: int, exclude: Tensor | None = None):
    """(counts, positions, weights) of LABOR-i, pi_u the largest c_v * pi_u of u's edges, edge by edge."""
    excluded = set() if exclude is None else set(exclude.tolist())
    ends, ids = csc.indptr.tolist(), csc.indices.tolist()
    columns = [[p for p in range(ends[v], ends[v + 1]) if p not in excluded] for v in seeds.tolist()]
    inverse = {ids[p]: 1.0 for column in columns for p in column}
    for step in range(rounds + 1):
        scale = [solved([inverse[ids[p]] for p in c], fanout) if len(c) > fanout else None for c in columns]
        if step < rounds:
            largest = dict.fromkeys(inverse, 0.0)
            for column, c in zip(columns, scale, strict=True):
                for u in (ids[p] for p in column):
                    largest[u] = max(largest[u], 1.0 if c is None else c / inverse[u])
            inverse = {u: 1.0 / value for u, value in largest.items()}
    below = {u: (word(u, 0, key) >> 11) * 2.0**-53 * inverse[u] for u in inverse}
    counts, positions, weights = [], [], []
    for column, c in zip(columns, scale, strict=True):
        taken = [p for p in column if c is None or below[ids[p]] < c]
        positions += taken
        weights += [1 / ((1.0 if c is None else min(1.0, c / inverse[ids[p]])) * len(column)) for p in taken]
        counts.append(len(taken))
    return counts, positions, weights


def rows_of(degrees: list[int], num_src: int, dtype: torch.dtype = torch.int64, seed: int = 0) -> CSC:
    """Some sources have many edges, most have few."""
    g = torch.Generator().manual_seed(seed)
    indptr = torch.tensor([0, *degrees]).cumsum(0)
    sources = (torch.rand(int(indptr[-1]), generator=g) ** 3 * num_src).to(dtype)
    return CSC(indptr, sources, num_src)


AROUND_BLOCKS = [0, 1, 3, 4, 5, 6, 7, 8, 0, 30, 41, 63, 90, 254, 255, 256, 257, 259, 511, 513, 700]


@grid(fanout=[1, 4, 15, 300], rounds=[0, 1, 2, 5], dtype=[torch.int32, torch.int64])
def test_edges_are_taken_by_the_importance_of_their_source(fanout: int, rounds: int, dtype: torch.dtype) -> None:
    csc = rows_of(AROUND_BLOCKS, 400, dtype, seed=fanout)
    seeds = torch.randperm(len(AROUND_BLOCKS), generator=torch.Generator().manual_seed(rounds)).to(dtype)
    exclude = torch.arange(0, csc.num_edges, 5) if rounds == 2 else None
    found = sample_labor_importance(csc, seeds, fanout, rounds, key=-5, exclude=exclude)
    counts, positions, weights = by_importance(csc, seeds, fanout, rounds, -5, exclude)
    assert found.indptr.diff().tolist() == counts and found.positions.tolist() == positions
    assert found.weight.dtype == torch.float32 and np.array_equal(found.weight.numpy(), np.float32(weights))
    assert found.ids.dtype == dtype and torch.equal(found.ids, csc.indices[found.positions])


def test_neither_threads_nor_how_sources_are_numbered_change_what_importance_takes() -> None:
    csc = rows_of([*AROUND_BLOCKS, *[40] * 3000], 5000, seed=1)
    sparse = CSC(csc.indptr, csc.indices, 1 << 30)  # by a hash table, not by a list of all sources
    exclude = torch.arange(0, csc.num_edges, 7)
    seeds, threads = torch.arange(csc.num_dst), torch.get_num_threads()
    try:
        for without in (None, exclude):
            found = sample_labor_importance(csc, seeds, 7, 2, key=3, exclude=without)
            for number in (1, 2, 5):
                torch.set_num_threads(number)
                other = sample_labor_importance(sparse, seeds, 7, 2, key=3, exclude=without)
                assert all(torch.equal(a, b) for a, b in zip(other, found, strict=True))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fanout": 0}, r"fanout must be 1 to 2\^28 - 1, got 0"),
        ({"rounds": -1}, "rounds must be at least 0, got -1"),
        ({"exclude": torch.tensor([3, 3])}, "ascending order"),
        ({"seeds": torch.tensor([0, 99])}, r"seeds must be in \[0, 30\)"),
        ({"seeds": torch.tensor([0, 1], dtype=torch.int32)}, "dtype of indices"),
    ],
)
def test_bad_arguments_of_importance_are_refused(options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sample_labor_importance(
            random_csc(30, 600), **{"seeds": torch.tensor([0, 1]), "fanout": 2, "rounds": 1, "key": 0, **options}
        )


def test_importance_is_traceable() -> None:
    csc = random_csc(50, 400)
    arguments = (csc.indptr, csc.indices, torch.arange(10), 50, 3, 2, 5, None)
    torch.library.opcheck(torch.ops.gnnsys.sample_labor_importance.default, arguments)


def test_sources_cannot_be_fewer_than_none() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    with pytest.raises(ValueError, match="num_src must not be negative"):
        torch.ops.gnnsys.sample_labor_importance(torch.zeros(1, dtype=torch.int64), empty, empty, -1, 2, 1, 0, None)
