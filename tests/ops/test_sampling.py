"""sample_neighbors against its definition: what may be drawn, how often, and that nothing else matters."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gnnsys.ops import CSC, find_edges, sample_neighbors, stream_key
from tests.support.grid import grid


def star(degree: int, dtype: torch.dtype = torch.int64) -> CSC:
    """Node 0 has `degree` in-neighbours, the others none."""
    indptr = torch.full((degree + 1,), degree, dtype=torch.int64)
    indptr[0] = 0
    return CSC(torch.cat([torch.zeros(1, dtype=torch.int64), indptr[1:]]), torch.arange(degree, dtype=dtype), degree)


def random_csc(num_nodes: int, num_edges: int, dtype: torch.dtype = torch.int64, seed: int = 0) -> CSC:
    generator = torch.Generator().manual_seed(seed)
    edge_index = (torch.rand(2, num_edges, generator=generator) ** 2 * num_nodes).to(dtype)
    return CSC.from_edge_index(edge_index, num_nodes)


def chi_square_is_plausible(counts: Tensor, expected: Tensor) -> bool:
    """Within six standard deviations of the chi-square distribution's mean (its variance is twice its mean)."""
    freedom = counts.numel() - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return abs(statistic - freedom) < 6 * math.sqrt(2 * freedom) + 6


