"""The tensors of a batch, whatever it is made of, and what each is for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gnnsys.planning.memory.ledger import MemoryKind

_STRUCTURE = ("edge_index", "edge_ids", "indptr", "indices", "adj", "csc", "blocks", "edges")


def given_tensors(batch: Any, name: str = "batch") -> Iterator[tuple[Tensor, MemoryKind, str]]:
    """(tensor, kind, name) of everything a batch holds: mappings, sequences, objects with attributes."""
    yield from _walk(batch, name, set(), 0)


def copied_bytes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """What copies of the storages of some tensors take, which need only what the tensors see of them."""
    seen: dict[int, tuple[int, int]] = {}
    for tensor in tensors:
        key, size = tensor.untyped_storage()._cdata, tensor.element_size()
        if tensor.numel():
            begin = int(tensor.storage_offset())
            last = begin + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
            low, high = seen.get(key, (begin * size, 0))
            seen[key] = min(low, begin * size), max(high, (last + 1) * size)
    return {key: high - low for key, (low, high) in seen.items()}


def _walk(value: Any, name: str, seen: set[int], depth: int) -> Iterator[tuple[Tensor, MemoryKind, str]]:
    if isinstance(value, Tensor):
        is_structure = not value.dtype.is_floating_point and any(part in name for part in _STRUCTURE)
        yield value, MemoryKind.STRUCTURE if is_structure else MemoryKind.INPUTS, name
        return
    if depth > 6 or id(value) in seen or isinstance(value, str | bytes | int | float | torch.device | type | None):
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        for key, each in list(value.items()):
            yield from _walk(each, f"{name}.{key}", seen, depth + 1)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for key, each in zip(value._fields, value, strict=True):
            yield from _walk(each, f"{name}.{key}", seen, depth + 1)
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _walk(each, f"{name}[{index}]", seen, depth + 1)
    elif hasattr(value, "__dict__") and not callable(value):
        for key, each in list(vars(value).items()):
            yield from _walk(each, f"{name}.{key.lstrip('_')}", seen, depth + 1)
