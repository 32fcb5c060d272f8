"""Names of the features to prefetch, in the forms that DGL takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from gnnsys.graph import did_you_mean, some

Names: TypeAlias = list[str] | Mapping[Any, list[str]] | None


class Prefetched(NamedTuple):
    """What a sampler prefetches: features of input nodes, labels of output nodes, features of edges."""

    node_feats: Names
    labels: Names
    edge_feats: Names


def names_of(names: Names, key: Any) -> list[str]:
    """Names for one type. DGL takes a list for the only type, or a dict by type (or by an edge type's middle name)."""
    if isinstance(names, Mapping):
        found = names.get(key)
        names = names.get(key[1]) if found is None and isinstance(key, tuple) else found
    if isinstance(names, str):
        raise ValueError(f"features to prefetch are lists of names, got {names!r}: write [{names!r}]")
    return list(names or [])


def check_names(option: str, key: Any, names: list[str], known: Mapping[str, Any]) -> None:
    """ValueError for a name that does not exist."""
    for name in names:
        if name not in known:
            there = f"{some(known, near=name)}{did_you_mean(name, known)}"
            raise ValueError(f"{option}: {key!r} has no {name!r}, only {there}")
