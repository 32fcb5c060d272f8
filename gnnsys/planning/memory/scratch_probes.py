"""Operators that may hold memory inside on a device: a call of each by size, for `gnnsys estimate --calibrate`.

Names are those that a dispatch mode sees. The size is the number of values of one argument, by which an estimate looks
the scratch up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_A = torch.ops.aten
_WIDTH = 64  # of rows: hidden sizes are like this
_LONG, _SHORT, _REAL, _HALF = torch.int64, torch.int32, torch.float32, torch.bfloat16
_Call = Callable[[], object]


class ScratchProbe(NamedTuple):
    """`make(size)` gives a call of `op` whose argument number `argument` has `size` values of `dtype`."""

    op: str
    argument: int
    dtype: torch.dtype
    make: Callable[[int], _Call]


def scratch_probes(device: str = "cuda") -> list[ScratchProbe]:
    """All of them. Nothing is made before `make` is called."""
    made = [probe for dtype in (_LONG, _SHORT, _REAL) for probe in _of_values(_Inputs(device, dtype))]
    made += [probe for dtype in (_REAL, _HALF) for probe in _of_rows(_Inputs(device, dtype))]
    return [*made, *_of_masks(_Inputs(device, _REAL)), *_of_places(_Inputs(device, _REAL))]


@dataclass(frozen=True)
class _Inputs:
    """Makes tensors on a device, those of values and rows of one dtype."""

    device: str
    dtype: torch.dtype

    def values(self, size: int) -> Tensor:
        return torch.randint(1 << 20, (size,), device=self.device).to(self.dtype)

    def mask(self, size: int) -> Tensor:
        return torch.randint(2, (size,), device=self.device, dtype=torch.int8).bool()

    def places(self, size: int) -> Tensor:
        return torch.randint(max(size // 4, 1), (size,), device=self.device)

    def ones(self, *shape: int) -> Tensor:
        return torch.ones(shape, dtype=self.dtype, device=self.device)

    def rows(self, size: int) -> Tensor:
        """So many values, in rows."""
        return self.ones(max(size // _WIDTH, 2), _WIDTH)

    def labels(self, rows: Tensor) -> Tensor:
        return torch.zeros(rows.shape[0], dtype=torch.int64, device=self.device)


def _of(op: Callable[..., object], *arguments: object, **named: object) -> _Call:
    return lambda: op(*arguments, **named)


def _of_values(given: _Inputs) -> list[ScratchProbe]:
    """Of a list of values: sorts, scans, what is different."""
    calls: list[tuple[str, Callable[[Tensor], _Call]]] = [
        ("sort", lambda values: _of(_A.sort.default, values)),
        ("sort", lambda values: _of(_A.sort.stable, values, stable=True, dim=0)),
        ("cumsum", lambda values: _of(_A.cumsum.default, values, 0)),
        ("_unique2", lambda values: _of(_A._unique2.default, values, True, True, True)),
        ("unique_consecutive", lambda values: _of(_A.unique_consecutive.default, values, True, True)),
        ("nonzero", lambda values: _of(_A.nonzero.default, values)),
        ("topk", lambda values: _of(_A.topk.default, values, min(values.numel(), 32))),
    ]
    if not given.dtype.is_floating_point:
        calls.append(("bincount", lambda values: _of(_A.bincount.default, values)))
    return [_probe(given, op, 0, given.values, call) for op, call in calls]


def _of_rows(given: _Inputs) -> list[ScratchProbe]:
    """Of rows: softmax, norms, losses; forward and backward. Sums are not measured, see `reduction_scratch`."""
    calls: list[tuple[str, int, Callable[[Tensor], _Call]]] = [
        ("_softmax", 0, lambda rows: _of(_A._softmax.default, rows, 1, False)),
        ("_log_softmax", 0, lambda rows: _of(_A._log_softmax.default, rows, 1, False)),
        ("native_layer_norm", 0, lambda rows: _of(_A.native_layer_norm.default, *_layer_norm(given, rows))),
        ("native_layer_norm_backward", 0, lambda rows: _layer_norm_backward(given, rows)),
        ("native_batch_norm", 0, lambda rows: _of(_A.native_batch_norm.default, *_batch_norm(given, rows))),
        ("native_batch_norm_backward", 0, lambda rows: _batch_norm_backward(given, rows)),
        ("nll_loss_forward", 0, lambda rows: _of(_A.nll_loss_forward.default, rows, given.labels(rows), None, 1, -100)),
        ("nll_loss_backward", 1, lambda rows: _nll_backward(given, rows)),
    ]
    return [_probe(given, op, argument, given.rows, call) for op, argument, call in calls]


def _of_masks(given: _Inputs) -> list[ScratchProbe]:
    """Of a mask: where it is true."""

    def select(mask: Tensor) -> _Call:
        return _of(_A.masked_select.default, given.ones(mask.numel()), mask)

    return [
        _probe(given, "nonzero", 0, given.mask, lambda mask: _of(_A.nonzero.default, mask), torch.bool),
        _probe(given, "masked_select", 1, given.mask, select, torch.bool),
    ]


def _of_places(given: _Inputs) -> list[ScratchProbe]:
    """Of an index into rows: reads, writes and sums by it. Scatters have a place per value, as PyG's messages have."""

    def into(places: Tensor) -> Tensor:
        return given.ones(max(places.shape[0] // 4, 1), _WIDTH)

    def rows(places: Tensor) -> Tensor:
        return given.ones(places.shape[0], _WIDTH)

    def spread(size: int) -> Tensor:
        return given.places(max(size // _WIDTH, 1)).view(-1, 1).expand(-1, _WIDTH)

    def put(op: Callable[..., object], *more: object) -> Callable[[Tensor], _Call]:
        return lambda at: _of(op, into(at), [at], rows(at), True, *more)

    def add(op: Callable[..., object]) -> Callable[[Tensor], _Call]:
        return lambda at: _of(op, into(at), 0, at, rows(at))

    def largest(op: Callable[..., object]) -> Callable[[Tensor], _Call]:
        return lambda at: _of(op, into(at), 0, at, rows(at), "amax", include_self=False)

    def embedded(at: Tensor) -> _Call:
        return _of(_A.embedding_dense_backward.default, rows(at), at, max(at.numel() // 4, 1), -1, False)

    one_per_row: list[tuple[str, int, Callable[[Tensor], _Call]]] = [
        ("index_select", 2, lambda at: _of(_A.index_select.default, into(at), 0, at)),
        ("index", 1, lambda at: _of(_A.index.Tensor, into(at), [at])),
        ("index_add", 2, add(_A.index_add.default)),
        ("index_add_", 2, add(_A.index_add_.default)),
        ("index_put", 1, put(_A.index_put.default)),
        ("index_put_", 1, put(_A.index_put_.default)),
        ("_index_put_impl_", 1, put(_A._index_put_impl_.default, True)),
        ("embedding_dense_backward", 1, embedded),
    ]
    one_per_value: list[tuple[str, Callable[[Tensor], _Call]]] = [
        ("gather", lambda at: _of(_A.gather.default, into(at), 0, at)),
        ("scatter_add", add(_A.scatter_add.default)),
        ("scatter_add_", add(_A.scatter_add_.default)),
        ("scatter_reduce", largest(_A.scatter_reduce.two)),
        ("scatter_reduce_", largest(_A.scatter_reduce_.two)),
    ]
    found = [_probe(given, op, argument, given.places, call, _LONG) for op, argument, call in one_per_row]
    return found + [_probe(given, op, 2, spread, call, _LONG) for op, call in one_per_value]


def _probe(
    given: _Inputs,
    op: str,
    argument: int,
    make: Callable[[int], Tensor],
    call: Callable[[Tensor], _Call],
    dtype: torch.dtype | None = None,
) -> ScratchProbe:
    return ScratchProbe(f"aten::{op}", argument, dtype or given.dtype, lambda size: call(make(size)))


def _layer_norm(given: _Inputs, rows: Tensor) -> tuple[object, ...]:
    weight = given.ones(_WIDTH)
    return rows, [_WIDTH], weight, weight, 1e-5


def _layer_norm_backward(given: _Inputs, rows: Tensor) -> _Call:
    _, _, weight, _, _ = known = _layer_norm(given, rows)
    _, mean, deviation = _A.native_layer_norm.default(*known)
    return _of(
        _A.native_layer_norm_backward.default, rows, rows, [_WIDTH], mean, deviation, weight, weight, [True, True, True]
    )


def _batch_norm(given: _Inputs, rows: Tensor) -> tuple[object, ...]:
    weight = given.ones(_WIDTH)
    return rows, weight, weight, None, None, True, 0.1, 1e-5


def _batch_norm_backward(given: _Inputs, rows: Tensor) -> _Call:
    known = _batch_norm(given, rows)
    _, mean, deviation = _A.native_batch_norm.default(*known)
    flags = [True, True, True]
    return _of(
        _A.native_batch_norm_backward.default, rows, rows, known[1], None, None, mean, deviation, True, 1e-5, flags
    )


def _nll_backward(given: _Inputs, rows: Tensor) -> _Call:
    labels = given.labels(rows)
    loss, total = _A.nll_loss_forward.default(rows, labels, None, 1, -100)
    return _of(_A.nll_loss_backward.default, loss, rows, labels, None, 1, -100, total)
