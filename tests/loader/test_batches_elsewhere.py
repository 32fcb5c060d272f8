"""Batches that another process makes are the trainer's own to the last bit, and it needs nobody to make them."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gnnsys
from gnnsys.comm import Client, Keys, Kind, Message, Reply, Request, Server
from gnnsys.graph import Graph
from gnnsys.loader import (
    Batch,
    BatchService,
    NeighborLoader,
    SamplerPeers,
    graph_identity,
)
from gnnsys.loader import batches_elsewhere as elsewhere
from gnnsys.partition import write_parts
from gnnsys.pipeline import Stage
from gnnsys.sampling import DistGraph
from gnnsys.session import GraphServer
from gnnsys.session.open_parts import open_alone
from gnnsys.session.sampler_server import GraphOpening, SamplerServer
from tests.partition.part_graphs import heterogeneous, homogeneous, random_assignment


def timed(graph: Graph) -> Graph:
    for node_type in graph.node_types:
        count = graph.num_nodes(node_type)
        graph.node_data[node_type]["t"] = torch.arange(count) % 50
        graph.node_data[node_type]["picked"] = torch.arange(count) % 3 == 0
    for edge_type in graph.edge_types:
        graph.edge_data[edge_type]["kept"] = torch.arange(graph.num_edges(edge_type)) % 4 != 0
    return graph


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    graph, path = timed(homogeneous(150, 1200)), tmp_path_factory.mktemp("plain") / "parts"
    write_parts(graph, random_assignment(graph, 3, 1), path)
    return path


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    graph, path = timed(heterogeneous(3, 60, 40, 300)), tmp_path_factory.mktemp("typed") / "parts"
    write_parts(graph, random_assignment(graph, 2, 1), path)
    return path


@contextlib.contextmanager
def with_samplers(path: Path, count: int = 1, keys: Keys | None = None) -> Iterator[DistGraph]:
    """A graph whose parts two servers have, and samplers that read from these too: all in this process."""
    with contextlib.ExitStack() as ends:
        machines = [GraphServer(machine, keys=keys) for machine in range(2)]
        samplers = [SamplerServer(str(path), number=number, keys=keys) for number in range(count)]
        for each in (*machines, *samplers):
            ends.callback(each.close)
        num_parts = len(list(path.glob("part-*")))
        machine_of_part = [part % 2 for part in range(num_parts)]
        for number, machine in enumerate(machines):
            machine.open(str(path), [part for part in range(num_parts) if part % 2 == number])
        session = ends.enter_context(gnnsys.init(process_group=False))
        endpoints = tuple(machine.start()[0] for machine in machines)
        graph = open_alone(path, verify=False)
        session._graphs.by_path[str(path)] = graph
        opening = GraphOpening(
            digest=graph_identity(graph), machine_of_part=tuple(machine_of_part), peers=endpoints, incarnation=1
        )
        peers = {number: sampler.start()[0] for number, sampler in enumerate(samplers)}
        client = ends.enter_context(Client(peers, sender=0, incarnation=1, keys=keys))
        graph.samplers = SamplerPeers(client, tuple(peers), opening.to_json(), 60.0)
        yield graph


def told(batch: Batch) -> list[Any]:
    """Everything that a batch says."""
    stores = [(key, dict(store)) for key, store in (*batch.nodes.items(), *batch.edges.items())]
    blocks = [
        (b.num_src, b.num_dst, {t: (c.indptr, c.indices, c.edge_ids) for t, c in b.csc.items()}) for b in batch.blocks
    ]
    return [stores, blocks, batch.input_type]


def assert_same(ours: Any, theirs: Any) -> None:
    if isinstance(ours, Tensor):
        assert isinstance(theirs, Tensor) and ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs)
        assert_same(list(ours.values()), list(theirs.values()))
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    else:
        assert ours == theirs


def counts(loader: NeighborLoader) -> dict[str, int]:
    return loader.counters()["sample"].counts


OPTIONS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "nothing ahead": {"num_threads": 0},
    "with replacement": {"replace": True},
    "weighted": {"weight_attr": "weight"},
    "bidirectional": {"subgraph_type": "bidirectional"},
    "induced": {"subgraph_type": "induced"},
    "disjoint": {"disjoint": True},
    "blocks": {"expand": "frontier"},
    "masked edges": {"edge_mask": "kept"},
    "their own times": {"time_attr": "t", "temporal_strategy": "last"},
    "times": {"time_attr": "t", "input_nodes": range(150), "input_time": torch.arange(150) % 40},
    "few rows": {"fetch": ["x", "weight"]},
    "no rows": {"fetch": []},
    "by mask": {"input_nodes": "picked", "drop_last": True},
    "transformed": {"transform": lambda batch: batch},
    "grouped": {"pipeline": gnnsys.loader.PipelineOptions(group=3)},
}


@pytest.fixture(scope="module")
def served(plain: Path) -> Iterator[DistGraph]:
    with with_samplers(plain, 2, Keys.generate()) as graph:
        yield graph


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_batches_are_the_trainers_own_to_the_last_bit(served, options, monkeypatch):
    for name in ("LEAST_PATIENCE", "MOST_PATIENCE", "FIRST_PATIENCE"):  # on a busy machine, too
        monkeypatch.setattr(elsewhere, name, 60.0)

    if isinstance(nodes := options.get("input_nodes"), range):
        options = {**options, "input_nodes": served.from_global(nodes)}

    def loader(samplers: bool) -> NeighborLoader:
        return NeighborLoader(served, [4, 3], batch_size=30, shuffle=True, seed=-7, samplers=samplers, **options)

    theirs, own = loader(True), loader(False)
    for _ in range(2):  # epochs
        for one, other in itertools.zip_longest(theirs, own):
            assert_same(told(one), told(other))
    assert counts(theirs)["from_samplers"] >= 2 * len(own) and counts(theirs)["own"] == counts(theirs)["failed"] == 0


@pytest.mark.parametrize("options", [{}, {"disjoint": True}, {"time_attr": "t"}], ids=["uniform", "disjoint", "times"])
def test_so_are_those_of_several_types(typed, options):
    fanouts = {edge_type: [3, 2] for edge_type in heterogeneous(3, 60, 40, 300).edge_types}
    with with_samplers(typed) as graph:
        for nodes in ("paper", {"paper": None, "author": graph.from_global(range(30), "author")}):
            made = [
                NeighborLoader(
                    graph, fanouts, input_nodes=nodes, batch_size=9, samplers=samplers, fetch=["x"], **options
                )
                for samplers in (True, False)
            ]
            for one, other in itertools.zip_longest(*made):
                assert_same(told(one), told(other))
            assert counts(made[0])["own"] == 0


def test_a_share_that_is_gone_on_with_in_mid_epoch_gives_the_rest_of_it(served):
    seeds = gnnsys.split(served, "picked")

    def loader(samplers: bool) -> NeighborLoader:
        return NeighborLoader(served, [3], input_nodes=seeds, batch_size=8, shuffle=True, samplers=samplers)

    first = loader(True)
    batches = iter(first)
    for _ in range(3):
        next(batches)
    state = first.state_dict()
    second, own = loader(True), loader(False)
    for each in (second, own):
        each.load_state_dict(state)
    rest = [told(batch) for batch in second]
    assert len(rest) == len(own) - 3
    for one, other in zip(rest, own, strict=True):
        assert_same(one, told(other))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "sampler": ({"sampler": lambda graph, seeds, key: None, "num_neighbors": None}, "a sampler of your own cannot be"),
    "execution": ({"execution": "auto"}, "execution is given, and a plan of execution says how"),
    "pad": ({"pad": True}, "padding finds its sizes"),
    "wire_dtype": ({"wire_dtype": torch.float16}, "which rows it narrows depends on where a batch is made"),
    "policy": (
        {"pipeline": gnnsys.loader.PipelineOptions(policy=lambda located: located[0])},
        "a policy cannot be described",
    ),
    "stage": (
        {"stages": [Stage("mine", lambda item: item, after="sample")]},
        "your stage 'mine' comes before the rows",
    ),
    "array": ({"fetch": ["x", "mine"]}, "'mine' of 'node' is not in the parts: name the arrays that are by fetch="),
}


@pytest.mark.parametrize(("options", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_told_another_process_is_refused_in_one_line_and_made_here_by_default(plain, options, words):
    graph = open_alone(plain, verify=False)
    graph.set_node_data("mine", torch.zeros(150, 1), order="global")
    graph.samplers = SamplerPeers(None, (0,), {})  # type: ignore[arg-type]  # never asked
    options = {"num_neighbors": [2], **options}
    with pytest.raises(ValueError, match="samplers elsewhere cannot make these batches: ") as caught:
        NeighborLoader(graph, samplers=True, **options)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert NeighborLoader(graph, **options)._elsewhere is None


def test_times_that_were_replaced_here_are_not_read_elsewhere(plain):
    graph = open_alone(plain, verify=False)
    graph.samplers = SamplerPeers(None, (0,), {})  # type: ignore[arg-type]  # never asked
    graph.set_node_data("t", torch.zeros(150, dtype=torch.int64), order="global")
    with pytest.raises(ValueError, match="'t' of 'node' was replaced here"):
        NeighborLoader(graph, [2], samplers=True, time_attr="t", fetch=["x"])
    assert NeighborLoader(graph, [2], time_attr="t", fetch=["x"])._elsewhere is None


def test_counts_of_neighbours_may_be_any_whole_numbers(served):
    loader = NeighborLoader(served, [np.int64(4), 3.0], batch_size=30, samplers=True)
    assert len(list(loader)) == len(loader) and counts(loader)["failed"] == 0 < counts(loader)["from_samplers"]


def test_without_samplers_none_are_asked(plain):
    graph = open_alone(plain, verify=False)
    assert NeighborLoader(graph, [2])._elsewhere is None
    with pytest.raises(ValueError, match=r"gnnsys\.open was given none, by samplers=N or by a plan"):
        NeighborLoader(graph, [2], samplers=True)
    with pytest.raises(ValueError, match="the graph is in this process's memory alone"):
        NeighborLoader(homogeneous(20, 50), [2], samplers=True)


# -- a sampler that is not as it should be


@contextlib.contextmanager
def served_by(path: Path, change: Callable[[Callable[[Request], Any], Request], Any]) -> Iterator[DistGraph]:
    """A sampler whose answers to BATCH are `change(handler, request)`."""
    graph = open_alone(path, verify=False)
    service = BatchService(lambda opening: graph, 2).handlers()
    batch = service[Kind.BATCH]
    handlers = {Kind.LOADER: service[Kind.LOADER], Kind.BATCH: lambda request: change(batch, request)}
    server = Server(handlers, threads=4)
    server.start()
    client = Client({0: server.endpoints[0]}, sender=0, incarnation=1)
    graph.samplers = SamplerPeers(client, (0,), {})
    try:
        yield graph
    finally:
        client.close()
        server.close()


def assert_epochs_are_right(graph: DistGraph, num_epochs: int = 1) -> dict[str, int]:
    theirs = NeighborLoader(graph, [4, 3], batch_size=13, shuffle=True, samplers=True)
    own = NeighborLoader(graph, [4, 3], batch_size=13, shuffle=True, samplers=False)
    for _ in range(num_epochs):
        for one, other in itertools.zip_longest(theirs, own):
            assert_same(told(one), told(other))
    theirs.close()
    return counts(theirs)


def test_a_sampler_that_lags_is_not_waited_for_and_asked_again_once_it_has_answered(plain, monkeypatch):
    for name in ("LEAST_PATIENCE", "MOST_PATIENCE"):
        monkeypatch.setattr(elsewhere, name, 0.5)
    go, number = threading.Event(), itertools.count()

    def hold(handler, request):
        if next(number) >= 3:
            assert go.wait(60)
        return handler(request)

    with served_by(plain, hold) as graph:
        theirs = NeighborLoader(graph, [4, 3], batch_size=13, shuffle=True, samplers=True)
        own = NeighborLoader(graph, [4, 3], batch_size=13, shuffle=True, samplers=False)
        for one, other in itertools.zip_longest(theirs, own):
            assert_same(told(one), told(other))
        lagging = counts(theirs)
        assert lagging["from_samplers"] == 3 and lagging["own"] >= len(own) - 3 and lagging["late"] > 0
        go.set()
        for _ in range(200):
            for one, other in itertools.zip_longest(theirs, own):
                assert_same(told(one), told(other))
            if counts(theirs)["from_samplers"] > 3:
                break
        assert counts(theirs)["from_samplers"] > 3
        theirs.close()


def test_samplers_that_cannot_be_reached_do_not_keep_the_first_batch_waiting_for_each_of_them(plain, monkeypatch):
    """Three of four are nowhere. All are told of the loader at once, and the one that answers is asked."""
    monkeypatch.setattr(elsewhere, "FIRST_PATIENCE", 40.0)
    with served_by(plain, lambda handler, request: handler(request)) as graph, contextlib.ExitStack() as ends:
        nowhere = [ends.enter_context(socket.socket()) for _ in range(3)]
        for each in nowhere:
            each.bind(("127.0.0.1", 0))  # and does not listen
        (there,) = graph.samplers.client.peers.values()
        peers = [*(f"tcp://127.0.0.1:{each.getsockname()[1]}" for each in nowhere), there]
        client = ends.enter_context(Client(dict(enumerate(peers)), sender=0, incarnation=1))
        graph.samplers = SamplerPeers(client, (0, 1, 2, 3), {})
        loader = NeighborLoader(graph, [4, 3], batch_size=13, samplers=True, num_threads=0)
        began = time.monotonic()
        next(iter(loader))
        assert time.monotonic() - began < 40.0
        assert counts(loader)["from_samplers"] >= 1
        loader.close()


def test_without_any_sampler_that_answers_the_first_batch_waits_once(plain, monkeypatch):
    monkeypatch.setattr(elsewhere, "FIRST_PATIENCE", 0.5)
    with contextlib.ExitStack() as ends:
        graph = open_alone(plain, verify=False)
        nowhere = [ends.enter_context(socket.socket()) for _ in range(8)]
        for each in nowhere:
            each.bind(("127.0.0.1", 0))
        peers = {number: f"tcp://127.0.0.1:{each.getsockname()[1]}" for number, each in enumerate(nowhere)}
        client = ends.enter_context(Client(peers, sender=0, incarnation=1))
        graph.samplers = SamplerPeers(client, tuple(peers), {})
        loader = NeighborLoader(graph, [4, 3], batch_size=13, samplers=True, num_threads=0)
        began = time.monotonic()
        next(iter(loader))
        assert 0.5 <= time.monotonic() - began < 4.0  # eight times in turn
        assert counts(loader)["own"] >= 1 and counts(loader)["from_samplers"] == 0
        loader.close()


def other_seeds(handler, request):
    changed = Message(request.header, [request.arrays[0].flip(0)], request.options)
    return handler(Request(changed, request.deadline))


def without_an_end(handler, request):
    *chunks, _ = handler(request)
    return iter(chunks)


def in_another_order(handler, request):
    first, *rows = handler(request)
    return iter([first, *reversed(rows)])


def wider(handler, request):
    first, *rows = handler(request)
    return iter([first, *(Reply([chunk.arrays[0].double()], chunk.options) for chunk in rows)])


def twice(handler, request):
    chunks = list(handler(request))
    return iter([*chunks, chunks[-1]])


def broken(handler, request):
    raise RuntimeError("planted")


@pytest.mark.parametrize("change", [other_seeds, without_an_end, in_another_order, wider, twice, broken])
def test_an_answer_that_is_none_is_not_taken_for_one(plain, change):
    with served_by(plain, change) as graph:
        counted = assert_epochs_are_right(graph)
    assert counted["failed"] > 0 and counted["from_samplers"] == 0


def test_a_sampler_that_has_forgotten_a_loader_is_told_again(plain, monkeypatch):
    monkeypatch.setattr("gnnsys.loader.batch_service.MOST_LOADERS", 1)

    def loaders(samplers: bool) -> list[NeighborLoader]:
        return [NeighborLoader(graph, [3], batch_size=10, seed=seed, samplers=samplers) for seed in range(2)]

    with served_by(plain, lambda handler, request: handler(request)) as graph:
        theirs = loaders(True)
        for one, other in zip(theirs, loaders(False), strict=True):
            for ours, own in itertools.zip_longest(one, other):
                assert_same(told(ours), told(own))
        first = counts(theirs[0])
        for ours, own in itertools.zip_longest(theirs[0], NeighborLoader(graph, [3], batch_size=10, samplers=False)):
            assert_same(ours.input_id, own.input_id)
        again = counts(theirs[0])
        assert again["failed"] > first["failed"] and again["from_samplers"] > first["from_samplers"]
        for loader in theirs:
            loader.close()
