"""Copies of states, taken between two steps, so that training can go on while they are written.

A state may hold only what `torch.load(weights_only=True)` reads back. Anything else is refused, by its name, when the
job starts and when it saves: it must not come up only when a checkpoint is restored.
"""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gnnsys.checkpoint import folder as folders
from gnnsys.ops import as_bytes
from gnnsys.store import DistTensor

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


@dataclass
class RankSnapshot:
    """What one rank writes of one checkpoint."""

    steps: int
    token: str
    dense: dict[str, Any] | None = None  # states that all ranks share; on rank 0 only
    differing: dict[str, Any] = field(default_factory=dict)  # shared states in which this rank differs from rank 0
    keys: dict[str, list[str]] = field(default_factory=dict)  # the entries of `differing`
    own: dict[str, Any] = field(default_factory=dict)  # states of this rank alone
    tables: list[tuple[str, DistTensor, int]] = field(default_factory=list)  # (name, table, machine) this rank asks for
    entries: dict[str, Any] = field(default_factory=dict)  # the manifest's, by table
    originals: dict[str, Any] = field(default_factory=dict)  # (graph, node type) whose original ids are written
    too_large: str | None = None  # what, on any rank, would not fit into memory a second time

    @property
    def staging(self) -> str:
        return folders.staging_name(self.steps, self.token)

    def token_of(self, name: str) -> str:
        return f"{self.token}/{name}"


def copied(value: Tensor) -> Tensor:
    """A copy of the tensor in host memory."""
    return value.clone() if value.device.type == "cpu" else value.cpu()


def as_it_is(value: Tensor) -> Tensor:
    """The tensor itself; a copy only if it is a view of a larger storage, all of which would be written."""
    if value.layout is torch.strided and value.untyped_storage().nbytes() == value.nbytes:
        return value
    return value.clone()


def snapshot(value: Any, name: str, of: Callable[[Tensor], Tensor] = copied) -> Any:
    """The state with `of(tensor)` in place of each tensor. ValueError, with `name`, for what could not be read back."""
    if type(value) is Tensor or type(value) is torch.nn.Parameter:
        return of(value.detach())
    if type(value) in _PLAIN:
        return value
    if type(value) in (dict, OrderedDict):
        items = [
            (snapshot(key, f"a key of {name}", of), snapshot(kept, f"{name}[{key!r}]", of))
            for key, kept in value.items()
        ]
        made = type(value)(items)
        if type(value) is OrderedDict and hasattr(value, "_metadata"):  # a module's: the versions of its layers
            made._metadata = copy.deepcopy(value._metadata)
        return made
    if type(value) in (list, tuple, set):
        return type(value)([snapshot(kept, f"{name}[{index}]", of) for index, kept in enumerate(value)])
    return _tried(value, name)


def check_state(value: Any, name: str) -> int:
    """The bytes of a state's tensors. ValueError, with `name`, for what could not be read back."""
    total = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal total
        total += tensor.nbytes if tensor.layout is torch.strided else 0
        return tensor

    snapshot(value, name, count)
    return total


def _tried(value: Any, name: str) -> Any:
    """A value of any other type, written and read back: the only proof that this works."""
    try:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=True, map_location="cpu")
    except Exception as error:
        reason = next((line for line in str(error).splitlines() if "Unsupported" in line or "GLOBAL" in line), "")
        raise ValueError(
            f"{name} is a {type(value).__name__}, which a checkpoint cannot hold: it would be read back only by "
            f"unpickling code. Keep tensors, numbers, text, lists and dictionaries in states. "
            f"({reason.strip() or type(error).__name__})"
        ) from error


def same(one: Any, other: Any) -> bool:
    """Whether two states hold the same values, bit for bit in their tensors."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return (
            isinstance(one, Tensor)
            and isinstance(other, Tensor)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and torch.equal(as_bytes(one), as_bytes(other))
        )
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
