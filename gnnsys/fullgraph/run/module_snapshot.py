"""What modules were when a pass began, for bins that are computed again on its way back.

Autograd keeps what it needs of a forward pass; a bin that is computed again reads modules as they are by then. Whether
they train, how much they drop and which types they were given is put back for that time. Where anything else of them
was changed, other numbers would come out, and the pass is refused, as torch refuses tensors that were written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from gnnsys.fullgraph.plan.model_stages import ModelStage
from gnnsys.fullgraph.plan.module_layout import ModuleLayout
from gnnsys.fullgraph.run.typed_layer import TypedConv, TypedRowLayer
from gnnsys.nn import HOOKS

_PUT_BACK = ("training", "p", "dropout")  # of a module's attributes, where they are numbers
_OF_TYPES = ("reads", "uses", "made", "input_widths")  # of typed layers, which follow x
_ADVICE = (
    "which computes bins again: call optimizer.step() and load_state_dict() and change layers after backward(), or "
    "leave recompute and memory_budget away"
)


class ModuleSnapshot:
    """Modules, parameters and buffers of stages, as they are when it is made."""

    def __init__(self, stages: Sequence[ModelStage]) -> None:
        self._stages = stages
        self._modules = _modules(stages)
        self._layers = _layers(self._modules)
        self._parameters, self._buffers = _parameters(self._modules), _buffers(stages)
        self._values = [(module, name, value) for module in self._modules for name, value in _values(module)]

    def check(self) -> None:
        """Raises RuntimeError where something is not what it was."""
        modules = _modules(self._stages)
        if _layers(modules) != self._layers:
            raise RuntimeError(f"layers were changed between a pass and its backward, {_ADVICE}")
        for what, now, then in (
            ("parameters", _parameters(modules), self._parameters),
            ("buffers", _buffers(self._stages), self._buffers),
        ):
            if [each[1:] for each in now] != [each[1:] for each in then]:
                raise RuntimeError(f"{what} were changed between a pass and its backward, {_ADVICE}")

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Inside it modules train and drop as they did, and are given the same types."""
        now = [(module, name, vars(module).get(name)) for module, name, _ in self._values]
        try:
            _put(self._values)
            yield
        finally:
            _put(now)


def _modules(stages: Sequence[ModelStage]) -> list[nn.Module]:
    found = {id(m): m for stage in stages for module in stage.modules for m in module.modules()}
    return list(found.values())


def _layers(modules: Sequence[nn.Module]) -> tuple[Any, ...]:
    """Kinds, children and settings of modules, and which hooks are called with them."""
    everywhere = [tuple(getattr(torch_module, f"_global{name}")) for name in HOOKS]
    own = [tuple(vars(module)[name]) for module in modules for name in HOOKS]
    return (ModuleLayout.of(nn.ModuleList(modules)).what[2:], everywhere, own)


def _parameters(modules: Sequence[nn.Module]) -> list[tuple[Tensor, int, int, bool]]:
    """All of them, held so that an id stays theirs, with how often they were written and whether they train."""
    return [(p, *_state(p)) for module in modules for p in module._parameters.values() if p is not None]


def _buffers(stages: Sequence[ModelStage]) -> list[tuple[Tensor, int, int, bool]]:
    """All but statistics of batch normalisation, which a pass writes itself and has what it needs of."""
    modules = _modules([stage for stage in stages if stage.norm is None])
    return [(b, *_state(b)) for module in modules for b in module._buffers.values() if b is not None]


def _state(tensor: Tensor) -> tuple[int, int, bool]:
    is_counted = not (isinstance(tensor, (UninitializedParameter, UninitializedBuffer)) or tensor.is_inference())
    return id(tensor), tensor._version if is_counted else 0, tensor.requires_grad


def _values(module: nn.Module) -> list[tuple[str, Any]]:
    held = vars(module)
    typed = [
        (name, held[name]) for name in _OF_TYPES if name in held and isinstance(module, (TypedConv, TypedRowLayer))
    ]
    return typed + [(name, held[name]) for name in _PUT_BACK if isinstance(held.get(name), (int, float))]


def _put(values: Sequence[tuple[nn.Module, str, Any]]) -> None:
    for module, name, value in values:
        vars(module)[name] = value
