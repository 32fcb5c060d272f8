"""Whether calling a module does what its class says and nothing else.

Our layers and full-graph training save work by taking modules apart: reading a linear layer's weight, running a model's
layers one by one. That is right only while nobody has changed what a call does. People do, by subclasses, hooks, LoRA,
`parametrize`, `weight_norm`, `prune` and `torch.compile`. Whoever takes a module apart asks here first, or calls it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

# What `nn.Module.__call__` looks at besides `forward`, on the module and for all modules.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

# Methods as their authors wrote them: some tools put others into the class itself, where all of its modules find them.
_WRITTEN: dict[tuple[type, str], Any] = {}


def note_written(kind: type, *methods: str) -> None:
    """Keeps in mind which methods a class has now."""
    _WRITTEN.update({(kind, name): getattr(kind, name) for name in methods if hasattr(kind, name)})


for _kind in (nn.Linear, nn.BatchNorm1d, nn.SyncBatchNorm, nn.Sequential):
    note_written(_kind, "forward", "__call__")
_LINEAR_FORWARD, _CALL = nn.Linear.forward, nn.Module.__call__


def _any_hooks_for_all() -> bool:
    return bool(
        torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
        or torch_module._global_backward_hooks
        or torch_module._global_backward_pre_hooks
    )


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module runs more than its forward."""
    return any(getattr(module, name, None) for name in HOOKS) or _any_hooks_for_all()


def as_written(module: nn.Module, kind: type[nn.Module], *methods: str) -> bool:
    """Whether these methods of the module are those of `kind`: neither a subclass nor the instance has others.

    Nor has `kind` itself got others since it was noted.
    """
    has, own = type(module), module.__dict__
    for name in methods:
        method = getattr(kind, name)
        if name in own or getattr(has, name) is not method or _WRITTEN.get((kind, name), method) is not method:
            return False
    return True


def runs_as(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a call of the module is `kind.forward` and nothing else.

    A subclass that keeps `forward` is; one with its own, an instance or a class whose `forward` was replaced, a
    compiled module and one with hooks are not.
    """
    return (
        isinstance(module, kind)
        and as_written(module, kind, "forward")
        and type(module).__call__ is _WRITTEN.get((kind, "__call__"), kind.__call__)
        and nn.Module.__call__ is _CALL  # which a `__call__` of our layers leads to
        and getattr(module, "_compiled_call_impl", None) is None
        and not has_hooks(module)
    )


@functools.lru_cache
def methods_of(kind: Any) -> frozenset[str]:
    """What an instance of a class must not have of its own, to do what the class says."""
    return frozenset(name for name in dir(kind) if callable(getattr(kind, name, None)))


def is_untouched(
    module: nn.Module, kind: type[nn.Module], linears: Mapping[str, Callable[[nn.Module | None], bool]] | None = None
) -> bool:
    """Whether a graph layer of ours may be computed in parts: the very class, with nothing changed in the module.

    `linears` are the linear layers, by name, whose weights the parts read, and what each of them must be.
    """
    return (
        type(module) is kind
        and runs_as(module, kind)
        and as_written(module, kind, "transform", "aggregate")
        and vars(module).keys().isdisjoint(methods_of(kind))  # type: ignore[arg-type]
        and all(is_plain(module._modules[n]) for n, is_plain in (linears or {}).items() if n in module._modules)
    )


def is_batch_norm(module: nn.Module) -> bool:
    """Whether it is batch normalisation as torch's, with parameters of its own."""
    return (runs_as(module, nn.BatchNorm1d) or runs_as(module, nn.SyncBatchNorm)) and not hasattr(
        module, "parametrizations"
    )


def why_whole(module: nn.Module) -> str:
    """Why a module is called as a whole and not taken apart, as the end of a sentence; "" where nothing is the matter.

    >>> why_whole(nn.Linear(1, 1))
    ''
    """
    known = ("torch.nn.", "torch_geometric.", "gnnsys.")
    kind = next((base for base in type(module).__mro__ if base.__module__.startswith(known)), None)
    if has_hooks(module):
        return "has hooks"
    if getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod"):
        return "is compiled"
    return "" if kind is None or kind is nn.Module or runs_as(module, kind) else "has a forward of its own"


def is_bare_linear(module: nn.Module | None) -> bool:
    """Whether a call of the module is `F.linear(x, module.weight, module.bias)` with parameters of its own.

    The exact class is asked for: subclasses (quantised, LoRA, `parametrize`) may give `weight` another meaning. So may
    subclasses of tensors (quantised ones, DTensor). Layers ask in each forward, so it says what `runs_as` would by
    reading the module's own dictionary: `nn.Module` finds attributes slowly.
    """
    if type(module) is not nn.Linear or nn.Linear.forward is not _LINEAR_FORWARD or nn.Linear.__call__ is not _CALL:
        return False
    own = module.__dict__
    if (
        "forward" in own
        or own.get("_compiled_call_impl") is not None
        or own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or _any_hooks_for_all()
    ):
        return False
    parameters = own["_parameters"]
    bias = parameters.get("bias")
    return type(parameters.get("weight")) is nn.Parameter and (bias is None or type(bias) is nn.Parameter)


def is_bare_product(module: nn.Module | None) -> bool:
    """Whether a call of the module is `x @ module.weight.t()`: a bare linear layer without a bias.

    Only such a layer may change places with a sum over edges: sum(x @ W) = sum(x) @ W.
    """
    return is_bare_linear(module) and module is not None and module._parameters.get("bias") is None
