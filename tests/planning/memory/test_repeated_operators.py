"""Operators on indices that are repeated: the same values, storages of their own, and nothing stale after a write."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gnnsys.planning.memory.repeated_operators import RepeatedOperators
from gnnsys.planning.memory.trace import trace_steps
from tests.planning.memory import jobs
from tests.planning.memory.allocations import allocated_peak

ATEN = torch.ops.aten
SIZE = 1 << 16


class Counted:
    """An operator that counts its calls."""

    def __init__(self, func) -> None:
        self._func, self.calls = func, 0

    def __getattr__(self, name: str):
        return getattr(self._func, name)

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self._func(*args, **kwargs)


def drawn() -> Tensor:
    return torch.randint(1000, (SIZE,), generator=torch.Generator().manual_seed(1))


def test_a_repeated_call_is_not_run_again_and_has_a_storage_of_its_own():
    repeated, values, sort = RepeatedOperators(), drawn(), Counted(ATEN.sort.default)
    first, again = repeated(sort, [values], {}), repeated(sort, [values], {})
    assert sort.calls == 1
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a, b) and a.untyped_storage()._cdata != b.untyped_storage()._cdata
        assert a.untyped_storage().nbytes() == b.untyped_storage().nbytes()
    assert torch.equal(first[0], values.sort()[0])


def test_results_of_results_are_known_too():
    repeated, values, added = RepeatedOperators(), drawn(), Counted(ATEN.add.Tensor)
    sums = [repeated(added, [repeated(ATEN.sort.default, [values], {})[0], 1], {}) for _ in range(3)]
    assert added.calls == 1 and all(torch.equal(each, values.sort()[0] + 1) for each in sums)


@pytest.mark.parametrize("what", ["argument", "result", "another result", "view of a result"])
def test_what_was_written_is_another_value(what: str):
    repeated, values = RepeatedOperators(), drawn()
    first = repeated(ATEN.add.Tensor, [values, 1], {})
    again = repeated(ATEN.add.Tensor, [values, 1], {})
    {"argument": values, "result": first, "another result": again, "view of a result": again[5:]}[what].zero_()
    assert torch.equal(repeated(ATEN.add.Tensor, [values, 1], {}), values + 1)
    for each in (first, again):
        assert torch.equal(repeated(ATEN.mul.Tensor, [each, 2], {}), each * 2)
    assert torch.equal(repeated(ATEN.mul.Tensor, [again, 2], {}), again * 2)


def test_arguments_that_differ_are_told_apart():
    repeated, values = RepeatedOperators(), drawn()
    found = [repeated(ATEN.add.Tensor, [given, by], {}) for given in (values, values[1:], values[::2]) for by in (1, 2)]
    real = [given + by for given in (values, values[1:], values[::2]) for by in (1, 2)]
    assert all(torch.equal(a, b) for a, b in zip(found, real, strict=True))


def test_a_storage_that_came_in_the_place_of_another_is_another_value():
    repeated = RepeatedOperators()
    for number in range(200):  # the allocator gives the same memory, and torch the same address, again and again
        values = torch.full((SIZE,), number)
        assert int(repeated(ATEN.add.Tensor, [values, 1], {})[0]) == number + 1


def test_random_numbers_and_views_are_never_kept():
    repeated, values = RepeatedOperators(), drawn()
    draws = [repeated(ATEN.randperm.default, [SIZE], {}) for _ in range(2)]
    assert not torch.equal(*draws)
    view = repeated(ATEN.view.default, [values, [2, -1]], {})
    assert view.untyped_storage()._cdata == values.untyped_storage()._cdata


@pytest.mark.parametrize("kind", ["GCN", "GAT"])
def test_a_graph_whose_operators_are_repeated_is_traced_to_the_byte(kind: str):
    """PyG's layers make self loops anew in every layer, here of 40,000 edges."""
    traced = trace_steps(jobs.gnn(kind, "pyg", num_edges=40_000))
    assert traced.start_bytes + allocated_peak(jobs.gnn(kind, "pyg", num_edges=40_000)) == traced.peak()[0]
