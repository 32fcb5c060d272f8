"""Sources of rows: tensors, tables, caches, rows in flight and a user's own are read alike, and wrap each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor

from gnnsys.comm import RequestContext, use_context
from gnnsys.comm.urgency import user_of
from gnnsys.store import (
    Candidate,
    DeviceCache,
    DistEmbedding,
    InFlightWindow,
    Pull,
    ReadContext,
    SharedInFlight,
    Source,
    TableSpec,
    as_source,
    read_rows,
)
from tests.store.cluster import Cluster, cluster, generator

NUM_ROWS, DIM = 600, 5
BOUNDS = (0, 250, 250, 600)


class Own:
    """All that a user must write."""

    mutable = False

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self.shape, self.dtype = tuple(rows.shape), rows.dtype

    def read(self, ids: Tensor, out: Tensor | None = None) -> Tensor:
        return self.rows[ids]

    def begin_read(self, ids: Tensor, out: Tensor | None = None) -> Future[Tensor]:
        reading: Future[Tensor] = Future()
        reading.set_result(self.read(ids, out))
        return reading


def random_rows(seed: int = 0) -> Tensor:
    return torch.rand(NUM_ROWS, DIM, generator=generator(seed))


def random_ids(count: int, seed: int = 1) -> Tensor:
    return torch.randint(NUM_ROWS, (count,), generator=generator(seed))


@pytest.fixture
def machines() -> Iterator[Cluster]:
    """Tables "x" and "y" on two machines, of which the first one's rows are here."""
    with cluster([0, 1, 1]) as c:
        for seed, name in enumerate(("x", "y")):
            c.add(TableSpec(name, (DIM,), torch.float32, BOUNDS, mutable=False), random_rows(seed))
        yield c


def hot() -> Tensor:
    return torch.arange(0, NUM_ROWS, 3)


