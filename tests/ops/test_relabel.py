"""Relabelling against a dictionary."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from gnnsys.ops import CSC, BufferPool, IdTable, compact, compact_scratch, sample_neighbors
from tests.support.grid import grid


class DictTable:
    """The oracle: numbers by order of first sight."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.count = 0

    def insert_seeds(self, ids: Tensor) -> None:
        for offset, i in enumerate(ids.tolist()):
            self.numbers.setdefault(i, self.count + offset)
        self.count += ids.numel()

    def insert(self, ids: Tensor) -> tuple[list[int], list[int]]:
        fresh = []
        for i in ids.tolist():
            if i not in self.numbers:
                self.numbers[i] = self.count
                self.count += 1
                fresh.append(i)
        return [self.numbers[i] for i in ids.tolist()], fresh


SIZES = (10, 0, 1000, 150_000, 5)


@cache
def first_sight(bound: int) -> list[tuple[Tensor, list[tuple[Tensor, Tensor, Tensor]], dict[int, int]]]:
    """Of two rounds: seeds, then ids with the numbers and the new ids that the oracle has for them, and all numbers."""
    generator, rounds = torch.Generator().manual_seed(bound), []
    for _ in range(2):
        oracle, calls = DictTable(), []
        seeds = torch.randint(0, bound, (300,), generator=generator)
        oracle.insert_seeds(seeds)
        for size in SIZES:
            ids = torch.randint(0, bound, (size,), generator=generator)
            local, fresh = oracle.insert(ids)
            calls.append((ids, torch.tensor(local, dtype=torch.int64), torch.tensor(fresh, dtype=torch.int64)))
        rounds.append((seeds, calls, oracle.numbers))
    return rounds


@pytest.mark.parametrize(
    ("bound", "dtype"),
    [(bound, dtype) for bound in (100, 50_000, 1 << 20) for dtype in (torch.int32, torch.int64)]
    + [(1 << 45, torch.int64)],
)
@grid(threads=[1, 2, 7])
def test_numbers_follow_first_sight_across_calls(threads: int, bound: int, dtype: torch.dtype) -> None:
    table, (*_, numbers) = IdTable(bound), first_sight(bound)[-1]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for seeds, calls, _ in first_sight(bound):  # the second time on a table that has been used
            table.clear()
            table.insert_seeds(seeds.to(dtype))
            for ids, local, fresh in calls:
                found = table.insert(ids.to(dtype))
                assert torch.equal(found[0], local) and torch.equal(found[1], fresh.to(dtype)), f"{len(ids)} ids"
    finally:
        torch.set_num_threads(before)
    unseen = torch.tensor([i for i in range(100) if i not in numbers], dtype=dtype)
    assert bool((table.lookup(unseen) == -1).all())
    known = torch.tensor(list(numbers)[:1000], dtype=dtype)
    assert table.lookup(known).tolist() == list(numbers.values())[:1000]


def test_ids_that_all_hash_to_one_slot_are_slow_but_right() -> None:
    inverse = pow(0x9E3779B97F4A7C15, -1, 1 << 64)  # undoes the multiplication, then the fold of the table's hash
    folded = [(k * inverse) % (1 << 64) for k in range(9000)]
    ids = torch.tensor([i for i in (f ^ (f >> 32) for f in folded) if i < 1 << 63][:4000])
    table, oracle = IdTable(1 << 62), DictTable()
    local, fresh = table.insert(ids)
    assert (local.tolist(), fresh.tolist()) == oracle.insert(ids)


def test_repeated_seeds_keep_their_places_and_are_known_by_the_first() -> None:
    table = IdTable(10)
    table.insert_seeds(torch.tensor([4, 7, 4]))
    local, fresh = table.insert(torch.tensor([7, 4, 9]))
    assert local.tolist() == [1, 0, 3] and fresh.tolist() == [9]


