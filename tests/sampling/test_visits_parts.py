"""Expected visits of a graph in parts: those of the whole graph, to the same bits wherever its parts are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gnnsys.comm import Kind, Reply, Request
from gnnsys.graph import EDGE, NODE, Graph
from gnnsys.ops import rmat_edges
from gnnsys.partition import open_parts, write_parts
from gnnsys.sampling import (
    DistGraph,
    GraphService,
    NeighborSampler,
    batch_visits,
    expected_visits,
    part_visits,
    presampled_visits,
    sample_batches,
)
from gnnsys.store import Shard, Store
from tests.sampling.machines import AT, CITES, REV_WRITES, WRITES, assign, homogeneous, machines, typed
from tests.support.processes import run_ranks

NUM_NODES = 3000
SEEDS = torch.arange(0, NUM_NODES, 7)


def rmat(num_edges: int = 30_000) -> Graph:
    """Hubs, and nodes without an edge."""
    edges = rmat_edges(torch.arange(NUM_NODES, dtype=torch.int32), num_edges, 0.57, 0.19, 0.19, key=3)
    return Graph.from_edge_index(edges, NUM_NODES, {"x": torch.zeros(NUM_NODES, 1)})


@contextmanager
def alone(folder: Path, num_parts: int) -> Iterator[DistGraph]:
    """The parts of a folder in one process, without a network."""
    owner, shard = [0] * num_parts, Shard(0)
    try:
        yield DistGraph(open_parts(folder), Store(machine_of_part=owner, local=shard), None, 0, owner)
    finally:
        shard.close()


def visits(graph: DistGraph, fanouts: list[int], **options: Any) -> Tensor:
    return expected_visits(graph, fanouts, graph.global_ids(SEEDS), batch_size=40, **options)


def by_original_id(graph: DistGraph, values: Tensor, node_type: str = NODE) -> Tensor:
    return values[graph.global_ids(torch.arange(values.numel()), node_type)]


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize(
    ("fanouts", "num_parts", "owner", "used", "halo_hops"),
    [
        ([5, 3], 2, [0, 1], None, 1),
        ([4, -1, 2], 3, [0, 1, 1], None, 2),
        ([3, 0, 2], 4, [1, 0, 2, 0], [0, 3], 1),  # two parts have no nodes
        ([-1, -1], 1, [0], None, 1),
    ],
)
def test_parts_anywhere_give_the_visits_of_the_whole_graph(
    tmp_path, replace, fanouts, num_parts, owner, used, halo_hops
):
    graph = rmat()
    expected = expected_visits(graph.csc(), fanouts, SEEDS, batch_size=40, replace=replace)
    options = {"machine_of_part": owner, "used": used, "halo_hops": halo_hops}
    with machines(graph, tmp_path / "p", num_parts, **options) as graphs, alone(tmp_path / "p", num_parts) as here:
        ours = visits(here, fanouts, replace=replace)
        assert ours.dtype == torch.float64 and ours.shape == (NUM_NODES,)
        torch.testing.assert_close(by_original_id(here, ours), expected, rtol=1e-12, atol=0)
        for there in graphs:
            assert torch.equal(visits(there, fanouts, replace=replace), ours)
        asked = [g for g in graphs if g.is_remote]
        assert all(g.client.counters()["kinds"]["VISITS"]["messages_in"] > 0 for g in asked)


def test_neither_pieces_of_work_nor_chunks_of_a_reply_change_a_bit(tmp_path, monkeypatch):
    with machines(rmat(), tmp_path / "p", 2) as graphs:
        expected = visits(graphs[0], [5, 3])
        whole = graphs[0].client.counters()["kinds"]["VISITS"]["messages_in"]
        monkeypatch.setattr(part_visits, "HOST_PIECE", 777)  # hubs have more edges
        monkeypatch.setattr(part_visits, "_CHUNK", 100)
        assert torch.equal(visits(graphs[0], [5, 3]), expected)
        assert graphs[0].client.counters()["kinds"]["VISITS"]["messages_in"] > whole + 20


def test_a_part_is_asked_once_for_its_halo_and_never_while_nothing_is_found_there(tmp_path):
    num_nodes = 60
    ring = torch.stack([torch.arange(num_nodes), (torch.arange(num_nodes) + 1) % num_nodes])
    seen: list[Request] = []
    with machines(
        Graph.from_edge_index(ring, num_nodes, {"x": torch.zeros(num_nodes)}), tmp_path / "p", 2, seen=seen
    ) as graphs:
        there = graphs[0]
        of_part = (there.book.part_of(torch.arange(num_nodes)) == 1).nonzero().view(-1)
        seen.clear()
        expected_visits(there, [1, 1, 1], of_part, batch_size=1)
        heads = [request.arrays[0].tolist() for request in seen if request.kind == Kind.VISITS]
        assert heads == [[0, 1, 1, 0, 1], [0, 1, 1, 0, 0], [0, 1, 1, 0, 0]]
        seen.clear()
        assert expected_visits(there, [0, 4], torch.tensor([0]), batch_size=1).nonzero().tolist() == [[0]]
        assert not seen


RANKS = """
import sys, torch, gnnsys
from gnnsys.sampling import expected_visits
session = gnnsys.init(timeout=60)
graph = gnnsys.open(sys.argv[1])
assert graph.is_remote
seeds = graph.global_ids(torch.load(sys.argv[2], weights_only=True))
torch.save(expected_visits(graph, [5, 3], seeds, batch_size=40), f"{sys.argv[3]}/{session.rank}.pt")
session.close()
"""


def test_ranks_of_two_machines_compute_what_one_process_does(tmp_path):
    graph = rmat()
    write_parts(graph, assign(graph, 2), tmp_path / "p")
    torch.save(SEEDS, tmp_path / "seeds.pt")
    run_ranks(RANKS, [1, 1], tmp_path / "p", tmp_path / "seeds.pt", tmp_path)
    with alone(tmp_path / "p", 2) as here:
        expected = visits(here, [5, 3])
    for rank in range(2):
        assert torch.equal(torch.load(tmp_path / f"{rank}.pt", weights_only=True), expected)


# -- messages --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def service(tmp_path_factory) -> GraphService:
    folder = tmp_path_factory.mktemp("parts") / "p"
    graph = homogeneous()
    write_parts(graph, assign(graph, 3), folder)
    return GraphService(open_parts(folder), [0, 1])


def ask(service: GraphService, arrays: list[Tensor]) -> list[Reply]:
    return list(service.visits(Request.local(Kind.VISITS, arrays)))


def test_a_server_gives_others_their_turn_between_pieces_and_cuts_its_reply(service, monkeypatch):
    part = service.views.parts.part(1)
    head, found = torch.tensor([0, 1, 3, 0, 1]), torch.full((part.num_core(),), 0.5, dtype=torch.float64)
    *working, answer = ask(service, [head, found])
    assert len(working) == 2 and not any(reply.arrays for reply in working)
    monkeypatch.setattr(part_visits, "HOST_PIECE", 20)
    monkeypatch.setattr(part_visits, "_CHUNK", 13)
    replies = ask(service, [head, found])
    working = [reply for reply in replies if not reply.arrays]
    assert len(working) == -(-part.num_core() // 20) - (-len(part.book.part_range(1, EDGE)) // 20)
    chunks = [reply for reply in replies if reply.arrays]
    assert replies == working + chunks and all(chunk.arrays[1].numel() <= 13 for chunk in chunks)
    assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    for place in (1, 2):
        assert torch.equal(torch.cat([chunk.arrays[place] for chunk in chunks]), answer.arrays[place])
    assert torch.equal(answer.arrays[2], part.halo())


def test_messages_that_do_not_add_up_are_refused(service):
    num_core = service.views.parts.part(0).num_core()
    head, found = torch.tensor([0, 0, 3, 0, 1]), torch.rand(num_core, dtype=torch.float64)
    ask(service, [head, found])
    wrong: list[list[Tensor]] = [
        [],
        [head],
        [found, head],
        [head, found, found],
        [head[:4], found],
        [head.int(), found],
    ]
    wrong += [[head.view(1, 5), found], [head, found.float()], [head, found.view(-1, 1)], [head, found[1:]]]
    for place, values in enumerate(((-1, 1), (-1, 2, 3), (-2, 1 << 28), (-1, 2), (-1, 2))):
        for value in (*values, 1 << 40, -(1 << 63)):
            changed = head.clone()
            changed[place] = value
            wrong.append([changed, found])
    for value in (-1e-300, 1.0 + 1e-15, float("nan"), float("inf"), -float("inf")):
        changed = found.clone()
        changed[num_core // 2] = value
        wrong.append([head, changed])
    for arrays in wrong:
        with pytest.raises(ValueError):
            ask(service, arrays)


def test_a_message_is_refused_before_anything_is_allocated_for_it(service, monkeypatch):
    monkeypatch.setattr(torch, "zeros", None)
    monkeypatch.setattr(torch, "empty", None)
    with pytest.raises(ValueError, match="probabilities came"):
        service.visits(Request.local(Kind.VISITS, [torch.tensor([0, 0, 3, 0, 1]), torch.ones(7, dtype=torch.float64)]))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda arrays: [arrays[0] + torch.tensor([0, 1]), *arrays[1:]],
        lambda arrays: [arrays[0], arrays[1][1:], arrays[2]],
        lambda arrays: [arrays[0] + torch.tensor([1, 0]), *arrays[1:]],
        lambda arrays: [arrays[0], arrays[1], arrays[2][1:]],
        lambda arrays: [arrays[0], arrays[1], arrays[2] + 120],
        lambda arrays: arrays[:2],
        lambda arrays: [arrays[0][:1], *arrays[1:]],
        lambda arrays: [],
    ],
)
def test_answers_that_do_not_add_up_are_refused(tmp_path, monkeypatch, spoil):
    replies = part_visits.SourceSums.replies

    def spoilt(self: Any) -> Iterator[Reply]:
        for reply in replies(self):
            yield Reply(spoil(reply.arrays) if reply.arrays else [], last=reply.last)

    with machines(homogeneous(), tmp_path / "p", 2) as graphs:
        monkeypatch.setattr(part_visits.SourceSums, "replies", spoilt)
        with pytest.raises(ValueError, match="part 1 "):
            expected_visits(graphs[0], [2], torch.arange(120), batch_size=10)


def test_bad_arguments_are_refused_by_name(tmp_path):
    write_parts(homogeneous(), assign(homogeneous(), 2), tmp_path / "one")
    write_parts(typed(), assign(typed(), 2), tmp_path / "typed")
    with alone(tmp_path / "one", 2) as here, alone(tmp_path / "typed", 2) as of_types:
        for words, seeds, fanouts in (
            ("seeds must be in", torch.tensor([120]), [2]),
            ("seeds must be ids", torch.tensor([0.5]), [2]),
            ("num_neighbors must be -1", torch.tensor([0]), [-2]),
            ("num_neighbors must have at least one hop", torch.tensor([0]), []),
        ):
            with pytest.raises(ValueError, match=words):
                expected_visits(here, fanouts, seeds, batch_size=1)
        with pytest.raises(ValueError, match="one node type and one edge type, got 3 and 4: use batch_visits"):
            expected_visits(of_types, [2], torch.tensor([0]), batch_size=1)
        with pytest.raises(ValueError, match="node_type must name the type of the seeds"):
            batch_visits(of_types, [2], torch.tensor([0]), batch_size=1)
        for seeds, options in ((torch.tensor([0]), {"num_batches": 0}), (torch.empty(0).long(), {})):
            with pytest.raises(ValueError, match="there must be seeds, and a batch to count"):
                batch_visits(of_types, [2], seeds, batch_size=1, node_type="paper", **options)
        with pytest.raises(ValueError, match="weight and time cannot be combined"):
            batch_visits(here, [2], torch.tensor([0]), batch_size=1, weight="w", time="t")


# -- whatever the loader -----------------------------------------------------------------------------------------------


def test_plain_loaders_have_expected_visits(tmp_path):
    graph = rmat()
    expected = {
        replace: expected_visits(graph.csc(), [5, 3], SEEDS, batch_size=40, replace=replace)
        for replace in (False, True)
    }
    with machines(graph, tmp_path / "p", 2) as graphs:
        for replace, values in expected.items():
            for fanouts in ([5, 3], {EDGE: [5, 3]}):
                ours = batch_visits(graph, fanouts, SEEDS, batch_size=40, replace=replace)
                assert list(ours) == [NODE] and torch.equal(ours[NODE], values)
            seeds = graphs[0].global_ids(SEEDS)
            ours = batch_visits(graphs[0], [5, 3], seeds, batch_size=40, replace=replace)
            assert torch.equal(ours[NODE], visits(graphs[0], [5, 3], replace=replace))


@pytest.mark.parametrize(
    ("make", "fanouts", "node_type", "options"),
    [
        (homogeneous, [3, 2], NODE, {"weight": "w"}),
        (homogeneous, [3, 2], NODE, {"time": "t"}),
        (homogeneous, [3, 2], NODE, {"time": "et", "temporal_strategy": "last"}),
        (homogeneous, [3, 2], NODE, {"disjoint": True}),
        (homogeneous, [3, 2], NODE, {"expand": "frontier"}),
        (typed, [3, 2], "paper", {}),
        (typed, {CITES: [3, 2], WRITES: [2, 0], REV_WRITES: [1, 1], AT: [0, 0]}, "author", {"replace": True}),
    ],
)
@pytest.mark.parametrize("num_batches", [2, 32])
def test_other_loaders_are_counted_alike_in_memory_and_in_parts(
    tmp_path, make, fanouts, node_type, options, num_batches
):
    graph = make()
    seeds = torch.arange(3, graph.num_nodes(node_type), 2)
    time = torch.full_like(seeds, 20) if "time" in options else None
    given = {"batch_size": 7, "node_type": node_type, "num_batches": num_batches, "seed_time": time, **options}
    ours = batch_visits(graph, fanouts, seeds, **given)
    assert list(ours) == graph.node_types
    count = min(num_batches, -(-seeds.numel() // 7))
    for t in graph.node_types:
        samples = sample_batches(
            NeighborSampler(graph, fanouts, **options), seeds, 7, node_type=node_type, seed_time=time
        )
        counted = presampled_visits(samples, count, num_nodes=graph.num_nodes(t), node_type=t)
        assert torch.equal(ours[t], counted)
    assert sum(float(shares.sum()) for shares in ours.values()) > 10  # more than the seeds
    with machines(graph, tmp_path / "p", 2) as graphs:
        parted = batch_visits(graphs[0], fanouts, graphs[0].global_ids(seeds, node_type), **given)
        for t in graph.node_types:
            assert torch.equal(by_original_id(graphs[0], parted[t], t), ours[t])


def test_visits_on_parts_do_not_depend_on_the_default_device(tmp_path):
    seeds = torch.arange(40)
    with machines(homogeneous(), tmp_path / "p", 2) as graphs:
        expected = [batch_visits(graphs[0], [3, 2], seeds, batch_size=8, weight=w)[NODE] for w in (None, "w")]
        torch.set_default_device("meta")
        try:
            found = [batch_visits(graphs[0], [3, 2], seeds, batch_size=8, weight=w)[NODE] for w in (None, "w")]
        finally:
            torch.set_default_device(None)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
