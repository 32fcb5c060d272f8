"""Messages of samplers elsewhere that nobody of ours has sent: refused in one line, and the next one is answered."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gnnsys.comm import Client, Kind, Limits, Message, Request, wire
from gnnsys.graph import NODE
from gnnsys.loader import BatchMaker, BatchService, DescribedLoader, WantedBatch, graph_identity
from gnnsys.loader.batch_message import answer, read_answer
from gnnsys.partition import write_parts
from gnnsys.sampling import DistGraph
from gnnsys.session.open_parts import open_alone
from gnnsys.session.sampler_server import GraphOpening, SamplerServer
from tests.fuzz.run import Attacker
from tests.loader.test_batches_elsewhere import assert_epochs_are_right, assert_same, served_by
from tests.partition.part_graphs import CITES, homogeneous, random_assignment


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    graph, path = homogeneous(150, 1200), tmp_path_factory.mktemp("plain") / "parts"
    write_parts(graph, random_assignment(graph, 3, 1), path)
    return path


VALUES = (
    None,
    True,
    -1,
    0,
    1,
    1 << 31,
    1 << 70,
    1.5,
    float("nan"),
    "",
    "x",
    "\0",
    [],
    [[]],
    ["x"],
    {},
    {"x": 1},
    [1] * 99,
)


def described(graph: DistGraph, **changes: Any) -> DescribedLoader:
    loader = DescribedLoader(
        graph=graph_identity(graph), seed=3, num_neighbors=(3, 2), names=((NODE, ("x",)),), weight_attr="weight"
    )
    return replace(loader, **changes)


def mutated(value: Any, chance: random.Random) -> Any:
    """The same JSON with something else somewhere in it."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        name = chance.choice(sorted(value))
        if chance.random() < 0.1:
            return {key: each for key, each in value.items() if key != name}
        return {**value, name: mutated(value[name], chance)}
    if isinstance(value, list) and value and chance.random() < 0.7:
        at = chance.randrange(len(value))
        return [*value[:at], mutated(value[at], chance), *value[at + 1 :]]
    return chance.choice(VALUES)


def test_a_description_comes_back_as_it_was_told(plain):
    graph = open_alone(plain, verify=False)
    for loader in (
        described(graph),
        described(graph, num_neighbors=((CITES, (1, -1)),), names=((CITES, ("time",)), ("paper", ())), time_attr="t"),
    ):
        assert DescribedLoader.from_json(loader.to_json()) == loader
        assert DescribedLoader.from_json(loader.to_json()).digest == loader.digest
    assert described(graph).digest != described(graph, seed=4).digest
    assert described(graph, num_neighbors=((CITES, (1, -1)),)).fanouts == {CITES: [1, -1]}


def test_requests_that_were_altered_are_refused_or_answered_and_the_next_right_one_is_answered(plain):
    graph, chance = open_alone(plain, verify=False), random.Random(0)
    opening = GraphOpening(digest=graph_identity(graph), machine_of_part=(0, 0, 0))
    sampler = SamplerServer(str(plain))
    handlers = sampler.server._handlers
    loader = described(graph)
    description = {"graph": opening.to_json(), "loader": loader.to_json()}
    wanted = WantedBatch(0, 2, {NODE: torch.tensor([5, 3, 140])})
    arrays, question = wanted.question(loader.digest)
    right = None
    try:
        refused = 0
        for number in range(1500):
            kind, options, given = Kind.LOADER, description, []
            if number % 3:
                kind, options, given = Kind.BATCH, question, list(arrays)
                if chance.random() < 0.5:
                    given = [
                        chance.choice([a.int(), a - 1000, a * 1000, a[:0], a[None], a.double(), a + (1 << 40)])
                        for a in given
                    ]
                if chance.random() < 0.2:
                    given = given * chance.randrange(3)
            if not given or chance.random() < 0.6:
                options = mutated(options, chance)
            if not isinstance(options, dict):
                continue  # the wire has refused it
            try:
                list(answer) if isinstance(
                    answer := handlers[kind](Request.local(kind, given, options)), Iterator
                ) else None
            except ValueError as error:
                assert "\n" not in str(error)
                refused += 1
            if number % 100 == 0:
                assert (
                    handlers[Kind.LOADER](Request.local(Kind.LOADER, (), description)).options["loader"]
                    == loader.digest
                )
                chunks = list(handlers[Kind.BATCH](Request.local(Kind.BATCH, arrays, question)))
                right = right or chunks
                for one, other in zip(chunks, right, strict=True):
                    assert_same([one.arrays, one.options], [other.arrays, other.options])
        assert refused > 500
    finally:
        sampler.close()


