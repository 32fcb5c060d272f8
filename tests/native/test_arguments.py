"""Arguments that sanitizers found to slip through an op's checks: each is refused, or harmless, for good.

They call the ops themselves: the typed functions above them would not let most of these through.
"""

from __future__ import annotations

import pytest
import torch

import gnnsys.ops  # noqa: F401 - loads the core

native = torch.ops.gnnsys
LARGEST, SMALLEST = 2**63 - 1, -(2**63)


def longs(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_an_indptr_whose_differences_wrap_around_does_not_rise():
    indptr = longs(0, LARGEST, SMALLEST, -1, 4)  # every difference, in 64 bits, is positive
    with pytest.raises(ValueError, match="decreases in between"):
        native.edge_softmax(indptr, torch.zeros(4, 1))


@pytest.mark.parametrize("bad", [(SMALLEST, 3), (3, SMALLEST), (LARGEST, 3), (1, LARGEST)])
def test_a_seed_whose_positions_are_anything_is_refused(bad):
    indptr, indices = longs(0, *bad, 4), longs(0, 1, 2, 0)
    none = (None, None, False, False, None, False, None, None, None)
    with pytest.raises(ValueError, match="indptr must ascend"):
        native.sample_neighbors(indptr, indices, longs(1), 2, False, 7, *none)
    bounds, edges = longs(0, 3), longs(0, 4)
    with pytest.raises(ValueError, match="indptr must ascend"):
        native.sample_parts(
            [indptr], [indices.int()], [longs(0, 1, 2)], [longs()], bounds, bounds, edges, longs(1), 2, False, 7, None,
            True,
        )  # fmt: skip


def test_an_arg_that_names_no_edge_of_its_row_is_refused():
    indptr, indices, grad = longs(0, 2, 3), longs(0, 1, 0), torch.ones(2, 1)
    for arg in (ints(2, 0), ints(0, 1), ints(0, 2**31 - 1)):
        with pytest.raises(ValueError, match="arg must name an in-edge"):
            native.spmm_extreme_grad_x(indptr, indices, arg.view(2, 1), grad, None, 2)
        with pytest.raises(ValueError, match="arg must name an in-edge"):
            native.spmm_extreme_grad_weight(indptr, indices, arg.view(2, 1), grad, torch.ones(2, 1))
    took = native.spmm_extreme_grad_x(indptr, indices, ints(1, -1).view(2, 1), grad, None, 2)
    assert took.view(-1).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("offsets", [[LARGEST, 0, 3], [0, LARGEST, 3], [1, 0, 3], [0, 1, 3]])
def test_a_list_of_neighbours_beyond_the_nodes_is_refused(offsets):
    lists = [longs(0, 1, 2, 3)], [ints(1, 2, 0)], [], offsets
    with pytest.raises(ValueError, match="does not fit 3 nodes"):
        native.partition_cluster(*lists, torch.ones(3, 1, dtype=torch.int64), longs(10), None, 1, 0)


def test_weights_whose_sums_overflow_and_negative_limits_are_refused():
    lists = [longs(0, 1, 2, 3)], [ints(1, 2, 0)], [], [0, 0, 3]
    for weights in (longs(1, 2**62, 1), longs(LARGEST, 1, 1), longs(1, -1, 1)):
        with pytest.raises(ValueError, match="weights must not be negative and add up"):
            native.partition_cluster(*lists, weights.view(3, 1), longs(10), None, 1, 0)
    part = ints(0, 1, 0)
    with pytest.raises(ValueError, match="limits must not be negative"):
        native.partition_refine(*lists, longs(1, 1, 1).view(3, 1), part, 2, longs(SMALLEST), 1, 0, 0)


@pytest.mark.parametrize("first", [-1, 1, LARGEST])
def test_a_run_beyond_the_nodes_is_refused(first):
    with pytest.raises(ValueError, match="are not in"):
        native.stream_cut(longs(0, 1, 2, 3), longs(1, 2, 0), first, ints(0, 1, 0))


def test_offsets_of_names_that_cannot_be_added_are_refused():
    counts, local, positions = longs(0, 2), ints(0, 2), longs(0, 1)
    for offsets in ((LARGEST, 2, 0), (0, LARGEST, 0), (0, 2, LARGEST)):
        first, num_core, first_edge = offsets
        with pytest.raises(ValueError, match="first, num_core and first_edge"):
            native.name_neighbors(counts, local, positions, first, num_core, longs(9), first_edge, None, True, True)


def test_first_rows_and_lines_may_be_as_large_as_they_like_or_are_refused():
    rows = torch.zeros(3, 2)
    native.fill_uniform(rows, LARGEST, 0.0, 1.0, 5)
    assert ((rows > 0) & (rows < 1)).all()
    with pytest.raises(ValueError, match="first_line"):
        native.parse_table(torch.frombuffer(bytearray(b"1 2\n"), dtype=torch.uint8), "ii", 0, SMALLEST)
