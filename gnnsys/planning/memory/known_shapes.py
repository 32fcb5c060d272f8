"""Shapes of what operators make of rows, kept: a layer asks for the same in every step, and so do layers of one width.

torch's FakeTensorMode takes a fifth of a millisecond of Python for each call. What an operator makes that is neither a
view nor a write depends on its arguments' shapes, strides and dtypes and on its numbers alone; so for the same ones new
fake tensors of the same kind are made without asking again.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_CPU = torch.device("cpu")
_PLAIN = {Tensor, FakeTensor, torch.nn.Parameter}
_DEPENDS_ON_VALUES = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


class _Made(NamedTuple):
    """One new tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class KnownShapes:
    """`key` says what a call is known by, None where it must be asked for; `make` its results, `keep` keeps them."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._kept: dict[Any, list[_Made]] = {}

    def key(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if not _makes_new(func):
            return None
        try:
            key = func, *map(_told, args), *((name, _told(value)) for name, value in kwargs.items())
            hash(key)
        except TypeError:  # of a kind that is not known here
            return None
        return key

    def make(self, key: Any) -> list[Any] | None:
        kept = self._kept.get(key)
        return None if kept is None else [self._new(each) for each in kept]

    def keep(self, key: Any, results: Sequence[Any], given: Sequence[Any] = ()) -> None:
        """Where each is a whole storage of its own on the host, as `make` makes it, and none of what was `given`."""
        if not results or not all(type(each) is FakeTensor and each.layout is torch.strided for each in results):
            return
        if any(each.fake_device != _CPU for each in results):
            return
        storages = [each.untyped_storage() for each in results]
        taken = {each.untyped_storage()._cdata for each in given if type(each) is FakeTensor}
        if len({storage._cdata for storage in storages} - taken) < len(storages):
            return
        made = [_Made(tuple(each.shape), each.stride(), each.dtype) for each in results]
        for each, one, storage in zip(results, made, storages, strict=True):
            if each.storage_offset() or self._new(one).untyped_storage().nbytes() != storage.nbytes():
                return
        self._kept[key] = made

    def _new(self, made: _Made) -> FakeTensor:
        with torch._C._DisableTorchDispatch():
            meta = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")
            return FakeTensor(self._mode, meta, _CPU)


@functools.cache
def _makes_new(func: Any) -> bool:
    """Whether an operator of torch's makes new tensors alone, of sizes that no value decides."""
    schema = func._schema
    if func.namespace != "aten" or schema.is_mutable or not _DEPENDS_ON_VALUES.isdisjoint(func.tags):
        return False
    if any(each.alias_info is not None for each in (*schema.arguments, *schema.returns)):
        return False
    return bool(schema.returns) and all(str(each.type) == "Tensor" for each in schema.returns)


def _told(value: Any) -> Any:
    """TypeError for what is not a plain tensor, a number, or something else that is told by its value."""
    if isinstance(value, Tensor):
        if type(value) not in _PLAIN or value.layout is not torch.strided:
            raise TypeError
        return tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_told, value))
    return type(value), value