def test_answers_that_were_altered_are_refused_or_have_the_structure_that_was_asked_for(plain):
    graph, chance = open_alone(plain, verify=False), random.Random(1)
    loader = described(graph)
    service = BatchService(lambda opening: graph, 1).handlers()
    service[Kind.LOADER](Request.local(Kind.LOADER, (), {"graph": {}, "loader": loader.to_json()}))
    wanted = WantedBatch(1, 4, {NODE: torch.tensor([5, 3, 140])})
    arrays, question = wanted.question(loader.digest)
    request = Request.local(Kind.BATCH, arrays, question)
    chunks = [Message(request.header, list(each.arrays), each.options or {}) for each in service[Kind.BATCH](request)]

    def expected(sample):
        return [(NODE, "x", (sample.node[NODE].numel(), 3), torch.float32)]

    def read(messages):
        return read_answer(messages, wanted, expected, lambda shape, dtype: torch.zeros(shape, dtype=dtype))

    sample, rows, num_bytes = read(chunks)
    assert_same(rows[NODE]["x"], graph.node_data[NODE]["x"][sample.node[NODE]]) and num_bytes > 0
    refused = 0
    for _ in range(1500):
        altered = list(chunks)
        at = chance.randrange(len(altered))
        message = altered[at]
        if (what := chance.randrange(5)) == 0:
            del altered[at]
        elif what == 1:
            altered.insert(chance.randrange(len(altered) + 1), message)
        elif what == 2:
            options = mutated(message.options, chance)
            altered[at] = Message(message.header, message.arrays, options if isinstance(options, dict) else {})
        else:
            which = chance.randrange(len(message.arrays))
            array = message.arrays[which].clone()
            if what == 3 and array.numel():
                array.view(-1)[chance.randrange(array.numel())] = chance.choice([0, 1, 2, 77, 127])
            else:
                array = chance.choice([array[:-1], array[None], torch.cat([array, array]), array.double()])
            altered[at] = Message(
                message.header, [*message.arrays[:which], array, *message.arrays[which + 1 :]], message.options
            )
        try:
            found, _, _ = read(altered)
        except ValueError as error:
            refused += 1
            assert "\n" not in str(error)
        else:
            assert torch.equal(found.node[NODE][:3], wanted.seeds[NODE])
    assert refused > 700


def test_the_rows_of_a_batch_come_in_chunks_of_a_few_megabytes(plain, monkeypatch):
    monkeypatch.setattr("gnnsys.loader.batch_message.CHUNK_BYTES", 100)
    monkeypatch.setattr("gnnsys.loader.batch_message.MOST_ARRAYS", 1)
    graph = open_alone(plain, verify=False)
    maker = BatchMaker(graph, described(graph), 1)
    sampled = maker.make(WantedBatch(0, 0, {NODE: torch.arange(20)}))
    chunks = list(answer(sampled, {NODE: ["x"]}))
    rows = [chunk for chunk in chunks if "rows" in chunk.options]
    assert all(sum(a.nbytes for a in chunk.arrays) <= 100 for chunk in rows) and len(rows) > 3 < len(chunks) - len(rows)
    with served_by(plain, lambda handler, request: handler(request)) as served:
        assert assert_epochs_are_right(served)["own"] == 0


def test_a_sampler_under_mutated_messages_answers_a_correct_client_throughout(plain):
    graph = open_alone(plain, verify=False)
    sampler, loader = SamplerServer(str(plain)), described(graph)
    opening = GraphOpening(digest=graph_identity(graph), machine_of_part=(0, 0, 0))
    description = {"graph": opening.to_json(), "loader": loader.to_json()}
    arrays, question = WantedBatch(0, 2, {NODE: torch.tensor([5, 3, 140])}).question(loader.digest)
    recorded = []
    for number, (kind, given, options) in enumerate([(Kind.LOADER, [], description), (Kind.BATCH, arrays, question)]):
        header = wire.make_header(kind, number + 1, timeout_us=10**7)
        recorded.append([bytes(frame) for frame in wire.encode(header, given, options, Limits())])
    (endpoint,) = sampler.start()
    attacker, right = Attacker(endpoint, recorded, seed=2), None
    try:
        with Client({0: endpoint}, sender=0, incarnation=1) as client:
            for first in range(0, 1000, 250):
                attacker.send(first, first + 250)
                client.request(0, Kind.LOADER, (), description).result()
                chunks = [
                    [each.arrays, each.options] for each in client.request(0, Kind.BATCH, arrays, question).chunks()
                ]
                right = right or chunks
                assert_same(chunks, right)
    finally:
        attacker.close()
        sampler.close()
    assert len(attacker.statuses) >= 3  # answered, refused by a handler, malformed


@pytest.mark.parametrize("tree", [-1, 1 << 24, 1 << 45])
def test_trees_that_no_batch_has_are_refused_before_memory_is_taken(tree):
    options = {"loader": "x", "epoch": 0, "batch": 0, "types": [NODE], "times": False, "trees": True}
    seeds, trees = torch.arange(2), torch.tensor([0, tree])
    request = SimpleNamespace(options=options, arrays=[seeds, trees])
    with pytest.raises(ValueError, match="BATCH has trees from 0 to"):
        WantedBatch.from_request(request)
