"""Sampling on parts, over real connections, against the sampler on the whole graph: id for id, for every kind."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gnnsys.graph import EDGE, NODE, NodeType
from gnnsys.partition import relabel
from gnnsys.sampling import NeighborSampler, NodeScores, SampleKey, sample_neighbors
from gnnsys.sampling.part_view import ViewSpec
from tests.sampling.machines import CITES, WRITES, assert_same_sample, homogeneous, machines, to_global, typed
from tests.support.grid import every_value

SECONDS = 120  # nothing here takes so long
KEY = SampleKey(seed=3, epoch=1, batch=4)
SEEDS: dict[NodeType, Tensor] = {NODE: torch.tensor([7, 11, 80, 3, 80, 119])}
KINDS = {
    "uniform": ([4, 3], {}),
    "all neighbours": ([-1, 2], {}),
    "a hop of none": ([3, 0, 2], {}),
    "with replacement": ([4, 3], {"replace": True}),
    "weighted": ([4, 3], {"weight": "w"}),
    "weighted with replacement": ([4, 3], {"weight": "w", "replace": True}),
    "disjoint": ([4, 3], {"disjoint": True}),
    "node times": ([4, 3], {"time": "t"}),
    "last by node times": ([4, 3], {"time": "t", "temporal_strategy": "last"}),
    "edge times": ([4, 3], {"time": "et"}),
    "last by edge times": ([4, 3], {"time": "et", "temporal_strategy": "last", "replace": True}),
    "blocks": ([4, 3], {"expand": "frontier"}),
    "weighted blocks": ([4, 3], {"expand": "frontier", "weight": "w"}),
}


def seed_time(seeds: dict[NodeType, Tensor], options: dict) -> dict[NodeType, Tensor] | None:
    return {t: 10 + torch.arange(ids.numel()) for t, ids in seeds.items()} if options.get("time") == "et" else None


@pytest.fixture(scope="module", params=[*(pytest.param(count, marks=pytest.mark.long) for count in (2, 3)), 4])
def parted(request, tmp_path_factory):
    graph = homogeneous()
    with machines(graph, tmp_path_factory.mktemp("parts") / "p", request.param) as graphs:
        yield graph, graphs


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.long), 3])
def parted_types(request, tmp_path_factory):
    graph = typed()
    with machines(graph, tmp_path_factory.mktemp("parts") / "p", request.param) as graphs:
        yield graph, graphs


@pytest.mark.parametrize("kind", KINDS)
def test_every_machine_samples_what_one_process_samples(parted, kind: str) -> None:
    graph, graphs = parted
    fanouts, options = KINDS[kind]
    time = seed_time(SEEDS, options)
    expected = NeighborSampler(graph, fanouts, **options).sample(SEEDS, key=KEY, seed_time=time)
    for mine in graphs:
        sampler = NeighborSampler(mine, fanouts, **options)
        assert_same_sample(sampler.sample(to_global(mine, SEEDS), key=KEY, seed_time=time), expected, mine)


@pytest.mark.parametrize("kind", KINDS)
def test_typed_samples_are_those_of_one_process(parted_types, kind: str) -> None:
    graph, graphs = parted_types
    fanouts, options = KINDS[kind]
    seeds = {"paper": torch.tensor([5, 60, 2, 5]), "author": torch.tensor([39, 0])}
    tree = {"paper": torch.tensor([0, 1, 2, 3]), "author": torch.tensor([4, 5])}
    if not (options.get("disjoint") or options.get("time")):
        tree = None
    time = seed_time(seeds, options)
    expected = NeighborSampler(graph, fanouts, **options).sample(seeds, key=KEY, seed_time=time, tree=tree)
    for mine in graphs:
        ours = NeighborSampler(mine, fanouts, **options)
        assert_same_sample(ours.sample(to_global(mine, seeds), key=KEY, seed_time=time, tree=tree), expected, mine)


@every_value(
    layout={
        "several parts on a machine, not neighbours": (4, [0, 1, 0, 1], None),
        "a machine alone with all parts": (4, [0, 0, 0, 0], None),
        "a machine without parts": (3, [1, 1, 1], None),
        "empty parts": (4, [0, 1, 2, 3], [0, 2]),
    },
    kind=["uniform", "node times", "blocks"],
)
def test_parts_may_lie_anywhere_and_be_empty(tmp_path: Path, layout, kind: str) -> None:
    graph, (num_parts, owner, used) = homogeneous(), layout
    fanouts, options = KINDS[kind]
    expected = NeighborSampler(graph, fanouts, **options).sample(SEEDS, key=KEY)
    with machines(graph, tmp_path / "p", num_parts, machine_of_part=owner, used=used) as graphs:
        for mine in graphs:
            sampler = NeighborSampler(mine, fanouts, **options)
            assert_same_sample(sampler.sample(to_global(mine, SEEDS), key=KEY), expected, mine)


@pytest.mark.parametrize("halo_hops", [1, 2, 3])
def test_a_deeper_halo_changes_no_sample(tmp_path: Path, halo_hops: int) -> None:
    graph = homogeneous(60, 200)
    seeds = {NODE: torch.tensor([3, 50, 14])}
    with machines(graph, tmp_path / "p", 3, halo_hops=halo_hops) as graphs:
        for options in ({}, {"weight": "w"}, {"time": "t"}, {"time": "et"}):
            time = seed_time(seeds, options)
            expected = NeighborSampler(graph, [3, -1], **options).sample(seeds, key=KEY, seed_time=time)
            ours = NeighborSampler(graphs[1], [3, -1], **options)
            assert_same_sample(ours.sample(to_global(graphs[1], seeds), key=KEY, seed_time=time), expected, graphs[1])


def test_ids_beyond_32_bits_travel_as_64(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(relabel, "INT32_END", 50)  # as if no more than 50 numbers fitted
    graph = homogeneous()
    with machines(graph, tmp_path / "p", 3) as graphs:
        mine = graphs[0]
        assert mine.parts.part(0).original_ids().dtype == torch.int64
        for options in ({}, {"weight": "w"}, {"time": "t"}):
            expected = NeighborSampler(graph, [4, 3], **options).sample(SEEDS, key=KEY)
            ours = NeighborSampler(mine, [4, 3], **options)
            assert_same_sample(ours.sample(to_global(mine, SEEDS), key=KEY), expected, mine)
        assert mine.neighborhoods().id_dtypes == {NODE: torch.int64}


@pytest.mark.parametrize("kind", ["uniform", "weighted", "edge times", "node times", "blocks"])
def test_excluded_edges_are_the_same_ones(parted, kind: str) -> None:
    graph, graphs = parted
    fanouts, options = KINDS[kind]
    time = seed_time(SEEDS, options)
    edges = graph.edge_index()
    src, dst = edges[:, torch.isin(edges[1], SEEDS[NODE])][:, ::2]
    whole = NeighborSampler(graph, fanouts, **options)
    exclude = {EDGE: whole.find_edges(EDGE, src, dst)}
    assert exclude[EDGE].numel() > 10
    expected = whole.sample(SEEDS, key=KEY, seed_time=time, exclude=exclude)
    for mine in graphs:
        ours = NeighborSampler(mine, fanouts, **options)
        found = {EDGE: ours.find_edges(EDGE, mine.global_ids(src), mine.global_ids(dst))}
        assert found[EDGE].numel() == exclude[EDGE].numel() and bool((found[EDGE].diff() > 0).all())
        assert_same_sample(ours.sample(to_global(mine, SEEDS), key=KEY, seed_time=time, exclude=found), expected, mine)


def test_edges_that_do_not_exist_are_not_found(parted) -> None:
    _, graphs = parted
    lonely = torch.tensor([116, 117, 118])  # nodes without edges, which no part has in its halo
    for mine in graphs:
        ids = mine.global_ids(lonely)
        assert NeighborSampler(mine, [1]).find_edges(EDGE, ids, ids.flip(0)).numel() == 0
        with pytest.raises(ValueError, match=r"src must be in \[0, 120\)"):
            NeighborSampler(mine, [1]).find_edges(EDGE, torch.tensor([120]), torch.tensor([0]))


def test_no_seeds_and_seeds_of_no_edges_give_empty_samples(parted_types) -> None:
    graph, graphs = parted_types
    for seeds in ({"venue": torch.empty(0).long()}, {"paper": torch.empty(0).long()}, {}):
        expected = NeighborSampler(graph, [3, 2]).sample(seeds, key=KEY)
        for mine in graphs:
            assert_same_sample(NeighborSampler(mine, [3, 2]).sample(seeds, key=KEY), expected, mine)


def test_batches_sampled_by_several_threads_at_once_do_not_mix(parted) -> None:
    graph, graphs = parted
    keys = [SampleKey(1, 0, b) for b in range(12)]
    seeds = [torch.randint(0, 120, (9,), generator=torch.Generator().manual_seed(b)) for b in range(12)]
    whole = NeighborSampler(graph, [5, 4])
    ours = NeighborSampler(graphs[-1], [5, 4])
    with ThreadPoolExecutor(4) as pool:
        taken = list(pool.map(lambda k, s: ours.sample(to_global(graphs[-1], {NODE: s}), key=k), keys, seeds))
    for key, chosen, sample in zip(keys, seeds, taken, strict=True):
        assert_same_sample(sample, whole.sample({NODE: chosen}, key=key), graphs[-1])


def test_one_hop_sends_one_message_to_each_other_machine(parted_types) -> None:
    _, graphs = parted_types
    mine = graphs[0]
    seeds = to_global(mine, {"paper": torch.arange(90), "author": torch.arange(40)})
    sampler = NeighborSampler(mine, [3])
    before = mine.client.counters()["kinds"].get("SAMPLE", {"messages_out": 0})["messages_out"]
    sampler.sample(seeds, key=KEY)
    assert mine.client.counters()["kinds"]["SAMPLE"]["messages_out"] - before == len(graphs) - 1


def test_one_tensor_may_name_nodes_of_two_types(parted_types) -> None:
    graph, graphs = parted_types
    for mine in graphs:
        ids = torch.arange(21, 29, dtype=torch.int32)  # as stored: nothing copies it on its way
        found = sample_neighbors(mine, {"paper": ids, "author": ids}, -1)
        whole = sample_neighbors(graph, {t: mine.original_ids(ids, t) for t in ("paper", "author")}, -1)
        assert sum(edges.ids.numel() for edges in found.values()) > 50
        for t, expected in whole.items():
            assert torch.equal(found[t].indptr, expected.indptr), t
            assert torch.equal(mine.original_ids(found[t].ids, t[0]), expected.ids), t


@pytest.mark.parametrize("time", ["x", "w", "wide", "flag"])
def test_times_that_cannot_be_any_are_refused_as_in_memory_before_anybody_is_asked(tmp_path: Path, time: str) -> None:
    graph = homogeneous()
    graph.set_node_data("wide", torch.zeros(120, 2, dtype=torch.int64))
    graph.set_edge_data("flag", torch.zeros(900, dtype=torch.bool))
    with machines(graph, tmp_path / "p", 2) as graphs:
        with pytest.raises(ValueError, match="must hold integers") as expected:
            NeighborSampler(graph, [2], time=time)
        with pytest.raises(ValueError) as got:
            NeighborSampler(graphs[0], [2], time=time)
        assert str(got.value) == str(expected.value)
        assert "PREPARE" not in graphs[0].client.counters()["kinds"]


def test_lookups_agree_with_the_whole_graph(parted_types) -> None:
    graph, graphs = parted_types
    for mine in graphs:
        for edge_type in graph.edge_types:
            ids = torch.randperm(graph.num_edges(edge_type), generator=torch.Generator().manual_seed(0))
            original = mine.original_edge_ids(ids, edge_type)
            assert original.sort().values.tolist() == list(range(graph.num_edges(edge_type)))
            ends = [
                mine.original_ids(end, t) for end, t in zip(mine.edge_ends(ids, edge_type), edge_type[::2], strict=True)
            ]
            assert torch.equal(torch.stack(ends), graph.edge_index(edge_type)[:, original])
            nodes = torch.arange(graph.num_nodes(edge_type[2]))
            degrees = mine.in_degrees(mine.global_ids(nodes, edge_type[2]), edge_type)
            assert torch.equal(degrees, graph.csc(edge_type).in_degrees())
    with pytest.raises(ValueError, match=r"must be in \[0, 500\)"):
        graphs[0].edge_ends(torch.tensor([500]), CITES)
    with pytest.raises(ValueError, match="no CSC of the whole"):
        graphs[0].csc(WRITES)
    with pytest.raises(ValueError, match="does not exist"):
        graphs[0].num_edges(("paper", "cites", "author"))
    with pytest.raises(ValueError, match="no edge type has an array 'nothing'"):
        NeighborSampler(graphs[0], [2], weight="nothing")


def test_a_view_in_time_keeps_the_order_of_its_edges_once(parted) -> None:
    _, graphs = parted
    views = graphs[0].neighborhoods(time="et")._views
    view = views.view(ViewSpec(time="et").key, 0)
    source, order = view._sources[EDGE], view._order[EDGE]
    assert order is not None and order.dtype == torch.int32 and order.numel() == source.csc.num_edges
    assert source.csc.edge_ids is None


def test_a_view_that_other_machines_are_still_preparing_holds_up_nobody_who_needs_another(tmp_path):
    with machines(homogeneous(), tmp_path / "parts", 2) as graphs:
        graph = graphs[0]
        prepare, asked, may_go_on = graph._prepare, queue.Queue(), threading.Event()

        def slow(spec):
            asked.put(spec)
            assert may_go_on.wait(SECONDS)
            prepare(spec)

        graph._prepare = slow
        with ThreadPoolExecutor(3) as pool:
            try:
                weighted = [pool.submit(graph.neighborhoods, weight="w") for _ in range(2)]
                timed = pool.submit(graph.neighborhoods, time="t")
                specs = {asked.get(timeout=SECONDS) for _ in range(2)}  # both wait for the other machine
                assert {(spec.weight, spec.time) for spec in specs} == {("w", None), (None, "t")}
                uniform = graph.neighborhoods()
                graph.begin_scores(NodeScores(0, torch.arange(4), torch.ones(4, dtype=torch.uint8)))
                graph.use_device(torch.device("cpu"), None, {})
                assert not any(each.done() for each in (*weighted, timed))
            finally:
                may_go_on.set()
            found = [each.result(SECONDS) for each in (*weighted, timed)]
        assert asked.empty(), "one thread prepares what two ask for"
        assert found[0] is found[1] is graph.neighborhoods(weight="w")
        assert len({id(each) for each in (*found, uniform)}) == 3


def test_a_view_that_could_not_be_prepared_is_prepared_by_who_asks_next(tmp_path):
    with machines(homogeneous(), tmp_path / "parts", 2) as graphs:
        prepare, failures = graphs[0]._prepare, iter([ConnectionError("gone")])

        def failing(spec):
            for error in failures:
                raise error
            prepare(spec)

        graphs[0]._prepare = failing
        with pytest.raises(ConnectionError, match="gone"):
            graphs[0].neighborhoods(weight="w")
        assert graphs[0].neighborhoods(weight="w") is graphs[0].neighborhoods(weight="w")
