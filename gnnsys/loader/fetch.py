"""The fetch stage: the rows of the nodes and edges that were sampled, wherever they are.

Every array is a source (`gnnsys.store.Source`). `begin` begins a read of each, as soon as a batch is sampled, and sends
what they have in common: one message per machine for all tables of a store. `finish`, in the batch's turn, first takes
what is in memory, and then waits for the rest.

A batch may say by which columns rows of other parts are read (`Sampled.columns`). Then only these are asked for, and a
batch that goes to a device has them made whole there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, Graph, NodeType, some
from gnnsys.loader.sampled import MadeSums, Sampled, SummedParts
from gnnsys.ops import BufferPool
from gnnsys.sampling import DistGraph
from gnnsys.store import (
    ColumnChoice,
    ColumnSource,
    CopiedRows,
    DeviceTable,
    DeviceWindow,
    DistTensor,
    InFlightWindow,
    NarrowReading,
    NarrowRows,
    PendingRead,
    Policy,
    ReadContext,
    RowBuffers,
    SharedInFlight,
    Source,
    TensorSource,
    as_source,
    begin_narrowed,
    has_short_rows,
    nearest,
    short_rows_on,
)

AnyType: TypeAlias = NodeType | EdgeType
Names: TypeAlias = Sequence[str] | Mapping[AnyType, Sequence[str]]
_MOST_CHOICES = 4  # of columns whose sources are kept: those of batches in flight


class Array(NamedTuple):
    """One array that batches have, and where its rows come from."""

    name: str
    source: Source
    waits: bool  # whether reads may wait for another process


class Fetch:
    """Fetches the arrays of a graph's node and edge data by the ids of a sample.

    `names` chooses arrays, for all types or by type; None means all but those that train (`mutable` is True): these
    are read in the forward pass, because a row that is fetched ahead may be an old one when it is used. `wire_dtype`
    is how floats travel between machines; `policy` is that of every read (`ReadContext`). Tables that `device` reads by
    itself are read there.
    What there is to fetch is decided once: arrays that the graph is given later, or instead of others, are not seen.
    """

    def __init__(
        self,
        graph: Graph | DistGraph,
        *,
        names: Names | None,
        wire_dtype: torch.dtype | None,
        policy: Policy | None = None,
        device: torch.device | None = None,
    ) -> None:
        check_names(graph, names)
        self._own = {
            key: [_read_by(device, graph, array, policy) for array in _chosen(names, key, arrays, policy)]
            for key, arrays in _data_of(graph).items()
        }
        self._arrays = self._own  # the same, with rows shared in flight where they are
        sources = [array.source for arrays in self._arrays.values() for array in arrays]
        self.num_arrays = len(sources)  # of a batch, over all types
        self.is_in_memory = all(
            isinstance(source, TensorSource) or (isinstance(source, DeviceTable) and not source.is_remote)
            for source in sources
        )  # nothing to begin
        self.waits = any(array.waits for arrays in self._arrays.values() for array in arrays)
        self._of_reads: dict[str, Any] = {
            "wire_dtype": check_wire_dtype(wire_dtype, sources), "policy": policy,
            "buffers": RowBuffers(BufferPool(max_free=0)),
        }  # fmt: skip
        self._window: InFlightWindow | None = None
        self.widens = True  # rows that come narrow are made whole here, and not by who makes a Batch of them
        self._narrowed: dict[tuple[AnyType, str, bytes], _NarrowSources] = {}
        self._device = device
        self._device_window: DeviceWindow | None = None
        self._counts = ReadContext().counts
        self._lock = threading.Lock()

    def check_on_host(self) -> None:
        """ValueError where rows are on a device although batches are not to be."""
        for key, arrays in self._arrays.items():
            for name, source, _ in arrays:
                if source.device.type not in ("cpu", "meta"):
                    where = source.device
                    raise ValueError(f"{name!r} of {key!r} is on {where}: make the loader with device={str(where)!r}")

    def names(self, key: AnyType) -> list[str]:
        """The arrays of a type that batches have."""
        return [array.name for array in self._arrays[key]]

    def all_names(self) -> dict[AnyType, list[str]]:
        """The same of every type."""
        return {key: self.names(key) for key in self._arrays}

    def source(self, key: AnyType, name: str) -> Source:
        """Where the rows of an array come from; KeyError where batches have no such array."""
        return {array.name: array.source for array in self._own[key]}[name]

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for rows of a batch, of the pool that it is prepared with."""
        buffers: RowBuffers = self._of_reads["buffers"]
        return buffers.empty(shape, dtype)

    def copied_tables(self) -> dict[str, Tensor]:
        """Tables in memory that a device with room would have a copy of, were they pinned (`short_rows_on`)."""
        tables = {
            array.name: array.source.rows
            for arrays in self._own.values()
            for array in arrays
            if isinstance(array.source, TensorSource)
        }
        return {
            name: rows
            for name, rows in tables.items()
            if rows.is_cpu and rows.is_contiguous() and not rows.requires_grad and has_short_rows(rows)
        }

    def row_bytes(self) -> int:
        """Of a node: of all arrays of nodes, whatever their type."""
        arrays = [array for key, found in self._own.items() if isinstance(key, str) for array in found]
        return sum(array.source.dtype.itemsize * prod(array.source.shape[1:]) for array in arrays)

    def prepare(self, buffers: RowBuffers, num_in_flight: int, keep: int = 0) -> None:
        """What to gather into, how many batches in flight share rows (0 for none), and how many behind them."""
        self._of_reads["buffers"] = buffers
        self._arrays, self._window, self._device_window, self._narrowed = self._own, None, None, {}
        if num_in_flight > 0:
            self._window = window = InFlightWindow(num_in_flight, keep)
            if self._device is not None:
                self._device_window = DeviceWindow(self._device, keep)
            self._arrays = {
                key: [_shared(array, key, window, self._device_window) for array in a] for key, a in self._own.items()
            }

    def begin(self, sampled: Sampled) -> Sampled:
        """Begins a read of every array, and sends the requests for what is not in this process's memory."""
        if sampled.rows:  # they came with the structure
            return sampled
        context = ReadContext(batch=sampled.position, **self._of_reads)
        reads = [
            _Reading(key, array, self._begin(key, number, _wanted(sampled, key, array, ids), sampled.columns, context))
            for key, ids in _ids_by_type(sampled)
            for number, array in enumerate(self._arrays[key])
            if not _is_kept(sampled, key, array.name)
        ]
        context.send()
        sampled.pending = _Reads(context, reads)
        return sampled

    def _begin(
        self, key: AnyType, number: int, ids: Tensor, choice: ColumnChoice | None, context: ReadContext
    ) -> PendingRead | NarrowReading:
        array = self._arrays[key][number]
        if choice is None or array.name != choice.rows or isinstance(key, tuple) or array.source.mutable is True:
            return array.source.begin(ids, None, context)
        sources = self._narrow_sources(key, number, choice)
        if sources.narrow is None:
            return sources.whole.begin(ids, None, context)
        return begin_narrowed(sources.whole, sources.narrow, choice, ids, context, in_place=self.widens)

    def _narrow_sources(self, key: AnyType, number: int, choice: ColumnChoice) -> _NarrowSources:
        """An array by a choice of columns. Batches in flight share its rows with those of the same choice alone."""
        name = key, self._arrays[key][number].name, choice.key
        with self._lock:
            found = self._narrowed.pop(name, None)
            if found is None:
                own, shared = self._own[key][number], self._arrays[key][number]
                found = _narrow(own, shared, choice, key, self._window, self._device_window)
            self._narrowed[name] = found  # the last one is the newest
            while len(self._narrowed) > _MOST_CHOICES:
                del self._narrowed[next(iter(self._narrowed))]
        return found

    def finish(self, sampled: Sampled) -> Sampled:
        """Gathers what is in memory, while the rest arrives; then waits for the rest."""
        if sampled.rows:
            return sampled
        if sampled.pending is None:
            self.begin(sampled)
        begun: _Reads = sampled.pending
        sampled.pending = None
        arrived = {reading: reading.read.result() for reading in begun.reads if not reading.array.waits}
        if self.waits:
            arrived |= {reading: reading.read.result() for reading in begun.reads if reading.array.waits}
        sampled.rows = {key: {} for key, _ in _ids_by_type(sampled)}
        if sampled.kept is not None:
            sampled.rows[sampled.kept.node_type][sampled.kept.name] = sampled.kept
        for reading in begun.reads:  # in the graph's order
            rows: Any = arrived[reading]
            if self.widens and isinstance(rows, NarrowRows):
                rows = rows.widen()
            if _is_summed(sampled.sums, reading.key, reading.array):
                made = cast(MadeSums, sampled.sums)
                rows = SummedParts(rows, made.sums, made.of, made.gather)
            sampled.rows.setdefault(reading.key, {})[reading.array.name] = rows
        moved = begun.context.counts
        if sampled.trace is not None:
            for flow in ("local", "remote", "shared"):
                sampled.trace.bytes[flow] = moved[f"bytes_{flow}"]
            if sampled.columns is not None:
                sampled.trace.bytes["left_out"] = moved["bytes_left_out"]
        with self._lock:
            for name, count in moved.items():
                self._counts[name] += count
        return sampled

    def __call__(self, sampled: Sampled) -> Sampled:
        return self.finish(self.begin(sampled))

    def counts(self) -> dict[str, int]:
        """Bytes from memory, from others, and from other batches in flight; remote rows asked for and shared."""
        with self._lock:
            return dict(self._counts)

    def forget(self) -> None:
        """Nothing that is under way now is shared with batches to come, and no row that was copied ahead."""
        for array in (array for arrays in self._own.values() for array in arrays):
            if isinstance(array.source, CopiedRows):
                array.source.forget()
        for window in (self._window, self._device_window):
            if window is not None:
                window.forget()


