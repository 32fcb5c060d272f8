"""What small pulls do to bytes, beside the ops that do the same to tensors."""

from __future__ import annotations

import pytest
import torch

from gnnsys.ops import (
    Bounds,
    MessageFront,
    RawRows,
    address_of,
    bucket_ids,
    gather_bytes,
    num_versions,
    place_bytes,
    split_ids,
)

BOUNDS = [[0, 10], [0, 4, 10], [0, 0, 3, 3, 9, 10], [0, *range(1, 11)]]
NO_FRONT = MessageFront(0, b"")
FRONT = MessageFront(5, b"12345" + bytes(8) + b"678" + bytes(8))  # the number of rows is in the zeros


def with_count(front: bytes, at: list[int], count: int) -> bytes:
    told = bytearray(front)
    for place in at:
        told[place : place + 8] = count.to_bytes(8, "little")
    return bytes(told)


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("local_bytes", [4, 8])
def test_ids_are_split_as_bucket_ids_does(bounds, dtype, local_bytes):
    ids, limits = (
        torch.randint(0, 10, (100,), generator=torch.Generator().manual_seed(1)).to(dtype),
        torch.tensor(bounds),
    )
    fronts = tuple(b"" if part % 2 else bytes([part]) * 20 for part in range(len(bounds) - 1))
    runs, order = split_ids(ids, Bounds.of(limits), local_bytes, 3, fronts)
    wanted = bucket_ids(ids, limits)
    counts = wanted.counts.tolist()
    assert [(part, count) for part, _, count, _ in runs] == [(p, count) for p, count in enumerate(counts) if count]
    assert [first for _, first, _, _ in runs] == [sum(counts[:part]) for part, _, _, _ in runs]
    local = b""
    for part, _, count, message in runs:
        front = with_count(fronts[part], [3], count) if fronts[part] else b""
        assert message[: len(front)] == front
        local += message[len(front) :]
    dtype = [torch.int32, torch.int64][local_bytes // 8]
    assert torch.frombuffer(bytearray(local), dtype=dtype).tolist() == wanted.local.tolist()
    if len(bounds) == 2:
        assert order is None
    else:
        assert torch.frombuffer(order, dtype=torch.int64).tolist() == wanted.order.tolist()


@pytest.mark.parametrize("ids", [[3, 3, 2], [2]])
def test_ids_of_one_part_stay_in_their_order(ids):
    (run,), order = split_ids(torch.tensor(ids), Bounds.of(limits := torch.tensor([0, 2, 5])), 8, 0, (b"", b""))
    assert (run[:3], order, limits.numel()) == ((1, 0, len(ids)), None, 3)
    assert torch.frombuffer(run[3], dtype=torch.int64).tolist() == [each - 2 for each in ids]


@pytest.mark.parametrize("bad", [-1, 10, 1 << 40, -(1 << 40)])
def test_an_id_out_of_range_is_left_to_others(bad):
    limits = torch.tensor([0, 4, 10])
    assert split_ids(torch.tensor([1, bad, 3]), Bounds.of(limits), 4, 0, (b"", b"")) is None


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (300,)])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shift", [0, 3])
@pytest.mark.parametrize("guarded", [False, True])
def test_rows_are_gathered_from_ids_at_any_address(shape, id_dtype, shift, guarded):
    rows = torch.rand(50, *shape)
    versions = torch.zeros(num_versions(50), dtype=torch.int32) if guarded else None
    ids = torch.randint(0, 50, (20,), generator=torch.Generator().manual_seed(2)).to(id_dtype)
    message = bytearray(shift) + ids.numpy().tobytes()
    raw = RawRows.of(rows, versions)
    found = gather_bytes(raw, address_of(message) + shift, id_dtype.itemsize, 20, FRONT)
    front = FRONT.front
    assert raw.row_bytes * 20 == rows[ids.long()].nbytes
    assert found[: len(front)] == with_count(front, [5, len(front) - 8], 20)
    assert found[len(front) :] == rows[ids.long()].numpy().tobytes()
    assert gather_bytes(raw, address_of(message) + shift, id_dtype.itemsize, 20, NO_FRONT) == found[len(front) :]


@pytest.mark.parametrize("bad", [-1, 50, 1 << 30])
def test_rows_that_there_are_none_of_are_not_gathered(bad):
    values, ids = torch.rand(50, 3), bytearray(torch.tensor([0, bad, 1]).numpy().tobytes())
    assert gather_bytes(RawRows.of(values), address_of(ids), 8, 3, NO_FRONT) is None


