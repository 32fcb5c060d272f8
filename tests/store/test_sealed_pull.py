"""What a pull brings where rows travel sealed, by CURVE, and in the clear."""

from __future__ import annotations

import pytest
import torch

from gnnsys.comm import Client, Keys, Kind, Server
from gnnsys.store import Pull, Shard, Store, TableSpec
from tests.store.cluster import random_ids, random_rows

NUM_ROWS = 30_000
X = TableSpec("node/paper/x", (64,), torch.float32, (0, 20_000, NUM_ROWS))  # 7.7 MB: frames of their own


@pytest.fixture(params=[True, "curve", None], ids=["sealed", "curve", "open"])
def store(request):
    """A store of another machine's, and its rows."""
    keys = None if request.param is None else Keys.generate(encrypts=request.param)
    rows, shard = random_rows(NUM_ROWS, 64), Shard(0)
    for part in (0, 1):
        shard.add(X, part, rows[X.bounds[part] : X.bounds[part + 1]])
    with Server(shard.handlers(), keys=keys, short={Kind.PULL: shard.answer_small}) as server:
        client = Client({0: server.endpoints[0]}, sender=0, incarnation=1, keys=keys)
        with client:
            made = Store(machine_of_part=[0, 0], machine=1, client=client, rank=0, world_size=1)
            made.register(X)
            yield made, rows
        assert server.counters()["events"] == {}


@pytest.mark.parametrize("count", [1, 7, 200, 1000])
def test_few_rows_are_those_of_the_table_however_they_travel(store, count):
    made, rows = store
    for ids in (random_ids(count, NUM_ROWS), random_ids(count, 20_000)):
        assert torch.equal(made.pull([Pull(X.name, ids)]).result()[0], rows[ids])


def test_rows_are_those_of_the_table_however_they_travel(store):
    made, rows = store
    ids = random_ids(25_000, NUM_ROWS)
    one_part = ids[ids < 20_000]
    wide = torch.full((ids.numel() + 5, 64), -1.0)
    at = torch.randperm(ids.numel() + 5)[: ids.numel()]
    columns = torch.arange(0, 64, 2)
    pulls = [
        Pull(X.name, ids),
        Pull(X.name, one_part, torch.empty(one_part.numel(), 64)),
        Pull(X.name, ids, wide, at=at),
        Pull(X.name, ids, columns=columns),
        Pull(X.name, one_part, wire_dtype=torch.bfloat16),
        Pull(X.name, one_part[:10]),
    ]
    got = made.pull(pulls).result()
    expected = [rows[ids], rows[one_part], None, rows[ids][:, columns], None, rows[one_part[:10]]]
    for found, wanted in zip(got, expected, strict=True):
        assert wanted is None or torch.equal(found, wanted)
    assert torch.equal(wide[at], rows[ids])
    assert torch.equal(got[4], rows[one_part].bfloat16().float())


def test_paced_rows_are_those_of_the_table_few_and_many_by_every_way(store):
    made, rows = store
    made._machines.client_for(0).set_rate_in(40_000_000)
    for count in (1, 200, 900, 25_000):
        ids = random_ids(count, NUM_ROWS)
        near = ids[ids < 20_000]
        got = made.pull([Pull(X.name, ids), Pull(X.name, near, columns=torch.arange(0, 64, 3))]).result()
        assert torch.equal(got[0], rows[ids]) and torch.equal(got[1], rows[near][:, ::3])
        assert torch.equal(made.pull([Pull(X.name, near)]).result()[0], rows[near])
