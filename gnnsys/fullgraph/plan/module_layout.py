"""Which modules of a user's may be taken apart, and what their parts are; everything else is called.

A model is computed stage by stage, batch normalisation over all ranks, some layers in halves. That is right only while
a call of a module does what its class says: `gnnsys.nn.plain` knows. People change modules at any time, so a pass asks
for the `Layout` of its layers, and plans anew where that is another than before.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from gnnsys.fullgraph.keyed_dropout import Dropout, keyed
from gnnsys.nn import GATConv, GCNConv, GINConv, SAGEConv, Stack, has_hooks, is_bare_linear, is_bare_product, runs_as

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# What of a layer's settings decides how it is taken in halves: they may be changed between passes. Modules of ours for
# lists of layers say by `decides` what plans are made from.
_SETTINGS: dict[type, tuple[str, ...]] = {
    SAGEConv: ("aggr", "normalize", "project", "root_weight"),
    GCNConv: ("normalize", "improved", "add_self_loops"),
}
# The linears that halves read. Behind a sum there is room for a bias; what changes places with one must have none.
_LINEARS: dict[type, dict[str, Callable[[nn.Module | None], bool]]] = {
    SAGEConv: {"lin_l": is_bare_linear, "lin_r": is_bare_product},
    GCNConv: {"lin": is_bare_product},
    GINConv: {},
    GATConv: {},
}


class OfStack(Dropout):
    """What a reference model drops between two layers: its rate, and only while it trains, as of the last look."""

    def __init__(self, stack: Stack) -> None:
        super().__init__(stack.dropout)
        self._stack = (stack,)  # in a tuple it is no child
        self.look()

    def look(self) -> None:
        """Once per pass: bins of a pass that are computed again drop what they did."""
        self.p, self.training = self._stack[0].dropout, self._stack[0].training


def flat(layers: nn.Module) -> Iterator[nn.Module]:
    """Lists within lists, reference models taken apart, torch's dropouts made ours."""
    if runs_as(layers, Stack):
        assert isinstance(layers, Stack)
        for index, conv in enumerate(layers.convs):
            yield conv
            if index < len(layers.convs) - 1:
                yield from flat(layers.norms[index])
                yield from (nn.ReLU(), OfStack(layers))
    elif _is_list(layers) or runs_as(layers, nn.Sequential):
        for module in layers._modules.values():  # `children` gives one that is there twice once
            if module is None:
                raise ValueError(f"{type(layers).__name__} holds None where a module is due")
            yield from flat(module)
    else:
        inner = getattr(layers, "module", None) if runs_pyg(layers, "BatchNorm") else None  # a hull around torch's
        yield inner if inner is not None and is_norm(inner) else keyed(layers)


def _is_list(module: nn.Module) -> bool:
    """A list that nobody calls, so hooks on it mean nothing."""
    return (
        isinstance(module, nn.ModuleList)
        and type(module).forward is nn.ModuleList.forward
        and "forward" not in vars(module)
    )


def is_norm(module: nn.Module) -> bool:
    """Whether it is batch normalisation as torch's, with parameters of its own."""
    return (runs_as(module, nn.BatchNorm1d) or runs_as(module, nn.SyncBatchNorm)) and not hasattr(
        module, "parametrizations"
    )


def is_bare(conv: nn.Module | None, kind: type[nn.Module]) -> bool:
    """Whether a graph layer of ours may be computed in parts: the very class, nothing changed in it or its linears."""
    return (
        type(conv) is kind
        and runs_as(conv, kind)
        and vars(conv).keys().isdisjoint(_methods(kind))  # type: ignore[arg-type]
        and all(is_plain(conv._modules[name]) for name, is_plain in _LINEARS[kind].items() if name in conv._modules)
    )


def is_lazy(modules: Iterable[nn.Module]) -> bool:
    """Whether some parameter will get its size, and be drawn, when a module is first called."""
    return any(isinstance(p, UninitializedParameter) for module in modules for p in module.parameters())


def is_pyg(module: nn.Module) -> bool:
    return any(base.__module__.startswith("torch_geometric.") for base in type(module).__mro__)


def runs_pyg(module: nn.Module, name: str) -> bool:
    """Whether a call of the module is that of PyG's class of this name and nothing else."""
    return any(
        base.__name__ == name and base.__module__.startswith("torch_geometric.") and runs_as(module, base)
        for base in type(module).__mro__
    )


def changed(module: nn.Module) -> str:
    """Why a module is called as a whole and not taken apart, as the end of a sentence; "" where nothing is the matter.

    >>> changed(nn.Linear(1, 1))
    ''
    """
    known = ("torch.nn.", "torch_geometric.", "gnnsys.")
    kind = next((base for base in type(module).__mro__ if base.__module__.startswith(known)), None)
    if has_hooks(module):
        return "has hooks"
    if getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod"):
        return "is compiled"
    return "" if kind is None or kind is nn.Module or runs_as(module, kind) else "has a forward of its own"


class Layout(NamedTuple):
    """What plans were made from: modules with their kinds, hooks and shapes. `modes` says which of them train now."""

    modules: list[nn.Module]  # held, so that an id stays theirs
    what: tuple[Any, ...]
    modes: tuple[bool, ...]

    @classmethod
    def of(cls, layers: nn.Module) -> Layout:
        """As the modules are now; some microseconds each."""
        modules = list(layers.modules())
        return cls(modules, (has_hooks(layers), *map(_kind, modules)), tuple(module.training for module in modules))

    def digest(self) -> int:
        """A number that is the same on ranks whose layers are alike."""
        kinds = [(each[2].__qualname__, *each[3:]) for each in self.what[1:]]
        return zlib.crc32(repr(kinds).encode())


def numbers_of(modules: Iterable[nn.Module], names: Sequence[str]) -> list[tuple[str, Any]]:
    """What modules have by these names of their own, where it is a number or None."""
    return [
        (name, held[name])
        for held in map(vars, modules)
        for name in names
        if name in held and (held[name] is None or isinstance(held[name], (bool, int, float)))
    ]


def _kind(module: nn.Module) -> tuple[Any, ...]:
    held: dict[str, Any] = module.__dict__
    kind: Any = type(module)
    children, parameters, settings = held["_modules"], held["_parameters"], _settings(kind)
    return (
        id(module),
        tuple(map(id, children.values())) if children else (),
        kind,
        bool(held["_forward_hooks"] or held["_forward_pre_hooks"])
        or bool(held["_backward_hooks"] or held["_backward_pre_hooks"]),
        None if held.keys().isdisjoint(_methods(kind)) else tuple(sorted(held.keys() & _methods(kind))),
        held.get("_compiled_call_impl") is not None,
        tuple(map(_shape, parameters.values())) if parameters else (),
        tuple(_frozen(held.get(name)) for name in settings) if settings else (),
    )


@functools.lru_cache
def _methods(kind: Any) -> frozenset[str]:
    """What an instance of a class must not have of its own, to do what the class says."""
    return frozenset(name for name in dir(kind) if callable(getattr(kind, name, None)))


@functools.lru_cache
def _settings(kind: Any) -> tuple[str, ...]:
    return _SETTINGS.get(kind, getattr(kind, "decides", ()))


def _frozen(value: Any) -> Any:
    return tuple(value.items()) if isinstance(value, dict) else value


def _shape(p: Tensor | None) -> tuple[Any, ...]:
    if p is None or isinstance(p, (UninitializedParameter, UninitializedBuffer)):
        return ()
    return (p.dtype, *p.shape)
