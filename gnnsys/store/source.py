"""Sources of rows: one protocol for tensors, tables, caches, rows shared in flight, and what a user writes.

Whoever reads makes a `ReadContext`, begins a read of every source with it, sends what the reads have in common, and
takes the results. So all tables of a store leave in one message per machine, whatever wraps them:

    context = ReadContext(batch=number)
    reads = [source.begin(ids, None, context) for source, ids in wanted]
    context.send()
    rows = [read.result() for read in reads]

`as_source` is the one place that decides what a thing is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from gnnsys.ops import BufferPool, DeviceReads, gather_rows, move_rows
from gnnsys.store.candidates import MEMORY, OWN, Candidate, Located, Policy

HOST = torch.device("cpu")
COUNTS = ("bytes_local", "bytes_remote", "bytes_shared", "bytes_left_out", "rows_asked", "rows_shared")


class PendingRead(Protocol):
    """A read under way."""

    def result(self) -> Tensor:
        """The rows, when they have come: `out` where the read has filled it, else a tensor of the source's own.

        Whoever began the read copies the latter; it has a row per id, of the source's row shape and dtype.
        """
        ...


@runtime_checkable
class FeatureSource(Protocol):
    """Rows by id: what a user writes. Such a class may stand wherever a table or a tensor of features does.

    `shape` is [num_rows, *row_shape]. A source may say more:

    - `mutable = False`: its rows never change, so that batches in flight may share them. `True`: they train, and are
      not fetched ahead unless they are named.
    - `is_remote = False`: its rows are here, and no read waits. The default is True.
    - `device`: a torch.device that is not the host. It is then given ids wherever they are, and leaves rows there.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, ids: Tensor, out: Tensor | None = None) -> Tensor:
        """The rows of `ids`: `out`, filled, or a tensor of its own, which the caller copies."""
        ...

    def begin_read(self, ids: Tensor, out: Tensor | None = None) -> PendingRead:
        """Starts a read and returns at once where that is possible. `out` may be filled until `result` returns."""
        ...


@runtime_checkable
class Source(Protocol):
    """What every source of rows is to those that read: tensors, tables, and all that wraps a source."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[num_rows, *row_shape]."""
        ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def mutable(self) -> bool | None:
        """Whether rows change while they are read: True for rows that train, None where nobody has said."""
        ...

    @property
    def is_remote(self) -> bool:
        """Whether some rows come from another process."""
        ...

    @property
    def device(self) -> torch.device:
        """Where rows arrive that are read without `out`."""
        ...

    @property
    def placement(self) -> Hashable:
        """Equal for two sources that have the row of any id in the same place."""
        ...

    def locate(self, ids: Tensor, policy: Policy | None = None) -> list[Located]:
        """All candidates for the rows of `ids`, nearest first, and which of them serves."""
        ...

    def begin(self, ids: Tensor, out: Tensor | None, context: ReadContext, at: Tensor | None = None) -> PendingRead:
        """Starts a read of `ids`, which may be on any device. The row of ids[j] goes to out[j], or to out[at[j]].

        Without `out` the source takes memory itself. Nothing need be sent before `context.send()`, and `result` of the
        read is called after it.
        """
        ...


class ReadGroup(Protocol):
    """Reads of one context that leave together."""

    def sending(self, context: ReadContext) -> AbstractContextManager[None]:
        """Sends them on entering. What it holds is let go of when all groups of the context are sent."""
        ...


_Group = TypeVar("_Group", bound=ReadGroup)
_Made = TypeVar("_Made")


