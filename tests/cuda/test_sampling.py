"""Sampling on the device: every mode, bit for bit what the CPU kernel gives, from device and from pinned memory."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gnnsys.ops import CSC, HopStructure, find_edges, sample_hops, sample_neighbors, stream_key

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

NUM_NODES = 700
HEAVY = 5  # a node whose in-degree is beyond what a warp works on alone
LARGE = {"weight", "time"}  # arguments that may stay in pinned memory


def graph(dtype: torch.dtype, seed: int) -> CSC:
    """A skewed multigraph: empty rows, rows of every size around the fanouts, one giant row."""
    g = torch.Generator().manual_seed(seed)
    degree = torch.randint(0, 70, (NUM_NODES,), generator=g)
    degree[torch.randperm(NUM_NODES, generator=g)[:100]] = 0
    degree[HEAVY] = 9001
    degree[-1] = 300
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)])
    return CSC(indptr, torch.randint(0, NUM_NODES, (int(indptr[-1]),), generator=g).to(dtype), NUM_NODES)


def on_device(csc: CSC, pinned: bool) -> CSC:
    if pinned:
        return CSC(csc.indptr.pin_memory(), csc.indices.pin_memory(), csc.num_src)
    return CSC(csc.indptr.cuda(), csc.indices.cuda(), csc.num_src)


def check(csc: CSC, seeds: Tensor, fanout: int, pinned: bool = False, **options: object) -> int:
    """Samples on both and compares; returns how many edges were taken."""
    expected = sample_neighbors(csc, seeds, fanout, **options)  # type: ignore[arg-type]
    moved = {
        name: (value.pin_memory() if pinned and name in LARGE else value.cuda()) if isinstance(value, Tensor) else value
        for name, value in options.items()
    }
    got = sample_neighbors(on_device(csc, pinned), seeds.cuda(), fanout, **moved)  # type: ignore[arg-type]
    for name, mine, reference in zip(got._fields, got, expected, strict=True):
        if reference is None:  # no weights without a rule
            assert mine is None, name
            continue
        assert mine.is_cuda and mine.dtype == reference.dtype, name
        assert torch.equal(mine.cpu(), reference), name
    return expected.ids.numel()


def some_seeds(dtype: torch.dtype, size: int, seed: int) -> Tensor:
    """Repeats included, and the giant row among them."""
    g = torch.Generator().manual_seed(seed)
    seeds = torch.randint(0, NUM_NODES, (size,), generator=g)
    seeds[size // 2] = HEAVY
    return seeds.to(dtype)


def options_of(mode: str, csc: CSC, num_seeds: int, seed: int) -> dict[str, object]:
    g = torch.Generator().manual_seed(seed)
    num_edges = csc.num_edges
    options: dict[str, object] = {"key": stream_key(seed, 7)}
    words = mode.split("+")
    if "replace" in words:
        options["replace"] = True
    if "weight" in words or "weight64" in words:
        weight = torch.rand(num_edges, generator=g, dtype=torch.float64 if "weight64" in words else torch.float32) ** 3
        weight[torch.rand(num_edges, generator=g) < 0.2] = 0
        weight[::11] = weight[3]  # equal weights, and a few far from the others
        weight[::101] *= 1e-30
        options["weight"] = weight
    if "exclude" in words:
        options["exclude"] = torch.randperm(num_edges, generator=g)[: num_edges // 3].sort().values
    if "time" in words or "sorted" in words:
        time = torch.randint(-50, 50, (num_edges,), generator=g)
        if "sorted" in words:
            for v in range(csc.num_dst):
                time[csc.indptr[v] : csc.indptr[v + 1]] = time[csc.indptr[v] : csc.indptr[v + 1]].sort().values
            options["time_sorted"] = True
        options["time"] = time
        options["seed_time"] = torch.randint(-60, 60, (num_seeds,), generator=g)
    if "node" in words:
        options["time"] = torch.randint(-50, 50, (NUM_NODES,), generator=g)
        options["seed_time"] = torch.randint(-60, 60, (num_seeds,), generator=g)
        options["node_time"] = True
    if "last" in words:
        options["last"] = True
    if "tree" in words:
        options["tree"] = torch.randint(0, 1 << 24, (num_seeds,), generator=g)
    if "rng" in words:
        options["rng_ids"] = torch.randint(0, 1 << 31, (num_seeds,), generator=g).to(csc.indices.dtype)
    if "wide" in words:
        options["rng_ids"] = torch.randint(0, 1 << 60, (num_seeds,), generator=g)
    return options


MODES = [
    "uniform",
    "replace",
    "tree",
    "rng",
    "wide",
    "exclude",
    "exclude+replace",
    "sorted",
    "sorted+last",
    "sorted+exclude+tree",
    "sorted+replace+last",
    "time",
    "time+exclude",
    "time+replace",
    "time+last",
    "node",
    "node+last+exclude",
    "weight",
    "weight64",
    "weight+exclude+wide",
    "weight+replace",
    "weight64+replace+exclude+tree",
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_a_sample_is_the_cpus_bit_for_bit(mode: str, dtype: torch.dtype) -> None:
    csc = graph(dtype, seed=1)
    taken = 0
    for fanout in (0, 1, 3, 5, 8, 9, 15, 16, 17, 32, 33, 100, -1):  # both sides of every width there is a kernel for
        seeds = some_seeds(dtype, 203, seed=fanout + 10)
        taken += check(csc, seeds, fanout, **options_of(mode, csc, 203, seed=fanout + 20))
    assert taken > 0


@pytest.mark.parametrize("mode", ["uniform", "exclude", "sorted", "time", "weight", "weight+replace"])
def test_a_graph_in_pinned_memory_gives_the_same(mode: str) -> None:
    csc = graph(torch.int64, seed=2)
    for fanout in (10, 64, -1):
        check(csc, some_seeds(torch.int64, 150, seed=3), fanout, pinned=True, **options_of(mode, csc, 150, seed=4))


@pytest.mark.parametrize("mode", ["uniform", "replace", "exclude", "time", "weight", "weight+replace"])
def test_thousands_of_edges_of_one_node_are_chosen_from_a_workspace(mode: str) -> None:
    csc = graph(torch.int64, seed=3)
    for fanout in (2048, 2049, 5000, 8999, 9000):
        seeds = torch.tensor([HEAVY, 0, HEAVY, NUM_NODES - 1, 1])
        options = options_of(mode, csc, 5, seed=fanout)
        if "time" in mode:
            options["seed_time"] = torch.full((5,), 1000)
        assert check(csc, seeds, fanout, **options) > fanout


@pytest.mark.parametrize("mode", MODES)
def test_a_fanout_beyond_all_edges_takes_them_all_and_no_more_memory(mode: str) -> None:
    csc = graph(torch.int64, seed=6)
    seeds = some_seeds(torch.int64, 203, seed=7)
    options = options_of(mode, csc, 203, seed=8)
    if "replace" in mode:  # as many as are asked for are drawn
        check(csc, seeds[:3], 9002, **options_of(mode, csc, 3, seed=8))
        return
    for fanout in (9001, 9002, 50_000, 10**8, 2**28 - 1):  # from the longest row to more than all rows have
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        check(csc, seeds, fanout, **options)
        assert fanout < 10**6 or torch.cuda.max_memory_allocated() - before < 64 << 20


def test_all_hops_at_once_take_a_fanout_beyond_all_edges_for_all() -> None:
    csc = on_device(graph(torch.int64, seed=6), pinned=False)
    structure, seeds = HopStructure.of(csc), [torch.arange(100)]
    expected = sample_hops(structure, seeds, [-1, -1], keys=[1, 2], on=csc.indptr)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = sample_hops(structure, seeds, [10**8, 2**28 - 1], keys=[1, 2], on=csc.indptr)
    assert torch.cuda.max_memory_allocated() - before < 160 << 20  # 64 MiB of it is the table of ids
    assert all(torch.equal(a, b) for (a,), (b,) in zip(got[:3], expected[:3], strict=True))
    assert (got.num_nodes, got.num_edges) == (expected.num_nodes, expected.num_edges)


@pytest.mark.parametrize("degree", [2, 3, 5, 16, 17, 33, 40, 64])
def test_almost_all_neighbours_of_a_small_row(degree: int) -> None:
    """Most draws hit what is in already, and chains of replaced draws are long."""
    csc = CSC(torch.tensor([0, degree]), torch.arange(degree), degree)
    num_trees = 500
    seeds = torch.zeros(num_trees, dtype=torch.int64)
    for fanout in range(max(degree - 3, 1), degree):
        check(csc, seeds, fanout, key=fanout, tree=torch.arange(num_trees))


@pytest.mark.parametrize("size", [1, 31, 1023, 1024, 1025, 40_000])
def test_any_number_of_seeds_is_summed_in_order(size: int) -> None:
    csc = graph(torch.int64, seed=4)
    seeds = torch.randint(0, NUM_NODES, (size,), generator=torch.Generator().manual_seed(size))
    seeds[seeds == HEAVY] = 0
    check(csc, seeds, 4, key=size)
    check(csc, seeds, 4, key=size, weight=torch.rand(csc.num_edges))


def test_three_hops_repeat_themselves() -> None:
    generator = torch.Generator().manual_seed(0)
    edge_index = (torch.rand(2, 2_000_000, generator=generator) ** 3 * 100_000).long()
    csc = CSC.from_edge_index(edge_index, 100_000, narrow=True)
    device_csc = on_device(csc, pinned=False)
    frontier = torch.randint(0, 100_000, (1024,), generator=generator).to(csc.indices.dtype)
    for hop, fanout in enumerate((15, 10, 5)):
        expected = sample_neighbors(csc, frontier, fanout, key=hop)
        for _ in range(2):
            got = sample_neighbors(device_csc, frontier.cuda(), fanout, key=hop)
            assert all(torch.equal(a.cpu(), b) for a, b in zip(got[:3], expected[:3], strict=True))
        frontier = expected.ids


def test_no_seeds_and_no_edges_are_fine() -> None:
    csc = graph(torch.int64, seed=5)
    empty = CSC(torch.zeros(4, dtype=torch.int64), torch.empty(0, dtype=torch.int64), 3)
    nothing = torch.empty(0, dtype=torch.int64)
    for mode in ("uniform", "weight", "time", "exclude"):
        for fanout in (3, 100, -1):
            assert check(csc, nothing, fanout, **options_of(mode, csc, 0, seed=1)) == 0
            assert check(empty, torch.arange(3), fanout, **options_of(mode, empty, 3, seed=1) if mode != "weight"
                         else {"key": 1, "weight": torch.empty(0)}) == 0  # fmt: skip


BAD = {
    "a seed out of range": {"seeds": torch.tensor([0, 50])},
    "a negative seed": {"seeds": torch.tensor([3, -1])},
    "a negative seed by weight": {"seeds": torch.tensor([3, -1]), "weight": torch.ones(400)},
    "a NaN weight": {"weight": torch.full((400,), math.nan)},
    "a negative weight": {"weight": torch.full((400,), -1.0)},
    "an infinite weight": {"weight": torch.full((400,), math.inf), "fanout": 100},
    "too few weights": {"weight": torch.ones(399)},
    "time without seed_time": {"time": torch.zeros(400, dtype=torch.int64)},
    "last without time": {"last": True},
    "too few times": {"time": torch.zeros(3, dtype=torch.int64), "seed_time": torch.zeros(2, dtype=torch.int64)},
    "an unsorted exclusion": {"exclude": torch.tensor([3, 1])},
    "an unsorted exclusion by weight": {"exclude": torch.tensor([3, 1]), "weight": torch.ones(400)},
    "an exclusion named twice": {"exclude": torch.tensor([3, 3])},
    "a tree out of range": {"tree": torch.tensor([0, 1 << 24])},
    "a fanout of -2": {"fanout": -2},
}


@pytest.mark.parametrize("case", BAD, ids=list(BAD))
def test_bad_input_is_refused_in_the_cpus_words(case: str) -> None:
    generator = torch.Generator().manual_seed(0)
    csc = CSC.from_edge_index(torch.randint(0, 50, (2, 400), generator=generator), 50)
    arguments: dict[str, object] = {"seeds": torch.tensor([0, 1]), "fanout": 3, "key": 0} | BAD[case]
    with pytest.raises(ValueError) as expected:
        sample_neighbors(csc, **arguments)  # type: ignore[arg-type]
    moved = {name: value.cuda() if isinstance(value, Tensor) else value for name, value in arguments.items()}
    with pytest.raises(ValueError) as got:
        sample_neighbors(on_device(csc, pinned=False), **moved)  # type: ignore[arg-type]
    if case in ("a NaN weight", "a negative weight", "an infinite weight"):  # which of many edges is named is open
        assert "weight must be finite" in str(got.value)
    else:
        assert str(got.value).splitlines()[0] == str(expected.value).splitlines()[0]


def test_node_times_that_end_too_early_are_refused() -> None:
    csc = graph(torch.int64, seed=6)
    options = {"time": torch.zeros(3, dtype=torch.int64), "seed_time": torch.ones(2, dtype=torch.int64)}
    for time_sorted in (False, True):
        with pytest.raises(ValueError, match="time must have an entry for every source node"):
            sample_neighbors(on_device(csc, pinned=False), torch.tensor([HEAVY, 2]).cuda(), 3, key=0, node_time=True,
                             time_sorted=time_sorted, **{k: v.cuda() for k, v in options.items()})  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"weight": torch.ones(4)}], ids=["plain", "listed"])
@pytest.mark.parametrize("indptr", [[0, 9, 4], [0, -3, 4], [0, 4, 2, 4]])
def test_an_indptr_that_does_not_ascend_is_refused(indptr: list[int], options: dict[str, Tensor]) -> None:
    csc = CSC(torch.tensor(indptr).cuda(), torch.arange(4).cuda(), 4)
    with pytest.raises(ValueError, match="indptr must ascend"):
        sample_neighbors(csc, torch.arange(csc.num_dst).cuda(), 2, key=0,
                         **{name: value.cuda() for name, value in options.items()})  # fmt: skip


def test_memory_that_is_not_pinned_is_refused() -> None:
    csc = graph(torch.int64, seed=7)
    with pytest.raises(ValueError, match="pinned"):
        sample_neighbors(csc, torch.tensor([1]).cuda(), 2, key=0)


def test_a_sample_made_on_a_side_stream_follows_its_order() -> None:
    csc = graph(torch.int64, seed=8)
    device_csc = on_device(csc, pinned=False)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        seeds = torch.zeros(50, dtype=torch.int64, device="cuda")
        torch.cuda._sleep(10_000_000)
        seeds += torch.arange(50, device="cuda")
        got = sample_neighbors(device_csc, seeds, 6, key=3)
    torch.cuda.current_stream().wait_stream(stream)
    expected = sample_neighbors(csc, torch.arange(50), 6, key=3)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(got[:3], expected[:3], strict=True))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("pinned", [False, True], ids=["device", "pinned"])
def test_find_edges_finds_what_the_cpu_finds(dtype: torch.dtype, pinned: bool) -> None:
    csc = graph(dtype, seed=9)
    g = torch.Generator().manual_seed(5)
    for size in (0, 1, 500):
        src = torch.randint(0, NUM_NODES, (size,), generator=g).to(dtype)
        dst = torch.randint(0, NUM_NODES, (size,), generator=g).to(dtype)
        if size > 1:
            at = torch.randint(0, csc.num_edges, (size // 2,), generator=g)  # half of the pairs are edges
            src[: size // 2], dst[: size // 2] = csc.indices[at], csc.dst()[at].to(dtype)
            src[-7:], dst[-7:] = csc.indices[csc.indptr[HEAVY]], HEAVY  # the same pair many times, in the giant row
        expected = find_edges(csc, src, dst)
        got = find_edges(on_device(csc, pinned), src.cuda(), dst.cuda())
        assert got.is_cuda and torch.equal(got.cpu(), expected)
        assert size < 2 or expected.numel() > size // 4


def test_find_edges_refuses_a_destination_out_of_range() -> None:
    csc = on_device(graph(torch.int64, seed=10), pinned=False)
    bad = torch.tensor([1, NUM_NODES]).cuda()
    with pytest.raises(ValueError, match=rf"dst must be in \[0, {NUM_NODES}\), got {NUM_NODES} at position 1"):
        torch.ops.gnnsys.find_edges(csc.indptr, csc.indices, torch.tensor([0, 0]).cuda(), bad)
