"""What is wrong with the rows a layer was given, in words, once a call of it has failed.

Asked only after an error, so that a call that works pays nothing and nothing that works is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.parameter import is_lazy

from gnnsys.graph import NodeType

ERRORS = (RuntimeError, ValueError, TypeError, AttributeError)  # of rows that do not fit
_OURS = f"{__name__.partition('.')[0]}."


def may_be_rows(layer: nn.Module, error: Exception) -> bool:
    """Whether rows that do not fit may have raised this: memory, CUDA and a user's own `forward` are other causes."""
    if isinstance(error, torch.OutOfMemoryError) or "CUDA error" in str(error):
        return False
    return is_ours(layer)


def is_ours(layer: nn.Module) -> bool:
    """Whether its `forward` is one of gnnsys."""
    return type(layer).forward.__module__.startswith(_OURS)


def why_unfit(layer: nn.Module, x: Any) -> str | None:
    """What is wrong with `x`, rows or a pair of them, and what to write; None if it is not the rows."""
    names = ("x[0]", "x[1]") if isinstance(x, tuple) else ("x",)
    for name, rows, width in zip(names, x if isinstance(x, tuple) else (x,), widths_of(layer), strict=False):
        # rows of destinations may be left out, and layers of relations may look rows up by node ids
        if rows is None and (name == "x[1]" or hasattr(layer, "num_relations")):
            continue
        if (why := _why(layer, name, rows, width)) is not None:
            return why
    return None


def why_unfit_by_type(layer: nn.Module, x: Mapping[NodeType, Any], widths: Mapping[NodeType, int | None]) -> str | None:
    """The same for rows by node type. `widths` has the node types that the layer reads, None for an unknown width."""
    for node_type, width in widths.items():
        if node_type in x and (why := _why(layer, f"x[{node_type!r}]", x[node_type], width, node_type)) is not None:
            return why
    return None


def widths_of(layer: nn.Module) -> tuple[int | None, int | None]:
    """How wide rows of sources and of destinations must be; None for what is not known."""
    width = getattr(layer, "in_channels", None)
    if not isinstance(width, (int, tuple)):  # a GIN layer has a module of the user's
        width = next((each.in_features for each in layer.modules() if isinstance(each, nn.Linear)), None)
    src, dst = width if isinstance(width, tuple) else (width, width)
    return (src if src is None or src > 0 else None), (dst if dst is None or dst > 0 else None)


def _why(layer: nn.Module, name: str, rows: Any, width: int | None, node_type: NodeType | None = None) -> str | None:
    wanted = f"{type(layer).__name__}({layer.extra_repr()})"
    if rows is None:
        return f"{wanted} takes rows, {name} is None"
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
            made = "make the layer" if node_type is None else "make the model"
            of_type = "" if node_type is None else f" for {node_type!r}"
            remedy = f"{made} with in_channels={rows.shape[-1]}{of_type}, or pass the rows it was made for"
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
