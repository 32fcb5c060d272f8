"""What small pulls do to bytes, beside the ops that do the same to tensors."""

from __future__ import annotations

import pytest
import torch

from gnnsys.ops import RawRows, address_of, bucket_ids, gather_bytes, num_versions, place_bytes, split_ids

BOUNDS = [[0, 10], [0, 4, 10], [0, 0, 3, 3, 9, 10], [0, *range(1, 11)]]


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("local_bytes", [4, 8])
def test_ids_are_split_as_bucket_ids_does(bounds, dtype, local_bytes):
    ids, limits = (
        torch.randint(0, 10, (100,), generator=torch.Generator().manual_seed(1)).to(dtype),
        torch.tensor(bounds),
    )
    counts, order, local = split_ids(ids, limits, local_bytes)
    wanted = bucket_ids(ids, limits)
    assert counts == tuple(wanted.counts.tolist())
    assert torch.frombuffer(local, dtype=[torch.int32, torch.int64][local_bytes // 8]).tolist() == wanted.local.tolist()
    if len(bounds) == 2:
        assert order is None
    else:
        assert torch.frombuffer(order, dtype=torch.int64).tolist() == wanted.order.tolist()


@pytest.mark.parametrize("ids", [[3, 3, 2], [2]])
def test_ids_of_one_part_stay_in_their_order(ids):
    counts, order, local = split_ids(torch.tensor(ids), torch.tensor([0, 2, 5]), 8)
    assert (counts, order) == ((0, len(ids)), None)
    assert torch.frombuffer(local, dtype=torch.int64).tolist() == [each - 2 for each in ids]


@pytest.mark.parametrize("bad", [-1, 10, 1 << 40, -(1 << 40)])
def test_an_id_out_of_range_is_left_to_others(bad):
    assert split_ids(torch.tensor([1, bad, 3]), torch.tensor([0, 4, 10]), 4) is None


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
    found = gather_bytes(raw, address_of(message) + shift, id_dtype.itemsize, 20, 24)
    assert raw.row_bytes * 20 == rows[ids.long()].nbytes
    assert torch.equal(torch.frombuffer(found, dtype=torch.float32, offset=24).view(20, *shape), rows[ids.long()])


@pytest.mark.parametrize("bad", [-1, 50, 1 << 30])
def test_rows_that_there_are_none_of_are_not_gathered(bad):
    rows, ids = RawRows.of(torch.rand(50, 3)), bytearray(torch.tensor([0, bad, 1]).numpy().tobytes())
    assert gather_bytes(rows, address_of(ids), 8, 3, 0) is None


def test_a_row_that_is_being_written_is_left_to_others():
    versions = torch.zeros(num_versions(100), dtype=torch.int32)
    versions[0] = 1  # odd: somebody writes one of rows 0 to 63
    rows, ids = torch.rand(100, 3), bytearray(torch.tensor([70, 5]).numpy().tobytes())
    raw = RawRows.of(rows, versions)
    assert gather_bytes(raw, address_of(ids), 8, 2, 0) is None
    assert gather_bytes(raw, address_of(ids), 8, 1, 0) == rows[70].numpy().tobytes()


@pytest.mark.parametrize("with_order", [False, True])
def test_rows_are_put_in_place(with_order):
    rows, out = torch.rand(7, 5), torch.zeros(9, 5)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(3))[:7]
    places, memory = bytearray(order.numpy().tobytes()), bytearray(rows.numpy().tobytes())
    assert place_bytes(address_of(memory), 7, 20, address_of(places) if with_order else 0, out)
    wanted = torch.zeros(9, 5)
    wanted[order if with_order else torch.arange(7)] = rows
    assert torch.equal(out, wanted)


def test_places_out_of_range_leave_everything_as_it_was():
    out, memory = torch.zeros(3, 5), bytearray(3 * 20)
    memory[:] = b"\xff" * len(memory)
    for order in ([0, 3, 1], [0, -1, 1]):
        places = bytearray(torch.tensor(order).numpy().tobytes())
        assert place_bytes(address_of(memory), 3, 20, address_of(places), out) is None
    assert place_bytes(address_of(memory), 4, 20, 0, out) is None
    assert not out.any()


def test_wrong_arguments_are_errors():
    from gnnsys.ops._library import plain

    with pytest.raises(TypeError):
        plain.split_ids(1, 2)
    with pytest.raises(TypeError):
        plain.place_bytes("1", 2, 3, 4, 5, 6)
    with pytest.raises(ValueError, match="not below zero"):
        plain.split_ids(0, 8, -1, 0, 1, 8)
    with pytest.raises(MemoryError):
        plain.split_ids(0, 8, 1 << 61, 0, 1, 8)
