"""A pull over several lanes brings what it would over one, and pushes stay in their order."""

from __future__ import annotations

import itertools

import pytest
import torch

from gnnsys.comm import Client, Kind, Server
from gnnsys.store import Pull, Shard, Store, TableSpec, pull
from tests.store.cluster import cluster, random_ids, random_rows

BOUNDS = (0, 300, 1000)
X = TableSpec("node/paper/x", (7,), torch.float32, BOUNDS)
Z = TableSpec("node/paper/z", (2, 3), torch.float64, BOUNDS)
LANES = 3


@pytest.fixture(autouse=True)
def small_requests(monkeypatch):
    monkeypatch.setattr(pull, "REQUEST_BYTES", 1000)


def pulls_of(ids: torch.Tensor) -> list[Pull]:
    """Two tables by the same ids, some columns, narrow rows, rows to chosen places, ids in order and few ids."""
    at = torch.randperm(ids.numel() + 5)[: ids.numel()]
    wide = torch.full((ids.numel() + 5, 7), -1.0)
    return [
        Pull(X.name, ids),
        Pull(Z.name, ids),
        Pull(X.name, ids, columns=torch.tensor([6, 0, 0])),
        Pull(X.name, ids, wire_dtype=torch.bfloat16),
        Pull(X.name, ids, wide, at=at),
        Pull(X.name, torch.arange(1000)),
        Pull(Z.name, torch.arange(300, 1000)),
        Pull(Z.name, ids[:1]),
    ]


def take_turns(client: Client) -> None:
    """Has pulls take one lane after the other, however soon they are answered."""
    for link in client._links.values():
        others, turns = link.connection_for, itertools.cycle(link.lanes)
        link.connection_for = lambda kind, size, o=others, t=turns: next(t) if kind == Kind.PULL else o(kind, size)


@pytest.mark.parametrize("layout", [[1, 1], [0, 1], [1, 2]])
def test_rows_are_those_of_one_lane(layout):
    ids, rows = random_ids(800, 1000), {X.name: random_rows(1000, 7), Z.name: random_rows(1000, 2, 3).double()}
    found = {}
    for lanes in (1, LANES):
        torch.manual_seed(0)
        with cluster(layout, lanes=lanes) as c:
            for spec in (X, Z):
                c.add(spec, rows[spec.name])
            take_turns(c.clients[0])
            pending = c.stores[0].pull(pulls_of(ids))
            found[lanes] = pending.result()
            assert torch.equal(found[lanes][0], rows[X.name][ids]) and torch.equal(found[lanes][1], rows[Z.name][ids])
            machines = sorted(machine for machine, _ in c.pulls)
            assert machines == sorted([*({*layout} - {0})] * lanes), "a message for each lane"
            found[lanes] += [torch.tensor([pending.bytes_remote, pending.rows_remote, pending.bytes_local])]
            assert all(lane.socket is not None for machine in machines for lane in c.clients[0]._links[machine].lanes)
    assert all(torch.equal(one, many) for one, many in zip(found[1], found[LANES], strict=True))


def test_row_numbers_that_tables_share_still_travel_once():
    ids = random_ids(800, 300)
    with cluster([1, 1], lanes=LANES) as c:
        for spec in (X, Z):
            c.add(spec, torch.zeros(1000, *spec.row_shape, dtype=spec.dtype))
        c.stores[0].pull([Pull(X.name, ids), Pull(Z.name, ids)]).result()
        assert [len(request.arrays) for _, request in c.pulls] == [2] * LANES, (
            "the plan, and a share of the row numbers"
        )
        assert sum(request.arrays[1].numel() for _, request in c.pulls) == ids.numel()


def test_rows_that_may_change_are_asked_for_in_one_message():
    with cluster([1, 1], lanes=LANES) as c:
        c.add(X, random_rows(1000, 7))
        c.stores[0].create("e", 1000, (7,), init=("uniform", 0.0, 1.0, 3))
        ids = random_ids(800, 1000)
        c.stores[0].pull([Pull("e", ids)]).result()
        assert len(c.pulls) == 1
        c.stores[0].pull([Pull("e", ids), Pull(X.name, ids)]).result()
        assert sorted(request.arrays[0].shape[0] for _, request in c.pulls[1:]) == [2, 2, 4]  # items by part


def test_a_table_that_was_dropped_and_made_anew_is_found_over_lanes_too():
    with cluster([1, 1], num_ranks=3, lanes=LANES) as c:
        first, _, third = c.stores
        for value in (1.0, 2.0):
            third.create("f", 1000, (7,), init=value, mutable=False)
            assert (first.tensor("f")[torch.arange(1000)] == value).all()
            third.drop("f")


def test_pushes_arrive_in_the_order_they_were_made_while_pulls_share_the_lanes():
    shard, came = Shard(1), []
    handlers = dict(shard.handlers())

    def push(request):
        came.append(request.sequence)
        return shard.handlers()[Kind.PUSH](request)

    with (
        Server({**handlers, Kind.PUSH: push}, threads=1, io_threads=2) as server,
        Client({1: server.endpoints[0]}, sender=0, incarnation=1, timeout=120, lanes=LANES) as client,
    ):
        store = Store(machine_of_part=[1], machine=0, client=client)
        store.create("big", 5000, (7,), init=1.0, mutable=False)
        store.create("e", 100, (2,))
        pulls, ids = [], torch.arange(100)
        for number in range(30):
            pulls.append(store.pull([Pull("big", random_ids(2000, 5000))]))
            store.push("e", ids, torch.full((100, 2), float(number)))
        assert all((pending.result()[0] == 1).all() for pending in pulls)
        assert (store.tensor("e")[ids] == 29).all()
        assert came == sorted(came) and len(came) == 30
        store.close()
    shard.close()