@pytest.mark.parametrize(
    ("degree", "fanout", "replace"),
    [
        (degree, fanout, replace)
        for degree in (2, 3, 7, 50, 1000, 100_000)
        for fanout in (1, 5, 15, 40)
        for replace in (False, True)
        if replace or fanout < degree  # else all are taken and nothing is random
    ],
)
def test_every_neighbour_is_equally_likely(degree: int, fanout: int, replace: bool) -> None:
    csc = star(degree)
    num_trees = 20_000  # as many independent draws of the same node, in one call
    seeds = torch.zeros(num_trees, dtype=torch.int64)
    sampled = sample_neighbors(csc, seeds, fanout, key=stream_key(degree, fanout), replace=replace,
                               tree=torch.arange(num_trees))  # fmt: skip
    assert sampled.ids.numel() == num_trees * fanout
    bins = min(degree, 500)
    counts = torch.bincount(sampled.ids * bins // degree, minlength=bins).double()
    width = torch.bincount(torch.arange(degree) * bins // degree, minlength=bins).double()
    expected = width / degree * num_trees * fanout
    if not replace:  # draws of one node are negatively correlated: rescale to unit variance
        counts = expected + (counts - expected) / math.sqrt(1 - fanout / degree)
    assert chi_square_is_plausible(counts, expected)


def test_pairs_of_neighbours_are_equally_likely() -> None:
    num_trees = 60_000
    sampled = sample_neighbors(star(6), torch.zeros(num_trees, dtype=torch.int64), 2, key=11,
                               tree=torch.arange(num_trees))  # fmt: skip
    first, second = sampled.ids.view(-1, 2).T
    assert bool((first < second).all())
    counts = torch.bincount(first * 6 + second, minlength=36).double()
    counts = counts[counts > 0]
    assert counts.numel() == 15
    assert chi_square_is_plausible(counts, torch.full((15,), num_trees / 15, dtype=torch.float64))


def test_weighted_draws_with_replacement_follow_the_weights() -> None:
    weight = torch.tensor([0.0, 1.0, 2.0, 3.0, 0.0, 10.0])
    num_trees = 20_000
    sampled = sample_neighbors(star(6), torch.zeros(num_trees, dtype=torch.int64), 4, key=3, replace=True,
                               weight=weight, tree=torch.arange(num_trees))  # fmt: skip
    counts = torch.bincount(sampled.ids, minlength=6).double()
    assert counts[0] == 0 and counts[4] == 0
    kept = weight > 0
    expected = (weight[kept] / weight.sum()).double() * sampled.ids.numel()
    assert chi_square_is_plausible(counts[kept], expected)


def test_weighted_draws_without_replacement_follow_successive_sampling() -> None:
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    num_trees = 40_000
    sampled = sample_neighbors(star(4), torch.zeros(num_trees, dtype=torch.int64), 2, key=5, weight=weight,
                               tree=torch.arange(num_trees))  # fmt: skip
    pairs = sampled.ids.view(-1, 2)
    counts = torch.bincount(pairs[:, 0] * 4 + pairs[:, 1], minlength=16).double().view(4, 4)
    share = weight / weight.sum()
    expected = torch.zeros(4, 4, dtype=torch.float64)
    for a in range(4):
        for b in range(4):
            if a != b:  # a first, then b of what is left
                expected[min(a, b), max(a, b)] += share[a] * share[b] / (1 - share[a])
    upper = torch.triu_indices(4, 4, 1)
    assert chi_square_is_plausible(counts[upper[0], upper[1]], expected[upper[0], upper[1]] * num_trees)


@grid(fanout=[0, 1, 3, 15, 20, 100, -1], replace=[False, True])
def test_a_sample_has_the_right_size_and_only_real_edges(fanout: int, replace: bool) -> None:
    csc = random_csc(300, 6000)
    seeds = torch.randperm(300)
    sampled = sample_neighbors(csc, seeds, fanout, key=1, replace=replace)
    degree = csc.in_degrees()[seeds]
    if fanout < 0:
        expected = degree
    elif replace:
        expected = torch.where(degree > 0, fanout, 0)
    else:
        expected = degree.clamp(max=fanout)
    assert torch.equal(sampled.indptr.diff(), expected)
    assert torch.equal(sampled.ids, csc.indices[sampled.positions])
    owner = torch.repeat_interleave(seeds, expected)
    assert torch.equal(csc.dst()[sampled.positions], owner)
    if not replace:
        assert sampled.positions.unique().numel() == sampled.positions.numel()
    steps = sampled.positions.diff()
    same_seed = owner[1:] == owner[:-1]
    assert bool((steps[same_seed] >= 0).all()), "a node's sampled in-edges keep the input's order"


@pytest.mark.parametrize(
    "options",
    [{}, {"replace": True}, {"weight": True}, {"weight": True, "replace": True}, {"time": True}, {"exclude": True}],
    ids=["uniform", "replace", "weight", "weight+replace", "time", "exclude"],
)
def test_threads_dtype_order_and_company_do_not_change_a_sample(options: dict[str, bool]) -> None:
    narrow, wide = random_csc(5000, 100_000, torch.int32), random_csc(5000, 100_000, torch.int64)
    seeds = torch.randperm(5000)[:3000]
    kwargs: dict[str, object] = {"replace": options.get("replace", False)}
    generator = torch.Generator().manual_seed(1)
    if "weight" in options:
        kwargs["weight"] = torch.rand(100_000, generator=generator)
    if "exclude" in options:
        kwargs["exclude"] = torch.randperm(100_000, generator=generator)[:20_000].sort().values
    seed_time = torch.randint(0, 100, (3000,), generator=generator)
    if "time" in options:
        kwargs["time"] = torch.randint(0, 100, (100_000,), generator=generator)

    def run(csc: CSC, which: Tensor, threads: int) -> tuple[Tensor, Tensor]:
        time = {"seed_time": seed_time[which]} if "time" in options else {}
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            out = sample_neighbors(csc, seeds[which].to(csc.indices.dtype), 10, key=99, **kwargs, **time)  # type: ignore[arg-type]
        finally:
            torch.set_num_threads(before)
        return out.indptr, out.positions

    everything = torch.arange(3000)
    indptr, positions = run(wide, everything, 1)
    for csc, threads in ((wide, 2), (narrow, 1), (narrow, 2), (wide, 5)):
        other_indptr, other_positions = run(csc, everything, threads)
        assert torch.equal(indptr, other_indptr) and torch.equal(positions, other_positions)
    backwards_indptr, backwards = run(wide, everything.flip(0), 2)
    for i in (0, 17, 2999):
        j = 2999 - i
        mine = positions[indptr[i] : indptr[i + 1]]
        assert torch.equal(mine, backwards[backwards_indptr[j] : backwards_indptr[j + 1]])


def test_excluded_edges_are_never_taken_and_the_rest_stay_uniform() -> None:
    csc = star(50)
    exclude = torch.tensor([0, 3, 4, 20, 49])
    num_trees = 20_000
    sampled = sample_neighbors(csc, torch.zeros(num_trees, dtype=torch.int64), 7, key=2, exclude=exclude,
                               tree=torch.arange(num_trees))  # fmt: skip
    counts = torch.bincount(sampled.positions, minlength=50).double()
    assert bool((counts[exclude] == 0).all())
    kept = torch.ones(50, dtype=torch.bool)
    kept[exclude] = False
    expected = torch.full((45,), num_trees * 7 / 45, dtype=torch.float64)
    assert chi_square_is_plausible(expected + (counts[kept] - expected) / math.sqrt(1 - 7 / 45), expected)


@pytest.mark.parametrize("node_time", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_sampling_in_time_sees_only_the_past(node_time: bool, last: bool) -> None:
    csc = random_csc(200, 8000, seed=3)
    generator = torch.Generator().manual_seed(0)
    time = torch.randint(0, 50, (200 if node_time else 8000,), generator=generator)
    of_position = time[csc.indices] if node_time else time
    seeds, seed_time = torch.arange(200), torch.randint(0, 50, (200,), generator=generator)
    out = sample_neighbors(csc, seeds, 6, key=4, time=time, node_time=node_time, seed_time=seed_time, last=last)
    for i in range(200):
        mine = out.positions[out.indptr[i] : out.indptr[i + 1]]
        begin, end = int(csc.indptr[i]), int(csc.indptr[i + 1])
        allowed = [p for p in range(begin, end) if of_position[p] <= seed_time[i]]
        assert mine.numel() == min(6, len(allowed)) and set(mine.tolist()) <= set(allowed)
        if last:
            assert mine.tolist() == sorted(allowed, key=lambda p: (int(of_position[p]), p))[-6:]


def test_storing_a_neighbourhood_sorted_by_time_does_not_change_what_is_drawn() -> None:
    csc = random_csc(100, 4000, seed=5)
    time = torch.randint(0, 30, (4000,), generator=torch.Generator().manual_seed(0))
    order = time.sort(stable=True).indices
    order = order[csc.dst()[order].sort(stable=True).indices]
    by_time = CSC(csc.indptr, csc.indices[order], 100)
    seeds, seed_time = torch.arange(100), torch.arange(100) % 30
    plain = sample_neighbors(csc, seeds, 5, key=8, time=time, seed_time=seed_time)
    presorted = sample_neighbors(by_time, seeds, 5, key=8, time=time[order], seed_time=seed_time, time_sorted=True)
    assert torch.equal(plain.indptr, presorted.indptr)
    assert torch.equal(plain.positions, order[presorted.positions])


def test_original_ids_decide_the_draw_of_relabelled_nodes() -> None:
    csc = random_csc(500, 20_000)
    whole = sample_neighbors(csc, torch.arange(100, 150), 4, key=6)
    begin, end = int(csc.indptr[100]), int(csc.indptr[150])
    part = CSC(csc.indptr[100:151] - begin, csc.indices[begin:end], 500)
    local = sample_neighbors(part, torch.arange(50), 4, key=6, rng_ids=torch.arange(100, 150))
    assert torch.equal(whole.ids, local.ids) and torch.equal(whole.positions, local.positions + begin)
    narrow = CSC(part.indptr, part.indices.int(), 500)
    for rng_ids in (
        torch.arange(100, 150),
        torch.arange(100, 150).int(),
    ):  # local ids may be narrower than original ones
        local = sample_neighbors(narrow, torch.arange(50).int(), 4, key=6, rng_ids=rng_ids)
        assert torch.equal(whole.positions, local.positions + begin)
    with pytest.raises(ValueError, match="rng_ids must have the dtype of seeds, or be int64"):
        sample_neighbors(part, torch.arange(50), 4, key=6, rng_ids=torch.arange(50).int())


def test_work_does_not_grow_with_the_degree() -> None:
    """At O(degree) per seed this call would take hours."""
    csc = star(2_000_000, torch.int32)
    seeds = torch.zeros(200_000, dtype=torch.int32)
    out = sample_neighbors(csc, seeds, 5, key=1, tree=torch.arange(200_000))
    assert out.ids.numel() == 1_000_000


def test_find_edges_finds_parallel_edges_once() -> None:
    csc = CSC.from_edge_index(torch.tensor([[0, 1, 1, 2], [3, 3, 3, 0]]), 4)
    assert find_edges(csc, torch.tensor([1, 1, 2, 3]), torch.tensor([3, 3, 0, 3])).tolist() == [0, 2, 3]


def test_sampling_is_traceable() -> None:
    csc = random_csc(50, 400)
    arguments = (csc.indptr, csc.indices, torch.arange(10), 3, False, 5, None, None, False, False, None, False, None,
                 None, None)  # fmt: skip
    torch.library.opcheck(torch.ops.gnnsys.sample_neighbors.default, arguments)
    torch.library.opcheck(
        torch.ops.gnnsys.find_edges.default, (csc.indptr, csc.indices, torch.arange(5), torch.arange(5))
    )


BAD = {
    "a seed out of range": ({"seeds": torch.tensor([0, 50])}, "seeds"),
    "a negative seed": ({"seeds": torch.tensor([-1])}, "seeds"),
    "seeds of another dtype": ({"seeds": torch.tensor([0], dtype=torch.int32)}, "seeds"),
    "a float seed": ({"seeds": torch.tensor([0.5])}, "seeds"),
    "a fanout of -2": ({"fanout": -2}, "fanout"),
    "a NaN weight": ({"weight": torch.full((400,), math.nan)}, "weight"),
    "a negative weight": ({"weight": torch.full((400,), -1.0)}, "weight"),
    "too few weights": ({"weight": torch.ones(399)}, "weight"),
    "time without seed_time": ({"time": torch.zeros(400, dtype=torch.int64)}, "seed_time"),
    "last without time": ({"last": True}, "time"),
    "too few times": (
        {"time": torch.zeros(3, dtype=torch.int64), "seed_time": torch.zeros(2, dtype=torch.int64)},
        "time",
    ),
    "too few node times": (
        {"time": torch.zeros(3, dtype=torch.int64), "seed_time": torch.ones(2, dtype=torch.int64), "node_time": True},
        "time",
    ),
    "an unsorted exclusion": ({"exclude": torch.tensor([3, 1])}, "exclude"),
    "an exclusion named twice": ({"exclude": torch.tensor([3, 3])}, "exclude"),
    "a tree out of range": ({"tree": torch.tensor([0, 1 << 24])}, "tree"),
}


@pytest.mark.parametrize("case", BAD, ids=list(BAD))
def test_bad_input_names_the_argument(case: str) -> None:
    changes, name = BAD[case]
    arguments: dict[str, object] = {"seeds": torch.tensor([0, 1]), "fanout": 3} | changes
    with pytest.raises(ValueError, match=name):
        sample_neighbors(random_csc(50, 400), key=0, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{}, {"weight": torch.ones(4)}], ids=["plain", "general"])
@pytest.mark.parametrize("indptr", [[0, 9, 4], [0, -3, 4], [0, 4, 2, 4]])
def test_an_indptr_that_does_not_ascend_is_refused(indptr: list[int], options: dict[str, Tensor]) -> None:
    csc = CSC(torch.tensor(indptr), torch.arange(4), 4)
    with pytest.raises(ValueError, match="indptr"):
        sample_neighbors(csc, torch.arange(csc.num_dst), 2, key=0, **options)  # type: ignore[arg-type]


def test_no_seeds_and_no_edges_are_fine() -> None:
    csc = random_csc(50, 400)
    assert sample_neighbors(csc, torch.empty(0, dtype=torch.int64), 3, key=0).ids.numel() == 0
    empty = CSC(torch.zeros(4, dtype=torch.int64), torch.empty(0, dtype=torch.int64), 3)
    assert sample_neighbors(empty, torch.arange(3), 3, key=0, replace=True).indptr.tolist() == [0, 0, 0, 0]


def test_ids_that_do_not_fit_are_refused_not_wrapped() -> None:
    csc = CSC.from_edge_index(torch.tensor([[1], [2]]), 5, narrow=True)
    with pytest.raises(ValueError, match="src"):
        find_edges(csc, torch.tensor([2**32 + 1]), torch.tensor([2]))