def test_a_row_that_is_being_written_is_left_to_others():
    versions = torch.zeros(num_versions(100), dtype=torch.int32)
    versions[0] = 1  # odd: somebody writes one of rows 0 to 63
    rows, ids = torch.rand(100, 3), bytearray(torch.tensor([70, 5]).numpy().tobytes())
    raw = RawRows.of(rows, versions)
    assert gather_bytes(raw, address_of(ids), 8, 2, NO_FRONT) is None
    assert gather_bytes(raw, address_of(ids), 8, 1, NO_FRONT) == rows[70].numpy().tobytes()


def reply_of(rows: torch.Tensor) -> tuple[bytearray, bytearray]:
    """A reply with these rows as it is made, and its front alone."""
    ids = bytearray(torch.arange(rows.shape[0]).numpy().tobytes())
    reply = gather_bytes(RawRows.of(rows), address_of(ids), 8, rows.shape[0], FRONT)
    assert reply is not None
    return reply, reply[: len(FRONT.front)]


@pytest.mark.parametrize("with_order", [False, True])
@pytest.mark.parametrize("is_inside", [False, True])
def test_rows_are_put_in_place(with_order, is_inside):
    rows, out = torch.rand(7, 5), torch.zeros(9, 5)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(3))[:7]
    places = bytearray(b"behind 2 others "[:16] + order.numpy().tobytes()) if with_order else None
    reply, front = reply_of(rows)
    reply[:3] = front[:3] = b"xyz"  # which are skipped
    memory = bytearray(rows.numpy().tobytes())
    message, beside = (reply, None) if is_inside else (front, memory)
    assert place_bytes(message, beside, 7, 20, places, 2, out, 3, FRONT)
    wanted = torch.zeros(9, 5)
    wanted[order if with_order else torch.arange(7)] = rows
    assert torch.equal(out, wanted)


def test_places_out_of_range_leave_everything_as_it_was():
    out, (reply, _) = torch.zeros(3, 5), reply_of(torch.rand(3, 5))
    for order in ([0, 3, 1], [0, -1, 1]):
        places = bytearray(torch.tensor(order).numpy().tobytes())
        assert place_bytes(reply, None, 3, 20, places, 0, out, 0, FRONT) is None
    assert place_bytes(reply_of(torch.rand(4, 5))[0], None, 4, 20, None, 0, out, 0, FRONT) is None
    assert not out.any()


def test_other_replies_leave_everything_as_it_was():
    out, rows = torch.zeros(3, 5), torch.rand(3, 5)
    reply, front = reply_of(rows)
    memory = bytearray(rows.numpy().tobytes())
    for at in range(len(front)):
        changed = bytearray(reply)
        changed[at] ^= 1
        assert place_bytes(changed, None, 3, 20, None, 0, out, 0, FRONT) is None
        assert place_bytes(changed[: len(front)], memory, 3, 20, None, 0, out, 0, FRONT) is None
    for message, beside in ((reply[:-1], None), (reply + b"0", None), (front[:-1], None), (front, memory[:-1]),
                            (front, None), (reply, memory), (bytearray(b"1"), None)):  # fmt: skip
        assert place_bytes(message, beside, 3, 20, None, 0, out, 0, FRONT) is None
    assert not out.any()
    assert place_bytes(reply, None, 3, 20, None, 0, out, 0, FRONT)


def test_wrong_arguments_are_errors():
    from gnnsys.ops._library import plain

    with pytest.raises(TypeError):
        plain.split_ids(1, 2)
    with pytest.raises(TypeError):
        plain.split_ids()
    with pytest.raises(TypeError):
        plain.place_bytes("1", *range(11), b"")
    with pytest.raises(ValueError, match="not below zero"):
        plain.split_ids(0, 8, -1, 0, 1, 8, 0, (b"",))
    with pytest.raises(MemoryError):
        plain.split_ids(0, 8, 1 << 61, 0, 1, 8, 0, (b"",))
    with pytest.raises(TypeError, match="an entry for each part"):
        plain.split_ids(0, 8, 0, 0, 1, 8, 0, ())
    ids, bounds = torch.tensor([0]), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="no room"):
        split_ids(ids, Bounds.of(bounds), 8, 3, (b"1234567890",))
    with pytest.raises(TypeError):
        split_ids(ids, Bounds.of(bounds), 8, 3, ("text",))
