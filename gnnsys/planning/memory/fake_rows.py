"""The dispatch mode of a trace: integers are real, rows are fake.

An operator on indices runs, so that sizes that depend on them (the edges of a CSC, the self loops that are there) are
those of the real run. An operator on rows has shapes alone: no row is computed and none is stored. torch's own
FakeTensorMode has fake indices too and stops at the first such size.

Real rows (weights, a loaded batch) are never read: each has a fake twin of the same storage size. A number that is one
value (a learning rate, the step counter of Adam) stays real as long as nothing fake is written into it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence, Set
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from gnnsys.planning.memory.accumulation import in_place, works_in_place
from gnnsys.planning.memory.known_shapes import KnownShapes
from gnnsys.planning.memory.ledger import MemoryKind, StepPhase, StorageLedger
from gnnsys.planning.memory.onednn_scratch import lstm_workspace
from gnnsys.planning.memory.repeated_operators import RepeatedOperators
from gnnsys.planning.memory.trace_ends import TraceEnds

_ONE_VALUE = 16  # bytes: a storage of a single number
_CPU = torch.device("cpu")
_LIFT = torch.ops.aten.lift_fresh.default
_INDEXES = {
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
    torch.ops.aten._index_put_impl_.default,
}
PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten.mv.default,
    torch.ops.aten.addmv.default,
    torch.ops.aten.dot.default,
}
_MASKED_SELECT = torch.ops.aten.masked_select.default
_DEVICE = torch.ops.prim.device.default  # what `.device` of a fake tensor asks for: half of all that is dispatched
_BATCH_NORM = torch.ops.aten.native_batch_norm.default
_LSTM = torch.ops.aten.mkldnn_rnn_layer.default
_CORRECTED = {_BATCH_NORM, _LSTM}  # whose fake kernels give other results than the real ones


Ended: TypeAlias = Callable[[], None]


class StorageWatch(TorchDispatchMode):
    """Enters what operators make into a ledger, and runs them as they are: how a real run is measured.

    `before(name, args)` is told of each operator of ours and of those named in `told`; what it returns is called when
    the operator has ended.
    """

    def __init__(
        self,
        ledger: StorageLedger,
        before: Callable[[str, Sequence[Any]], Callable[[], None] | None] | None = None,
        told: Set[str] = frozenset(),
    ) -> None:
        super().__init__()
        self.ledger, self._before, self._told_ops = ledger, before, told

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if works_in_place(func, args, kwargs):
            return in_place(func)(*args, **(kwargs or {}))
        _enter_captured(self.ledger, func, _tensors(tree_flatten((args, kwargs))[0]))
        ended = None
        if self._before is not None and (func.namespace == "gnnsys" or op_name(func) in self._told_ops):
            ended = self._before(op_name(func), all_arguments(func, args, kwargs or {}))
        out = func(*args, **(kwargs or {}))
        for value in tree_flatten(out)[0]:
            if isinstance(value, Tensor):
                self.ledger.made(value, op_name(func))
        if ended is not None:
            ended()
        return out


class FakeRows(TorchDispatchMode):
    """Runs operators on indices, pretends those on rows. `before(name, args)` is told of each operator of ours, of
    products of matrices and of those named in `told`; what it returns is called when the operator has ended."""

    def __init__(
        self,
        ledger: StorageLedger,
        before: Callable[[str, Sequence[Any]], Callable[[], None] | None],
        told: Set[str] = frozenset(),
    ) -> None:
        super().__init__()
        self.ledger, self._before, self._told_ops = ledger, before, told
        self._fake_mode = FakeTensorMode()
        self._twins: dict[int, weakref.ref[Any]] = {}  # real storage -> fake one
        self._twin_of: dict[int, tuple[weakref.ref[Any], Tensor]] = {}  # fake storage -> keeps the real one alive
        self._written: dict[int, weakref.ref[Any]] = {}  # real storages into which something fake was written
        self._makes_rows: dict[Any, bool | None] = {}
        self._repeated, self._shapes = RepeatedOperators(), KnownShapes(self._fake_mode)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if works_in_place(func, args, kwargs):
            ended = self._told(func, args, kwargs or {})
            if ended is not None:
                ended()
            return args[0]
        kwargs = kwargs or {}
        flat, spec = tree_flatten((args, kwargs))
        tensors = [value for value in flat if isinstance(value, Tensor)]
        if any(tensor.layout is not torch.strided for tensor in tensors):
            raise TraceEnds(self._is_sparse(func))
        _enter_captured(self.ledger, func, tensors)
        if all(map(self._is_real, tensors)):
            makes_rows = self._asks_for_rows(func, flat, spec)
            if not makes_rows:
                return self._run(func, args, kwargs, turns_fake=makes_rows is None)
        return self._pretend(func, flat, spec)

    def _is_real(self, tensor: Tensor) -> bool:
        if type(tensor) is FakeTensor:
            return False
        if _has_rows(tensor) and tensor.untyped_storage().nbytes() > _ONE_VALUE:
            return False
        return not self._written or tensor.untyped_storage()._cdata not in self._written

    def _asks_for_rows(self, func: Any, flat: list[Any], spec: Any) -> bool | None:
        """Whether the operator makes rows of indices; None where only a run can tell its sizes."""
        sizes = tuple(value for value in flat if isinstance(value, int)) if not _tensors(flat) else ()
        key = (func, sizes, *(_sort_of(value) for value in flat))
        if key not in self._makes_rows:
            args, kwargs = tree_unflatten([self._twin_or_value(value) for value in flat], spec)
            try:
                with self._fake_mode:
                    results = _tensors(tree_flatten(func(*args, **kwargs))[0])
                self._makes_rows[key] = any(_has_rows(t) and t.untyped_storage().nbytes() > _ONE_VALUE for t in results)
            except (DynamicOutputShapeException, DataDependentOutputException, UnsupportedOperatorException):
                self._makes_rows[key] = None
        return self._makes_rows[key]

    def _run(self, func: Any, args: Any, kwargs: Any, turns_fake: bool) -> Any:
        ended = self._told(func, args, kwargs)
        places = self._places_inside(func, args, kwargs)
        out = self._repeated(func, args, kwargs)
        values, spec = tree_flatten(out)
        for index, value in enumerate(values):
            if isinstance(value, Tensor):
                if turns_fake and _has_rows(value) and value.untyped_storage().nbytes() > _ONE_VALUE:
                    values[index] = value = self._like(value)
                self.ledger.made(value, op_name(func), is_index=not _has_rows(value))
        if places is not None:
            places()
        if ended is not None:
            ended()
        return tree_unflatten(values, spec)

    def _places_inside(self, func: Any, args: Sequence[Any], kwargs: Any) -> Ended | None:
        """Indexing integers by a mask: torch finds the places where it is true first, and keeps them until the end."""
        if func not in _INDEXES or _fills(func, args, kwargs):
            return None
        masks = [index for index in args[1] if _is_mask(index)]
        num_bytes = sum(int(mask.count_nonzero()) * mask.dim() * torch.int64.itemsize for mask in masks)
        return self.ledger.workspace(num_bytes, "aten::nonzero") if num_bytes else None

    def _pretend(self, func: Any, flat: list[Any], spec: Any) -> Any:
        if self.ledger.phase is StepPhase.OPTIMIZER and _only_writes(func):
            self._note_writes(func, flat, spec)
            return tree_unflatten(flat, spec)[0][0] if func._schema.returns else None
        if func in _INDEXES and not _fills(func, *tree_unflatten(flat, spec)):
            flat, spec = tree_flatten(self._masks_as_places(*tree_unflatten(flat, spec)))
        if func not in _CORRECTED:
            given = tree_unflatten(flat, spec)
            key = self._shapes.key(func, *given)
            if (known := None if key is None else self._shapes.make(key)) is not None:
                return self._enter_known(func, given, known)
        else:
            key = None
        twins = [self._twin_or_value(value) for value in flat]
        original = {id(twin): value for twin, value in zip(twins, flat, strict=True) if isinstance(value, Tensor)}
        args, kwargs = tree_unflatten(twins, spec)
        ended = self._told(func, args, kwargs)
        try:
            chosen = int(flat[1].expand(flat[0].shape).sum()) if self._selects_by_real_mask(func, flat) else None
            with self._fake_mode:
                out = func(*args, **kwargs) if chosen is None else args[0].new_empty(chosen)
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            raise TraceEnds(
                f"{op_name(func)}{self._place()} asks for a value or a size that depends on rows, which a trace does "
                "not compute: take it out of the step (loss.item(), a mask of rows made by comparing them), or run the "
                "job to learn its memory"
            ) from error
        except UnsupportedOperatorException as error:
            raise TraceEnds(self._no_shapes(func)) from error
        except RuntimeError as error:
            if "no fake impl" not in str(error):
                raise
            raise TraceEnds(self._no_shapes(func)) from error
        self._note_writes(func, flat, spec)
        values, out_spec = tree_flatten(out)
        if any(isinstance(value, Tensor) and value.layout is not torch.strided for value in values):
            raise TraceEnds(self._is_sparse(func))
        if func is _BATCH_NORM:
            self._correct_batch_norm(values, args)
        elif func is _LSTM:
            with self._fake_mode:
                values[3] = values[3].new_empty(lstm_workspace(args))
        if key is not None:
            self._shapes.keep(key, values, twins)
        for index, value in enumerate(values):
            if isinstance(value, Tensor):
                if id(value) in original:
                    values[index] = original[id(value)]
                elif value.untyped_storage()._cdata not in self._twin_of:
                    self.ledger.made(value, op_name(func))
        if ended is not None:
            ended()
        return tree_unflatten(values, out_spec)

    def _enter_known(self, func: Any, given: Any, known: list[Any]) -> Any:
        """As `_pretend` ends, for results that were made without asking torch."""
        ended = self._told(func, *given)
        for value in known:
            self.ledger.made(value, op_name(func))
        if ended is not None:
            ended()
        return tuple(known) if len(func._schema.returns) > 1 else known[0]

    def _masks_as_places(self, args: Sequence[Any], kwargs: Any) -> tuple[Sequence[Any], Any]:
        """Indexing by a real mask, as torch does it: by the places where it is true, found for this operator alone."""
        indices: list[Any] = []
        for index in args[1]:
            if _is_mask(index) and self._is_real(index):
                places = index.nonzero()
                self.ledger.made(places, "aten::nonzero", is_index=True)
                indices += places.unbind(1)
            else:
                indices.append(index)
        return (args[0], indices, *args[2:]), kwargs

    def _selects_by_real_mask(self, func: Any, flat: list[Any]) -> bool:
        return func is _MASKED_SELECT and self._is_real(flat[1])

    def _correct_batch_norm(self, values: list[Any], args: Sequence[Any]) -> None:
        """torch 2.13 gives a batch's mean and deviation the dtype of rows; they have that of the weights."""
        rows, weight = args[0], args[1]
        if weight is not None and weight.dtype != rows.dtype:
            with self._fake_mode:
                values[1:] = [value.to(weight.dtype) for value in values[1:]]

    def _told(self, func: Any, args: Any, kwargs: Any) -> Ended | None:
        ended = None
        if func.namespace == "gnnsys" or func in PRODUCTS or op_name(func) in self._told_ops:
            ended = self._before(op_name(func), all_arguments(func, args, kwargs))
        held = self._wide_indices(args[1]) if func in _INDEXES else None
        return ended if held is None else _both(held, ended)

    def _wide_indices(self, indices: Sequence[Any]) -> Ended | None:
        """Indices of 32 bits are copied for an operator that indexes."""
        short = [each for each in indices if isinstance(each, Tensor) and each.dtype == torch.int32]
        num_bytes = sum(index.numel() * torch.int64.itemsize for index in short)
        return self.ledger.workspace(num_bytes, "aten::to") if num_bytes else None

    def _is_sparse(self, func: Any) -> str:
        return (
            f"{op_name(func)}{self._place()} takes or makes a sparse tensor, whose sizes a trace does not follow: use "
            "gnnsys.ops.spmm with a CSC, or an embedding with sparse=False, or run the job to learn its memory"
        )

    def _no_shapes(self, func: Any) -> str:
        return f"{op_name(func)}{self._place()} tells no shapes: register them with torch.library.register_fake"

    def _place(self) -> str:
        module, _ = self.ledger.where()
        return f" in {module}" if module else ""

    def _note_writes(self, func: Any, flat: list[Any], spec: Any) -> None:
        if not func._schema.is_mutable:
            return
        args, kwargs = tree_unflatten(flat, spec)
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = kwargs.get(argument.name) if index >= len(args) else args[index]
            for tensor in _tensors(given if isinstance(given, list | tuple) else [given]):
                if type(tensor) is not FakeTensor and self._is_real(tensor):
                    self._forget_values(tensor.untyped_storage())

    def _forget_values(self, storage: torch.UntypedStorage) -> None:
        """Something fake was written there: what reads it is fake from now on."""
        key = storage._cdata

        def gone(_: Any) -> None:
            self._written.pop(key, None)

        self._written[key] = weakref.ref(storage, gone)

    def _twin_or_value(self, value: Any) -> Any:
        return self._twin(value) if isinstance(value, Tensor) and type(value) is not FakeTensor else value

    def _twin(self, tensor: Tensor) -> FakeTensor:
        """A fake tensor of the same shape, over the fake storage that stands for the real one."""
        real = tensor.untyped_storage()
        found = self._twins.get(real._cdata)
        storage = None if found is None else found()
        if storage is None:
            storage = torch.UntypedStorage(real.nbytes(), device="meta")
            self._tie(storage, tensor.detach(), real._cdata)
        with torch._C._DisableTorchDispatch():
            meta = torch.empty(0, dtype=tensor.dtype, device="meta")
            meta.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload]
            return FakeTensor(self._fake_mode, meta, _CPU)

    def _tie(self, fake: torch.UntypedStorage, tensor: Tensor, real_key: int) -> None:
        fake_key = fake._cdata

        def gone(_: Any) -> None:
            self._twins.pop(real_key, None)
            self._twin_of.pop(fake_key, None)

        self._twins[real_key] = reference = weakref.ref(fake, gone)
        self._twin_of[fake_key] = reference, tensor

    def _like(self, tensor: Tensor) -> Tensor:
        with self._fake_mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_CPU)


