"""Remembers what was derived from tensors and CSCs (an edge_index as CSC, a graph with self loops) while they live.

A memo of pure functions: bounded, weak, and without it nothing changes but the time. An entry is used only for the very
same objects, unwritten since (a tensor's version counter says so), and goes when any of them goes.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from gnnsys.ops.csc import CSC, is_captured, refuse_to_capture

T = TypeVar("T")
Source = Tensor | CSC
Key = tuple[Hashable, ...]
_MISSING = object()


class Memo:
    """At most `capacity` results; the one not used for longest goes first. A result must not hold its sources."""

    def __init__(self, capacity: int = 64) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[Key, tuple[list[weakref.ref[Any]], list[Hashable], Any]] = OrderedDict()
        self._lock = threading.RLock()  # a weak reference's callback may run while this thread holds it

    def get(self, make: Callable[[], T], *sources: Source, key: Hashable) -> T:
        """The result of `make()`, which depends on `sources` and `key` alone, made now or remembered.

        While a CUDA graph is captured it must be remembered: every replay has it as it is.
        """
        found = self.find(*sources, key=key, default=_MISSING)
        if found is _MISSING:
            refuse_to_capture("a structure", *_tensors(sources))
            found = make()
            self.put(found, *sources, key=key)
        return found

    def find(self, *sources: Source, key: Hashable, default: Any = None, in_replays: bool = False) -> Any:
        """What is remembered, or `default`. With `in_replays` it is true whatever is written into tensors between
        replays of a CUDA graph, and so found while one is captured."""
        if not _leave_traces(sources) or (not in_replays and _may_differ_in_replays(sources)):
            return default
        name = _name(key, sources)
        versions = [_version(source) for source in sources]
        with self._lock:
            entry = self._entries.get(name)
            if (
                entry is not None
                and entry[1] == versions
                and all(r() is s for r, s in zip(entry[0], sources, strict=True))
            ):
                self._entries.move_to_end(name)
                return entry[2]
        return default

    def put(self, result: object, *sources: Source, key: Hashable) -> None:
        """Remembers something about `sources` that whoever made them knows."""
        if not _leave_traces(sources) or is_captured(*_tensors(sources)):
            return
        name = _name(key, sources)
        versions = [_version(source) for source in sources]
        references = [weakref.ref(source, lambda _: self._forget(name)) for source in sources]
        with self._lock:
            self._entries[name] = (references, versions, result)
            self._entries.move_to_end(name)
            while len(self._entries) > self._capacity:
                self._entries.popitem(last=False)

    def reserve(self, num_results: int) -> None:
        """Keeps at least so many from now on, for somebody who comes back to all of them in turn: with less room each
        would be gone when it is asked for."""
        with self._lock:
            self._capacity = max(self._capacity, num_results)

    def __len__(self) -> int:
        return len(self._entries)

    def _forget(self, name: Key) -> None:
        with self._lock:
            self._entries.pop(name, None)


def _leave_traces(sources: tuple[Source, ...]) -> bool:
    """Writes to inference tensors do not. Nor is anything remembered where results are inference tensors, which
    training cannot use."""
    return not (torch.is_inference_mode_enabled() or any(t.is_inference() for t in _tensors(sources)))


def _may_differ_in_replays(sources: tuple[Source, ...]) -> bool:
    """Whether a CUDA graph is captured that is told the structure by tensors alone.

    People write the next batch into the tensors of a captured graph, and its replays would still have the structure of
    this one. A CSC is not written.
    """
    return not any(isinstance(source, CSC) for source in sources) and is_captured(*_tensors(sources))


def _tensors(sources: tuple[Source, ...]) -> list[Tensor]:
    return [t for s in sources for t in ((s.indptr, s.indices) if isinstance(s, CSC) else (s,))]


def _name(key: Hashable, sources: tuple[Source, ...]) -> Key:
    return (key, *(id(source) for source in sources))


def _version(source: Source) -> Hashable:
    """Changes whenever the source's contents may have."""
    if isinstance(source, CSC):
        return (_version(source.indptr), _version(source.indices))
    return (source._version, source.data_ptr(), tuple(source.shape))


STRUCTURES = Memo(capacity=512)


class ReplayedEdges:
    """What is true of every batch that is written into an edge_index between replays of a CUDA graph.

    Edges come by destination, `num_src` x `num_dst`, and `ends` are where hops end. So the structure can be made by the
    graph itself, anew in every replay and without a wait; what was made in a capture is kept until that ends.
    """

    def __init__(self, num_src: int, num_dst: int, ends: Mapping[int, int]) -> None:
        self._num_src, self._num_dst, self._ends = num_src, num_dst, ends
        self._made: dict[tuple[int, int], CSC] = {}

    def csc(self, edge_index: Tensor, num_src: int, num_dst: int) -> CSC:
        """Of the edge_index that is captured."""
        if num_src < self._num_src or num_dst < self._num_dst:
            raise ValueError(
                f"edge_index leads from {self._num_src} nodes to {self._num_dst}, a layer has {num_src} and {num_dst}"
            )
        made = self._made.get((num_src, num_dst))
        if made is None:
            made = self._made[num_src, num_dst] = CSC.from_sorted(edge_index, num_src, num_dst, self._ends)
            made.is_replayed = True
        return made

    def forget(self) -> None:
        """The capture has ended: what was made has its values in replays alone."""
        self._made.clear()


# Of an edge_index: (sources, destinations, {number of destinations: their edges}), known to whoever made it.
BY_DESTINATION = "edges come by destination"
# Of an edge_index that batches are copied into: `ReplayedEdges`.
IN_REPLAYS = "edges of every replay"
NOT_KNOWN = (0, 0, None)
