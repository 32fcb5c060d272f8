"""What is wrong with the rows a layer was given, in words, once a call of it has failed.

Asked only after an error, so that a call that works pays nothing and nothing that works is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.parameter import is_lazy


def why_unfit(layer: nn.Module, x: Any) -> str | None:
    """What is wrong with `x`, rows or a pair of them, and what to write; None if it is not the rows."""
    names = ("x", "x[1]") if not isinstance(x, tuple) else ("x[0]", "x[1]")
    pairs = zip(names, x if isinstance(x, tuple) else (x,), widths_of(layer), strict=False)
    return next((why for name, rows, width in pairs if (why := _why(layer, name, rows, width)) is not None), None)


def widths_of(layer: nn.Module) -> tuple[int | None, int | None]:
    """How wide rows of sources and of destinations must be; None for what is not known."""
    width = getattr(layer, "in_channels", None)
    if not isinstance(width, (int, tuple)):  # a GIN layer has a module of the user's
        width = next((each.in_features for each in layer.modules() if isinstance(each, nn.Linear)), None)
    src, dst = width if isinstance(width, tuple) else (width, width)
    return (src if src is None or src > 0 else None), (dst if dst is None or dst > 0 else None)


def _why(layer: nn.Module, name: str, rows: Any, width: int | None) -> str | None:
    wanted = f"{type(layer).__name__}({layer.extra_repr()})"
    if rows is None:
        may_be_none = name == "x[1]" or hasattr(layer, "num_relations")  # of relations, rows are found by node ids
        return None if may_be_none else f"{wanted} takes rows, {name} is None"
    if isinstance(rows, Proxy):  # a model is traced, and has other problems
        return None
    if not isinstance(rows, Tensor):
        kind = type(rows).__name__
        return f"{wanted} takes rows as a torch.Tensor, {name} is of type {kind}: pass torch.as_tensor({name})"
    if width is not None and (rows.dim() < 2 or rows.shape[-1] != width):
        found = f"{name} has shape {list(rows.shape)}"
        if rows.dim() == 1:
            remedy = f"pass {name}.view(-1, 1)" if width == 1 else "pass rows of features"
        else:
            remedy = f"make the layer with in_channels={rows.shape[-1]}, or pass the rows it was made for"
        return f"{wanted} takes rows of width {width}, {found}: {remedy}"
    dtype = next(_dtypes(layer), None)
    casts = rows.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(rows.device.type)
    if dtype is not None and rows.dtype != dtype and not casts:
        remedy = f"pass {name}.to({dtype})" + (f", or model.to({rows.dtype})" if rows.is_floating_point() else "")
        return f"{wanted} has weights of {_short(dtype)}, and {name} is {_short(rows.dtype)}: {remedy}"
    return None


def _dtypes(layer: nn.Module) -> Iterator[torch.dtype]:
    return (each.dtype for each in layer.parameters() if not is_lazy(each) and each.is_floating_point())


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
