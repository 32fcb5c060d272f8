"""Guided draws against a model of them in plain Python: who is taken, how many of each side, by which weights."""

import math

import pytest
import torch

from gnnsys.ops import CSC, sample_guided, sample_neighbors

NUM_SRC = 60


def lists(seed: int = 0, dtype: torch.dtype = torch.int32) -> CSC:
    g = torch.Generator().manual_seed(seed)
    degrees = torch.randint(0, 30, (40,), generator=g)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])
    return CSC(indptr, torch.randint(0, NUM_SRC, (int(indptr[-1]),), generator=g).to(dtype), NUM_SRC)


def scores(seed: int = 1) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    some = torch.randint(1, 256, (NUM_SRC,), generator=g)
    return torch.where(torch.rand(NUM_SRC, generator=g) < 0.5, 0, some).to(torch.uint8)


def expected_local(num_local: int, num_remote: int, k: int, deviation: float, split: str) -> int:
    shift = math.ceil(deviation * k)
    if split == "proportional":
        return max(min(k * num_local // (num_local + num_remote) + shift, num_local, k), k - num_remote)
    local = min(num_local, k)
    return local - min(shift, local, num_remote - (k - local))


@pytest.mark.parametrize("split", ["local", "proportional"])
@pytest.mark.parametrize("deviation", [0.0, 0.1, 0.5, 1.0])
def test_each_side_has_its_share_and_the_total_stays(split, deviation):
    csc, score, seeds = lists(), scores(), torch.arange(40, dtype=torch.int32)
    exclude = torch.arange(0, csc.num_edges, 7)
    for k in (0, 1, 3, 5, 12, -1):
        options = {"deviation": deviation, "proportional": split == "proportional"}
        found = sample_guided(csc, seeds, k, key=5, score=score, exclude=exclude, **options)
        assert found.weight is None and torch.equal(csc.indices[found.positions], found.ids)
        for v in range(40):
            mine = found.positions[found.indptr[v] : found.indptr[v + 1]].tolist()
            there = [p for p in range(int(csc.indptr[v]), int(csc.indptr[v + 1])) if p % 7]
            assert mine == sorted(set(mine)) and set(mine) <= set(there)
            if k < 0 or len(there) <= k:
                assert mine == there
                continue
            is_local = {p: int(score[int(csc.indices[p])]) == 0 for p in there}
            num_local = sum(is_local.values())
            wanted = expected_local(num_local, len(there) - num_local, k, deviation, split) if k else 0
            assert len(mine) == k and sum(is_local[p] for p in mine) == wanted


def test_draws_depend_on_the_original_id_and_the_tree_alone():
    csc, score = lists(), scores()
    seeds = torch.arange(40, dtype=torch.int32)
    for unbiased in (False, True):
        whole = sample_guided(csc, seeds, 4, key=5, score=score, unbiased=unbiased, deviation=0.1)
        wide = sample_guided(
            lists(dtype=torch.int64), seeds.long(), 4, key=5, score=score, unbiased=unbiased, deviation=0.1
        )
        assert torch.equal(whole.positions, wide.positions)
        for v in range(40):
            alone = sample_guided(csc, seeds[v : v + 1], 4, key=5, score=score, unbiased=unbiased, deviation=0.1)
            mine = slice(int(whole.indptr[v]), int(whole.indptr[v + 1]))
            assert torch.equal(alone.positions, whole.positions[mine])
            assert not unbiased or torch.equal(alone.weight, whole.weight[mine])
        ids = seeds.long() + (1 << 40)
        other = sample_guided(csc, seeds, 4, key=5, score=score, rng_ids=ids, unbiased=unbiased, deviation=0.1)
        tree = sample_guided(csc, seeds, 4, key=5, score=score, tree=seeds.long(), unbiased=unbiased, deviation=0.1)
        assert not torch.equal(other.positions, whole.positions) and not torch.equal(tree.positions, whole.positions)


def test_remote_ones_are_drawn_by_their_scores_and_local_ones_alike():
    csc = CSC(torch.tensor([0, 12]), torch.arange(12, dtype=torch.int32), 12)
    score = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 1, 200, 200, 200], dtype=torch.uint8)
    seed, taken, runs = torch.zeros(1, dtype=torch.int32), torch.zeros(12), 2000
    for key in range(runs):
        taken[sample_guided(csc, seed, 4, key=key, score=score, deviation=0.5).positions] += 1
    assert int(taken[:6].sum()) == 2 * runs and int(taken[6:].sum()) == 2 * runs
    assert float((taken[:6] / runs - 1 / 3).abs().max()) < 4 * (1 / 3 * 2 / 3 / runs) ** 0.5
    assert float(taken[6:9].sum()) < 0.05 * float(taken[9:].sum())


