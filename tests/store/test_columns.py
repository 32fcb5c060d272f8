"""Rows by some of their columns: made whole again with what stands in for the others, wherever they were read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from gnnsys.ops import fill_columns, widen_rows
from gnnsys.store import (
    ColumnChoice,
    ColumnSource,
    DeviceWindow,
    InFlightWindow,
    ReadContext,
    SharedInFlight,
    TensorSource,
)
from gnnsys.store.columns import begin_narrowed
from gnnsys.store.message_plan import columns_from_wire, columns_to_wire
from tests.sampling.machines import homogeneous, machines
from tests.store.test_device_table import HOST, IDS, on_host

COLUMNS, WIDTH = torch.tensor([1, 3]), 4


def choice_of(own: range, fill: Tensor | None = None) -> ColumnChoice:
    values = torch.tensor([5.0, 6.0, 7.0, 8.0]) if fill is None else fill
    return ColumnChoice("x", (own.start, own.stop), COLUMNS, values)


def expected(table: Tensor, choice: ColumnChoice, ids: Tensor) -> Tensor:
    rows = table[ids].clone()
    for number, node in enumerate(ids.tolist()):
        if not choice.own[0] <= node < choice.own[1]:
            kept = rows[number, choice.columns].clone()
            rows[number] = choice.fill
            rows[number, choice.columns] = kept
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_widened_rows_have_their_columns_and_in_the_others_what_was_given(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(1)
    rows = torch.randint(-9, 9, (7, 9), generator=g).to(dtype)
    choice = ColumnChoice("x", (0, 0), torch.tensor([0, 2, 3, 8]), torch.arange(9).to(dtype))
    at = torch.tensor([6, 1, 3])
    out = torch.full((8, 9), -1).to(dtype)
    before = out.clone()
    narrow = rows[:3, choice.columns].contiguous()
    widen_rows(narrow, out, at, choice.place, choice.dropped, choice.values(dtype))
    before[at] = expected(rows, choice, torch.arange(3))
    assert torch.equal(out, before)
    whole = rows.clone()
    is_own = torch.tensor([True, False] * 3 + [True])
    fill_columns(whole, is_own, choice.dropped, choice.values(dtype))
    other = torch.where(is_own[:, None], rows, expected(rows, choice, torch.arange(7)))
    assert torch.equal(whole, other)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("owner", [[0, 0, 0], [0, 1, 0], [0, 1, 2]])
def test_a_source_of_columns_brings_them_from_everywhere(tmp_path: Path, owner: list[int], in_place: bool) -> None:
    with machines(homogeneous(), tmp_path / "p", 3, machine_of_part=owner) as graphs:
        for mine in graphs:
            table = mine.store.tensor("node/node/x")
            rows, choice = table[torch.arange(120)], choice_of(mine.book.part_range(1))
            for source in (table, TensorSource(rows)):
                narrow = ColumnSource(source, COLUMNS)
                assert narrow.shape == (120, 2) and narrow.is_remote == source.is_remote
                for ids in (IDS, IDS[:0], torch.arange(120)):
                    context = ReadContext()
                    read = begin_narrowed(source, narrow, choice, ids, context, in_place=in_place)
                    context.send()
                    assert torch.equal(read.result().widen(), expected(rows, choice, ids))
                scattered = torch.zeros(10, 2)
                context = ReadContext()
                begun = narrow.begin(IDS, scattered, context, at=torch.arange(8) + 1)
                context.send()
                assert torch.equal(begun.result()[1:9], rows[IDS][:, COLUMNS])


@pytest.mark.parametrize("owner", [[0, 0, 0, 0], [0, 1, 0, 1], [0, 1, 2, 3]])
def test_a_device_narrows_rows_that_are_here_or_cached_like_those_that_come(tmp_path: Path, owner: list[int]) -> None:
    with machines(homogeneous(), tmp_path / "p", 4, machine_of_part=owner) as graphs:
        for mine in graphs:
            table, rows = mine.store.tensor("node/node/x"), on_host(mine, "node/node/x")
            choice, all_rows = choice_of(mine.book.part_range(2)), table[torch.arange(120)]
            is_here = 2 in mine.parts_here  # else own rows are among those that come, and all of them come whole
            remote = SharedInFlight(ColumnSource(table, COLUMNS), InFlightWindow(2)) if is_here else table
            narrowed = rows.narrowed(choice, remote)
            for cached in (torch.empty(0).long(), torch.tensor([0, 3, 80, 118, 44, 119])):
                rows.fill_cache(cached)
                for ids in (IDS, torch.arange(120)):
                    context = ReadContext()
                    read = narrowed.begin(ids, None, context)
                    context.send()
                    assert torch.equal(read.result(), expected(all_rows, choice, ids))
                    assert torch.equal(rows.read(ids), all_rows[ids])  # the cache is whole
                    left_out = context.counts["rows_asked"] * 4 * (WIDTH - COLUMNS.numel())
                    assert context.counts["bytes_left_out"] == (left_out if is_here else 0)


def test_choices_are_equal_where_they_make_the_same_rows_and_bad_ones_say_why() -> None:
    choice = choice_of(range(3, 9))
    assert choice.key == ColumnChoice.of_state(choice.state()).key
    different = [choice_of(range(3, 8)), choice_of(range(3, 9), torch.zeros(4))]
    different.append(ColumnChoice("x", (3, 9), torch.tensor([1, 2]), choice.fill))
    different.append(ColumnChoice("y", (3, 9), COLUMNS, choice.fill))
    assert len({choice.key, *(each.key for each in different)}) == 5
    for columns, told in (
        (torch.tensor([1, 4]), r"in \[0, 4\)"),
        (torch.tensor([2, 1]), "must ascend"),
        (torch.tensor([1, 1]), "must ascend"),
        (torch.tensor([1.0]), "must be int64"),
        (torch.tensor([], dtype=torch.int64), "at least one"),
    ):
        with pytest.raises(ValueError, match=told):
            ColumnChoice("x", (0, 3), columns, torch.zeros(4))


def test_a_device_keeps_narrow_rows_of_one_choice_and_lets_go_of_those_before(tmp_path: Path) -> None:
    with machines(homogeneous(), tmp_path / "p", 2) as graphs:
        mine = graphs[0]
        table, rows, window = mine.store.tensor("node/node/x"), on_host(mine, "node/node/x"), DeviceWindow(HOST, 2)
        own, all_rows = mine.book.part_range(0), table[torch.arange(120)]
        for fill in (torch.zeros(4), torch.ones(4)):
            choice = choice_of(own, fill)
            shared = rows.narrowed(choice, ColumnSource(table, COLUMNS)).sharing(window, "node")
            counts = []
            for ids in (IDS, IDS, torch.arange(120)):
                context = ReadContext()
                read = shared.begin(ids, None, context)
                context.send()
                assert torch.equal(read.result(), expected(all_rows, choice, ids))
                counts.append(context.counts["rows_asked"])
            assert counts[0] > 0 and counts[1] == 0  # the second time the device has them
            assert len(window._rings) == 1


def test_columns_travel_as_bits_where_these_are_fewer_bytes_and_say_the_same() -> None:
    generator = torch.Generator().manual_seed(0)
    for width in (1, 7, 8, 9, 64, 513):
        for count in {1, width // 2, width - 1, width} - {0}:
            columns = torch.randperm(width, generator=generator)[:count].sort().values
            sent = columns_to_wire(columns, width)
            assert sent is not None and sent.nbytes == min(columns.nbytes, -(-width // 8))
            assert torch.equal(columns_from_wire(sent, width).long(), columns)
    assert columns_to_wire(None, 8) is None
    for other in (torch.arange(64).flip(0), torch.zeros(64, dtype=torch.int64), torch.arange(64) + 1):
        assert columns_to_wire(other, 64) is other  # lists that bits cannot say, and what is refused elsewhere


def test_bits_that_are_no_columns_are_refused() -> None:
    for bad in (torch.ones(2, dtype=torch.uint8), torch.ones(1), torch.ones(1, 1, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="malformed request: columns must be"):
            columns_from_wire(bad, 5)
    with pytest.raises(ValueError, match="column 5 of a row that has 5"):
        columns_from_wire(torch.tensor([0b100001], dtype=torch.uint8), 5)