def all_arguments(func: Any, args: Sequence[Any], kwargs: Any) -> list[Any]:
    """Those that were given, by place: what was left out before one that was given is as it is by default."""
    more = func._schema.arguments[len(args) :]
    last = max((number for number, each in enumerate(more) if each.name in kwargs), default=-1)
    return [*args, *(kwargs.get(each.name, each.default_value) for each in more[: last + 1])]


def op_name(func: Any) -> str:
    return f"{func.namespace}::{func._opname}"


@functools.cache
def _only_writes(func: Any) -> bool:
    """Whether an operator makes nothing: it writes its first argument, and returns that or nothing."""
    schema, first = func._schema, func._schema.arguments[0]
    if func.namespace != "aten" or first.alias_info is None or not first.alias_info.is_write:
        return False
    if torch.Tag.inplace_view in func.tags or func._opname in ("set_", "resize_", "resize_as_"):
        return False
    if any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments[1:]):
        return False
    return not schema.returns or (len(schema.returns) == 1 and schema.returns[0].alias_info is not None)


def _both(one: Ended, other: Ended | None) -> Ended:
    def ended() -> None:
        one()
        if other is not None:
            other()

    return ended


def _fills(func: Any, args: Sequence[Any], kwargs: Any) -> bool:
    """Whether one number is written where one mask is true: torch fills then, and looks for no places."""
    _, indices, *more = all_arguments(func, args, kwargs)
    given = [index for index in indices if index is not None]
    if func is torch.ops.aten.index.Tensor or len(given) != 1 or not _is_mask(given[0]) or (len(more) > 1 and more[1]):
        return False
    return type(more[0]) is not FakeTensor and more[0].dim() == 0


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.bool


def _has_rows(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor)]


def _enter_captured(ledger: StorageLedger, func: Any, tensors: Sequence[Tensor]) -> None:
    """Arguments that nobody entered: `torch.tensor(...)` made them just now, all others were there before."""
    for tensor in tensors:
        if type(tensor) is not FakeTensor:
            if func is _LIFT:
                ledger.made(tensor, "torch.tensor", is_index=not _has_rows(tensor))
            else:
                ledger.given(tensor, MemoryKind.INPUTS, "captured")


def _sort_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.dim(), value.numel() < 3
    return value if isinstance(value, torch.dtype) else type(value)
