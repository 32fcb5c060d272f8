"""PartitionBook: binary search and subtraction against a plain scan of the ranges."""

from __future__ import annotations

import json

import pytest
import torch

from gnnsys.partition import PartitionBook

CITES = ("paper", "cites", "paper")


def book() -> PartitionBook:
    """Three parts of two trainers: part 1 is empty of papers, subpart 1 and 5 too; there are no venues at all."""
    return PartitionBook(
        3,
        2,
        {"paper": torch.tensor([0, 4, 4, 4, 4, 9, 9]), "venue": torch.zeros(7, dtype=torch.int64)},
        {CITES: torch.tensor([0, 1, 5, 5, 5, 30, 31])},
    )


@pytest.mark.parametrize("type", ["paper", "venue", CITES])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_owners_and_local_ids_are_what_a_scan_of_the_ranges_finds(type, dtype):
    b = book()
    for id in range(b.num_ids(type)):
        ids = torch.tensor([id], dtype=dtype)
        subpart = next(s for s in range(6) if id in b.subpart_range(s, type))
        part = next(p for p in range(3) if id in b.part_range(p, type))
        assert part == subpart // 2
        assert b.subpart_of(ids, type).tolist() == [subpart] and b.part_of(ids, type).tolist() == [part]
        local = b.to_local(ids, part, type)
        assert local.tolist() == [b.part_range(part, type).index(id)]
        assert b.to_global(local, part, type).tolist() == [id]


def test_ranges_cover_all_ids_once_in_order():
    assert book().ranges("paper").tolist() == [[0, 4], [4, 4], [4, 9]]
    assert book().ranges("venue").tolist() == [[0, 0]] * 3
    assert book().ranges(CITES).tolist() == [[0, 5], [5, 5], [5, 31]]


def test_many_ids_keep_their_shape_and_no_ids_are_no_trouble():
    assert book().part_of(torch.tensor([[0, 8], [3, 4]]), "paper").tolist() == [[0, 2], [0, 2]]
    assert book().part_of(torch.empty(0, dtype=torch.int64), "venue").numel() == 0


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda b: b.part_of(torch.tensor([9]), "paper"), r"ids must be in \[0, 9\), got 9 to 9"),
        (lambda b: b.part_of(torch.tensor([-1]), "paper"), r"got -1 to -1"),
        (lambda b: b.to_local(torch.tensor([4]), 0, "paper"), r"ids of part 0 must be in \[0, 4\)"),
        (lambda b: b.to_global(torch.tensor([5]), 2, "paper"), r"local ids of part 2 must be in \[0, 5\)"),
        (lambda b: b.part_range(3, "paper"), r"part must be in \[0, 3\), got 3"),
        (lambda b: b.subpart_range(-1, "paper"), r"subpart must be in \[0, 6\)"),
        (lambda b: b.part_of(torch.tensor([0])), "type must be named"),
        (lambda b: b.part_of(torch.tensor([0]), "author"), "'author' does not exist"),
        (lambda b: b.part_of(torch.tensor([0]), ("a", "b", "c")), "does not exist"),
    ],
)
def test_what_is_not_there_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(book())


def test_a_book_survives_json_and_a_type_may_be_left_away_where_there_is_one():
    copy = PartitionBook.from_json(json.loads(json.dumps(book().to_json())))
    assert copy.to_json() == book().to_json() and (copy.num_parts, copy.trainers_per_part) == (3, 2)
    single = PartitionBook(2, 1, {"node": torch.tensor([0, 3, 5])}, {})
    assert single.part_of(torch.tensor([2, 3])).tolist() == [0, 1] and single.num_ids() == 5


@pytest.mark.parametrize(
    "change,message",
    [
        ({"nodes": [["paper", [0, 4, 3, 4, 4, 9, 9]]]}, "never decrease"),
        ({"nodes": [["paper", [1, 4, 4, 4, 4, 9, 9]]]}, "start at 0"),
        ({"nodes": [["paper", [0, 4]]]}, r"must be int64 \[7\]"),
        ({"nodes": [["paper", [0, 0.5, 1, 2, 3, 4, 5]]]}, "not a partition book"),
        ({"edges": [[["a", "b"], [0]]]}, "not a partition book"),
        ({"num_parts": 0}, "must be >= 1"),
        ({"trainers_per_part": "two"}, "not a partition book"),
    ],
)
def test_what_is_not_a_book_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        PartitionBook.from_json(book().to_json() | change)