@dataclass(eq=False, kw_only=True)
class ReadContext:
    """What reads belong to, and what they have in common until they are sent. One for each batch.

    `batch` is the batch's number, -1 where there is none. Floats that are wider than `wire_dtype` travel as that.
    `policy` chooses among candidates; None leaves that to the store. Whose messages they are, and how urgent, says the
    `gnnsys.comm.RequestContext` of the thread that sends. Rows are gathered into `buffers`; None leaves
    memory to the source.
    """

    batch: int = -1
    wire_dtype: torch.dtype | None = None
    policy: Policy | None = None
    buffers: RowBuffers | None = None
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))

    def __post_init__(self) -> None:
        check_policy(self.policy)
        self._wrappers: dict[int, ReadGroup] = {}  # by the owner's id; a group keeps its owner alive
        self._stores: dict[int, ReadGroup] = {}
        self._ids: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}
        self._made: dict[Hashable, Any] = {}
        self._lock = threading.Lock()

    def on(self, ids: Tensor, device: torch.device) -> Tensor:
        """The ids on a device. Equal calls return the same tensor: ids are copied once for all sources."""
        if ids.device == device:
            return ids
        key = id(ids), device
        if key not in self._ids:
            self._ids[key] = ids, send(ids, device)
        return self._ids[key][1]

    def once(self, key: Hashable, make: Callable[[], _Made]) -> _Made:
        """What `make` returned for the first read of this context that asked with an equal key: what reads of several
        tables have in common. `key` must not outlive what it names, so name things by ids only while a read holds them.
        """
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised memory of the host, for rows."""
        return (
            torch.empty(shape, dtype=dtype, device="cpu") if self.buffers is None else self.buffers.empty(shape, dtype)
        )

    def collect(self, owner: object, make: Callable[[], _Group], *, wraps: bool = False) -> _Group:
        """The group of reads that leave together with those of `owner`, a store say; made by the first of them.

        A group that `wraps` sources begins their reads when it is sent, so it is sent before the others.
        """
        groups: dict[int, Any] = self._wrappers if wraps else self._stores
        if id(owner) not in groups:
            groups[id(owner)] = make()
        return groups[id(owner)]

    def send(self) -> None:
        """Sends what the reads so far have left to be sent together."""
        if not self._wrappers and not self._stores:
            return
        with ExitStack() as sending:
            while self._wrappers:
                sending.enter_context(self._wrappers.pop(next(iter(self._wrappers))).sending(self))
            stores, self._stores = self._stores, {}
            for group in stores.values():
                sending.enter_context(group.sending(self))

    def count(self, **counts: int) -> None:
        """Adds to `counts`; any thread may, as batches complete each other's reads."""
        with self._lock:
            for name, count in counts.items():
                self.counts[name] += count


class RowBuffers:
    """Memory that rows are gathered into: of a pool, or pinned where rows go on to a device."""

    def __init__(self, pool: BufferPool, pin: bool = False) -> None:
        self._pool, self._pin = pool, pin

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised memory of the host."""
        if self._pin:  # torch keeps pinned memory for reuse by itself
            return torch.empty(shape, dtype=dtype, pin_memory=True, device="cpu")
        return self._pool.empty(shape, dtype)


class TensorSource:
    """A tensor as a source. Its rows are gathered when the result is asked for, while others are on their way.

    Rows on a device are gathered there, and so are rows in pinned memory where that is where the ids are.
    """

    mutable = False
    is_remote = False
    placement: Hashable = MEMORY

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self._reads = DeviceReads()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.rows.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.rows.dtype

    @property
    def device(self) -> torch.device:
        return self.rows.device

    def locate(self, ids: Tensor, policy: Policy | None = None) -> list[Located]:
        return located_at(Candidate(MEMORY), ids)

    def begin(self, ids: Tensor, out: Tensor | None, context: ReadContext, at: Tensor | None = None) -> PendingRead:
        if at is not None:
            return begin_scattered(self, ids, out, context, at)
        return _Gathering(self, ids, out, context)

    def gather(self, ids: Tensor, out: Tensor | None, context: ReadContext) -> Tensor:
        """The rows of `ids`; in `out` where the rows are on the host."""
        rows = self.rows
        if rows.requires_grad or not rows.is_contiguous():
            return rows.index_select(0, context.on(ids, rows.device))
        if rows.is_cuda or (ids.is_cuda and rows.is_pinned()):
            where = rows.device if rows.is_cuda else ids.device
            self._reads(where, rows)
            return gather_rows(rows, context.on(ids, where))
        if not rows.is_cpu:
            return rows.index_select(0, context.on(ids, rows.device))
        at = context.on(ids, HOST)
        return gather_rows(rows, at, context.empty((at.numel(), *rows.shape[1:]), rows.dtype) if out is None else out)


class _Gathering(NamedTuple):
    """A read of a tensor, that is done in `result`."""

    source: TensorSource
    ids: Tensor
    out: Tensor | None
    context: ReadContext

    def result(self) -> Tensor:
        rows = self.source.gather(self.ids, self.out, self.context)
        self.context.count(bytes_local=rows.nbytes)
        return rows


class UserSource:
    """A user's own class (`FeatureSource`) as a source. `name` is what errors call it."""

    def __init__(self, own: FeatureSource, name: str) -> None:
        self.own, self.name = own, name
        device = getattr(own, "device", None)
        self.device = device if isinstance(device, torch.device) else HOST
        self.is_on_host = self.device.type in ("cpu", "meta")
        self.mutable: bool | None = getattr(own, "mutable", None)
        self.is_remote = bool(getattr(own, "is_remote", self.is_on_host))
        self.placement: Hashable = id(own)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.own.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.own.dtype

    def locate(self, ids: Tensor, policy: Policy | None = None) -> list[Located]:
        return located_at(Candidate(OWN if self.is_remote else MEMORY), ids)

    def begin(self, ids: Tensor, out: Tensor | None, context: ReadContext, at: Tensor | None = None) -> PendingRead:
        if at is not None:
            return begin_scattered(self, ids, out, context, at)
        num_bytes = ids.numel() * row_bytes(self)
        if self.is_remote:
            context.count(rows_asked=ids.numel(), bytes_remote=num_bytes)
        else:
            context.count(bytes_local=num_bytes)
        if not self.is_on_host and out is None:
            return self.own.begin_read(ids)
        ids = context.on(ids, HOST) if self.is_on_host else ids
        out = context.empty((ids.numel(), *self.shape[1:]), self.dtype) if out is None else out
        return _Put(self.own.begin_read(ids, out), out, self.name)


