"""Masks as arrays, and messages in shared memory: what is written is read, and nothing else is."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading

import pytest
import torch

from gnnsys.explain import Mailbox, Masks, make_masks, masks_from_arrays, masks_to_arrays


def some_masks(num_nodes: int = 5, num_columns: int = 3) -> Masks:
    ids = torch.arange(num_nodes) * 7
    sn = torch.arange(1, num_nodes + 1, dtype=torch.uint8)
    return Masks(4, 2, ids, sn, torch.linspace(0, 1, num_columns), position=90, divergence=0.25, seconds=1.5)


def same(left: Masks, right: Masks) -> bool:
    pairs = zip(dataclasses.astuple(left), dataclasses.astuple(right), strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize("num_nodes", [0, 5])
def test_masks_come_back_from_their_arrays(num_nodes: int):
    masks = some_masks(num_nodes)
    assert same(masks_from_arrays(masks_to_arrays(masks)), masks)


@pytest.mark.parametrize(
    ("place", "array", "text"),
    [
        (0, torch.zeros(7, dtype=torch.int64), "head of masks"),
        (0, torch.tensor([9, 4, 2, 90, 5, 3, 0, 0]), "format 1, got 9"),
        (0, torch.tensor([1, -1, 2, 90, 5, 3, 0, 0]), "version -1"),
        (0, torch.tensor([1, 4, 2, 90, 1 << 50, 3, 0, 0]), "ids of masks"),
        (1, torch.arange(5).flip(0), "ascend"),
        (1, torch.arange(5, dtype=torch.int32), "int64"),
        (2, torch.zeros(5, dtype=torch.uint8), r"\[1, 255\]"),
        (2, torch.ones(4, dtype=torch.uint8), r"uint8 \[5\]"),
        (3, torch.tensor([0.0, float("nan"), 1.0]), r"\[0, 1\]"),
        (3, torch.ones(3, dtype=torch.float64), "float32"),
    ],
)
def test_arrays_that_are_no_masks_are_refused(place: int, array: torch.Tensor, text: str):
    arrays = masks_to_arrays(some_masks())
    arrays[place] = array
    with pytest.raises(ValueError, match=text):
        masks_from_arrays(arrays)
    with pytest.raises(ValueError, match="4 arrays"):
        masks_from_arrays(arrays[:3])


def test_importances_of_any_scale_become_bytes_that_keep_their_order():
    values = torch.tensor([0.0, 1e-9, 3.0, 2.0, float("nan"), -1.0])
    masks = make_masks(0, torch.arange(6), values, torch.tensor([5.0, 0.0]))
    assert masks.sn.tolist()[2] == 255 and masks.sn[2] >= masks.sn[3] > masks.sn[0] == masks.sn[4] == masks.sn[5] == 1
    assert masks.sf.tolist() == [1.0, 0.0]


def test_the_columns_with_the_highest_numbers_are_chosen_and_ties_go_to_the_first():
    masks = dataclasses.replace(some_masks(), sf=torch.tensor([0.5, 0.1, 0.9, 0.5]))
    assert masks.columns(0.5).tolist() == [0, 2] and masks.columns(1.0).tolist() == [0, 1, 2, 3]
    assert masks.columns(1e-6).tolist() == [2]
    with pytest.raises(ValueError, match=r"\(0, 1\]"):
        masks.columns(0.0)


def test_a_mailbox_gives_the_newest_message_to_another_process_of_the_machine():
    box = Mailbox.create(1000)
    assert box.read() is None
    box.write([torch.arange(3), torch.empty(0)])
    box.write([torch.arange(4), torch.ones(2, dtype=torch.bfloat16)])
    child = os.fork()
    if child == 0:
        found = Mailbox.open(box.address()).read()
        right = found is not None and found[0] == 2 and torch.equal(found[1][0], torch.arange(4))
        os._exit(0 if right and found is not None and found[1][1].dtype == torch.bfloat16 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_message_that_is_too_large_is_refused_and_leaves_the_one_before():
    box = Mailbox.create(100)
    box.write([torch.arange(3)])
    with pytest.raises(ValueError, match="does not fit"):
        box.write([torch.arange(1000)])
    found = box.read()
    assert found is not None and found[1][0].tolist() == [0, 1, 2]


def test_a_writer_that_was_killed_in_the_middle_leaves_the_message_before():
    box = Mailbox.create(1000)
    box.write([torch.zeros(50)])
    slot = box._slots[0]  # the next message's
    slot[0] = 0
    box._memory[box._slot_at(0) + 64 : box._slot_at(0) + 164] = bytes(range(100))
    found = box.read()
    assert found is not None and found[0] == 1
    assert box.write([torch.ones(50)]) == 2  # by the writer that takes its place
    found = box.read()
    assert found is not None and found[0] == 2 and bool((found[1][0] == 1).all())


def test_a_message_in_the_making_is_told_by_its_number_and_by_its_checksum():
    box = Mailbox.create(1000)
    box.write([torch.zeros(50)])
    box._slots[1][0] = 0
    assert box.read() is None and box.torn == 1
    box._slots[1][0] = 1
    assert box.read() is not None
    box._memory[box._slot_at(1) + 150] = 7  # a byte of the message
    assert box.read() is None and box.torn == 2


def test_no_reader_ever_sees_half_a_message():
    box = Mailbox.create(100_000)
    stop, seen = threading.Event(), []

    def write() -> None:
        value = 0
        while not stop.is_set():
            value += 1
            box.write([torch.full((10_000,), value, dtype=torch.int64)])

    writer = threading.Thread(target=write)
    writer.start()
    try:
        reader = Mailbox.open(box.address())
        while len(seen) < 200:
            if (found := reader.read()) is not None:
                number, (values,) = found
                assert bool((values == number).all())
                seen.append(number)
    finally:
        stop.set()
        writer.join()
    assert seen == sorted(seen)


def test_a_mailbox_that_is_another_one_is_not_opened():
    box = Mailbox.create(1000)
    with pytest.raises(ValueError, match="another mailbox"):
        Mailbox.open(box.address() | {"token": 1})
    with pytest.raises(ValueError, match="no mailbox"):
        Mailbox.open(box.address() | {"capacity": 128})
    with pytest.raises(ValueError, match="cannot be reached"):
        Mailbox.open(box.address() | {"fd": 1_000_000})


def test_readers_are_told_that_a_mailbox_is_closed_or_its_owner_killed():
    box = Mailbox.create(1000)
    box.write([torch.arange(3)])
    reader = Mailbox.open(address := box.address())
    assert not reader.is_left and not box.is_left
    box.close()
    box.close()
    assert reader.is_left and box.is_left and reader.read() is not None
    with pytest.raises(ValueError, match=r"cannot be reached|is closed|another|no mailbox"):
        Mailbox.open(address)
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        owned = Mailbox.create(1000)
        os.write(tell, json.dumps(owned.address()).encode())
        signal.pause()
    reader = Mailbox.open(json.loads(os.read(told, 4096)))
    assert not reader.is_left
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert reader.is_left
    os.close(told)
    os.close(tell)


def test_masks_of_a_slice_are_added_to_those_before():
    before = Masks(1, 0, torch.tensor([2, 3, 7]), torch.tensor([20, 30, 70], dtype=torch.uint8), torch.ones(2))
    later = Masks(2, 0, torch.tensor([1, 3]), torch.tensor([11, 33], dtype=torch.uint8), torch.zeros(2))
    both = later.over(before)
    assert both.ids.tolist() == [1, 2, 3, 7] and both.sn.tolist() == [11, 20, 33, 70]
    assert both.version == 2 and later.over(None) is later
    assert both.sf.tolist() == [0.5, 0.5]  # two nodes of four have it from before
