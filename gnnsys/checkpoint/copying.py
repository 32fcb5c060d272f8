"""Copies of states, taken at a step boundary, so that training can go on while they are written.

Only what `torch.load(weights_only=True)` reads back may be in one: anything else is refused when it is saved, by its
name, and not when it is needed.
"""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def snapshot(value: Any, name: str) -> Any:
    """A copy of a state in this machine's memory; ValueError, by `name`, for what could not be read again."""
    if type(value) is Tensor or type(value) is torch.nn.Parameter:
        copied = value.detach()
        return copied.clone() if copied.device.type == "cpu" else copied.cpu()
    if type(value) in _PLAIN:
        return value
    if type(value) in (dict, OrderedDict):
        items = [(snapshot(key, f"a key of {name}"), snapshot(of, f"{name}[{key!r}]")) for key, of in value.items()]
        copied = type(value)(items)
        if type(value) is OrderedDict and hasattr(value, "_metadata"):  # a module's: what version its layers have
            copied._metadata = copy.deepcopy(value._metadata)
        return copied
    if type(value) in (list, tuple, set):
        return type(value)([snapshot(of, f"{name}[{index}]") for index, of in enumerate(value)])
    return _tried(value, name)


def _tried(value: Any, name: str) -> Any:
    """What is of no plain type, written and read again: the only proof that it can be."""
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
            and torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))
        )
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