def _is_summed(made: MadeSums | None, key: AnyType, array: Array) -> bool:
    return made is not None and (made.node_type, made.name) == (key, array.name)


def _is_kept(sampled: Sampled, key: AnyType, name: str) -> bool:
    kept = sampled.kept
    return kept is not None and (kept.node_type, kept.name) == (key, name)


def _wanted(sampled: Sampled, key: AnyType, array: Array, ids: Tensor) -> Tensor:
    """Ids whose rows are read: only the first ones where sums stand for the others."""
    made = sampled.sums
    return ids[: made.num_own] if made is not None and _is_summed(made, key, array) else ids


class _Reading:
    """A read of one array for one batch."""

    __slots__ = ("array", "key", "read")

    def __init__(self, key: AnyType, array: Array, read: PendingRead | NarrowReading) -> None:
        self.key, self.array, self.read = key, array, read


class _NarrowSources(NamedTuple):
    """An array by a choice of columns: `whole` reads all rows as they are to be where there is no `narrow`."""

    whole: Source
    narrow: Source | None


def _narrow(
    own: Array,
    shared: Array,
    choice: ColumnChoice,
    key: AnyType,
    window: InFlightWindow | None,
    on_device: DeviceWindow | None,
) -> _NarrowSources:
    """`own` is the array, `shared` the same with rows shared in flight, where they are."""
    source = own.source
    if choice.fill.numel() != prod(source.shape[1:]) or len(source.shape) != 2:
        raise ValueError(
            f"columns are chosen of rows of {choice.fill.numel()} values, {own.name!r} has rows of "
            f"{list(source.shape[1:])}"
        )
    first = torch.tensor(choice.own[:1], dtype=torch.int64, device="cpu")
    is_here = choice.own[0] == choice.own[1] or not source.locate(first)[0].serving.is_remote
    if isinstance(source, DeviceTable):
        remote = ColumnSource(source.remote, choice.columns) if is_here else source.remote
        narrowed = own._replace(source=source.narrowed(choice, remote))
        return _NarrowSources(_shared(narrowed, key, window, on_device).source, None)
    narrow = own._replace(source=ColumnSource(source, choice.columns))
    return _NarrowSources(source if is_here else shared.source, _shared(narrow, key, window, None).source)


