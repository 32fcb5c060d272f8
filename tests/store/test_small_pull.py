"""Pulls of few rows, which travel as bytes: the rows are those of one dense tensor, the errors of the ordinary way."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import zmq

from gnnsys.comm import HEADER_BYTES, Kind, Limits, Request, wire
from gnnsys.store import Pull, Shard, TableSpec
from gnnsys.store.message_plan import SMALL_BYTES, SMALL_FILE_ROWS, SMALL_ROWS
from gnnsys.store.pull import RenewedPull
from gnnsys.store.small_pull import SmallPull
from tests.store.cluster import Cluster, cluster, random_ids, random_rows

BOUNDS = (0, 400, 1000)


def spec(shape: tuple[int, ...] = (7,), dtype: torch.dtype = torch.float32) -> TableSpec:
    return TableSpec("node/paper/x", shape, dtype, BOUNDS)


@contextmanager
def counted(layout: list[int], **options: Any) -> Iterator[tuple[Cluster, list[int]]]:
    """A cluster that answers small pulls from their bytes, and how many rows each of those had."""
    with cluster(layout, short=True, **options) as c:
        answered: list[int] = []
        for shard, server in zip(c.shards, c.servers, strict=True):

            def note(header: Any, front: memoryview, shard: Shard = shard) -> Any:
                reply = shard.answer_small(header, front)
                if reply is not None:
                    answered.append(header.request_id)
                return reply

            server._short[Kind.PULL] = note
        yield c, answered


@pytest.mark.parametrize("layout", [[0, 1], [1, 0], [1, 1], [1, 2]])
@pytest.mark.parametrize("count", [1, 2, 100, 200, SMALL_ROWS])
def test_few_rows_are_those_of_the_dense_tensor(layout, count):
    table, rows = spec(), random_rows(1000, 7)
    with counted(layout) as (c, answered):
        c.add(table, rows)
        for ids in (
            random_ids(count, 1000),
            random_ids(count, 1000).int(),
            random_ids(count, 400),
            torch.full((count,), 999),
        ):
            out = torch.empty(count, 7)
            pull = c.stores[0].pull([Pull(table.name, ids, out)])
            assert pull.result()[0] is out
            assert torch.equal(out, rows[ids.long()])
            assert torch.equal(c.stores[0].tensor(table.name)[ids], rows[ids.long()])
            away = sum(
                int(((ids >= a) & (ids < b)).sum())
                for (a, b), m in zip(itertools.pairwise(BOUNDS), layout, strict=True)
                if m
            )
            assert (pull.rows_remote, pull.bytes_remote, pull.bytes_local) == (away, 28 * away, 28 * (count - away))
        assert answered or layout == [1, 1] or count > SMALL_FILE_ROWS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (1024,)])
def test_few_rows_of_any_shape_and_dtype_travel_as_bytes(shape, dtype):
    table, rows = spec(shape, dtype), random_rows(1000, *shape, dtype=dtype)
    with counted([0, 1]) as (c, answered):
        c.add(table, rows)
        for count in (1, 15, 16, 17, 60):  # around what lies in the first frame
            ids = 400 + random_ids(count, 600)
            pull = c.stores[0].pull([Pull(table.name, ids)])
            assert isinstance(pull, SmallPull)
            assert torch.equal(pull.result()[0], rows[ids])
        assert answered
        assert len(answered) + len(c.pulls) == 5  # the server's thread hands one over that comes right behind another


def test_rows_without_bytes_are_pulled():
    table = spec((0,))
    with counted([0, 1]) as (c, _):
        c.add(table, torch.empty(1000, 0))
        assert c.stores[0].pull([Pull(table.name, 400 + random_ids(10, 600))]).result()[0].shape == (10, 0)


def test_an_output_that_was_changed_while_rows_were_on_their_way_is_not_written_beyond_its_end():
    table, rows = spec((64,)), random_rows(1000, 64)
    with counted([0, 1]) as (c, _):
        c.add(table, rows)
        out, guarded = torch.empty(10, 64), torch.full((10, 64), -1.0)
        pull = c.stores[0].pull([Pull(table.name, 400 + random_ids(10, 600), out)])
        out.set_(guarded.view(-1)[:80].view(10, 8))  # type: ignore[call-overload]
        with pytest.raises(ValueError):
            pull.result()
        assert bool((guarded.view(-1)[80:] == -1).all())


def test_more_rows_and_other_pulls_go_the_ordinary_way():
    table, rows = spec((512,)), random_rows(1000, 512)
    with cluster([0, 1], short=True) as c:
        c.add(table, rows)
        ids, store = 400 + random_ids(20, 600), c.stores[0]
        many = 400 + random_ids(SMALL_BYTES // 2048 + 1, 600)
        wide = torch.zeros(40, 512)
        for pull, wanted in (
            (Pull(table.name, many), rows[many]),
            (Pull(table.name, ids, columns=torch.tensor([3, 1])), rows[ids][:, [3, 1]]),
            (Pull(table.name, ids, wire_dtype=torch.bfloat16), rows[ids].bfloat16().float()),
            (Pull(table.name, ids, out=wide, at=torch.arange(0, 40, 2)), None),
            (Pull(table.name, random_ids(40, 1000)[::2]), rows[random_ids(40, 1000)[::2]]),
        ):
            under_way = store.pull([pull])
            assert isinstance(under_way, RenewedPull)
            found = under_way.result()[0]
            assert torch.equal(found, wide if wanted is None else wanted)
        assert torch.equal(wide[::2], rows[ids])


@pytest.mark.parametrize("bad", [-1, 1000, 1 << 40])
def test_an_id_out_of_range_is_refused_in_the_same_words(bad):
    table = spec()
    with cluster([0, 1], short=True) as c:
        c.add(table, random_rows(1000, 7))
        with pytest.raises(ValueError, match=r"table 'node/paper/x': ids must be in \[0, 1000\), got"):
            c.stores[0].pull([Pull(table.name, torch.tensor([500, bad]))])
        with pytest.raises(ValueError, match=r"must be int32 or int64 \[n\]"):
            c.stores[0].pull([Pull(table.name, torch.tensor([[500]]), torch.empty(1, 1, 7))])
        with pytest.raises(ValueError, match="out must be"):
            c.stores[0].pull([Pull(table.name, torch.tensor([500]), torch.empty(2, 7))])


def test_a_row_is_read_after_it_was_pushed_and_a_table_is_found_again_that_was_made_anew():
    with counted([1, 1], num_ranks=2) as (c, answered):
        mine, other = c.stores[0], c.stores[1]
        for number in range(3):
            mine.create("t", 1000, (7,), init=float(number))
            ids = random_ids(50, 400)
            assert torch.equal(other.tensor("t")[ids], torch.full((50, 7), float(number)))
            assert torch.equal(mine.tensor("t")[ids], torch.full((50, 7), float(number)))
            mine.push("t", ids, torch.full((50, 7), 9.0))
            assert torch.equal(mine.tensor("t")[ids], torch.full((50, 7), 9.0))
            mine.drop("t")
        with pytest.raises(ValueError, match="table 't' does not exist"):
            mine.tensor("t")[ids]
        assert answered


def test_rows_are_whole_while_they_are_written():
    with counted([1, 1], num_ranks=2) as (c, answered), ThreadPoolExecutor(1) as writer:
        c.stores[0].create("t", 200, (256,))
        ids = torch.arange(100)

        def write() -> None:
            for number in range(60):
                c.stores[0].push("t", ids, torch.full((100, 256), float(number))).result()

        written = writer.submit(write)
        seen = set()
        while not written.done():
            rows = c.stores[0].pull([Pull("t", ids.clone())]).result()[0]
            assert torch.equal(rows, rows[:, :1].expand_as(rows))
            seen.add(float(rows[0, 0]))
        written.result()
        assert answered
        assert len(seen) > 1


def shard_of(table: TableSpec, rows: torch.Tensor) -> Shard:
    shard = Shard(1)
    for part in range(table.num_parts):
        shard.add(table, part, rows[BOUNDS[part] : BOUNDS[part + 1]])
    return shard


def by_the_handler(shard: Shard, front: bytes) -> Any:
    """What the ordinary way answers to a message: the frames of its one reply, or the error."""
    header = wire.read_header(front, Limits())
    try:
        message = wire.read_message(header, [zmq.Frame(front)], Limits())
        replies = list(shard.handlers()[Kind.PULL](Request(message, 1e12)))
    except (ValueError, wire.WireError) as error:
        return error
    assert len(replies) == 1
    return [bytes(frame) for frame in wire.encode(wire.reply_header(header), replies[0].arrays, None, Limits())]


def from_bytes(shard: Shard, front: bytes) -> Any:
    header = wire.read_header(front, Limits())
    reply = shard.answer_small(header, memoryview(bytearray(front)))
    if reply is None:
        return None
    frames, num_arrays = reply
    wire.put_header(frames[0], wire.reply_header(header), num_arrays)
    return [bytes(frame) for frame in frames]


def request_for(table: TableSpec, part: int, ids: torch.Tensor, **header: Any) -> bytes:
    plan = torch.tensor([[table.number, part, 1, -1, -1]])
    front = wire.encode(wire.make_header(Kind.PULL, 1, timeout_us=10**6, **header), [plan, ids], None, Limits())[0]
    assert isinstance(front, bytes)
    return front


@pytest.mark.parametrize("count", [1, 63, 64, 65, 256])
def test_a_reply_from_bytes_is_the_handlers_reply_bit_by_bit(count):
    table, rows = spec((256,)), random_rows(1000, 256)
    shard = shard_of(table, rows)
    for dtype in (torch.int32, torch.int64):
        front = request_for(table, 1, random_ids(count, 600).to(dtype), priority=3, batch=5)
        assert from_bytes(shard, front) == by_the_handler(shard, front)
    shard.close()


def test_no_damaged_request_is_answered_from_bytes_in_another_way_than_by_the_handler():
    table, rows = spec(), random_rows(1000, 7)
    shard = shard_of(table, rows)
    whole = request_for(table, 1, random_ids(5, 600))
    num_answered = 0
    for at in range(HEADER_BYTES, len(whole)):
        for change in (1, 0x80, 0xFF):
            front = whole[:at] + bytes([whole[at] ^ change]) + whole[at + 1 :]
            answered = from_bytes(shard, front)
            if answered is not None:
                num_answered += 1
                assert answered == by_the_handler(shard, front)
    assert 0 < num_answered < 3 * (len(whole) - HEADER_BYTES)
    for front in (whole[:-1], whole + b"\0", whole[: HEADER_BYTES + 3]):
        assert from_bytes(shard, front) is None
    for field in ({"num_arrays": 3}, {"num_option_bytes": 4}):
        header = wire.read_header(whole, Limits())._replace(**field)
        assert shard.answer_small(header, memoryview(bytearray(whole))) is None
    shard.close()


def test_requests_that_are_not_small_are_not_answered_from_bytes():
    table, rows = spec((512,)), random_rows(1000, 512)
    shard = shard_of(table, rows)
    for ids in (
        random_ids(SMALL_ROWS + 1, 600),
        random_ids(SMALL_BYTES // 2048 + 1, 600),
        torch.empty(0, dtype=torch.int64),
    ):
        assert from_bytes(shard, request_for(table, 1, ids)) is None
    for table_of, part in ((table, 2), (TableSpec("none", (1,), torch.float32, BOUNDS), 0)):
        assert from_bytes(shard, request_for(table_of, part, random_ids(5, 100))) is None
    shard.close()
