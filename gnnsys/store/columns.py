"""Rows by some of their columns: what is chosen, and sources that bring no more than that.

Rows of a part's own nodes are whole. Those of other parts have the chosen columns, and in the others what the choice
says. This is so wherever a row comes from, so that a batch depends neither on caches nor on who shares a machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnsys.ops import DeviceReads, as_bytes, fill_columns, move_rows, widen_rows
from gnnsys.store.candidates import Located, Policy
from gnnsys.store.dist_tensor import DistTensor
from gnnsys.store.source import HOST, PendingRead, ReadContext, Source, begin_scattered


@dataclass(frozen=True, eq=False)
class ColumnChoice:
    """The columns by which rows of other parts are read.

    `rows` is the name of the rows ("x"). Ids from `own[0]` to before `own[1]` have whole rows. `fill` has a value for
    every column of a row, which stands in those that are left out.
    """

    rows: str
    own: tuple[int, int]
    columns: Tensor  # int64, ascending
    fill: Tensor  # [num_columns of a whole row]

    def __post_init__(self) -> None:
        columns, width = self.columns, self.fill.numel()
        if columns.dim() != 1 or columns.dtype != torch.int64 or self.fill.dim() != 1:
            raise ValueError(
                "columns must be int64 [n] and fill a value per column, got "
                f"{columns.dtype} {list(columns.shape)} and {list(self.fill.shape)}"
            )
        if not columns.numel():
            raise ValueError(f"no columns of {self.rows!r} are chosen: choose at least one of its {width}")
        if not 0 <= int(columns.min()) <= int(columns.max()) < width:
            raise ValueError(
                f"columns must be in [0, {width}), {self.rows!r} has so many, got {int(columns.min())} to "
                f"{int(columns.max())}"
            )
        if bool((columns[1:] <= columns[:-1]).any()):
            raise ValueError("columns must ascend, each named once: pass columns.unique()")

    @cached_property
    def key(self) -> bytes:
        """Equal for choices that make the same rows."""
        told = hashlib.sha256(f"{self.rows} {self.own} {self.fill.dtype}".encode())
        for values in (self.columns, self.fill):
            told.update(as_bytes(values.contiguous()).numpy().data)
        return told.digest()

    @cached_property
    def place(self) -> Tensor:
        """int64 by column of a whole row: where a narrow row has it, 0 for columns that were left out."""
        place = torch.zeros(self.fill.numel(), dtype=torch.int64, device="cpu")
        place[self.columns] = torch.arange(self.columns.numel(), device="cpu")
        return place

    @cached_property
    def dropped(self) -> Tensor:
        """The columns that are left out, int64, ascending."""
        is_dropped = torch.ones(self.fill.numel(), dtype=torch.bool, device="cpu")
        is_dropped[self.columns] = False
        return is_dropped.nonzero().view(-1)

    def values(self, dtype: torch.dtype) -> Tensor:
        """What stands in the columns that are left out."""
        return self.fill[self.dropped].to(dtype)

    def is_own(self, ids: Tensor) -> Tensor:
        """Which ids have whole rows, bool, on the device of `ids`."""
        return (ids >= self.own[0]) & (ids < self.own[1])

    def state(self) -> dict[str, Any]:
        """As a checkpoint keeps it."""
        return {"rows": self.rows, "own": list(self.own), "columns": self.columns, "fill": self.fill}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> ColumnChoice:
        """What `state` gave; ValueError for anything else."""
        try:
            first, end = state["own"]
            return cls(str(state["rows"]), (int(first), int(end)), state["columns"].clone(), state["fill"].clone())
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this is no choice of columns: {error!r}") from error


class NarrowRows(NamedTuple):
    """Rows of a batch on their way: whole ones and narrow ones apart, and where among all they go."""

    whole: Tensor  # [num_own, width], or all rows with the whole ones in place (`own_at` is None)
    own_at: Tensor | None
    narrow: Tensor  # [num_others, num_columns]
    others_at: Tensor
    place: Tensor
    dropped: Tensor
    values: Tensor

    def widen(self) -> Tensor:
        """All rows, whole, on the device that these are on."""
        out = self.whole
        if self.own_at is not None:
            num_rows = self.own_at.numel() + self.others_at.numel()
            out = self.whole.new_empty((num_rows, *self.whole.shape[1:]))
            out.index_copy_(0, self.own_at, self.whole)
        return widen_rows(self.narrow, out, self.others_at, self.place, self.dropped, self.values)


class ColumnSource:
    """Some columns of the rows of `source`, which has one-dimensional rows; a source.

    A table is asked for these columns alone; of any other source whole rows are read, and narrowed here.
    """

    def __init__(self, source: Source, columns: Tensor) -> None:
        self._source, self._columns = source, columns

    @property
    def shape(self) -> tuple[int, ...]:
        return self._source.shape[0], self._columns.numel()

    @property
    def dtype(self) -> torch.dtype:
        return self._source.dtype

    @property
    def mutable(self) -> bool | None:
        return self._source.mutable

    @property
    def is_remote(self) -> bool:
        return self._source.is_remote

    @property
    def device(self) -> torch.device:
        return self._source.device

    @property
    def placement(self) -> Hashable:
        return self._source.placement

    def locate(self, ids: Tensor, policy: Policy | None = None) -> list[Located]:
        return self._source.locate(ids, policy)

    def begin(self, ids: Tensor, out: Tensor | None, context: ReadContext, at: Tensor | None = None) -> PendingRead:
        if isinstance(self._source, DistTensor):
            return self._source.begin(ids, out, context, at, columns=self._columns)
        if at is not None:
            return begin_scattered(self, ids, out, context, at)
        return _Picking(self._source.begin(ids, None, context), self._columns, out, context)


class _Picking(NamedTuple):
    """A read of whole rows, of which some columns are taken."""

    read: PendingRead
    columns: Tensor
    out: Tensor | None
    context: ReadContext

    def result(self) -> Tensor:
        rows = self.read.result()
        if not rows.is_cpu:
            return rows.index_select(1, self.context.on(self.columns, rows.device))
        out = self.out
        if out is None:
            out = self.context.empty((rows.shape[0], self.columns.numel()), rows.dtype)
        return move_rows(rows.contiguous(), out, columns=self.columns)


class NarrowReading(NamedTuple):
    """A read of whole rows of own nodes, and of narrow ones of others. `result` has both."""

    whole: PendingRead
    own_at: Tensor | None
    narrow: PendingRead
    others_at: Tensor
    choice: ColumnChoice

    def result(self) -> NarrowRows:
        whole, narrow, choice = self.whole.result(), self.narrow.result(), self.choice
        where = whole.device
        parts = (self.others_at, choice.place, choice.dropped, choice.values(whole.dtype))
        others_at, place, dropped, values = (part.to(where) for part in parts)
        own_at = None if self.own_at is None else self.own_at.to(where)
        return NarrowRows(whole, own_at, narrow, others_at, place, dropped, values)


class DeviceColumns:
    """A choice as a device applies it to rows that it has read whole or narrow."""

    def __init__(self, choice: ColumnChoice, dtype: torch.dtype, device: torch.device) -> None:
        self._choice = choice
        self._place, self._dropped, self._values = (
            values.to(device) for values in (choice.place, choice.dropped, choice.values(dtype))
        )
        self._reads = DeviceReads()  # by threads whose streams know nothing of the one that made these

    def put(self, narrow: Tensor, out: Tensor, at: Tensor) -> None:
        """Narrow rows to their places in `out`."""
        self._note(out)
        widen_rows(narrow, out, at, self._place, self._dropped, self._values)

    def narrow(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Rows that were read whole, those of other parts with what the choice leaves of them."""
        self._note(rows)
        return fill_columns(rows, self._choice.is_own(ids), self._dropped, self._values)

    def _note(self, rows: Tensor) -> None:
        if rows.is_cuda:
            self._reads(rows.device, self._place, self._dropped, self._values)


def begin_narrowed(
    whole: Source,
    narrow: Source,
    choice: ColumnChoice,
    ids: Tensor,
    context: ReadContext,
    *,
    in_place: bool,
) -> NarrowReading:
    """Starts a read of `ids`: own rows from `whole`, others from `narrow`, a `ColumnSource` of the same rows.

    `in_place` gathers own rows where they belong among all, which is right where rows are made whole on the host.
    """
    ids = context.on(ids, HOST)
    _, own_at, own, others_at, others = context.once((id(ids), choice.own), lambda: (ids, *_split(ids, choice)))
    if not in_place:
        return NarrowReading(
            whole.begin(own, None, context), own_at, narrow.begin(others, None, context), others_at, choice
        )
    out = context.empty((ids.numel(), *whole.shape[1:]), whole.dtype)
    read = whole.begin(own, out, context, own_at)
    return NarrowReading(read, None, narrow.begin(others, None, context), others_at, choice)


def _split(ids: Tensor, choice: ColumnChoice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where own ids stand and what they are, and the same of the others."""
    is_own = choice.is_own(ids)
    own_at, others_at = is_own.nonzero().view(-1), (~is_own).nonzero().view(-1)
    return own_at, ids[own_at], others_at, ids[others_at]
