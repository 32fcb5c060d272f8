"""Ids as users give them: a tensor, a numpy array, a list, a tuple, a range; or a mask in any of these.

Every call that takes ids reads them here, so that the same values mean the same everywhere. A mask is told by what it
holds, never by its length, and a float is never cut off to an id.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

IdsLike: TypeAlias = "Tensor | np.ndarray[Any, Any] | list[int] | list[bool] | tuple[int, ...] | range"

_ID_TYPES = (torch.int32, torch.int64)
_REMEDY = (
    "give a mask as bools with an entry for each (.bool() or .astype(bool)), or ids as whole numbers (.long() or "
    ".astype(int))"
)


def as_ids(values: IdsLike, num_ids: int, name: str, what: str = "node") -> Tensor:
    """A user's selection of nodes, or of `what`, as int32 or int64 ids where they are; ValueError when out of range.

    >>> as_ids([True, False, True], 3, "input_nodes")
    tensor([0, 2])
    """
    ids = ids_of(values, num_ids, name, what)
    if ids.numel():
        low, high = torch.stack(ids.aminmax()).tolist()
        if low < 0 or high >= num_ids:
            raise ValueError(f"{name} must be in [0, {num_ids}), got {low} to {high}")
    return ids


def chosen_ids(values: IdsLike, num_ids: int, name: str, what: str = "node") -> Tensor:
    """`as_ids` for what a loader or a split is made of, once: a mask that was given as integers is refused too.

    >>> chosen_ids(torch.tensor([1, 0, 1]), 3, "input_nodes")
    Traceback (most recent call last):
    ValueError: input_nodes holds 3 integers, all 0 or 1, one per node: this looks like a mask: write mask.bool() ...
    """
    ids = as_ids(values, num_ids, name, what)
    check_no_mask(ids, num_ids, name, what)
    return ids


def check_no_mask(ids: Tensor, num_ids: int, name: str, what: str = "node") -> None:
    """ValueError for integers that are as many as the ids, more than two, and all 0 or 1: they would train 0 and 1."""
    if ids.dtype == torch.bool or num_ids <= 2 or ids.numel() != num_ids:
        return
    low, high = torch.stack(ids.aminmax()).tolist()
    if low >= 0 and high <= 1:
        raise ValueError(
            f"{name} holds {num_ids} integers, all 0 or 1, one per {what}: this looks like a mask: write mask.bool() "
            "(.astype(bool) of an array), or leave repeated ids away"
        )


def ids_of(values: IdsLike, num_ids: int, name: str, what: str = "node") -> Tensor:
    """The same without a look at the values: ids may be on a device, where that would mean to wait for it."""
    if isinstance(values, Tensor) and values.dtype in _ID_TYPES and values.dim() == 1:  # every batch's seeds
        return values
    ids = ids_or_mask(values, name)
    if ids.dtype != torch.bool:
        return ids
    if ids.numel() != num_ids:
        raise ValueError(f"{name}: a mask must have {num_ids} entries, one per {what}, got {ids.numel()}")
    return ids.nonzero().view(-1)


def ids_or_mask(values: Any, name: str, num_ids: int | None = None) -> Tensor:
    """A vector of int32, int64 or bool, on the host unless `values` is a tensor elsewhere; ValueError for others.

    With `num_ids`, a mask that was given as integers is refused too.
    """
    ids = as_integers(values, name)
    if ids.dim() != 1:
        raise ValueError(f"{name} must be one-dimensional int32, int64 or bool, got {list(ids.shape)} {ids.dtype}")
    if num_ids is not None:
        check_no_mask(ids, num_ids, name)
    return ids


def as_integers(values: Any, name: str) -> Tensor:
    """Whole numbers, or bools, of any shape."""
    if isinstance(values, range):
        return torch.arange(values.start, values.stop, values.step, device="cpu")
    if isinstance(values, Tensor):
        found = values
    elif isinstance(values, (str, bytes, dict)) or not hasattr(values, "__iter__"):
        raise ValueError(f"{name} must be ids or a mask, got {values!r}")
    else:
        found = _from_items(values, name) if not isinstance(values, np.ndarray) else _from_numpy(values, name)
    if found.dtype in (torch.int32, torch.int64, torch.bool):
        return found
    if found.numel() == 0:  # nothing has no type of its own
        return found.new_empty(found.shape, dtype=torch.int64)
    if found.dtype in (torch.int8, torch.int16):
        return found.long()
    raise ValueError(
        f"{name} must be ids or a mask, int32, int64 or bool, got {found.dtype} {list(found.shape)}: {_REMEDY}"
    )


def is_column(ids: Tensor) -> bool:
    """Whether these are ids [n, 1], which `mask.nonzero()` is."""
    return ids.dim() == 2 and ids.shape[1] == 1 and ids.dtype != torch.bool


def as_links(values: Any, name: str) -> Tensor:
    """Links by their ends, int32 or int64 [2, num_links]; ValueError for others."""
    if isinstance(values, (list, tuple)) and len(values) == 2 and all(isinstance(end, Tensor) for end in values):
        links = torch.stack(list(values)) if values[0].shape == values[1].shape else values[0][None]
    else:
        links = as_integers(values, name)
    if links.dim() == 2 and links.shape[0] == 2 and links.dtype in (torch.int32, torch.int64):
        return links
    remedy = (
        ": of a mask of edges gnnsys.split(graph, mask, type=...) makes a share" if links.dtype == torch.bool else ""
    )
    raise ValueError(f"{name} must be integers of shape [2, num_links], got {list(links.shape)} {links.dtype}{remedy}")


def _from_numpy(values: np.ndarray[Any, Any], name: str) -> Tensor:
    if values.dtype == object:
        return _from_items(values.tolist(), name)
    if values.dtype.kind == "u" and values.dtype != np.uint8:
        values = values.astype(np.int64)
    try:
        return torch.from_numpy(values if values.flags.writeable and values.dtype.isnative else values.copy())
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be ids or a mask, got an array of {values.dtype}: {_REMEDY}") from error


def _from_items(values: Any, name: str) -> Tensor:
    """Of one kind all of them: [True, 2] is neither a mask nor ids."""
    items = list(values)
    if any(issubclass(kind, Tensor) for kind in set(map(type, items))):
        items = [value.item() if isinstance(value, Tensor) and value.dim() == 0 else value for value in items]
    kinds = {issubclass(kind, (bool, np.bool_)) for kind in set(map(type, items))}
    try:
        found = torch.from_numpy(np.array(items)) if items else torch.empty(0, dtype=torch.int64, device="cpu")
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} must be ids or a mask, got {_brief(items)}: {_REMEDY}") from error
    if found.dim() == 1 and len(kinds) > 1:
        raise ValueError(f"{name} holds bools and numbers, got {_brief(items)}: {_REMEDY}")
    return found


def _brief(items: list[Any]) -> str:
    shown = ", ".join(map(repr, items[:5]))
    return f"[{shown}{', ...' if len(items) > 5 else ''}]"
