"""GraphService: a hop's messages there and back, and everything that it must refuse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gnnsys.comm import Kind, Reply, Request
from gnnsys.graph import EDGE, NODE
from gnnsys.ops import PartNeighbors
from gnnsys.partition import open_parts, write_parts
from gnnsys.sampling import DistGraph, GraphService, NeighborSampler, SampleKey
from gnnsys.sampling.hop_message import Draw, HopAnswer, PartsRequest, Slot, answers_from_arrays, answers_to_arrays
from gnnsys.store import Shard, Store
from tests.sampling.machines import assert_same_sample, assign, homogeneous, machines, to_global

SLOT = Slot([2, 1], torch.tensor([0, 3, 1]).int(), torch.tensor([5, 6, 7]), None)
REQUEST = PartsRequest(0, [0, 1], [SLOT], [Draw(0, 0, 2, 99, [torch.tensor([4, 8]), None])], replace=True, requester=1)


@pytest.fixture(scope="module")
def service(tmp_path_factory) -> GraphService:
    folder = tmp_path_factory.mktemp("parts") / "p"
    graph = homogeneous()
    write_parts(graph, assign(graph, 3), folder)
    return GraphService(open_parts(folder), [0, 1])


def ask(service: GraphService, kind: Kind, arrays, options=None) -> list[Reply]:
    answer = service.handlers()[kind](Request.local(kind, arrays, options))
    return [answer] if isinstance(answer, Reply) else list(answer)  # type: ignore[arg-type]


def test_a_hops_request_is_read_as_it_was_written() -> None:
    read = PartsRequest.from_arrays(REQUEST.to_arrays())
    assert replace(read, slots=[], draws=[]) == replace(REQUEST, slots=[], draws=[])
    assert read.slots[0].counts == SLOT.counts and torch.equal(read.slots[0].tree, SLOT.tree)
    assert torch.equal(read.slots[0].seeds, SLOT.seeds) and read.slots[0].seed_time is None
    (draw,) = read.draws
    assert (draw.edge_type, draw.slot, draw.fanout, draw.key) == (0, 0, 2, 99)
    assert draw.exclude[0].tolist() == [4, 8] and draw.exclude[1] is None


def test_answers_are_read_as_they_were_written() -> None:
    piece = PartNeighbors(torch.tensor([1, 0]).int(), torch.tensor([7]).int(), torch.tensor([3]))
    (read,) = answers_from_arrays(answers_to_arrays([HopAnswer(1, 2, 3, 2, piece)]))
    assert read[:4] == (1, 2, 3, 2) and all(torch.equal(a, b) for a, b in zip(read.piece[:3], piece[:3], strict=True))


def test_no_head_of_a_request_makes_the_service_do_anything_but_answer_or_refuse(service: GraphService) -> None:
    """Every number of the head replaced by others, every array left away, cut or of another dtype."""
    arrays = REQUEST.to_arrays()
    refused = 0
    for place in range(arrays[0].numel()):
        for value in (-1, 3, 7, 2**40, -(2**63)):
            head = arrays[0].clone()
            head[place] = value
            try:
                ask(service, Kind.SAMPLE, [head, *arrays[1:]])
            except ValueError:
                refused += 1
    assert refused > 40
    broken = [arrays[:k] + arrays[k + 1 :] for k in range(len(arrays))]
    broken += [[*arrays[:k], arrays[k][:-1], *arrays[k + 1 :]] for k in range(len(arrays))]
    broken += [[*arrays[:k], arrays[k].float(), *arrays[k + 1 :]] for k in range(len(arrays))]
    broken += [[*arrays[:k], arrays[k].view(1, -1), *arrays[k + 1 :]] for k in range(len(arrays))]
    broken += [[*arrays, arrays[0]], []]
    for wrong in broken:
        with pytest.raises(ValueError):
            ask(service, Kind.SAMPLE, wrong)
    ask(service, Kind.SAMPLE, arrays)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (replace(REQUEST, parts=[0, 2]), r"part 2 is not here, only \[0, 1\]"),
        (replace(REQUEST, view=5), "view 5 was not prepared"),
        (replace(REQUEST, draws=[replace(REQUEST.draws[0], edge_type=1)]), r"edge type must be in \[0, 1\)"),
        (replace(REQUEST, slots=[replace(SLOT, seeds=SLOT.seeds + 100)]), "must be in"),
        (replace(REQUEST, score_version=-1), "must name a version of scores"),
    ],
)
def test_what_is_not_here_is_refused(service: GraphService, request_: PartsRequest, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask(service, Kind.SAMPLE, request_.to_arrays())


def test_edges_and_their_ends_are_refused_where_they_are_nobodys(service: GraphService) -> None:
    one = torch.tensor([0])
    for arrays in (
        [torch.tensor([0, 0, 2, 1]), one, one],  # a part of another machine
        [torch.tensor([0, 0, 0, 2]), one, one],  # fewer pairs than announced
        [torch.tensor([0, 0, 0, -1]), one, one],
        [torch.tensor([0, 0, 0]), one, one],
        [torch.tensor([0, 0, 0, 1]), one, one + 500],
        [one],
    ):
        with pytest.raises(ValueError):
            ask(service, Kind.FIND_EDGES, arrays)
    for arrays in (
        [torch.tensor([1, 0, 2, 1]), one],
        [torch.tensor([1, 0, 0, 1]), one + 10_000],
        [torch.tensor([3, 0, 0, 1]), one - 1],
        [torch.tensor([9, 0, 0, 1]), one],
    ):
        with pytest.raises(ValueError):
            ask(service, Kind.EDGE_ENDS, arrays)


def test_a_view_is_made_once_its_halo_times_are_there(service: GraphService) -> None:
    options = {"weight": None, "time": "t"}
    (reply,) = ask(service, Kind.PREPARE, [], options)
    assert reply.options["ready"] is False and reply.options["wanted"] == [[0, NODE], [1, NODE]]
    for wrong in ([reply.arrays[0]], [ids[1:].long() for ids in reply.arrays], [ids.float() for ids in reply.arrays]):
        with pytest.raises(ValueError):
            ask(service, Kind.PREPARE, wrong, options)
    (made,) = ask(service, Kind.PREPARE, [ids.long() for ids in reply.arrays], options)
    (again,) = ask(service, Kind.PREPARE, [], options)
    assert made.options == again.options == {"ready": True}
    for options in ({"time": 3}, {"weight": "nothing"}):
        with pytest.raises(ValueError):
            ask(service, Kind.PREPARE, [], options)


def test_a_large_answer_comes_in_chunks_that_make_the_same_sample(tmp_path: Path) -> None:
    graph = homogeneous(3000, 300_000)
    seeds = {NODE: torch.arange(3000)}
    expected = NeighborSampler(graph, [-1]).sample(seeds, key=SampleKey())
    with machines(graph, tmp_path / "p", 2) as graphs:
        ours = NeighborSampler(graphs[0], [-1]).sample(to_global(graphs[0], seeds), key=SampleKey())
        assert graphs[0].client.counters()["kinds"]["SAMPLE"]["messages_in"] > 1
        assert_same_sample(ours, expected, graphs[0])


def test_a_process_alone_needs_no_network(tmp_path: Path) -> None:
    graph, owner = homogeneous(), [0, 0, 0]
    write_parts(graph, assign(graph, 3), tmp_path / "p")
    parts, shard = open_parts(tmp_path / "p"), Shard(0)
    alone = DistGraph(parts, Store(machine_of_part=owner, local=shard), None, 0, owner)
    seeds = {NODE: torch.tensor([5, 80])}
    for options in ({}, {"time": "t"}, {"weight": "w"}):
        expected = NeighborSampler(graph, [4, 3], **options).sample(seeds, key=SampleKey(1))
        ours = NeighborSampler(alone, [4, 3], **options).sample(to_global(alone, seeds), key=SampleKey(1))
        assert_same_sample(ours, expected, alone)
    assert not alone.is_remote and alone.parts_here == [0, 1, 2] and alone.is_homogeneous
    assert alone.num_edges(EDGE) == 900 and repr(alone).startswith("DistGraph(nodes {node: 120}")
    with pytest.raises(ValueError, match="need a client"):
        DistGraph(parts, Store(machine_of_part=[0, 1, 1], local=shard), None, 0, [0, 1, 1])
    with pytest.raises(ValueError, match="expected 120 rows, one per node"):
        alone.set_node_data("short", torch.zeros(7))
    alone.set_node_data("mine", torch.zeros(120, 2), order="global")
    assert alone.node_data[NODE]["mine"].shape == (120, 2)
    shard.close()