class _Put(NamedTuple):
    """A read whose rows end in `out`, wherever the source has left them."""

    read: PendingRead
    out: Tensor
    name: str

    def result(self) -> Tensor:
        return put_rows(self.read.result(), self.out, self.name)


class _Scattered(NamedTuple):
    """A read of a source that fills whole buffers only; its rows go to out[at] in the end."""

    read: PendingRead
    rows: Tensor
    out: Tensor
    at: Tensor

    def result(self) -> Tensor:
        move_rows(put_rows(self.read.result(), self.rows, "array"), self.out, order=self.at)
        return self.out


def begin_scattered(source: Source, ids: Tensor, out: Tensor | None, context: ReadContext, at: Tensor) -> PendingRead:
    """For sources that cannot put rows at places of `out` themselves."""
    assert out is not None, "at names rows of out"
    rows = torch.empty((ids.numel(), *source.shape[1:]), dtype=source.dtype, device="cpu")
    return _Scattered(source.begin(ids, rows, context), rows, out, at)


def as_source(thing: Any, name: str = "array") -> Source:
    """A tensor, a table, or a user's own class as a source; ValueError that says what a thing lacks to be one.

    >>> as_source(torch.zeros(3, 2)).shape
    (3, 2)
    """
    if isinstance(thing, Tensor):
        return TensorSource(thing)
    if isinstance(thing, Source):
        return thing
    missing = [part for part in ("shape", "dtype", "read", "begin_read") if not hasattr(thing, part)]
    if missing:
        raise ValueError(
            f"{name!r} is a {type(thing).__name__}, which is no source of rows: it lacks {', '.join(missing)} "
            "(see gnnsys.store.FeatureSource)"
        )
    return UserSource(thing, name)


def read_rows(wanted: Iterable[tuple[Any, Tensor]], context: ReadContext | None = None) -> list[Tensor]:
    """The rows of each (source, ids), here and now: one message per machine for all tables of a store.

    Rows of a tensor are where it is, all others on the host.
    """
    context = ReadContext() if context is None else context
    begun = []
    for thing, ids in wanted:
        source = as_source(thing)
        begun.append((source, source.begin(ids, None, context)))
    context.send()
    read = [(source, reading.result()) for source, reading in begun]
    return [rows if isinstance(source, TensorSource) else rows.cpu() for source, rows in read]


def check_policy(policy: Any) -> None:
    """ValueError unless it is None or a function."""
    if policy is not None and not callable(policy):
        raise ValueError(f"policy must be a function of a part's candidates that returns one of them, got {policy!r}")


def put_rows(rows: Tensor, out: Tensor, name: str) -> Tensor:
    """`out` with the rows that a source returned, copied where it returned a tensor of its own.

    ValueError where they cannot be the rows that were asked for: another shape, another dtype, or no tensor.
    """
    if rows is out:
        return out
    if not isinstance(rows, Tensor) or rows.shape != out.shape or rows.dtype != out.dtype:
        got = f"{list(rows.shape)} {rows.dtype}" if isinstance(rows, Tensor) else type(rows).__name__
        raise ValueError(f"the source of {name!r} must return rows {list(out.shape)} {out.dtype}, got {got}")
    return out.copy_(rows.detach())


def located_at(candidate: Candidate, ids: Tensor) -> list[Located]:
    """All ids in one place, which there is no choice about."""
    return [Located(0, None, ids, (candidate,), candidate)]


def row_bytes(source: Source) -> int:
    """Of one row in memory."""
    return prod(source.shape[1:]) * source.dtype.itemsize


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """To the device without waiting for it, which takes pinned memory; to the host when it is all there."""
    if device.type == "cpu":
        return tensor.cpu()
    if device.type == "cuda" and tensor.is_cpu and tensor.numel() and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
