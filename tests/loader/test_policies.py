"""Which candidate serves a batch's rows, with which priority and path: said by a loader, or where a graph is opened."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import gnnsys
from gnnsys.comm import Kind, Request
from gnnsys.comm.urgency import user_of
from gnnsys.graph import Graph
from gnnsys.loader import LinkNeighborLoader, NeighborLoader, PipelineOptions
from gnnsys.partition import write_parts
from gnnsys.sampling import DistGraph
from gnnsys.session.graph_server import GraphServer
from gnnsys.store import Candidate
from tests.sampling.machines import assign, homogeneous

OPTIONS: dict[str, Any] = {"batch_size": 16, "seed": 3}
NUM_SERVERS = 2


def shard_first(candidates: Sequence[Candidate]) -> Candidate:
    return next(candidate for candidate in candidates if candidate.kind == "shard")


def last(candidates: Sequence[Candidate]) -> Candidate:
    return candidates[-1]


@pytest.fixture(scope="module")
def graph() -> Graph:
    return homogeneous()


@pytest.fixture(scope="module")
def folder(graph: Graph, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policies") / "parts"
    write_parts(graph, assign(graph, 2), path)
    return path


@pytest.fixture
def session() -> Iterator[gnnsys.Session]:
    with gnnsys.init(process_group=False) as session:
        yield session


def batches(graph: DistGraph, pipeline: PipelineOptions | None = None) -> tuple[list[Any], dict[str, int]]:
    loader = NeighborLoader(graph, [4, 3], pipeline=pipeline, **OPTIONS)
    out = list(loader)
    loader.close()
    return out, loader.counters()["fetch"].counts


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs) > 1
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.n_id, b.n_id) and torch.equal(a.x, b.x) and torch.equal(a.w, b.w)


def test_a_loader_says_who_serves_its_rows(folder: Path, session: gnnsys.Session) -> None:
    opened = session.open(folder)
    expected, counts = batches(opened)
    assert counts["bytes_remote"] == counts["rows_asked"] == 0 < counts["bytes_local"]
    served, counts = batches(opened, PipelineOptions(policy=shard_first))
    assert_same(served, expected)
    assert counts["bytes_local"] == 0 < counts["bytes_remote"] and counts["rows_asked"] > 0
    links = LinkNeighborLoader(opened, [3], pipeline=PipelineOptions(policy=shard_first, share=False), batch_size=99)
    list(links)
    assert links.counters()["fetch"].counts["bytes_local"] == 0


def test_a_graph_is_opened_with_a_policy(folder: Path, session: gnnsys.Session) -> None:
    opened = session.open(folder, policy=shard_first)
    served, counts = batches(opened)
    assert counts["bytes_local"] == 0 < counts["bytes_remote"]
    own, counts = batches(opened, PipelineOptions(policy=lambda candidates: candidates[0]))
    assert counts["bytes_remote"] == 0 < counts["bytes_local"]
    assert_same(served, own)
    assert session.open(folder) is session.open(folder, policy=shard_first) is opened
    with pytest.raises(ValueError, match="open with another policy: give it to loaders"):
        session.open(folder, policy=last)


@pytest.mark.usefixtures("one_epoch")
def test_replicas_serve_and_messages_have_priority_path_and_batch(
    graph: Graph, folder: Path, session: gnnsys.Session
) -> None:
    pulls: list[tuple[int, Request]] = []
    with ExitStack() as stack:
        endpoints = []
        for number in range(NUM_SERVERS):  # both have all parts
            server = GraphServer(number, alone=True)
            stack.callback(server.close)
            server.open(str(folder), [0, 1])
            serve = server._services[Kind.PULL]

            def pull(request: Request, number: int = number, serve: Any = serve) -> Any:
                pulls.append((number, request))
                return serve(request)

            server._services[Kind.PULL] = pull
            endpoints += server.start()
        opened = gnnsys.open(folder, servers=endpoints, policy=last, priority=2, path_id=5)
        pulls.clear()
        served, _ = batches(opened)
        headers = [request.header for number, request in pulls if number == 1]
        assert len(headers) == len(pulls)  # nobody asked the first server for rows
        assert {(user_of(h.priority), h.path) for h in headers} == {(2, 5)}
        assert {h.batch for h in headers} >= set(range(len(served)))
        own, _ = batches(opened, PipelineOptions(policy=lambda candidates: candidates[0], priority=-1, path=9))
        told = [(number, user_of(r.header.priority), r.header.batch) for number, r in pulls if r.header.path == 9]
        assert {(number, priority) for number, priority, _ in told} == {(0, -1)}
        assert {batch for _, _, batch in told} >= set(range(len(own)))
        assert_same(own, served)
        batches(opened, PipelineOptions(priority=0, path=0))
        newest = max(r.header.loader for _, r in pulls)  # what earlier loaders had asked ahead may arrive only now
        told = [(user_of(r.header.priority), r.header.path) for _, r in pulls if r.header.loader == newest]
        assert set(told) == {(0, 0)}, "0 is said, not left out"
        original = opened.original_ids(served[0].n_id)
        assert torch.equal(served[0].x, graph.node_data["node"]["x"][original])


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"policy": 3}, "policy must be a function of a part's candidates that returns one of them, got 3"),
        ({"priority": 1.5}, "priority must be a whole number from"),
        ({"path": -2}, "path must be a whole number from 0 to 4294967295, got -2"),
    ],
)
def test_what_cannot_be_a_policy_priority_or_path_is_refused(argument: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PipelineOptions(**argument)
