"""What people do to the layers of a model, each as a function that does it to a layer and returns the layer.

A layer of ours and one of PyG's, or two copies of a layer, given the same change must still do the same: a change is a
function of the layer's parameters alone, draws nothing from torch's generator that another call would see, and names
parameters alike. It acts on the linear layers inside, or on the layer where it has none (RGCNConv); those in
`OF_THE_LAYER` act on the layer itself. Nothing here knows gnnsys or PyG.

    for name, change in CHANGES.items():
        ours, theirs = change(make_ours()), change(make_theirs())
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

Change = Callable[[nn.Module], nn.Module]


def is_linear(module: nn.Module) -> bool:
    """torch's linear layer or PyG's own, which is no subclass of it."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Linear"


def linears(layer: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """(parent, attribute, linear layer) of each linear layer inside, once where it has several places."""
    found = []
    for parent in list(layer.modules()):
        found += [(parent, name, child) for name, child in parent.named_children() if is_linear(child)]
    return found


def _weighted(layer: nn.Module) -> list[nn.Module]:
    """The linear layers inside, or the layer itself where it keeps weights of its own."""
    inside = [linear for _, _, linear in linears(layer)]
    return inside or ([layer] if "weight" in layer._parameters else [])


def _noise(*shape: int, like: Tensor, seed: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")
    return (0.3 * drawn).to(dtype=like.dtype, device=like.device)


def _sizes(linear: nn.Module) -> tuple[int, int]:
    num_out, num_in = linear.weight.shape  # type: ignore[operator]
    return int(num_in), int(num_out)


def _seeded(act: Callable[[nn.Module], Any]) -> Change:
    """`act` on each module with weights, with draws that leave torch's generator as it was."""

    def change(layer: nn.Module) -> nn.Module:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the older functions say that they are
            torch.manual_seed(11)
            for module in _weighted(layer):
                act(module)
        return layer

    return change


def _replacing(make: Callable[[nn.Module], nn.Module]) -> Change:
    """Puts `make(linear)` where a linear layer was."""

    def change(layer: nn.Module) -> nn.Module:
        for parent, name, linear in linears(layer):
            setattr(parent, name, make(linear))
        return layer

    return change


class LoRA(nn.Module):
    """A linear layer that is frozen, and a product of two thin matrices that trains (Hu 2021)."""

    def __init__(self, base: nn.Module, rank: int = 2) -> None:
        super().__init__()
        num_in, num_out = _sizes(base)
        weight: Tensor = base.weight  # type: ignore[assignment]
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(_noise(rank, num_in, like=weight))
        self.up = nn.Parameter(_noise(num_out, rank, like=weight, seed=8))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.t() @ self.up.t()


class LoRAInside(nn.Linear):
    """The same as a subclass of nn.Linear that shows a `weight`, as PEFT's layers do."""

    def __init__(self, base: nn.Module, rank: int = 2) -> None:
        num_in, num_out = _sizes(base)
        weight: Tensor = base.weight  # type: ignore[assignment]
        super().__init__(num_in, num_out, bias=base.bias is not None, dtype=weight.dtype, device=weight.device)
        self.load_state_dict(base.state_dict())
        self.requires_grad_(False)
        self.down = nn.Parameter(_noise(rank, num_in, like=weight))
        self.up = nn.Parameter(_noise(num_out, rank, like=weight, seed=8))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.down.t() @ self.up.t()


def _other_linear(linear: nn.Module) -> nn.Module:
    """With a bias, which the one before may not have had, and not linear: the order of a layer's halves shows."""
    num_in, num_out = _sizes(linear)
    weight: Tensor = linear.weight  # type: ignore[assignment]
    other = nn.Linear(num_in, num_out, dtype=weight.dtype, device=weight.device)
    with torch.no_grad():
        other.weight.copy_(_noise(num_out, num_in, like=weight))
        other.bias.copy_(_noise(num_out, like=weight, seed=8))
    return nn.Sequential(other, nn.Tanh())


def _subclassed(module: nn.Module) -> nn.Module:
    """The module, of a subclass whose forward does more."""
    kind = type(module)

    class Louder(kind):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return 1.5 * kind.forward(self, *args, **kwargs) + 0.25

    module.__class__ = Louder
    return module


def _on_instance(module: nn.Module) -> nn.Module:
    """The module with another `forward` of its own, as accelerate and others put one there."""
    forward = module.forward
    module.forward = lambda *args, **kwargs: 1.5 * forward(*args, **kwargs) + 0.25
    return module


def _scaled_grads(module: nn.Module, grads: Any, *_: Any) -> tuple[Tensor | None, ...]:
    return tuple(1.5 * g if g is not None and g.is_floating_point() else g for g in grads)


class _Doubled(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return 2 * value + 0.125


def _parametrised(layer: nn.Module) -> nn.Module:
    """Every parameter anywhere in the layer is a function of another one."""
    for module in list(layer.modules()):
        for name, value in list(module._parameters.items()):
            if value is not None:
                parametrize.register_parametrization(module, name, _Doubled())
    return layer


def _assigned(layer: nn.Module) -> nn.Module:
    """Other tensors in the place of all parameters."""
    state = {name: 0.5 * value.detach() + 0.125 for name, value in layer.state_dict().items()}
    layer.load_state_dict(state, assign=True)
    return layer


def _frozen(layer: nn.Module) -> nn.Module:
    """All but the last parameter."""
    for parameter in list(layer.parameters())[:-1]:
        parameter.requires_grad_(False)
    return layer


def _tied(layer: nn.Module) -> nn.Module:
    """Linear layers of one shape become one: the layer has a module twice."""
    kept: dict[tuple[int, int], nn.Module] = {}
    for parent, name, linear in linears(layer):
        setattr(parent, name, kept.setdefault(_sizes(linear), linear))
    return layer


def _hooked(layer: nn.Module) -> nn.Module:
    layer.register_forward_hook(lambda _, __, out: 1.5 * out + 0.25)
    return layer


def _pre_hooked(layer: nn.Module) -> nn.Module:
    layer.register_forward_pre_hook(lambda _, args: (1.5 * args[0], *args[1:]))
    return layer


def _backward_hooked(layer: nn.Module) -> nn.Module:
    layer.register_full_backward_hook(_scaled_grads)
    return layer


def _backward_pre_hooked(layer: nn.Module) -> nn.Module:
    layer.register_full_backward_pre_hook(_scaled_grads)
    return layer


def _to_each_linear(act: Callable[[nn.Module], Any]) -> Change:
    def change(layer: nn.Module) -> nn.Module:
        for _, _, linear in linears(layer):
            act(linear)
        return layer

    return change


CHANGES: dict[str, Change] = {
    "plain": lambda layer: layer,
    "LoRA around": _replacing(LoRA),
    "LoRA inside": _replacing(LoRAInside),
    "spectral_norm": _seeded(parametrizations.spectral_norm),
    "spectral_norm, old": _seeded(nn.utils.spectral_norm),
    "weight_norm": _seeded(parametrizations.weight_norm),
    "weight_norm, old": _seeded(nn.utils.weight_norm),
    "prune": _seeded(lambda module: prune.l1_unstructured(module, "weight", amount=0.3)),
    "parametrised": _parametrised,
    "replaced linears": _replacing(_other_linear),
    "subclassed linears": _to_each_linear(_subclassed),
    "linears with a forward of their own": _to_each_linear(_on_instance),
    "forward hook": _to_each_linear(_hooked),
    "forward pre-hook": _to_each_linear(_pre_hooked),
    "backward hook": _to_each_linear(_backward_hooked),
    "backward pre-hook": _to_each_linear(_backward_pre_hooked),
    "compiled linears": _to_each_linear(lambda linear: linear.compile(backend="eager")),
    "assign=True": _assigned,
    "frozen": _frozen,
    "tied linears": _tied,
}

OF_THE_LAYER: dict[str, Change] = {
    "subclass": _subclassed,
    "a forward of its own": _on_instance,
    "forward hook of the layer": _hooked,
    "backward hook of the layer": _backward_hooked,
    "backward pre-hook of the layer": _backward_pre_hooked,
}
