"""LABOR on the device: bit for bit what the CPU kernels give, in samplers and loaders too, LABOR-0 also on parts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gnnsys.graph import EDGE, NODE, Graph
from gnnsys.loader import LinkNeighborLoader, NeighborLoader
from gnnsys.ops import CSC, normalize_rows, sample_labor, sample_labor_importance, source_words
from gnnsys.partition import write_parts
from gnnsys.sampling import DistGraph, FastGCNSampler, LaborSampler, LadiesSampler, SampleKey
from gnnsys.session import init
from tests.cuda.places import CITES, PLACES, homogeneous, placed, same_batch, same_sample, typed
from tests.cuda.test_sampling import HEAVY, NUM_NODES, graph, on_device, some_seeds
from tests.sampling.device_parts import LAYOUTS, check_labor
from tests.sampling.machines import assign

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

KEY = SampleKey(seed=3, epoch=1, batch=4)
DTYPES = [torch.int32, torch.int64]
FANOUTS = [-1, 0, 1, 3, 15, 69, 400, 9001, 1 << 20]


def check(csc: CSC, seeds: Tensor, fanout: int, pinned: bool = False, **options: Any) -> int:
    """Draws on both and compares; returns how many edges were taken."""
    expected = sample_labor(csc, seeds, fanout, **options)
    moved = {
        name: (value.pin_memory() if pinned and name == "source_ids" else value.cuda())
        if isinstance(value, Tensor)
        else value
        for name, value in options.items()
    }
    got = sample_labor(on_device(csc, pinned), seeds.cuda(), fanout, **moved)
    for name, mine, reference in zip(got._fields, got, expected, strict=True):
        assert mine.is_cuda and mine.dtype == reference.dtype, name
        assert torch.equal(mine.cpu(), reference), name
    return expected.ids.numel()


def original_ids(dtype: torch.dtype) -> Tensor:
    ids = torch.randperm(NUM_NODES, generator=torch.Generator().manual_seed(4))
    return ids.to(dtype) if dtype == torch.int32 else ids + (1 << 40)


@pytest.mark.parametrize("pinned", [False, True], ids=["device", "pinned"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["int32", "int64"])
@pytest.mark.parametrize("source_dtype", [None, *DTYPES], ids=["own ids", "int32 ids", "int64 ids"])
def test_a_draw_is_the_cpus_bit_for_bit(pinned: bool, dtype: torch.dtype, source_dtype: torch.dtype | None) -> None:
    csc, taken = graph(dtype, seed=1), 0
    ids = None if source_dtype is None else original_ids(source_dtype)
    g = torch.Generator().manual_seed(2)
    for number, fanout in enumerate(FANOUTS):
        seeds = some_seeds(dtype, 600, number)
        exclude = torch.randperm(csc.num_edges, generator=g)[:3000].sort().values
        tree = torch.randint(0, 1 << 24, (600,), generator=g)
        for options in ({}, {"exclude": exclude}, {"tree": tree}, {"exclude": exclude, "tree": tree}):
            taken += check(csc, seeds, fanout, pinned, key=-7 + number, source_ids=ids, **options)
    assert taken > 10_000


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 2047, 2048, 40_000])
def test_any_number_of_seeds_is_summed_in_order(size: int) -> None:
    csc = graph(torch.int32, seed=2)
    seeds = torch.randint(0, NUM_NODES, (size,), generator=torch.Generator().manual_seed(size)).int()
    check(csc, seeds, 6, key=size)


def test_rows_around_what_a_warp_and_a_block_work_on() -> None:
    degrees = torch.tensor([0, 1, 31, 32, 33, 2047, 2048, 2049, 2303, 2304, 2305, 70_000])
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])
    sources = torch.randint(0, 1 << 20, (int(indptr[-1]),), generator=torch.Generator().manual_seed(0))
    csc, seeds = CSC(indptr, sources, 1 << 20), torch.arange(12).repeat(3)
    for fanout in (1, 5, 32, 2048, 69_999, 70_000):
        assert check(csc, seeds, fanout, key=fanout) > 0
        for exclude in (
            torch.arange(0, csc.num_edges, 3),
            torch.arange(csc.num_edges),
            torch.tensor([], dtype=torch.int64),
        ):
            check(csc, seeds, fanout, key=fanout, exclude=exclude)


def test_a_graph_without_edges_is_fine() -> None:
    empty = CSC(torch.zeros(4, dtype=torch.int64), torch.empty(0, dtype=torch.int32), 3)
    assert check(empty, torch.tensor([0, 2], dtype=torch.int32), 5, key=1) == 0


BAD: dict[str, dict[str, Any]] = {
    "fanout": {"fanout": -2},
    "seeds": {"seeds": torch.tensor([0, NUM_NODES])},
    "negative seeds": {"seeds": torch.tensor([0, -1])},
    "exclude": {"exclude": torch.tensor([3, 3])},
    "tree": {"tree": torch.tensor([0, 1 << 24])},
    "trees": {"tree": torch.tensor([0])},
    "source_ids": {"source_ids": torch.arange(3)},
    "dtype": {"seeds": torch.tensor([0, 1], dtype=torch.int32)},
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_refused_in_the_cpus_words(case: str) -> None:
    csc = graph(torch.int64, seed=3)
    arguments = {"seeds": torch.tensor([0, HEAVY]), "fanout": 4, "key": 1, **BAD[case]}
    moved = {name: v.cuda() if isinstance(v, Tensor) else v for name, v in arguments.items()}
    with pytest.raises(ValueError) as expected:
        sample_labor(csc, **arguments)
    with pytest.raises(ValueError) as got:
        sample_labor(on_device(csc, False), **moved)
    assert str(got.value).splitlines()[0] == str(expected.value).splitlines()[0]


def test_a_source_without_an_original_id_and_a_damaged_indptr_are_refused() -> None:
    csc = CSC(torch.tensor([0, 4, 6]), torch.tensor([0, 1, -1, 1, 0, 1]), 2)
    with pytest.raises(ValueError, match=r"sources must be in \[0, 2\), got -1"):
        sample_labor(on_device(csc, False), torch.tensor([0]).cuda(), 2, key=1, source_ids=torch.arange(2).cuda())
    torn = CSC(torch.tensor([0, 4, 2, 6]), torch.zeros(6, dtype=torch.int64), 3)
    with pytest.raises(ValueError, match="indptr must ascend"):
        sample_labor(on_device(torn, False), torch.tensor([1]).cuda(), 2, key=1)


# -- LABOR-i -----------------------------------------------------------------------------------------------------------


def check_importance(
    csc: CSC, seeds: Tensor, fanout: int, rounds: int, *, key: int, exclude: Tensor | None = None, pinned: bool = False
) -> int:
    """The same for LABOR-i."""
    expected = sample_labor_importance(csc, seeds, fanout, rounds, key=key, exclude=exclude)
    without = None if exclude is None else exclude.cuda()
    got = sample_labor_importance(on_device(csc, pinned), seeds.cuda(), fanout, rounds, key=key, exclude=without)
    for name, mine, reference in zip(got._fields, got, expected, strict=True):
        assert mine.is_cuda and mine.dtype == reference.dtype, name
        assert torch.equal(mine.cpu(), reference), name
    return expected.ids.numel()


@pytest.mark.parametrize("pinned", [False, True], ids=["device", "pinned"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["int32", "int64"])
@pytest.mark.parametrize("rounds", [0, 1, 2, 3, 10, 30])
def test_a_draw_by_importance_is_the_cpus_bit_for_bit(pinned: bool, dtype: torch.dtype, rounds: int) -> None:
    """Empty rows, rows of at most the fanout, a hub, seeds twice; sources numbered by id and by a hash table."""
    csc, taken = graph(dtype, seed=1), 0
    many = CSC(csc.indptr, csc.indices, 1 << 30)
    g = torch.Generator().manual_seed(2)
    for number, fanout in enumerate(f for f in FANOUTS if f > 0):
        seeds = some_seeds(dtype, 600, number)
        exclude = torch.randperm(csc.num_edges, generator=g)[:3000].sort().values
        for each in (csc, many):
            for without in (None, exclude):
                taken += check_importance(each, seeds, fanout, rounds, key=number - 7, exclude=without, pinned=pinned)
    assert taken > 10_000


@pytest.mark.parametrize("rounds", [1, 2, 10])
def test_columns_around_what_four_threads_a_warp_and_a_block_solve(rounds: int) -> None:
    edges = [0, 1, 3, 4, 5, 31, 33, 255, 256, 257, 511, 513, 2047, 2048, 2049, 8191, 8192, 8193, 8449, 16_385, 70_000]
    degrees = torch.tensor([*edges, *[20] * 500])
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])
    g = torch.Generator().manual_seed(rounds)
    sources = (torch.rand(int(indptr[-1]), generator=g) ** 4 * 50_000).long()
    csc, seeds = CSC(indptr, sources, 50_000), torch.randperm(degrees.numel(), generator=g)
    for fanout in (1, 5, 32, 300, 8192, 69_999):
        assert check_importance(csc, seeds, fanout, rounds, key=fanout) > 0
        for exclude in (torch.arange(0, csc.num_edges, 3), torch.arange(csc.num_edges)):
            check_importance(csc, seeds, fanout, rounds, key=fanout, exclude=exclude)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 2049, 20_000])
def test_any_number_of_columns_is_solved(size: int) -> None:
    csc = graph(torch.int32, seed=2)
    seeds = torch.randint(0, NUM_NODES, (size,), generator=torch.Generator().manual_seed(size)).int()
    check_importance(csc, seeds, 6, 2, key=size)


def test_columns_without_edges_have_none() -> None:
    empty = CSC(torch.zeros(4, dtype=torch.int64), torch.empty(0, dtype=torch.int32), 3)
    assert check_importance(empty, torch.tensor([0, 2], dtype=torch.int32), 5, 2, key=1) == 0


def test_two_draws_by_importance_are_one() -> None:
    csc = on_device(graph(torch.int64, seed=5), False)
    seeds = some_seeds(torch.int64, 600, 1).cuda()
    first = sample_labor_importance(csc, seeds, 4, 10, key=1)
    for _ in range(20):
        again = sample_labor_importance(csc, seeds, 4, 10, key=1)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


BAD_IMPORTANCE: dict[str, dict[str, Any]] = {
    "fanout": {"fanout": 0},
    "rounds": {"rounds": -1},
    "seeds": {"seeds": torch.tensor([0, NUM_NODES])},
    "exclude": {"exclude": torch.tensor([3, 3])},
    "dtype": {"seeds": torch.tensor([0, 1], dtype=torch.int32)},
}


@pytest.mark.parametrize("case", BAD_IMPORTANCE)
def test_bad_arguments_of_importance_are_refused_in_the_cpus_words(case: str) -> None:
    csc = graph(torch.int64, seed=3)
    arguments = {"seeds": torch.tensor([0, HEAVY]), "fanout": 4, "rounds": 1, "key": 1, **BAD_IMPORTANCE[case]}
    moved = {name: v.cuda() if isinstance(v, Tensor) else v for name, v in arguments.items()}
    with pytest.raises(ValueError) as expected:
        sample_labor_importance(csc, **arguments)
    with pytest.raises(ValueError) as got:
        sample_labor_importance(on_device(csc, False), **moved)
    assert str(got.value).splitlines()[0] == str(expected.value).splitlines()[0]


def test_importance_refuses_sources_that_are_none_and_a_damaged_indptr() -> None:
    edges = torch.tensor([0, 1, -1, 1, 0, 1])
    for num_src in (0, 2, 1 << 30):
        csc = CSC(torch.tensor([0, 4, 6]), edges, num_src)
        with pytest.raises(ValueError, match=rf"sources must be in \[0, {num_src}\), got {-1 if num_src else 0}"):
            sample_labor_importance(on_device(csc, False), torch.tensor([0]).cuda(), 2, 1, key=1)
    torn = CSC(torch.tensor([0, 4, 2, 6]), torch.zeros(6, dtype=torch.int64), 3)
    with pytest.raises(ValueError, match="indptr must ascend"):
        sample_labor_importance(on_device(torn, False), torch.tensor([1]).cuda(), 2, 1, key=1)


def test_words_of_sources_are_the_cpus() -> None:
    for ids in (torch.arange(3000), torch.arange(3000, dtype=torch.int32), torch.arange(9) + (1 << 50)):
        assert torch.equal(source_words(ids.cuda(), key=-9).cpu(), source_words(ids, key=-9))


def test_rows_are_divided_by_their_sum_in_the_cpus_order() -> None:
    g = torch.Generator().manual_seed(1)
    degree = torch.randint(0, 90, (3000,), generator=g)
    degree[7] = 50_000
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)])
    weight = torch.rand(int(indptr[-1]), generator=g) * 10.0 ** torch.randint(-6, 6, (int(indptr[-1]),), generator=g)
    got = normalize_rows(indptr.cuda(), weight.cuda())
    assert got.is_cuda and torch.equal(got.cpu(), normalize_rows(indptr, weight))
    nothing = normalize_rows(torch.zeros(1, dtype=torch.int64).cuda(), torch.empty(0).cuda())
    assert nothing.numel() == 0


# -- samplers and loaders ----------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "normalized": {"normalize": True},
    "one number for all hops": {"layer_dependency": True},
    "disjoint": {"disjoint": True},
    "blocks": {"expand": "frontier"},
    "normalized blocks": {"expand": "frontier", "normalize": True},
    "LABOR-1": {"importance_sampling": 1},
    "LABOR-2, one number for all hops": {"importance_sampling": 2, "layer_dependency": True},
    "LABOR-10, normalized blocks": {"importance_sampling": 10, "expand": "frontier", "normalize": True},
}


def same_weights(there: Any, here: Any) -> None:
    assert (there.edge_weight is None) == (here.edge_weight is None)
    for t, weight in (here.edge_weight or {}).items():
        assert there.edge_weight[t].is_cuda and torch.equal(there.edge_weight[t].cpu(), weight), t


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("fanouts", [[5], [15, 10, 5], [-1, 2], [3, 0, 2]], ids=str)
def test_samples_are_the_hosts(place: str, wide: bool, option: str, fanouts: list[int]) -> None:
    whole = homogeneous(wide=wide)
    there = LaborSampler(placed(whole, place), fanouts, device="cuda", **OPTIONS[option])
    here = LaborSampler(whole, fanouts, **OPTIONS[option])
    walk = LaborSampler(placed(whole, place), fanouts, device="cuda", **OPTIONS[option])
    assert (there._plain is not None) == (option in ("plain", "normalized", "one number for all hops"))
    walk._plain = None  # hop by hop, which is how what is not plain is drawn
    for number, count in enumerate((1, 97, 300)):
        seeds = {NODE: torch.randint(0, 600, (count,), generator=torch.Generator().manual_seed(number))}
        a, b, c = (sampler.sample(seeds, key=KEY._replace(batch=number)) for sampler in (there, here, walk))
        for mine in (a, c):
            same_sample(mine, b)
            same_weights(mine, b)
            for block, other in zip(mine.blocks, b.blocks, strict=True):
                same_weights(block, other)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("option", OPTIONS)
def test_typed_samples_are_the_hosts(place: str, option: str) -> None:
    whole, seeds = typed(), {"paper": torch.arange(0, 90, 3)}
    there = LaborSampler(placed(whole, place), [4, 3], device="cuda", **OPTIONS[option]).sample(seeds, key=KEY)
    here = LaborSampler(whole, [4, 3], **OPTIONS[option]).sample(seeds, key=KEY)
    assert CITES in here.num_sampled_edges
    same_sample(there, here)
    same_weights(there, here)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rounds", [0, 2])
def test_excluded_edges_are_the_same_ones(place: str, rounds: int) -> None:
    whole, seeds, options = homogeneous(), {NODE: torch.arange(0, 200)}, {"importance_sampling": rounds}
    there = LaborSampler(placed(whole, place), [4, 3], device="cuda", **options)
    here = LaborSampler(whole, [4, 3], **options)
    src, dst = whole.edge_index()[:, ::2]
    exclude = [{EDGE: sampler.find_edges(EDGE, src, dst)} for sampler in (there, here)]
    a, b = (s.sample(seeds, key=KEY, exclude=e) for s, e in zip((there, here), exclude, strict=True))
    same_sample(a, b)
    same_weights(a, b)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.parametrize("kind", [NeighborLoader, LinkNeighborLoader])
@pytest.mark.parametrize("rounds", [0, 1])
def test_batches_are_the_hosts(place: str, num_threads: int, kind: Any, rounds: int) -> None:
    whole = homogeneous()
    graphs = placed(whole, place), whole
    options = {"batch_size": 64, "shuffle": True, "seed": 5}
    make = partial(LaborSampler, num_neighbors=[5, 3], importance_sampling=rounds)
    there = kind(graphs[0], sampler=make(graphs[0], device="cuda"), device="cuda", num_threads=num_threads, **options)
    here = kind(graphs[1], sampler=make(graphs[1]), num_threads=0, **options)
    for _ in range(2):
        for a, b in zip(there, here, strict=True):
            same_batch(a, b)
            assert a.edge_weight.is_cuda and torch.equal(a.edge_weight.cpu(), b.edge_weight)


HOST_ONLY = {
    "FastGCN": partial(FastGCNSampler, num_nodes=[20, 20]),
    "LADIES": partial(LadiesSampler, num_nodes=[20, 20]),
}


@pytest.mark.parametrize("name", HOST_ONLY)
def test_samplers_that_draw_on_the_host_do_so_for_a_pinned_graph_and_refuse_one_on_the_device(name: str) -> None:
    whole = homogeneous()
    pinned = whole.pin_memory()
    options = {"batch_size": 64, "shuffle": True}
    there = NeighborLoader(pinned, sampler=HOST_ONLY[name](pinned), device="cuda", **options)
    here = NeighborLoader(whole, sampler=HOST_ONLY[name](whole), num_threads=0, **options)
    for a, b in zip(there, here, strict=True):
        same_batch(a, b)
    with pytest.raises(ValueError, match=r"draws on the host, and the graph is on cuda:0: .*pin_memory"):
        HOST_ONLY[name](whole.to("cuda"))


# -- parts -------------------------------------------------------------------------------------------------------------


def placing(place: str, graph: DistGraph) -> None:
    from tests.cuda.test_parts import placing as put

    put(place)(graph)


@pytest.mark.parametrize("place", ("device", "structure", "registered"))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_that_the_gpu_reads_give_the_sample_of_one_process(tmp_path: Path, layout: str, place: str) -> None:
    check_labor(tmp_path / "p", layout, partial(placing, place))


@pytest.mark.parametrize("place", ("device", "registered", "host"))
def test_a_loader_of_parts_gives_the_hosts_batches(tmp_path: Path, place: str) -> None:
    whole = large()
    write_parts(whole, assign(whole, 3), tmp_path / "p")
    with init(process_group=False) as session:
        graph = session.open(tmp_path / "p", device="cuda", place=place)
        options = {"input_nodes": graph.from_global(range(1500)), "batch_size": 256, "shuffle": True}
        graph.place_on(torch.device("cuda", 0))
        there = NeighborLoader(graph, sampler=LaborSampler(graph, [10, 5]), **options)
        here = NeighborLoader(graph, sampler=LaborSampler(graph, [10, 5], device="cpu"), device="cpu", **options)
        for a, b in zip(there, here, strict=True):
            same_batch(a, b)


def large() -> Graph:
    """More seeds than a block has threads, and hubs with more in-edges than any fanout."""
    g = torch.Generator().manual_seed(3)
    edges = torch.randint(0, 20_000, (2, 300_000), generator=g)
    edges[1, :30_000] = torch.randint(0, 5, (30_000,), generator=g)
    return Graph.from_edge_index(edges, 20_000, {"x": torch.randn(20_000, 9, generator=g)})