def sampled_in_two_steps(table: IdTable, csc: CSC, seeds: Tensor, fanout: int, replace: bool) -> list[Tensor]:
    drawn = sample_neighbors(csc, seeds, fanout, key=5, replace=replace)
    local, fresh = table.insert(drawn.ids)
    return [drawn.indptr, local, drawn.positions, fresh]


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.int32, 1 << 20), (torch.int64, 1 << 20), (torch.int64, 1 << 45)])
def test_numbering_while_drawing_is_numbering_what_was_drawn(dtype: torch.dtype, bound: int, threads: int) -> None:
    generator = torch.Generator().manual_seed(3)
    degrees = torch.randint(0, 40, (5000,), generator=generator)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])
    indices = torch.randint(0, 200_000, (int(indptr[-1]),), generator=generator).to(dtype)
    csc, before = CSC(indptr, indices, 200_000), torch.get_num_threads()
    together, apart, buffers, seen = IdTable(bound), IdTable(bound), BufferPool(2), []
    try:
        torch.set_num_threads(threads)
        for fanout, replace, size in (
            (3, False, 1000),
            (-1, False, 3000),
            (15, True, 4000),
            (70, False, 5000),
            (0, True, 9),
        ):
            seeds = torch.randint(0, 5000, (size,), generator=generator).to(dtype)
            for table in (together, apart):
                table.clear()
                table.insert_seeds(seeds[:7])
            for _ in range(2):  # the second time all are known
                found = together.insert_sampled(csc, seeds, fanout, key=5, replace=replace, buffers=buffers)
                seen.append((found, sampled_in_two_steps(apart, csc, seeds, fanout, replace)))
            everything = torch.arange(200_000).to(dtype)
            assert torch.equal(together.lookup(everything), apart.lookup(everything))
        for found, wanted in seen:  # none was written over by a later one
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2])
def test_numbering_while_drawing_refuses_what_both_refuse(threads: int) -> None:
    csc, before = CSC(torch.arange(0, 4001, 2), torch.arange(4000) % 1000, 1000), torch.get_num_threads()
    table, seeds = IdTable(1000), torch.arange(2000)
    try:
        torch.set_num_threads(threads)
        with pytest.raises(ValueError, match=r"seeds must be in \[0, 2000\), got 2000"):
            table.insert_sampled(csc, seeds + 1, 2, key=1)
        with pytest.raises(ValueError, match="indptr must ascend"):
            torn = csc.indptr.clone()
            torn[900] = 5000
            table.insert_sampled(CSC(torn, csc.indices, 1000), seeds, 2, key=1)
        with pytest.raises(ValueError, match=r"ids must be in \[0, 4294967296\), got -7"):
            negative = csc.indices.clone()
            negative[3100] = -7
            table.insert_sampled(CSC(csc.indptr, negative, 1000), seeds, 2, key=1)
        table.clear()
        assert torch.equal(table.insert_sampled(csc, seeds, 2, key=1).fresh, torch.arange(1000))
    finally:
        torch.set_num_threads(before)


def test_compact_relabels_several_types_in_one_call() -> None:
    seeds = [torch.tensor([5, 2, 5]), torch.tensor([], dtype=torch.int64), torch.tensor([1], dtype=torch.int32)]
    ids = [torch.tensor([2, 9]), torch.tensor([3, 3, 8]), torch.tensor([9, 4]), torch.tensor([0, 1], dtype=torch.int32)]
    nodes, local = compact(seeds, ids, [0, 1, 0, 2])
    assert [n.tolist() for n in nodes] == [[5, 2, 5, 9, 4], [3, 8], [1, 0]]
    assert [i.tolist() for i in local] == [[1, 3], [0, 0, 1], [3, 4], [1, 0]]


def test_compact_reuses_its_scratch() -> None:
    scratch = compact_scratch(200)
    for seed in range(5):
        ids = torch.randint(0, 1000, (150,), generator=torch.Generator().manual_seed(seed))
        (nodes,), (local,) = compact([ids[:20]], [ids], [0], scratch)
        assert torch.equal(nodes[local], ids)
        assert torch.equal(nodes[:20], ids[:20])


def test_bad_input_names_the_argument() -> None:
    table = IdTable(10)
    with pytest.raises(ValueError, match="ids"):
        table.insert(torch.tensor([-1]))
    with pytest.raises(ValueError, match="ids"):
        table.insert(torch.tensor([1 << 40]))  # beyond what a narrow table was made for
    with pytest.raises(ValueError, match="ids"):
        table.insert(torch.tensor([1.0]))
    with pytest.raises(ValueError, match="types"):
        compact([torch.tensor([1])], [torch.tensor([1])], [1])
    with pytest.raises(ValueError, match=r"table"):
        compact([torch.arange(1000)], [torch.arange(1000)], [0], compact_scratch(10))
    with pytest.raises(ValueError, match="table"):
        torch.ops.gnnsys.relabel(torch.zeros(4, dtype=torch.int64), torch.tensor([1]))


def test_relabelling_is_traceable() -> None:
    table = torch.zeros(8 + 1024, dtype=torch.int64)
    torch.ops.gnnsys.id_table_init(table, 10, False)
    torch.library.opcheck(torch.ops.gnnsys.lookup.default, (table, torch.arange(5)))
    utilities = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.gnnsys.relabel.default, (table, torch.arange(5)), test_utils=utilities)
    sampled = (table, torch.tensor([0, 2, 3]), torch.tensor([1, 0, 1]), torch.tensor([1, 0]), 1, False, 3)
    sampled += (torch.empty(4, dtype=torch.int64), torch.empty(4, dtype=torch.int64))
    torch.library.opcheck(torch.ops.gnnsys.sample_into_table.default, sampled, test_utils=utilities)


def test_a_small_table_grows_by_more_than_twice_where_one_group_has_filled_it():
    """300 known ids and 512 new ones in one group: 812 are more than a table of twice the size is to have."""
    table, ids = IdTable(id_bound=10_000), torch.randperm(10_000)[:1500]
    table.insert_seeds(ids[:300])
    for begin, end in ((300, 812), (812, 1412)):
        local, fresh = table.insert(ids[begin:end])
        assert torch.equal(local, torch.arange(begin, end)) and torch.equal(fresh, ids[begin:end])
    assert torch.equal(table.lookup(ids), torch.where(torch.arange(1500) < 1412, torch.arange(1500), -1))
