"""Layers of a kind are tried once in a file whose tests are about something else: the trials were a third of the time.

Every rank of every model tries its layers on pieces of a small graph before they run (`check_layers`). Tests of that,
and of layers that someone has changed, are in other files; here two models whose layers are of the same types, settings
and shapes count as one. What is refused, and what has hooks or a forward of its own, is tried every time.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import nn

from gnnsys.fullgraph.plan.layer_trial import check_layers
from gnnsys.fullgraph.plan.model_stages import ModelStage
from gnnsys.fullgraph.run.typed_layer import TypedConv, TypedRowLayer
from gnnsys.nn import has_hooks

PLAIN = (bool, int, float, str, tuple, type(None), torch.dtype)


class TriedOnce:
    """In the words of `check_layers`."""

    def __init__(self) -> None:
        self._left: dict[Hashable, tuple[list[bool], list[dict[str, Any]]]] = {}  # by a trial, in stages and layers

    def __call__(self, stages: Sequence[ModelStage], *given: Any) -> None:
        modules = [inner for stage in stages for module in stage.modules for inner in module.modules()]
        if any(has_hooks(module) or "forward" in vars(module) for module in modules):
            return check_layers(stages, *given)
        width, dtype, device, data, widths = given
        edges = None if data is None else repr([(name, rows.shape[1:], rows.dtype) for name, rows in data.rows.items()])
        cast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        shape = repr([(len(stage.modules), stage.keep_as, stage.joins) for stage in stages] + [widths])
        typed = [module for module in modules if isinstance(module, (TypedConv, TypedRowLayer))]
        key = (width, dtype, device, edges, cast, torch.is_grad_enabled(), shape, *map(described, modules))
        if key not in self._left:
            check_layers(stages, *given)
            types = [
                {name: held[name] for name in ("reads", "uses", "made") if name in held} for held in map(vars, typed)
            ]
            self._left[key] = [stage.in_place for stage in stages], types
        for stage, in_place in zip(stages, self._left[key][0], strict=True):
            stage.in_place |= in_place
        for module, types_of in zip(typed, self._left[key][1], strict=True):
            vars(module).update(types_of)


def described(module: nn.Module) -> Hashable:
    """What decides what a module without hooks does, but for the values of its parameters."""
    settings = [(name, value) for name, value in vars(module).items() if isinstance(value, PLAIN) or callable(value)]
    tensors = [
        (name, None if each is None else (each.dtype, each.requires_grad, str(getattr(each, "shape", ""))))
        for name, each in (*module._parameters.items(), *module._buffers.items())
    ]
    return type(module), repr(settings), repr(tensors)