class _Reads(NamedTuple):
    """What the fetch stage has begun of a batch."""

    context: ReadContext
    reads: list[_Reading]


def _chosen(names: Names | None, key: AnyType, arrays: Mapping[str, Any], policy: Policy | None) -> Iterator[Array]:
    """A type's arrays that are wanted, in the graph's order."""
    named = names.get(key, ()) if isinstance(names, Mapping) else names
    for name, rows in arrays.items():
        if named is not None and name not in named:
            continue
        source = as_source(rows, name)
        if policy is not None and isinstance(source, DistTensor):
            source = source.with_policy(policy)  # and says by it whether it is remote
        if named is not None or source.mutable is not True:
            yield Array(name, source, source.is_remote)


def _read_by(device: torch.device | None, graph: Graph | DistGraph, array: Array, policy: Policy | None) -> Array:
    """An array as the device reads it by itself, where it does: rows that nobody's policy chooses."""
    if device is not None and isinstance(array.source, TensorSource):
        return array._replace(source=short_rows_on(array.source, device))
    if isinstance(graph, Graph) or policy is not None or graph.store.policy is not nearest:
        return array
    source = graph.read_by(device, array.source)
    return array._replace(source=source, waits=source.is_remote)


def _shared(array: Array, key: AnyType, window: InFlightWindow | None, on_device: DeviceWindow | None) -> Array:
    """Rows from other processes that never change are shared between the batches of a window: on the device where that
    reads the table, else on the host."""
    source = array.source
    if window is None or not source.is_remote or source.mutable is not False:
        return array
    if isinstance(source, DeviceTable):
        on_host = SharedInFlight(source.remote, window, kind=key)  # where the device has no memory for them
        if on_device is not None and source.device == on_device.device:
            return array._replace(source=source.sharing(on_device, key, otherwise=on_host))
        return array._replace(source=source.with_remote(on_host))
    if source.device.type != "cpu":
        return array
    return array._replace(source=SharedInFlight(source, window, kind=key))


