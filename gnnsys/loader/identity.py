"""Whether a loader is the one that a state was taken of: its graph, its inputs and how it samples.

A position in an epoch means nothing for other inputs, another graph or other fanouts: the resumed run would see some
inputs twice and others never, or other neighbours, and say nothing. So a state says what it was taken of, as values
where they are short and as CRC-32 where they are not; this finds accidents, not forgeries. Every face uses it.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from gnnsys.graph import MANIFEST, Graph
from gnnsys.ops import as_bytes
from gnnsys.sampling import AnyGraph
from gnnsys.seeds import InputIds

NAME = "made_of"  # where it is in a loader's state
_SAMPLES = 1024  # entries of a structure that are looked at


def checksum(*values: Any, before: int = 0) -> int:
    """A CRC-32 of tensors (dtype, shape, content), and of plain values as they are shown."""
    told = before
    for value in values:
        if isinstance(value, InputIds):
            value = value.own
        if isinstance(value, Tensor):
            told = zlib.crc32(f"{value.dtype} {list(value.shape)}".encode(), told)
            told = zlib.crc32(as_bytes(value.cpu()).numpy().data, told)
        else:
            told = zlib.crc32(_shown(value).encode(), told)
    return told


def _shown(value: Any) -> str:
    """Of ids that are not written out their bounds, or at least their number: their own text may be an address."""
    if value is None or isinstance(value, (str, int, float, tuple, list)):
        return repr(value)
    bounds = getattr(value, "first", None), getattr(value, "end", None)
    return repr((len(value), *bounds))


def graph_identity(graph: AnyGraph) -> str:
    """Of parts the digest of their manifest, which has their files' checksums. Of a graph in memory its sizes, and
    some entries of its structure: it is told from others at a cost that does not grow with it."""
    if not isinstance(graph, Graph):
        return hashlib.sha256((graph.parts.path / MANIFEST).read_bytes()).hexdigest()
    told = zlib.crc32(repr([(t, graph.num_nodes(t)) for t in graph.node_types]).encode())
    for edge_type in graph.edge_types:
        csc = graph.csc(edge_type)
        told = checksum(edge_type, csc.num_edges, _some(csc.indptr).long(), _some(csc.indices).long(), before=told)
    return f"{told:08x}"


def _some(values: Tensor) -> Tensor:
    step = max(1, values.numel() // _SAMPLES)
    return values[::step]


class Identity:
    """What a loader is made of: its graph and inputs, told once they are asked for, and the options of its sampling.

    `inputs` are what decides a batch besides the schedule: ids, ends of links, labels, times. Those of a share are
    told by the share.
    """

    def __init__(self, graph: AnyGraph, inputs: Iterable[Any] | None, options: Mapping[str, Any]) -> None:
        self._graph = graph
        self._inputs = None if inputs is None else list(inputs)
        self._options = options
        self._told: dict[str, Any] = {}

    def state(self) -> dict[str, Any]:
        if not self._told:
            inputs = None if self._inputs is None else checksum(*self._inputs)
            self._told = {"graph": graph_identity(self._graph), "inputs": inputs, "sampling": plain(self._options)}
        return dict(self._told)

    def check(self, state: Mapping[str, Any]) -> None:
        """ValueError for a state of another loader; what a state does not say (an older one) is not compared."""
        check_made_of(state, self.state)

    def check_sampling(self, state: Mapping[str, Any]) -> None:
        """The same of what all ranks have in common, however many they are."""
        check_sampling(state, self.state()["sampling"])


def check_made_of(state: Mapping[str, Any], ours: Callable[[], Mapping[str, Any] | None]) -> None:
    theirs = state.get(NAME)
    here = None if theirs is None else ours()
    if theirs is None or here is None:
        return
    check_sampling(state, here["sampling"])
    if theirs.get("graph") not in (None, here["graph"]):
        raise ValueError(
            "this state is of a loader on another graph, or on other parts of it: a position there means nothing here. "
            "Give it the same graph, or begin anew"
        )
    if None not in (theirs.get("inputs"), here["inputs"]) and theirs["inputs"] != here["inputs"]:
        raise ValueError(
            "this state is of a loader with other inputs, or in another order: a position among them means nothing "
            "here. Give it the same, in the same order, or begin anew"
        )


def check_sampling(state: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    theirs = (state.get(NAME) or {}).get("sampling") or {}
    differing = [name for name, value in ours.items() if name in theirs and theirs[name] != value]
    if differing:
        told = "; ".join(f"{name}={theirs[name]}, here it is {ours[name]}" for name in differing)
        raise ValueError(f"this state is of a loader with {told}")


def plain(value: Any) -> Any:
    """As a checkpoint keeps it: numbers, text, lists, dictionaries by text; a tensor as its checksum."""
    if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.dim() == 0):
        return value.item()
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {checksum(value):08x}"
    if isinstance(value, Mapping):
        return {"|".join(key) if isinstance(key, tuple) else str(key): plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__
