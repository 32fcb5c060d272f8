"""What a loader is, as JSON: all that another process must know to make the structure and rows of any of its batches.

Which seeds a batch has is not here: whoever asks for a batch sends them along, so that shares, shuffling and what is
left of an epoch stay the trainer's own. Two loaders with one digest make the same batches of the same seeds, to the
last bit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias

from gnnsys.graph import EdgeType, NodeType

AnyType: TypeAlias = NodeType | EdgeType
MOST_HOPS, MOST_FANOUT, MOST_TYPES = 64, 1 << 28, 4096
_TEXTS = ("graph", "subgraph_type", "temporal_strategy", "expand")
_MAYBE_TEXTS = ("time_attr", "weight_attr", "edge_mask")
_FLAGS = ("replace", "disjoint")


@dataclass(frozen=True, kw_only=True)
class DescribedLoader:
    """`graph` is the digest of the parts' manifest; `num_neighbors` a list of fanouts, or (edge type, fanouts) pairs;
    `names` the arrays of each type, in the order in which their rows are sent. The rest: see `NeighborLoader`."""

    graph: str
    seed: int
    num_neighbors: tuple[Any, ...]
    names: tuple[tuple[AnyType, tuple[str, ...]], ...]
    replace: bool = False
    subgraph_type: str = "directional"
    disjoint: bool = False
    temporal_strategy: str = "uniform"
    time_attr: str | None = None
    weight_attr: str | None = None
    expand: str = "new"
    edge_mask: str | None = None

    @property
    def fanouts(self) -> list[int] | dict[EdgeType, list[int]]:
        """As a sampler takes them."""
        if self.num_neighbors and isinstance(self.num_neighbors[0], tuple):
            return {tuple(edge_type): list(counts) for edge_type, counts in self.num_neighbors}
        return list(self.num_neighbors)

    @property
    def arrays(self) -> dict[AnyType, list[str]]:
        return {key: list(named) for key, named in self.names}

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]

    @classmethod
    def from_json(cls, values: Any) -> DescribedLoader:
        """ValueError, one line, for anything that `to_json` did not write."""
        known = [field.name for field in fields(cls)]
        if not isinstance(values, Mapping) or sorted(values) != sorted(known):
            raise ValueError(f"a loader is described by {', '.join(known)}, got {str(values)[:200]}")
        for name in (*_TEXTS, *_MAYBE_TEXTS):
            if not (isinstance(values[name], str) or (name in _MAYBE_TEXTS and values[name] is None)):
                raise ValueError(f"{name} of a loader must be text, got {str(values[name])[:200]}")
        for name in _FLAGS:
            if not isinstance(values[name], bool):
                raise ValueError(f"{name} of a loader must be true or false, got {str(values[name])[:200]}")
        seed = values["seed"]
        if not is_whole(seed, -(1 << 63), 1 << 63):
            raise ValueError(f"seed of a loader must be a whole number of 64 bits, got {str(seed)[:200]}")
        own = {"num_neighbors": _fanouts(values["num_neighbors"]), "names": _names(values["names"])}
        return cls(**{**values, **own})


def is_whole(value: Any, least: int, end: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < end


def as_type(value: Any) -> AnyType:
    """A node type, or an edge type as JSON has it."""
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)) and len(value) == 3 and all(isinstance(word, str) for word in value):
        return (value[0], value[1], value[2])
    raise ValueError(f"a type must be a name or three of them, got {str(value)[:200]}")


def _fanouts(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list) or not 0 < len(value) <= MOST_TYPES:
        raise ValueError(f"num_neighbors of a loader must be a list, got {str(value)[:200]}")
    if not isinstance(value[0], list):
        return _hops(value)
    if not all(isinstance(entry, list) and len(entry) == 2 for entry in value):
        raise ValueError(f"num_neighbors of a loader must be pairs of edge type and fanouts, got {str(value)[:200]}")
    return tuple((as_type(edge_type), _hops(counts)) for edge_type, counts in value)


def _hops(counts: Any) -> tuple[int, ...]:
    is_list = isinstance(counts, list) and len(counts) <= MOST_HOPS
    if not is_list or not all(is_whole(count, -1, MOST_FANOUT) for count in counts):
        raise ValueError(f"fanouts of a loader must be at most {MOST_HOPS} numbers from -1, got {str(counts)[:200]}")
    return tuple(counts)


def _names(value: Any) -> tuple[tuple[AnyType, tuple[str, ...]], ...]:
    if not isinstance(value, list) or len(value) > MOST_TYPES:
        raise ValueError(f"names of a loader must be a list of at most {MOST_TYPES} types, got {str(value)[:200]}")
    found = []
    for entry in value:
        if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], list)):
            raise ValueError(f"names of a loader must be pairs of type and names, got {str(entry)[:200]}")
        if not all(isinstance(name, str) for name in entry[1]):
            raise ValueError(f"names of arrays must be text, got {str(entry[1])[:200]}")
        found.append((as_type(entry[0]), tuple(entry[1])))
    if len({key for key, _ in found}) != len(found):
        raise ValueError("names of a loader have a type twice")
    return tuple(found)
