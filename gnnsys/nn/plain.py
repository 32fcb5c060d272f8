"""Whether calling a module does what its class says and nothing else.

Our layers and full-graph training save work by taking modules apart: reading a linear layer's weight, running a model's
layers one by one. That is right only while nobody has changed what a call does. People do, by subclasses, hooks, LoRA,
`parametrize`, `weight_norm`, `prune` and `torch.compile`. Whoever takes a module apart asks here first, or calls it.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as torch_module

# What `nn.Module.__call__` looks at besides `forward`, on the module and for all modules.
_OWN_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_ALL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module runs more than its forward."""
    return any(getattr(module, name, None) for name in _OWN_HOOKS) or any(
        getattr(torch_module, name, None) for name in _ALL_HOOKS
    )


def as_written(module: nn.Module, kind: type[nn.Module], *methods: str) -> bool:
    """Whether these methods of the module are those of `kind`: neither a subclass nor the instance has others."""
    return all(getattr(type(module), name) is getattr(kind, name) and name not in vars(module) for name in methods)


def runs_as(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a call of the module is `kind.forward` and nothing else.

    A subclass that keeps `forward` is; one with its own, an instance whose `forward` was replaced, a compiled module
    and one with hooks are not.
    """
    return (
        isinstance(module, kind)
        and as_written(module, kind, "forward")
        and type(module).__call__ is kind.__call__
        and getattr(module, "_compiled_call_impl", None) is None
        and not has_hooks(module)
    )


def is_bare_linear(module: nn.Module | None) -> bool:
    """Whether a call of the module is `F.linear(x, module.weight, module.bias)` with parameters of its own.

    The exact class is asked for: subclasses (quantised, LoRA, `parametrize`) may give `weight` another meaning. So may
    subclasses of tensors (quantised ones, DTensor).
    """
    return (
        module is not None
        and type(module) is nn.Linear
        and runs_as(module, nn.Linear)
        and type(module._parameters.get("weight")) is nn.Parameter
        and type(module._parameters.get("bias")) in (nn.Parameter, type(None))
    )


def is_bare_product(module: nn.Module | None) -> bool:
    """Whether a call of the module is `x @ module.weight.t()`: a bare linear layer without a bias.

    Only such a layer may change places with a sum over edges: sum(x @ W) = sum(x) @ W.
    """
    return is_bare_linear(module) and module is not None and module._parameters.get("bias") is None