def check_wire_dtype(wire_dtype: torch.dtype | None, sources: Sequence[Source]) -> torch.dtype | None:
    """ValueError unless floats can travel so: narrowed to 16 bits, or as what some array is (which narrows nothing)."""
    allowed = {torch.float16, torch.bfloat16, *(s.dtype for s in sources if s.dtype.is_floating_point)}
    if wire_dtype is not None and (not isinstance(wire_dtype, torch.dtype) or wire_dtype not in allowed):
        raise ValueError(f"wire_dtype must be torch.float16, torch.bfloat16 or None (as stored), got {wire_dtype!r}")
    return wire_dtype


def _ids_by_type(sampled: Sampled) -> Iterator[tuple[AnyType, Tensor]]:
    """Ids whose rows are wanted; with expand="frontier" edges are in the blocks, and have none."""
    sample = sampled.sample
    yield from sample.node.items()
    for edge_type, ids in sample.edge.items():
        if edge_type in sample.row:
            yield edge_type, ids


def _data_of(graph: Graph | DistGraph) -> dict[AnyType, Mapping[str, Any]]:
    data: dict[AnyType, Mapping[str, Any]] = dict(graph.node_data.items())
    data.update(graph.edge_data.items())
    return data


def check_names(graph: Graph | DistGraph, names: Names | None) -> None:
    """ValueError unless every name that is to be fetched is an array of the graph."""
    if names is None:
        return
    if isinstance(names, str):
        raise ValueError(f"fetch must be a list of names, got {names!r}: write [{names!r}]")
    data = _data_of(graph)
    if isinstance(names, Mapping):
        for key, chosen in names.items():
            if key not in data:
                raise ValueError(f"fetch: there is no node or edge type {key!r}, only {some(data, near=key)}")
            for name in chosen:
                if name not in data[key]:
                    raise ValueError(f"fetch: {key!r} has no array {name!r}, only {some(data[key], near=name)}")
        return
    for name in names:
        if not any(name in arrays for arrays in data.values()):
            known = sorted({known for arrays in data.values() for known in arrays})
            raise ValueError(f"fetch: no node or edge type has an array {name!r}, only {some(known, near=name)}")
