"""A pull returns the rows that one dense tensor of all rows would, wherever they are."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from gnnsys.comm import Kind
from gnnsys.store import DistTensor, FeatureSource, Pull, Shard, Store, TableSpec
from tests.store.cluster import alone, cluster, generator, random_ids, random_rows

BOUNDS = {1: (0, 1000), 2: (0, 400, 1000), 5: (0, 100, 100, 500, 800, 1000)}
LAYOUTS = [[0], [0, 1], [1, 0], [0, 0, 0, 0, 0], [0, 1, 1, 0, 2], [2, 2, 1, 2, 2]]


def spec(parts: int, shape: tuple[int, ...] = (7,), dtype: torch.dtype = torch.float32, name: str = "x") -> TableSpec:
    return TableSpec(f"node/paper/{name}", shape, dtype, BOUNDS[parts])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_those_of_the_dense_tensor_on_any_layout(layout):
    table, rows = spec(len(layout)), random_rows(1000, 7)
    with cluster(layout, num_ranks=3) as c:
        c.add(table, rows)
        for store in c.stores:
            for ids in [random_ids(5000, 1000), random_ids(3, 1000).int(), torch.empty(0, dtype=torch.int64)]:
                assert torch.equal(store.tensor(table.name)[ids], rows[ids.long()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5)])
def test_rows_of_any_shape_and_dtype_travel(shape, dtype):
    table, rows = spec(2, shape, dtype), random_rows(1000, *shape, dtype=dtype)
    with cluster([1, 1]) as c:
        c.add(table, rows)
        assert torch.equal(c.stores[0].tensor(table.name)[random_ids(300, 1000)], rows[random_ids(300, 1000)])


def test_rows_that_fill_many_chunks_arrive_whole():
    table = TableSpec("big", (512,), torch.float32, (0, 2000, 5000))
    rows, ids = random_rows(5000, 512), random_ids(9000, 5000)
    with cluster([0, 1]) as c:
        c.add(table, rows)
        pending = c.stores[0].pull([Pull("big", ids)])
        assert torch.equal(pending.result()[0], rows[ids])
        assert pending.bytes_remote == int((ids >= 2000).sum()) * 2048


def test_several_tables_take_one_message_and_the_same_ids_travel_once():
    tables = [spec(2, (16,), name="x"), spec(2, (), torch.int64, "y"), spec(2, (4,), torch.float64, "z")]
    data = [random_rows(1000, *t.row_shape, dtype=t.dtype, seed=k) for k, t in enumerate(tables)]
    ids = random_ids(10_000, 1000)
    with cluster([1, 1]) as c:
        for table, rows in zip(tables, data, strict=True):
            c.add(table, rows)
        store, before = c.stores[0], c.servers[1].counters()
        received = store.pull([Pull(t.name, ids) for t in tables]).result()
        after = c.servers[1].counters()
    assert all(torch.equal(got, rows[ids]) for got, rows in zip(received, data, strict=True))
    assert messages_in(after) - messages_in(before) == 1
    assert bytes_in(after) - bytes_in(before) < 4 * ids.numel() + 1000


def messages_in(counters: dict) -> int:
    return counters["kinds"]["PULL"]["messages_in"] if "PULL" in counters["kinds"] else 0


def bytes_in(counters: dict) -> int:
    return counters["kinds"]["PULL"]["bytes_in"] if "PULL" in counters["kinds"] else 0


@pytest.mark.parametrize("layout", [[0, 0], [0, 1], [1, 1]])
def test_columns_are_taken_of_the_flattened_row(layout):
    table, rows, ids = spec(2, (3, 4)), random_rows(1000, 3, 4), random_ids(500, 1000)
    columns = torch.tensor([11, 0, 5])
    with cluster(layout) as c:
        c.add(table, rows)
        found = c.stores[0].tensor(table.name).pull(ids, columns=columns)
        with pytest.raises(ValueError, match=r"columns must be in \[0, 12\), got 12"):
            c.stores[0].tensor(table.name).pull(ids, columns=torch.tensor([12]))
    assert torch.equal(found, rows.view(1000, 12)[ids][:, columns])


@pytest.mark.parametrize("wire_dtype", [torch.bfloat16, torch.float16])
def test_rows_of_others_may_travel_narrow_and_own_rows_stay_exact(wire_dtype):
    table, rows, ids = spec(2), random_rows(1000, 7), random_ids(500, 1000)
    with cluster([0, 1]) as c:
        c.add(table, rows)
        pending = c.stores[0].pull([Pull(table.name, ids, wire_dtype=wire_dtype)])
        (found,) = pending.result()
    own = ids < 400
    assert found.dtype == torch.float32
    assert torch.equal(found[own], rows[ids[own]])
    assert torch.equal(found[~own], rows[ids[~own]].to(wire_dtype).float())
    assert pending.bytes_remote == int((~own).sum()) * 7 * 2


@pytest.mark.parametrize("layout", [[0], [1], [0, 1]])
def test_rows_go_where_the_caller_wants_them_and_nothing_else_is_touched(layout):
    table, rows, ids = spec(len(layout)), random_rows(1000, 7), random_ids(60, 1000)
    at = torch.randperm(100, generator=generator())[:60]
    out = torch.full((100, 7), -1.0, dtype=torch.float64)
    with cluster(layout) as c:
        c.add(table, rows)
        (found,) = c.stores[0].pull([Pull(table.name, ids, out=out, at=at)]).result()
    assert found is out
    assert torch.equal(out[at], rows[ids].double())
    rest = torch.ones(100, dtype=torch.bool)
    rest[at] = False
    assert (out[rest] == -1).all()


def test_a_table_is_a_feature_source():
    table, rows, ids = spec(2), random_rows(1000, 7), random_ids(60, 1000)
    with cluster([0, 1], num_ranks=2) as c:
        c.add(table, rows)
        source = c.stores[1].tensor(table.name)
        assert isinstance(source, FeatureSource) and isinstance(source, DistTensor)
        assert (source.shape, source.dtype, len(source)) == ((1000, 7), torch.float32, 1000)
        out = torch.empty(60, 7)
        reading = source.begin_read(ids, out)
        assert reading.result() is out and torch.equal(out, rows[ids])
        assert torch.equal(source.read(ids), rows[ids])
        assert torch.equal(source[990:], rows[990:])


def test_a_store_says_where_rows_are():
    table, rows = spec(5), random_rows(1000, 7)
    ids = torch.tensor([999, 5, 450, 7, 600])
    with cluster([0, 1, 1, 0, 2]) as c:
        c.add(table, rows)
        c.stores[0].create("made", 1000, (2,))
        runs = c.stores[0].locate(table.name, ids)
        made = [[candidate.kind for candidate in part] for part in c.stores[0].candidates("made")]
        source = c.stores[0].tensor(table.name)
        assert source.is_remote and sorted(source.remote_positions(ids).tolist()) == [0, 2]
        assert not source.mutable and c.stores[0].tensor("made").mutable
    assert [(r.part, r.order.tolist(), r.local.tolist()) for r in runs] == [
        (0, [1, 3], [5, 7]),
        (2, [2], [350]),
        (3, [4], [100]),
        (4, [0], [199]),
    ]
    assert [[(p.kind, p.machine) for p in r.candidates] for r in runs] == [
        [("file", 0), ("shard", 0)],
        [("shard", 1)],
        [("file", 0), ("shard", 0)],
        [("shard", 2)],
    ]
    assert made == [["shared", "shard"], ["shard"], ["shard"], ["shared", "shard"], ["shard"]]


def test_alone_nothing_is_remote():
    table, rows, ids = spec(2), random_rows(1000, 7), random_ids(60, 1000)
    with alone(2) as store:
        store.add_local(table, 0, rows[:400])
        store.add_local(table, 1, rows[400:])
        pending = store.pull([Pull(table.name, ids)])
        assert torch.equal(pending.result()[0], rows[ids]) and pending.bytes_remote == 0
        assert not store.tensor(table.name).is_remote
        assert store.tensor(table.name).remote_positions(ids).numel() == 0


@pytest.mark.parametrize(
    ("pull", "message"),
    [
        (Pull("node/paper/x", torch.tensor([1000])), r"'node/paper/x': ids must be in \[0, 1000\), got 1000"),
        (Pull("node/paper/x", torch.tensor([-1])), "got -1"),
        (Pull("node/paper/x", torch.tensor([1.0])), "must be int32 or int64"),
        (Pull("node/paper/x", torch.tensor([1]), out=torch.empty(1, 6)), r"out must be \[1, 7\]"),
        (Pull("node/paper/x", torch.tensor([1]), wire_dtype=torch.int8), "wire_dtype must be one of"),
        (Pull("node/paper/x", torch.tensor([1]), at=torch.tensor([1])), "at must name one row of out per id"),
        (Pull("node/author/x", torch.tensor([1])), "table 'node/author/x' does not exist"),
    ],
)
def test_pulls_that_cannot_be_say_why(pull, message):
    with cluster([0, 1]) as c:
        c.add(spec(2), random_rows(1000, 7))
        with pytest.raises(ValueError, match=message):
            c.stores[0].pull([pull]).result()


def test_a_table_with_another_shape_of_the_same_name_is_refused():
    with alone() as store:
        store.register(spec(1))
        with pytest.raises(ValueError, match="exists and is another one"):
            store.register(spec(1, (8,)))
        with pytest.raises(ValueError, match=r"expected torch.float32 \[1000, 7\]"):
            store.add_local(spec(1), 0, torch.zeros(999, 7))
    with pytest.raises(ValueError, match="needs a client"):
        Store(machine_of_part=[0])


def test_malformed_pulls_are_answered_with_an_error_and_the_shard_lives_on():
    table, rows = spec(2), random_rows(1000, 7)
    plan = [[table.number, 0, 1, -1, -1]]
    bad = [
        [],
        [torch.zeros(3)],
        [torch.zeros(1, 4, dtype=torch.int64)],
        [torch.tensor(plan)],
        [torch.tensor([[table.number, 9, 1, -1, -1]]), torch.tensor([0])],
        [torch.tensor([[table.number, 0, 1, -1, 77]]), torch.tensor([0])],
        [torch.tensor([[table.number, 0, 1, -5, -1]]), torch.tensor([0])],
        [torch.tensor([[12345, 0, 1, -1, -1]]), torch.tensor([0])],
        [torch.tensor(plan), torch.tensor([0.5])],
        [torch.tensor(plan), torch.tensor([400])],
        [torch.tensor(plan), torch.tensor([-1])],
    ]
    with cluster([1, 1]) as c:
        c.add(table, rows)
        for arrays in bad:
            with pytest.raises(ValueError):
                list(c.clients[0].request(1, Kind.PULL, arrays).chunks())
        assert torch.equal(c.stores[0].tensor(table.name)[torch.tensor([5])], rows[5:6])


def test_many_threads_pull_through_one_store():
    table, rows = spec(5), random_rows(1000, 7)
    with cluster([0, 1, 1, 0, 2]) as c, ThreadPoolExecutor(6) as pool:
        c.add(table, rows)

        def work(seed: int) -> bool:
            ids = random_ids(200 + seed, 1000, seed)
            pending = [c.stores[0].pull([Pull(table.name, ids)], batch=seed) for _ in range(3)]
            return all(torch.equal(p.result()[0], rows[ids]) for p in reversed(pending))

        assert all(pool.map(work, range(60), timeout=60))


def test_a_shard_refuses_rows_that_are_not_the_tables():
    shard = Shard(0)
    with pytest.raises(ValueError, match="parts 0 to 1, got 2"):
        shard.add(spec(2), 2, torch.zeros(600, 7))
    with pytest.raises(ValueError, match="must be contiguous"):
        shard.add(spec(2), 0, torch.zeros(7, 400).t())
