"""What a user's list of layers is made of, as it is now, and which containers in it are opened.

A model is computed stage by stage, batch normalisation over all ranks, some layers in halves. That is right only while
a call of a module does what its class says: `gnnsys/nn/plain.py` knows. People change modules at any time, so a pass
asks for the `ModuleLayout` of its layers, and plans anew where that is another than before. A layer's `decides` names
those of its settings that plans depend on.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from gnnsys.fullgraph.keyed_dropout import Dropout, keyed
from gnnsys.fullgraph.modules import ByNodeType
from gnnsys.fullgraph.plan.graph_types import GraphTypes
from gnnsys.fullgraph.plan.pyg_halves import settings_of
from gnnsys.fullgraph.run.pyg_layers import unwrapped
from gnnsys.fullgraph.run.typed_layer import TypedConv, TypedRowLayer
from gnnsys.nn import HGT, Stack, TypedRGCN, TypedStack, has_hooks, is_batch_norm, methods_of, runs_as


class StackDropout(Dropout):
    """What a reference model drops between two layers: its rate, and only while it trains, as of the last look."""

    def __init__(self, stack: Stack | TypedStack) -> None:
        super().__init__(stack.dropout)
        self._stack = (stack,)  # in a tuple it is no child
        self.look()

    def look(self) -> None:
        """Once per pass: bins of a pass that are computed again drop what they did."""
        self.p, self.training = self._stack[0].dropout, self._stack[0].training


def flat(layers: nn.Module, types: GraphTypes | None = None) -> Iterator[nn.Module]:
    """Lists within lists, reference models taken apart, torch's dropouts made ours; `types` are a typed graph's."""
    if isinstance(layers, TypedStack) and any(runs_as(layers, kind) for kind in (TypedStack, TypedRGCN, HGT)):
        yield from _typed_stack(layers, types)
    elif runs_as(layers, Stack):
        assert isinstance(layers, Stack)
        for index, conv in enumerate(layers.convs):
            yield conv
            if index < len(layers.convs) - 1:
                yield from flat(layers.norms[index])
                yield from (nn.ReLU(), StackDropout(layers))
    elif _is_list(layers) or runs_as(layers, nn.Sequential):
        for module in layers._modules.values():  # `children` gives one that is there twice once
            if module is None:
                raise ValueError(f"{type(layers).__name__} holds None where a module is due")
            yield from flat(module, types)
    elif isinstance(layers, ByNodeType) and types is not None:
        yield TypedRowLayer(layers, types)
    else:
        inner = unwrapped(layers)
        yield inner if is_batch_norm(inner) else keyed(layers)


def _typed_stack(stack: TypedStack, types: GraphTypes | None) -> Iterator[nn.Module]:
    """The layers of a typed reference model, each with the types that it is given there."""
    name, plan = type(stack).__name__, stack.plan
    if types is None:
        raise ValueError(
            f"{name} is for typed graphs, and this one has one node type and one edge type: use a model of x"
        )
    others = set(types.node_types) ^ set(plan.node_types) or set(types.edge_types) - set(plan.edge_types)
    if others:
        raise ValueError(
            f"{name} was made for other types than the graph has, {sorted(others)[0]!r} for one: make it with "
            "metadata=graph"
        )
    for index, conv in enumerate(stack.convs):
        yield TypedConv(conv, types, plan.read(index), plan.uses[index])
        if index < len(stack.convs) - 1:
            norms = stack.norms[index]
            if len(norms):  # type: ignore[arg-type]
                named = dict(zip(plan.makes[index], norms.values(), strict=True))  # type: ignore[operator]
                if any(isinstance(norm, nn.modules.batchnorm._BatchNorm) for norm in named.values()):
                    raise ValueError(
                        f"{name} has a batch normalisation per node type, whose statistics would be a bin's: make it "
                        'with norm="layer"'
                    )
                yield TypedRowLayer(ByNodeType(named), types)
            yield from (nn.ReLU(), StackDropout(stack))
    if isinstance(stack, HGT) and len(stack.last):
        heads = dict(zip(plan.makes[-1], stack.last.values(), strict=True))
        yield TypedRowLayer(ByNodeType(heads), types)


def _is_list(module: nn.Module) -> bool:
    """A list that nobody calls, so hooks on it mean nothing."""
    return (
        isinstance(module, nn.ModuleList)
        and type(module).forward is nn.ModuleList.forward
        and "forward" not in vars(module)
    )


def is_lazy(modules: Iterable[nn.Module]) -> bool:
    """Whether some parameter will get its size, and be drawn, when a module is first called."""
    return any(isinstance(p, UninitializedParameter) for module in modules for p in module.parameters())


class ModuleLayout(NamedTuple):
    """What plans were made from: modules with their kinds, hooks and shapes. `modes` says which of them train now."""

    modules: list[nn.Module]  # held, so that an id stays theirs
    what: tuple[Any, ...]
    modes: tuple[bool, ...]

    @classmethod
    def of(cls, layers: nn.Module) -> ModuleLayout:
        """As the modules are now; some microseconds each."""
        modules = list(layers.modules())
        return cls(modules, (has_hooks(layers), *map(_kind, modules)), tuple(module.training for module in modules))

    def digest(self) -> int:
        """A number that is the same on ranks whose layers are alike: the first two of `_kind` are a process's own."""
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


_CALLED = ("forward", "__call__", "transform", "aggregate")


def _kind(module: nn.Module) -> tuple[Any, ...]:
    held: dict[str, Any] = module.__dict__
    kind: Any = type(module)
    children, parameters, settings = held["_modules"], held["_parameters"], getattr(kind, "decides", ())
    return (
        (id(module), *(map(id, children.values()) if children else ())),
        tuple(getattr(kind, name, None) for name in _CALLED),  # as somebody may have put other ones into the class
        kind,
        bool(held["_forward_hooks"] or held["_forward_pre_hooks"])
        or bool(held["_backward_hooks"] or held["_backward_pre_hooks"]),
        None if held.keys().isdisjoint(methods_of(kind)) else tuple(sorted(held.keys() & methods_of(kind))),
        held.get("_compiled_call_impl") is not None,
        tuple(map(_shape, parameters.values())) if parameters else (),
        tuple(_frozen(held.get(name)) for name in settings) if settings else settings_of(module),
    )


def _frozen(value: Any) -> Any:
    return tuple(value.items()) if isinstance(value, dict) else value


def _shape(p: Tensor | None) -> tuple[Any, ...]:
    if p is None or isinstance(p, (UninitializedParameter, UninitializedBuffer)):
        return ()
    return (type(p), p.dtype, *p.shape)
