"""The fetch stage: the rows of the nodes and edges that were sampled, wherever they are.

Rows in memory are gathered. Rows of distributed tables are asked for in one request per machine for the whole batch,
as soon as it is sampled (`begin`), and waited for in the batch's turn (`finish`); so are those of a user's own source.
A source that says its `device` (a cache there) is given the ids where they are and leaves the rows on the device.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, Graph, NodeType, some
from gnnsys.loader.inflight import Flight, Leg, Pending, Window
from gnnsys.loader.join import Ids, Rows, Sampled
from gnnsys.ops import BufferPool, move_rows
from gnnsys.sampling import DistGraph
from gnnsys.store import DistTensor, PendingPull, PendingRead, Pull, Store, is_table, put_rows

AnyType: TypeAlias = NodeType | EdgeType
Names: TypeAlias = Sequence[str] | Mapping[AnyType, Sequence[str]]


class Fetch:
    """Fetches the arrays of a graph's node and edge data by the ids of a sample.

    `names` chooses arrays, for all types or by type; None means all but those that train (`mutable` is True): these
    are read in the forward pass, because a row that is fetched ahead may be an old one when it is used. `wire_dtype`
    is how floats travel between machines. What there is to fetch is decided once: arrays that the graph is given
    later, or instead of others, are not seen.
    """

    def __init__(self, graph: Graph | DistGraph, *, names: Names | None, wire_dtype: torch.dtype | None) -> None:
        check_names(graph, names)
        data = _data_of(graph)
        self._arrays = {key: list(_chosen(names, key, arrays)) for key, arrays in data.items()}
        sources = [source for arrays in self._arrays.values() for _, source in arrays]
        self.num_arrays = len(sources)  # of a batch, over all types
        self.is_in_memory = all(isinstance(source, Tensor) for source in sources)  # nothing to begin
        self.waits = any(not isinstance(s, Tensor) and getattr(s, "is_remote", not is_on_device(s)) for s in sources)
        self._wire_dtype = check_wire_dtype(wire_dtype, sources)
        self._rows = Rows(BufferPool(max_free=0))
        self._window: Window | None = None
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._lock = threading.Lock()

    def check_on_host(self) -> None:
        """ValueError where rows are on a device although batches are not to be."""
        for key, arrays in self._arrays.items():
            for name, source in arrays:
                device = getattr(source, "device", None)
                if isinstance(device, torch.device) and device.type not in ("cpu", "meta"):
                    raise ValueError(f"{name!r} of {key!r} is on {device}: make the loader with device={str(device)!r}")

    def names(self, key: AnyType) -> list[str]:
        """The arrays of a type that batches have."""
        return [name for name, _ in self._arrays[key]]

    def all_names(self) -> dict[AnyType, list[str]]:
        """The same of every type."""
        return {key: self.names(key) for key in self._arrays}

    def prepare(self, rows: Rows, num_in_flight: int, keep: int = 0) -> None:
        """What to gather into, how many batches in flight share rows (0 for none), and how many behind them."""
        self._rows = rows
        self._window = Window(num_in_flight, keep) if num_in_flight > 0 else None

    def begin(self, sampled: Sampled) -> Sampled:
        """Sends the requests for everything that is not in this process's memory."""
        if self.is_in_memory:
            return sampled
        order = _Order(sampled)
        for key, ids in _ids_by_type(sampled):
            at = Ids(ids)
            for name, source in self._arrays[key]:
                if isinstance(source, Tensor):
                    continue
                if is_on_device(source):
                    order.reads[key, name] = source.begin_read(ids)
                    continue
                out = self._rows.empty((ids.numel(), *source.shape[1:]), source.dtype)
                order.add(key, name, source, at.on(_HOST), out)
        if not order.arriving and not order.reads:
            return sampled
        sampled.pending = order
        with order.flight.lock:
            try:
                if self._window is not None and order.shared:
                    self._window.enter(order.flight, order.shared)
                order.flight.pending += order.send(self._wire_dtype)
            except BaseException as error:
                order.flight.fail(error)
                raise
        return sampled

    def finish(self, sampled: Sampled) -> Sampled:
        """Gathers what is in memory, while the rest arrives; then waits for the rest."""
        order: _Order | None = sampled.pending
        sampled.pending = None
        num_bytes = 0
        rows: dict[AnyType, dict[str, Tensor]] = {}
        for key, ids in _ids_by_type(sampled):
            into = rows[key] = {} if order is None else dict(order.arriving.get(key, {}))
            at = Ids(ids)
            for name, source in self._arrays[key]:
                if isinstance(source, Tensor):
                    into[name] = self._rows(source, at)
                elif order is not None and (key, name) in order.reads:
                    into[name] = order.reads[key, name].result()
                else:
                    continue
                num_bytes += into[name].nbytes
        moved = {"bytes_local": num_bytes}
        if order is not None:
            order.flight.complete()
            for key, into in rows.items():  # in the graph's order
                rows[key] = {name: into[name] for name, _ in self._arrays[key]}
            order.count(moved)
        sampled.rows = rows
        if sampled.trace is not None:
            flows = sampled.trace.bytes
            flows["local"], flows["remote"] = moved["bytes_local"], moved.get("bytes_remote", 0)
            flows["shared"] = moved.get("bytes_shared", 0)
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
        """Nothing that is under way now is shared with batches to come."""
        if self._window is not None:
            self._window.forget()


