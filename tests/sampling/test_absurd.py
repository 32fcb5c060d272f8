"""Requests about structure that would fill memory or take for ever: cut into pieces, or refused."""

from __future__ import annotations

import pytest
import torch

from gnnsys.comm import Kind, Request
from gnnsys.graph import Graph
from gnnsys.partition import open_parts, write_parts
from gnnsys.sampling import GraphService, part_view, prepared_views
from gnnsys.sampling.hop_message import Draw, PartsRequest, Slot, answers_from_arrays
from tests.sampling.machines import assign

HUB = 3


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """A node with a thousand in-edges, and others with one."""
    edges = torch.stack([torch.arange(1000) % 50, torch.full((1000,), HUB)])
    edges = torch.cat([edges, torch.stack([torch.arange(50), (torch.arange(50) + 1) % 50])], 1)
    graph = Graph.from_edge_index(edges, 50, {"x": torch.zeros(50)}, {"w": torch.rand(1050)})
    folder = tmp_path_factory.mktemp("absurd") / "parts"
    write_parts(graph, assign(graph, 1), folder)
    return GraphService(open_parts(folder), [0])


def sample(service, seeds, fanout, *, replace=False, view=0):
    slot = Slot([seeds.numel()], seeds.int(), None, None)
    request = PartsRequest(view, [0], [slot], [Draw(0, 0, fanout, 5, [None])], replace=replace)
    replies = list(service.sample(Request.local(Kind.SAMPLE, request.to_arrays())))
    return [answer for reply in replies for answer in answers_from_arrays(reply.arrays)]


@pytest.mark.parametrize(("fanout", "replace"), [(-1, False), (900, False), (2000, True)])
def test_a_hub_that_is_asked_for_again_and_again_is_answered_in_pieces(service, monkeypatch, fanout, replace):
    seeds = torch.full((200,), HUB)
    whole = sample(service, seeds, fanout, replace=replace)
    monkeypatch.setattr(prepared_views, "_EDGES_PER_PIECE", 5000)
    pieces = sample(service, seeds, fanout, replace=replace)
    assert len(whole) == 1 and len(pieces) >= 40
    assert [piece.first for piece in pieces] == [0, *torch.tensor([p.size for p in pieces]).cumsum(0)[:-1].tolist()]
    for mine, other in zip(
        *([torch.cat(rows) for rows in zip(*(a.piece[:3] for a in each), strict=True)] for each in (pieces, whole)),
        strict=True,
    ):
        assert torch.equal(mine, other)


@pytest.mark.parametrize(
    ("seeds", "fanout", "replace", "words"),
    [
        ([0], 2**40, False, "fanout"),
        ([0], 2**40, True, "fanout with replacement must be at most"),
        ([0], 2**27, True, "fanout with replacement must be at most"),
        ([0], -2, False, "fanout"),
        ([50], 3, False, r"\[0, 50\)"),
        ([-1], 3, False, r"\[0, 50\)"),
        ([50], -1, False, r"\[0, 50\)"),
        ([-1], 1000, False, r"\[0, 50\)"),
    ],
)
def test_fanouts_and_seeds_that_cannot_be_are_refused(service, seeds, fanout, replace, words):
    with pytest.raises(ValueError, match=words):
        sample(service, torch.tensor(seeds), fanout, replace=replace)


def test_pairs_with_more_edges_than_may_be_looked_at_are_refused(service, monkeypatch):
    src, dst = torch.zeros(10, dtype=torch.int64), torch.full((10,), HUB)
    find = lambda: service.find_edges(Request.local(Kind.FIND_EDGES, [torch.tensor([0, 0, 0, 10]), src, dst]))  # noqa: E731
    assert find().arrays[1].numel() == 20
    monkeypatch.setattr(part_view, "_MAX_LOOKED_AT", 9000)
    with pytest.raises(ValueError, match="10010 edges to look at, at most 9000"):
        find()
    dst += 2**32  # which is the same in 32 bits
    with pytest.raises(ValueError, match=r"destinations of part 0 must be in \[0, 50\)"):
        find()


def test_heads_with_more_numbers_than_anybody_writes_are_refused(service):
    head = torch.zeros(1 << 19, dtype=torch.int64)
    for ask, arrays in ((service.sample, [head]), (service.edge_ends, [head, head])):
        with pytest.raises(ValueError, match="524288 numbers"):
            ask(Request.local(Kind.SAMPLE, arrays))
