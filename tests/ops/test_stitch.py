"""stitch and name_neighbors against lists, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from gnnsys.ops import Neighbors, PartNeighbors, name_neighbors, stitch_neighbors


def piece(lists: list[list[int]], first_edge: int, ids: torch.dtype, edges: torch.dtype) -> PartNeighbors:
    flat = [v for values in lists for v in values]
    counts = torch.tensor([len(values) for values in lists], dtype=torch.int32)
    return PartNeighbors(
        counts, torch.tensor(flat, dtype=ids), torch.arange(first_edge, first_edge + len(flat), dtype=edges)
    )


@pytest.mark.parametrize("num_seeds", [0, 1, 17, 9_000])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_answers_of_any_pieces_stand_in_the_order_of_the_seeds(num_seeds: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(num_seeds)
    order = torch.randperm(num_seeds, generator=g)
    sizes = torch.randint(0, 4, (num_seeds,), generator=g).tolist()
    grouped = [torch.randint(0, 99, (size,), generator=g).tolist() for size in sizes]
    cuts = [0, num_seeds // 3, num_seeds // 2, num_seeds]
    # The first piece answers the first and the last third of what is grouped, the second the rest.
    one = piece(grouped[: cuts[1]] + grouped[cuts[2] :], 0, dtype, torch.int32)
    two = piece(grouped[cuts[1] : cuts[2]], 10**10, dtype, torch.int64)
    segments = [(0, 0, cuts[1]), (1, cuts[1], cuts[2] - cuts[1]), (0, cuts[2], cuts[3] - cuts[2])]
    expected: list[list[int]] = [[] for _ in range(num_seeds)]
    edges: list[list[int]] = [[] for _ in range(num_seeds)]
    edges_of = iter(one.edges.tolist()), iter(two.edges.tolist())
    for j, values in enumerate(grouped):
        which = 1 if cuts[1] <= j < cuts[2] else 0
        expected[order[j]] = values
        edges[order[j]] = [next(edges_of[which]) for _ in values]
    found = stitch_neighbors(order, [one, two], segments, wide=dtype == torch.int64)
    assert found.ids.dtype == dtype and found.positions.dtype == torch.int64
    assert found.ids.tolist() == [v for values in expected for v in values]
    assert found.positions.tolist() == [e for values in edges for e in values]
    assert found.indptr.diff().tolist() == [len(values) for values in expected]


@pytest.mark.parametrize(
    ("order", "segments", "message"),
    [
        ([0, 0], [(0, 0, 2)], "order must name every seed once"),
        ([0, 2], [(0, 0, 2)], r"order must be in \[0, 2\)"),
        ([0, 1, 2], [(0, 0, 2)], "must cover 3 seeds"),
        ([0, 1], [(0, 0, 1), (0, 0, 1)], "must not overlap"),
        ([0, 1], [(1, 0, 2)], "must name a piece"),
        ([0, 1], [(0, 1, 2)], r"must lie in \[0, 2\)"),
        ([0, 1, 2], [(0, 0, 3)], "piece 0 answers 2 seeds, 3 are asked"),
    ],
)
def test_answers_that_do_not_fit_the_seeds_are_refused(order, segments, message: str) -> None:
    answer = piece([[1], [2, 3]], 0, torch.int32, torch.int32)
    with pytest.raises(ValueError, match=message):
        stitch_neighbors(torch.tensor(order), [answer], segments, wide=False)


def test_a_piece_whose_counts_lie_is_refused() -> None:
    counts, ids, edges, _ = piece([[1], [2, 3]], 0, torch.int32, torch.int32)
    for wrong in (
        PartNeighbors(counts + 1, ids, edges),
        PartNeighbors(counts - 2, ids, edges),
        PartNeighbors(counts, ids, edges[1:]),
    ):
        with pytest.raises(ValueError, match="counts"):
            stitch_neighbors(torch.tensor([0, 1]), [wrong], [(0, 0, 2)], wide=False)


@pytest.mark.parametrize("wide", [False, True])
def test_local_ids_become_global_ids(wide: bool) -> None:
    halo = torch.tensor([3, 90, 95], dtype=torch.int64 if wide else torch.int32)
    neighbors = Neighbors(
        torch.tensor([0, 3, 3, 5]), torch.tensor([0, 4, 5, 9, 7]).int(), torch.tensor([2, 0, 1, 4, 3])
    )
    options = {"first": 50, "num_core": 7, "first_edge": 1000, "wide_ids": wide, "wide_edges": wide}
    with pytest.raises(ValueError, match="neighbors must be in"):
        name_neighbors(neighbors, halo=halo[:2], order=None, **options)
    found = name_neighbors(neighbors, halo=halo, order=None, **options)
    assert found.counts.tolist() == [3, 0, 2] and found.ids.tolist() == [50, 54, 55, 95, 3]
    assert found.edges.tolist() == [1002, 1000, 1001, 1004, 1003]
    assert found.ids.dtype == found.edges.dtype == (torch.int64 if wide else torch.int32)
    order = torch.tensor([9, 8, 7, 6, 5])
    assert name_neighbors(neighbors, halo=halo, order=order, **options).edges.tolist() == [1007, 1009, 1008, 1005, 1006]
    with pytest.raises(ValueError, match="positions must be in"):
        name_neighbors(neighbors, halo=halo, order=order[:4], **options)


def test_the_ops_are_known_to_the_compiler() -> None:
    one = piece([[1], [2, 3]], 0, torch.int32, torch.int32)
    arguments = (torch.tensor([1, 0]), [one.counts], [one.ids], [one.edges], [0, 0, 2], False)
    torch.library.opcheck(torch.ops.gnnsys.stitch.default, arguments)
    found = (torch.tensor([0, 1]), torch.tensor([2]).int(), torch.tensor([0]))
    torch.library.opcheck(
        torch.ops.gnnsys.name_neighbors.default, (*found, 5, 2, torch.tensor([9]).int(), 7, None, False, True)
    )
