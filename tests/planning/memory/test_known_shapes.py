"""Shapes that are kept: what is made of them is what torch makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gnnsys.planning.memory.known_shapes import KnownShapes

aten = torch.ops.aten
X, NARROW = torch.rand(6, 4), torch.rand(4, 4)
CALLS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "a sum with a row": (aten.add.Tensor, (X, torch.rand(4)), {}),
    "of a transposed tensor": (aten.mul.Tensor, (X.t(), X.t()), {}),
    "a product": (aten.mm.default, (X, NARROW), {}),
    "a sum of columns": (aten.sum.dim_IntList, (X, [0], True), {"dtype": torch.float64}),
    "pieces put together": (aten.cat.default, ([X, X, NARROW],), {}),
    "rows chosen": (aten.index_select.default, (X, 0, torch.tensor([1, 1, 5])), {}),
    "a kind that changes": (aten._to_copy.default, (X,), {"dtype": torch.bfloat16}),
    "several results": (aten.native_layer_norm.default, (X, [4], None, None, 1e-5), {}),
    "zeros": (aten.new_zeros.default, (X, [3, 2]), {}),
}


def fake(mode: FakeTensorMode, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(fake(mode, each) for each in value)
    return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value


def described(results: Any) -> list[Any]:
    values = list(results) if isinstance(results, list | tuple) else [results]
    return [(tuple(each.shape), each.stride(), each.dtype, each.untyped_storage().nbytes()) for each in values]


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_what_is_made_again_is_what_torch_makes(call):
    func, args, kwargs = call
    mode = FakeTensorMode()
    shapes = KnownShapes(mode)
    key = shapes.key(func, args, kwargs)
    assert key is not None and shapes.make(key) is None, "nobody has asked for it yet"
    with mode:
        out = func(*fake(mode, args), **kwargs)
    shapes.keep(key, list(out) if isinstance(out, tuple) else [out])
    first, again = shapes.make(key), shapes.make(key)
    assert described(first) == described(again) == described(func(*args, **kwargs))
    assert all(str(each.device) == "cpu" for each in first)
    assert not {each.untyped_storage()._cdata for each in first} & {each.untyped_storage()._cdata for each in again}


def test_calls_that_differ_in_a_number_or_its_kind_or_in_where_it_stands_are_not_taken_for_one_another():
    shapes = KnownShapes(FakeTensorMode())
    counts = torch.arange(6)
    keys = [
        shapes.key(func, args, kwargs)
        for func, args, kwargs in [
            *[(aten.add.Scalar, (counts, number), {}) for number in (1, 1.0, True, 2)],
            (aten.sum.dim_IntList, (X, [0]), {}),
            (aten.sum.dim_IntList, (X, [0, 1]), {}),
            (aten.sum.dim_IntList, (X, [0], True), {}),
            (aten.sum.dim_IntList, (X, [0]), {"dtype": torch.float64}),
            (aten.sum.dim_IntList, (X.double(), [0]), {}),
            (aten.sum.dim_IntList, (X.t(), [0]), {}),
        ]
    ]
    assert None not in keys and len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.t.default, (X,)),  # a view
        (aten.add_.Tensor, (X, X)),  # a write
        (aten.nonzero.default, (X,)),  # as many as values decide
        (aten.add.Tensor, (X, X.to_sparse())),
        (aten._foreach_sqrt.default, ([X, X],)),  # a list of results
    ],
)
def test_views_writes_and_what_values_decide_are_asked_for_each_time(func, args):
    assert KnownShapes(FakeTensorMode()).key(func, args, {}) is None


def test_a_result_that_is_a_piece_of_a_larger_storage_is_not_kept():
    mode = FakeTensorMode()
    shapes = KnownShapes(mode)
    with mode:
        piece = torch.empty(8, 4)[:, :2]
    shapes.keep("key", [piece])
    assert shapes.make("key") is None


def test_a_result_that_is_an_argument_or_on_another_device_is_not_kept():
    """As of `aten.dropout` where nothing is trained, and of `.to("meta")`."""
    mode = FakeTensorMode()
    shapes = KnownShapes(mode)
    with mode:
        rows, elsewhere = torch.empty(8, 4), torch.empty(8, 4, device="meta")
    shapes.keep("same", [rows], [rows])
    shapes.keep("elsewhere", [elsewhere])
    shapes.keep("other", [rows], [elsewhere])
    assert shapes.make("same") is None and shapes.make("elsewhere") is None and shapes.make("other") is not None