MAKERS: dict[str, Callable[[Any], Any]] = {
    "tensor": lambda table: random_rows(),
    "table": lambda table: table,
    "own": lambda table: Own(random_rows()),
    "cache of a table": lambda table: DeviceCache(table, hot(), "cpu"),
    "cache of an own one": lambda table: DeviceCache(Own(random_rows()), hot(), "cpu"),
    "table in flight": lambda table: SharedInFlight(table, InFlightWindow(4)),
    "own one in flight": lambda table: SharedInFlight(as_source(Own(random_rows())), InFlightWindow(4)),
    "cache of a table in flight": lambda table: DeviceCache(SharedInFlight(table, InFlightWindow(4)), hot(), "cpu"),
    "cache of a cache": lambda table: DeviceCache(DeviceCache(table, hot(), "cpu"), hot() + 1, "cpu"),
    "cache in flight": lambda table: SharedInFlight(DeviceCache(table, hot(), "cpu"), InFlightWindow(4)),
    "table in flight twice": lambda table: SharedInFlight(SharedInFlight(table, InFlightWindow(4)), InFlightWindow(4)),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_every_source_is_read_alike(machines: Cluster, kind: str) -> None:
    source, rows, ids = as_source(MAKERS[kind](machines.stores[0].tensor("x"))), random_rows(), random_ids(200)
    assert isinstance(source, Source)
    assert (source.shape, source.dtype, source.mutable) == ((NUM_ROWS, DIM), torch.float32, False)
    out, scattered = torch.empty(200, DIM), torch.full((300, DIM), -1.0)
    at = torch.randperm(300, generator=generator())[:200]
    context = ReadContext()
    reads = [
        source.begin(ids, None, context),
        source.begin(ids, out, context),
        source.begin(ids, scattered, context, at),
        source.begin(ids[:0], None, context),
        source.begin(ids[:50].int(), None, context),
    ]
    context.send()
    plain, filled, placed, empty, narrow = (read.result() for read in reads)
    assert torch.equal(plain, rows[ids]) and torch.equal(filled, rows[ids]) and empty.shape == (0, DIM)
    assert placed is scattered and torch.equal(narrow, rows[ids[:50]])
    expected = torch.full((300, DIM), -1.0)
    expected[at] = rows[ids]
    assert torch.equal(scattered, expected)
    assert torch.equal(read_rows([(source, ids)])[0], rows[ids])


@pytest.mark.parametrize("kind", MAKERS)
def test_every_source_says_where_each_row_is(machines: Cluster, kind: str) -> None:
    source, ids = as_source(MAKERS[kind](machines.stores[0].tensor("x"))), random_ids(200)
    found = source.locate(ids)
    positions = [torch.arange(200) if each.order is None else each.order for each in found]
    assert torch.equal(torch.cat(positions).sort().values, torch.arange(200))
    assert all(each.serving in each.candidates for each in found)
    remote = [each.serving.is_remote for each in found]
    assert source.is_remote == any(remote) and source.device == torch.device("cpu")
    if kind.startswith("cache of"):
        cached = [at for each, at in zip(found, positions, strict=True) if each.serving.kind == "device"]
        assert set((hot() if len(cached) == 1 else torch.cat([hot(), hot() + 1])).tolist()) >= set(
            ids[torch.cat(cached)].tolist()
        )


def test_tables_of_a_store_leave_in_one_message_per_machine_whatever_wraps_them(machines: Cluster) -> None:
    store, ids = machines.stores[0], random_ids(300)
    x, y = store.tensor("x"), store.tensor("y")
    sources = [x, y, DeviceCache(x, hot(), "cpu"), SharedInFlight(y, InFlightWindow(4))]
    machines.pulls.clear()
    context = ReadContext(batch=12, wire_dtype=torch.bfloat16)
    reads = [source.begin(ids, None, context) for source in sources]
    assert not machines.pulls
    with use_context(RequestContext(priority=3, path=7)):
        context.send()
    rows = [read.result() for read in reads]
    ((machine, request),) = machines.pulls
    assert machine == 1
    header = request.header
    assert (header.batch, user_of(header.priority), header.path) == (12, 3, 7)
    here = ids < BOUNDS[1]
    for number, found in enumerate(rows):
        whole = random_rows(number % 2)[ids]
        narrowed = torch.where(here[:, None], whole, whole.bfloat16().float())
        if number == 2:  # what the cache has was read when it was made
            narrowed[ids % 3 == 0] = whole[ids % 3 == 0]
        assert torch.equal(found, narrowed), number


def test_what_a_cache_has_not_is_asked_for_once_while_it_is_in_flight(machines: Cluster) -> None:
    table, rows, ids = machines.stores[0].tensor("x"), random_rows(), torch.arange(200, 500)
    window = InFlightWindow(4)
    source = DeviceCache(SharedInFlight(table, window), hot(), "cpu")
    begun = []
    for first in (0, 50):  # the second batch begins before the first has its rows
        context = ReadContext(batch=first)
        read = source.begin(ids[first : first + 200], None, context)
        context.send()
        begun.append((context, read, ids[first : first + 200]))
    for _, read, wanted in reversed(begun):
        assert torch.equal(read.result(), rows[wanted])
    remote = [wanted[(wanted >= BOUNDS[1]) & (wanted % 3 != 0)] for _, _, wanted in begun]
    both = torch.isin(remote[1], remote[0])
    assert [context.counts["rows_asked"] for context, _, _ in begun] == [remote[0].numel(), int((~both).sum())]
    assert begun[1][0].counts["rows_shared"] == int(both.sum()) > 0
    assert sorted(request.header.batch for _, request in machines.pulls[-2:]) == [0, 50]  # served by several threads


def test_counts_say_where_rows_came_from(machines: Cluster) -> None:
    table, ids = machines.stores[0].tensor("x"), random_ids(200)
    remote = int((ids >= BOUNDS[1]).sum())
    context = ReadContext()
    sources: Sequence[Any] = [table, random_rows(), Own(random_rows())]
    reads = [as_source(source).begin(ids, None, context) for source in sources]
    context.send()
    for read in reads:
        read.result()
    assert context.counts == {
        "bytes_local": (200 - remote + 200) * 4 * DIM,
        "bytes_remote": (remote + 200) * 4 * DIM,
        "bytes_left_out": 0,
        "bytes_shared": 0,
        "rows_asked": remote + 200,
        "rows_shared": 0,
    }


def shard_first(candidates: Sequence[Candidate]) -> Candidate:
    return next(candidate for candidate in candidates if candidate.kind == "shard")


def test_a_policy_chooses_among_the_candidates(machines: Cluster) -> None:
    store, rows, ids = machines.stores[0], random_rows(), torch.arange(240)  # all of them are mapped here
    table = store.tensor("x")
    assert [[c.kind for c in each.candidates] for each in table.locate(ids)] == [["file", "shard"]]
    for read in (
        lambda: table.with_policy(shard_first)[ids],
        lambda: read_rows([(table, ids)], ReadContext(policy=shard_first))[0],
        lambda: store.pull([Pull("x", ids, policy=shard_first)]).result()[0],
    ):
        machines.pulls.clear()
        assert torch.equal(read(), rows[ids])
        assert [machine for machine, _ in machines.pulls] == [0]
    machines.pulls.clear()
    assert torch.equal(table[ids], rows[ids]) and not machines.pulls
    assert not table.remote_positions(ids).numel()
    assert table.with_policy(shard_first).remote_positions(ids).numel() == ids.numel()
    with pytest.raises(ValueError, match=r"must return one of the candidates it is given, \['file', 'shard'\], got 3"):
        table.with_policy(lambda candidates: 3)[ids]  # type: ignore[arg-type, return-value]


def test_a_replica_serves_where_a_policy_says_so(machines: Cluster) -> None:
    store, rows, ids = machines.stores[0], random_rows(), torch.arange(260, 400)
    table = store.tensor("x")
    machines.shards[0].add(store.spec("x"), 2, rows[BOUNDS[2] :])
    store.add_replica("x", 2, 0)
    assert [[(c.kind, c.machine) for c in each.candidates] for each in table.locate(ids)] == [
        [("shard", 1), ("shard", 0)]
    ]
    for policy, machine in ((None, 1), (lambda candidates: candidates[-1], 0)):
        machines.pulls.clear()
        assert torch.equal(table.with_policy(policy)[ids], rows[ids])
        assert [served for served, _ in machines.pulls] == [machine]
    store.create("trained", 10, (2,))
    with pytest.raises(ValueError, match="'trained' changes, and its changes go to machine 0 alone"):
        store.add_replica("trained", 0, 1)
    with pytest.raises(ValueError, match="machine 7 cannot be reached from here"):
        store.add_replica("x", 0, 7)


def test_an_embedding_names_the_batch_it_is_asked_for(machines: Cluster) -> None:
    embedding = DistEmbedding(machines.stores[0], 90, 4, "embedding")
    machines.pulls.clear()
    embedding(torch.tensor([80, 3]), batch=21)
    embedding(torch.tensor([80, 3]))
    assert [request.header.batch for _, request in machines.pulls] == [21, -1]


def test_what_is_no_source_is_refused_with_what_it_lacks() -> None:
    class Half:
        shape, dtype = (3, 2), torch.float32

    with pytest.raises(ValueError, match=r"'x' is a Half, which is no source of rows: it lacks read, begin_read"):
        as_source(Half(), "x")
    with pytest.raises(ValueError, match="rows that may change are not shared"):
        SharedInFlight(as_source(type("Changing", (Own,), {"mutable": None})(random_rows())), InFlightWindow(1))
    with pytest.raises(ValueError, match="policy must be a function"):
        ReadContext(policy="nearest")  # type: ignore[arg-type]
