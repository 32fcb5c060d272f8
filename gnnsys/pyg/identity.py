"""Whether a saved state belongs to a PyG-style loader. Does what `gnnsys.loader.identity` does, for torch's loaders."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gnnsys.loader import checksum

_NAMES = ("node", "row", "col", "label", "time")  # attributes of PyG's inputs, of nodes and of links


def fingerprint(inputs: Any) -> int:
    """A CRC-32 of PyG's sampler inputs: ids in their order, labels, times, weights and type."""
    told = zlib.crc32(repr(inputs.input_type).encode())
    ids = getattr(inputs, "ids", None)  # links that are edges in parts have ids, or a range of them
    values = [getattr(inputs, name, None) for name in _NAMES]
    for value in (*values, getattr(ids, "own", None)):
        told = zlib.crc32(b"-" if value is None else b"+", told)
        if isinstance(value, Tensor):
            told = checksum(value, before=told)
    weight = getattr(inputs, "weight", None)
    return told if weight is None else checksum(weight, before=told)  # without any, as in states of before there were


def check_options(state: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """ValueError if `state` was saved with other options. Skips options that an older state does not have."""
    theirs = state.get("inputs")
    if theirs is not None and "inputs" in ours and list(theirs) != list(ours["inputs"]):
        here = ours["inputs"][0]
        which = f"{theirs[0]} inputs, here there are {here}" if theirs[0] != here else f"{here} inputs, but not these"
        raise ValueError(
            f"this state is of a loader with {which}: a position among other inputs means nothing. Give it the same, "
            "in the same order, or begin anew"
        )
    for name, value in ours.items():
        if name != "inputs" and name in state and state[name] != value:
            raise ValueError(f"this state is of a loader with {name}={state[name]}, here it is {value}")
