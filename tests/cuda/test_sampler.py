"""Samplers on a graph in device memory and in pinned memory: the sample is the CPU's, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gnnsys.graph import EDGE, NODE, Graph
from gnnsys.sampling import NeighborSampler, SampleKey, sample_neighbors, to_block
from tests.cuda.places import CITES, PLACES, WRITES, WRITTEN, homogeneous, placed, same, same_blocks, same_sample, typed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

KEY = SampleKey(seed=3, epoch=1, batch=4)


def both(graph: Graph, place: str, fanouts: Any, **options: Any) -> tuple[NeighborSampler, NeighborSampler]:
    on_device = NeighborSampler(placed(graph, place), fanouts, device="cuda", **options)
    return on_device, NeighborSampler(graph, fanouts, **options)


def random_seeds(num_nodes: int, count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, num_nodes, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("fanouts", [[5], [15, 10, 5], [-1, 2], [3, 0, 2], [40, 40]])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"replace": True},
        {"expand": "frontier"},
        {"disjoint": True},
        {"weight": "w"},
        {"weight": "w", "replace": True},
    ],
    ids=str,
)
def test_every_option_draws_what_the_cpu_draws(place: str, wide: bool, fanouts: list[int], options: dict) -> None:
    graph = homogeneous(wide=wide)
    there, here = both(graph, place, fanouts, **options)
    for number, count in enumerate((1, 97, 300)):
        seeds = {NODE: random_seeds(600, count, number)}  # some of them repeat
        key = KEY._replace(batch=number)
        same_sample(there.sample(seeds, key=key), here.sample(seeds, key=key))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("fanouts", [[0], [0, 3], [4, -1, -1], [-1, -1, -1, -1], [2] * 9, [3, -1, 40, 0, 5]], ids=str)
def test_hops_in_one_call_are_those_of_the_walk(place: str, wide: bool, replace: bool, fanouts: list[int]) -> None:
    graph = homogeneous(seed=1, wide=wide)
    there, here = both(graph, place, fanouts, replace=replace)
    walk = NeighborSampler(placed(graph, place), fanouts, device="cuda", replace=replace)
    assert there._plain is not None
    walk._plain = None
    for number, count in enumerate((0, 1, 5, 200)):
        seeds = {NODE: random_seeds(600, count, number)}
        key = KEY._replace(batch=number)
        expected = here.sample(seeds, key=key)
        same_sample(there.sample(seeds, key=key), expected)
        same_sample(walk.sample(seeds, key=key), expected)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("fanouts", [[15, 10, 5], [-1, -1], [-1, 12, -1]], ids=str)
def test_hops_in_one_call_of_many_nodes(place: str, fanouts: list[int]) -> None:
    """Many tiles, and a table that is made anew as hops turn out larger than was to be expected."""
    edge_index = torch.randint(0, 100_000, (2, 1_500_000), generator=torch.Generator().manual_seed(2))
    edge_index[1, :50_000] = 11
    graph = Graph.from_edge_index(edge_index[:, edge_index[1].argsort(stable=True)], 100_000)  # edges keep their places
    assert graph.csc().edge_ids is None
    there, here = both(graph, place, fanouts)
    for number, seeds in enumerate((random_seeds(100_000, 1500), torch.tensor([11, 11, 5]))):
        key = KEY._replace(batch=number)
        same_sample(there.sample({NODE: seeds}, key=key), here.sample({NODE: seeds}, key=key))


def test_a_room_that_was_made_ahead_of_need_may_be_too_small() -> None:
    """More ids than a table is ever made for on expectation."""
    num_nodes = 6_000_000
    edge_index = torch.stack([torch.arange(num_nodes), torch.arange(num_nodes) // 200])
    graph = Graph.from_edge_index(edge_index, num_nodes)
    there, here = both(graph, "device", [-1, 200, 300])
    seeds = {NODE: torch.arange(300)}
    same_sample(there.sample(seeds, key=KEY), here.sample(seeds, key=KEY))


def test_one_call_makes_plain_samples_alone() -> None:
    graph = homogeneous().to("cuda")
    others: list[dict[str, Any]] = [{"weight": "w"}, {"time": "t"}, {"disjoint": True}, {"expand": "frontier"}]
    assert all(NeighborSampler(graph, [3], **options)._plain is None for options in others)
    assert all(NeighborSampler(typed().to("cuda"), [3], **options)._plain is None for options in others[2:])
    assert NeighborSampler(typed().to("cuda"), [3])._plain is not None
    assert NeighborSampler(homogeneous(), [3])._plain is None
    sampler = NeighborSampler(graph, [3, 2])
    sample = sampler.sample({NODE: random_seeds(600, 20).int()[::2]}, key=KEY)  # converted, and not contiguous
    assert sample.num_sampled_nodes[NODE][0] == 10
    with pytest.raises(ValueError, match="node type"):
        sampler.sample({"paper": torch.arange(3)}, key=KEY)
    assert sampler.sample({}, key=KEY).node[NODE].numel() == 0


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("time", ["t", "et"])
@pytest.mark.parametrize("strategy", ["uniform", "last"])
def test_sampling_in_time_sees_what_the_cpu_sees(place: str, time: str, strategy: str) -> None:
    there, here = both(homogeneous(), place, [6, 4], time=time, temporal_strategy=strategy)
    seeds = {NODE: random_seeds(600, 120)}
    seed_time = {NODE: random_seeds(100, 120, 1)}
    same_sample(there.sample(seeds, key=KEY, seed_time=seed_time), here.sample(seeds, key=KEY, seed_time=seed_time))


@pytest.mark.parametrize("place", PLACES)
def test_seeds_bring_their_own_time(place: str) -> None:
    there, here = both(homogeneous(), place, [6, 4], time="t")
    seeds = {NODE: random_seeds(600, 120)}
    same_sample(there.sample(seeds, key=KEY), here.sample(seeds, key=KEY))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("expand", ["new", "frontier"])
@pytest.mark.parametrize("fanouts", [[4, 3], {WRITES: [3, 2], CITES: [2, -1], WRITTEN: [0, 4]}], ids=["all", "by type"])
def test_typed_graphs_give_the_same_sample(place: str, expand: str, fanouts: Any) -> None:
    there, here = both(typed(), place, fanouts, expand=expand)
    seeds = {"paper": random_seeds(100, 30), "author": torch.empty(0, dtype=torch.int64)}
    same_sample(there.sample(seeds, key=KEY), here.sample(seeds, key=KEY))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("weight", [None, "w"])
def test_excluded_edges_are_found_and_left_out_alike(place: str, weight: str | None) -> None:
    graph = homogeneous()
    there, here = both(graph, place, [5, 5], weight=weight)
    src, dst = graph.edge_index()[:, ::9]
    without, expected = there.find_edges(EDGE, src, dst), here.find_edges(EDGE, src, dst)
    same(without, expected, "positions")
    seeds = {NODE: dst.unique()}
    same_sample(
        there.sample(seeds, key=KEY, exclude={EDGE: without}), here.sample(seeds, key=KEY, exclude={EDGE: expected})
    )


@pytest.mark.parametrize("place", PLACES)
def test_no_seeds_and_a_graph_without_edges(place: str) -> None:
    none = {NODE: torch.empty(0, dtype=torch.int64)}
    there, here = both(homogeneous(), place, [3, 3])
    same_sample(there.sample(none, key=KEY), here.sample(none, key=KEY))
    empty = Graph.from_edge_index(torch.empty(2, 0, dtype=torch.int64), 10)
    there, here = both(empty, place, [3, 3])
    seeds = {NODE: torch.tensor([4, 4, 9])}
    same_sample(there.sample(seeds, key=KEY), here.sample(seeds, key=KEY))


@pytest.mark.parametrize("place", PLACES)
def test_seeds_may_be_on_the_device_and_bad_ones_are_refused(place: str) -> None:
    there, here = both(homogeneous(), place, [5, 5])
    seeds = random_seeds(600, 50)
    same_sample(there.sample({NODE: seeds.cuda()}, key=KEY), here.sample({NODE: seeds}, key=KEY))
    for bad in ([600], [-1], [3, 1 << 31]):
        with pytest.raises(ValueError, match="seed"):
            there.sample({NODE: torch.tensor(bad)}, key=KEY)
    same_sample(there.sample({NODE: seeds}, key=KEY), here.sample({NODE: seeds}, key=KEY))


def test_samples_made_on_two_streams_at_once_do_not_disturb_each_other() -> None:
    there, here = both(homogeneous(), "device", [10, 10])
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    made = []
    for number in range(12):
        with torch.cuda.stream(streams[number % 2]):
            seeds = {NODE: random_seeds(600, 200, number)}
            made.append(there.sample(seeds, key=KEY._replace(batch=number)))
    torch.cuda.synchronize()
    for number, sample in enumerate(made):
        seeds = {NODE: random_seeds(600, 200, number)}
        same_sample(sample, here.sample(seeds, key=KEY._replace(batch=number)))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("weight", [None, "w"])
def test_blocks_of_a_users_own_sampler_are_those_of_the_cpu(place: str, weight: str | None) -> None:
    graph = homogeneous()
    there = placed(graph, place)
    nodes, on_device = random_seeds(600, 40).unique(), random_seeds(600, 40).unique().cuda()
    for hop in range(2):
        found = sample_neighbors(graph, nodes, 6, key=KEY, hop=hop, weight=weight)
        on_there = sample_neighbors(there, on_device, 6, key=KEY, hop=hop, weight=weight)
        for name in ("nodes", "indptr", "ids", "edge_ids"):
            same(getattr(on_there, name), getattr(found, name), name)
        block, source = to_block(found)
        block_there, source_there = to_block(on_there)
        same_blocks([block_there], [block])
        same(source_there[NODE], source[NODE], "sources")
        nodes, on_device = source[NODE], source_there[NODE]


def test_a_graph_keeps_its_width_and_its_sources_when_it_moves() -> None:
    graph = homogeneous()
    for moved in (graph.to("cuda"), graph.pin_memory()):
        csc = moved.csc()
        assert csc.indices.dtype == graph.csc().indices.dtype == torch.int32
        assert csc.edge_ids is not None and csc.edge_ids.dtype == torch.int32
        assert moved.node_data[NODE].keys() == graph.node_data[NODE].keys()
    there, pinned = graph.to("cuda"), graph.pin_memory()
    assert there.device == torch.device("cuda", torch.cuda.current_device()) and not there.is_pinned
    assert pinned.device.type == "cpu" and pinned.is_pinned and not graph.is_pinned
    assert all(rows.is_pinned() for rows in pinned.node_data[NODE].values())
    assert torch.equal(there.edge_index().cpu(), graph.edge_index())
    back = there.to("cpu")
    assert back.device.type == "cpu" and torch.equal(back.edge_index(), graph.edge_index())


def test_structure_that_the_device_cannot_read_is_refused() -> None:
    graph = homogeneous()
    with pytest.raises(ValueError, match=r"pinned: pass graph.pin_memory\(\)"):
        NeighborSampler(graph, [3], device="cuda")
    with pytest.raises(ValueError, match="cannot be sampled on cpu"):
        NeighborSampler(graph.to("cuda"), [3], device="cpu")