@pytest.mark.parametrize("k", [2, 3])
def test_one_heavy_node_among_many_light_ones_is_taken_as_often_as_its_score_says(k):
    """One after the other without putting back: of 100, one has score 255 and the others 1."""
    runs, size = 20_000, 100
    indptr = torch.arange(0, size * runs + 1, size)
    csc = CSC(indptr, torch.arange(size, dtype=torch.int32).repeat(runs), size)
    score = torch.ones(size, dtype=torch.uint8)
    score[7] = 255
    found = sample_guided(csc, torch.arange(runs, dtype=torch.int32), k, key=3, score=score)
    missed = 1.0
    for taken in range(k):
        missed *= 1 - 255 / (255 + size - 1 - taken)
    rate = float((found.ids == 7).sum()) / runs
    assert abs(rate - (1 - missed)) < 4 * (missed * (1 - missed) / runs) ** 0.5


@pytest.mark.parametrize("split", [False, True])
def test_unbiased_draws_have_the_mean_over_all_in_neighbours_as_their_expectation(split):
    csc, score, runs = lists(), scores(), 2000
    rows = torch.randn(NUM_SRC, generator=torch.Generator().manual_seed(2)).double()
    seeds = torch.arange(40, dtype=torch.int32)
    sums = torch.zeros(runs, 40, dtype=torch.float64)
    counts = torch.zeros(40)
    for key in range(runs):
        found = sample_guided(csc, seeds, 5, key=key, score=score, deviation=0.1, proportional=split, unbiased=True)
        counts += found.indptr.diff()
        dst = torch.repeat_interleave(torch.arange(40), found.indptr.diff())
        sums[key].index_add_(0, dst, rows[found.ids.long()] * found.weight.double())
    degrees = csc.in_degrees()
    exact = torch.zeros(40, dtype=torch.float64).index_add_(0, csc.dst().long(), rows[csc.indices.long()])
    exact /= degrees.clamp(min=1)
    sampled = degrees > 5
    error = (sums.mean(0) - exact)[sampled] / (sums[:, sampled].std(0) / runs**0.5)
    assert torch.allclose(sums[:, ~sampled], exact[~sampled].expand(runs, -1), atol=1e-6)
    assert float((error**2).mean() ** 0.5) < 1.5 and float(error.abs().max()) < 5
    assert float((counts[sampled] / runs - 5).abs().max()) < 0.3  # as many as were asked for, on average


def test_without_remote_ones_or_without_local_ones_all_draws_go_to_the_other():
    csc, seeds = lists(), torch.arange(40, dtype=torch.int32)
    uniform = sample_neighbors(csc, seeds, 5, key=1)
    for score in (torch.zeros(NUM_SRC, dtype=torch.uint8), torch.full((NUM_SRC,), 9, dtype=torch.uint8)):
        for split in (False, True):
            found = sample_guided(csc, seeds, 5, key=1, score=score, deviation=0.3, proportional=split)
            assert torch.equal(found.indptr, uniform.indptr)


@pytest.mark.parametrize(
    "change, told",
    [
        ({"score": torch.zeros(3, dtype=torch.uint8)}, "score must have an entry for every source"),
        ({"score": torch.zeros(NUM_SRC)}, "score"),
        ({"deviation": 1.5}, "deviation must be in"),
        ({"deviation": float("nan")}, "deviation must be in"),
        ({"fanout": -2}, "fanout"),
        ({"seeds": torch.tensor([40], dtype=torch.int32)}, "seeds"),
        ({"seeds": torch.tensor([4])}, "seeds must have the dtype"),
        ({"rng_ids": torch.arange(3)}, "rng_ids"),
        ({"tree": torch.arange(3)}, "tree"),
        ({"exclude": torch.tensor([5, 5])}, "exclude"),
    ],
)
def test_what_cannot_be_is_refused(change, told):
    given = {"csc": lists(), "seeds": torch.arange(40, dtype=torch.int32), "fanout": 3, "key": 1, "score": scores()}
    with pytest.raises((ValueError, RuntimeError), match=told):
        sample_guided(**(given | change))