def _chosen(names: Names | None, key: AnyType, arrays: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and sources of a type's arrays that are wanted, in the graph's order."""
    named = names.get(key, ()) if isinstance(names, Mapping) else names
    for name, source in arrays.items():
        if named is None:
            is_wanted = isinstance(source, Tensor) or getattr(source, "mutable", None) is not True
        else:
            is_wanted = name in named
        if is_wanted:
            yield name, source


class _Group(NamedTuple):
    """What is asked for together: tables of one type in stores, or one source of another kind."""

    key: AnyType
    name: str | None
    is_fixed: bool  # rows never change


_HOST = torch.device("cpu")
_COUNTS = ("bytes_local", "bytes_remote", "bytes_shared", "rows_asked", "rows_shared")


class _Order:
    """What one batch asks for, tables with the same ids and owners together."""

    def __init__(self, sampled: Sampled) -> None:
        self.batch = sampled.position
        self.flight = Flight()
        self.arriving: dict[AnyType, dict[str, Tensor]] = {}
        self.reads: dict[tuple[AnyType, str], PendingRead] = {}  # of sources on a device
        self.legs: dict[_Group, Leg] = {}
        self._tables: dict[_Group, list[tuple[str, Any]]] = {}  # names and sources, as outs of the leg
        self._pulls: list[PendingPull] = []

    def add(self, key: AnyType, name: str, source: Any, ids: Tensor, out: Tensor) -> None:
        """A table that is not plain memory; only rows that never change are shared between batches."""
        group = _Group(key, None if is_table(source) else name, getattr(source, "mutable", None) is False)
        if group not in self.legs:
            remote = source.remote_positions(ids) if is_table(source) else torch.arange(ids.numel(), device="cpu")
            self.legs[group] = Leg(group, ids, remote, [], source.shape[0])
            self._tables[group] = []
        self.legs[group].outs.append(out)
        self._tables[group].append((name, source))
        self.arriving.setdefault(key, {})[name] = out

    @property
    def shared(self) -> list[Leg]:
        """Legs whose rows other batches may have asked for."""
        return [leg for group, leg in self.legs.items() if group.is_fixed and leg.remote.numel()]

    def send(self, wire_dtype: torch.dtype | None) -> list[Pending]:
        """Asks for all rows that the legs ask for: one pull per store, one read per source of another kind."""
        pulls: dict[int, tuple[Store, list[Pull]]] = {}
        pending: list[Pending] = []
        for group, leg in self.legs.items():
            ids = leg.ids if leg.asked is None else leg.ids[leg.asked]
            for (name, source), out in zip(self._tables[group], leg.outs, strict=True):
                if is_table(source):
                    pulls.setdefault(id(source.store), (source.store, []))[1].append(
                        make_pull(source, ids, out, leg.asked, wire_dtype)
                    )
                elif leg.asked is None:
                    pending.append(_Read(source.begin_read(ids, out), out, name))
                else:
                    rows = torch.empty((ids.numel(), *out.shape[1:]), dtype=out.dtype, device="cpu")
                    pending.append(_Scattered(_Read(source.begin_read(ids, rows), rows, name), out, leg.asked))
        self._pulls = [store.pull(wanted, batch=self.batch) for store, wanted in pulls.values()]
        return [*self._pulls, *pending]

    def count(self, counts: dict[str, int]) -> None:
        """Adds what was moved, once it is all there."""
        counts.update(dict.fromkeys(_COUNTS, 0) | counts)
        for group, leg in self.legs.items():
            for (_, source), out in zip(self._tables[group], leg.outs, strict=True):
                row_bytes = prod(out.shape[1:]) * out.element_size()
                num_asked = leg.remote.numel() - leg.num_shared
                counts["rows_asked"] += num_asked
                counts["rows_shared"] += leg.num_shared
                counts["bytes_shared"] += leg.num_shared * row_bytes
                counts["bytes_local"] += (leg.ids.numel() - leg.remote.numel()) * row_bytes
                if not is_table(source):
                    counts["bytes_remote"] += num_asked * row_bytes
        counts["bytes_remote"] += sum(pull.bytes_remote for pull in self._pulls)


class _Read(NamedTuple):
    """A read from a source that is no table: its rows are in `out`, or the source has brought its own."""

    pending: PendingRead
    out: Tensor
    name: str

    def result(self) -> Tensor:
        return put_rows(self.pending.result(), self.out, self.name)


class _Scattered(NamedTuple):
    """A read of some of a batch's rows from a source that fills whole buffers."""

    read: _Read
    out: Tensor
    at: Tensor

    def result(self) -> None:
        move_rows(self.read.result(), self.out, order=self.at)


def is_on_device(source: Any) -> bool:
    """Whether a source takes ids wherever they are and brings its rows to an accelerator."""
    device = getattr(source, "device", None)
    return isinstance(device, torch.device) and device.type != "cpu"


def make_pull(source: DistTensor, ids: Tensor, out: Tensor, at: Tensor | None, wire_dtype: torch.dtype | None) -> Pull:
    """The rows of `ids` to their places in `out`; only what is wider than `wire_dtype` is narrowed on the wire."""
    narrows = wire_dtype is not None and out.is_floating_point() and wire_dtype.itemsize < out.element_size()
    return Pull(source.name, ids, out=out, at=at, wire_dtype=wire_dtype if narrows else None)


def check_wire_dtype(wire_dtype: torch.dtype | None, sources: Sequence[Any]) -> torch.dtype | None:
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
