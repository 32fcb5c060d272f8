"""Halves of PyG's GCNConv, SAGEConv and GINConv: what `GraphLayer.halves` says of ours, said for them.

Without a plan PyG's layers are called. A plan may take them apart where a call of them is what their class says: then
nothing is gathered along edges, and sums of rows that never change are made once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gnnsys.fullgraph.run.pyg_layers import runs_pyg
from gnnsys.nn import Dense, Halves, NarrowFirst, has_hooks, methods_of

_REDUCTIONS = {"mean": "mean", "sum": "sum", "add": "sum"}
_SETTINGS = ("aggr", "flow", "node_dim", "decomposed_layers", "explain")
# What of a layer's settings its halves depend on
_DECIDES: Mapping[str, tuple[str, ...]] = {
    "GCNConv": ("improved", "add_self_loops", "normalize", *_SETTINGS),
    "SAGEConv": ("normalize", "root_weight", "project", *_SETTINGS),
    "GINConv": _SETTINGS,
}


def pyg_halves(conv: nn.Module) -> Halves | None:
    """How a layer of PyG's is computed from sums over in-edges, as it is now; None where it can only be called."""
    name = type(conv).__name__
    made = _HALVES.get(name)
    if made is None or not _is_pyg_class(type(conv), name) or not runs_pyg(conv, name):
        return None
    layer: Any = conv
    is_plain = (
        vars(conv).keys().isdisjoint(methods_of(type(conv)))  # type: ignore[arg-type]
        and not _message_hooks(conv)
        and (layer.flow, layer.node_dim, layer.decomposed_layers) == ("source_to_target", -2, 1)
        and not layer.explain
    )
    return made(layer) if is_plain else None


def settings_of(module: nn.Module) -> tuple[Any, ...]:
    """What halves depend on beside kinds and shapes: passes are planned anew where it changes."""
    names = _DECIDES.get(type(module).__name__)
    if names is None or not _is_pyg_class(type(module), type(module).__name__):
        return ()
    return (_message_hooks(module), *(repr(getattr(module, name, None)) for name in names))


def _is_pyg_class(kind: type, name: str) -> bool:
    """The very class: a subclass may have messages of its own."""
    return kind.__name__ == name and kind.__module__.startswith("torch_geometric.nn.")


def _message_hooks(conv: nn.Module) -> bool:
    """Whether something is called beside what PyG's `propagate` does by itself."""
    return any(held for name, held in vars(conv).items() if name.endswith(("_forward_hooks", "_forward_pre_hooks")))


def _is_linear(module: nn.Module | None, has_bias: bool) -> bool:
    """Whether a call is a product with `module.weight`, of its own, and nothing else but a bias where one may be."""
    if not (isinstance(module, nn.Module) and (runs_pyg(module, "Linear") or type(module) is nn.Linear)):
        return False
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    is_bare = type(weight) is nn.Parameter and (bias is None or type(bias) is nn.Parameter)
    return is_bare and not has_hooks(module) and (has_bias or bias is None)


def _narrows(module: Any) -> bool:
    return bool(module.weight.shape[0] < module.weight.shape[1])


def _gcn(conv: Any) -> Halves | None:
    is_known = not conv.improved and (conv.add_self_loops or not conv.normalize) and conv.aggr in ("add", "sum")
    if not is_known or not _is_linear(conv.lin, False):
        return None

    def add_bias(rows: Tensor) -> Tensor:
        return rows if conv.bias is None else rows + conv.bias

    narrow_first = NarrowFirst(
        transform=Dense(lambda rows: conv.lin(rows), lambda: [conv.lin.weight]),
        combine=Dense(add_bias, lambda: [conv.bias]),
    )
    return Halves(
        reduce="gcn" if conv.normalize else "sum",
        combine=lambda sums, own: add_bias(conv.lin(sums)),
        takes_weight=True,
        narrow_first=narrow_first if _narrows(conv.lin) else None,
    )


def _sage(conv: Any) -> Halves | None:
    adds_own = conv.root_weight
    is_known = isinstance(conv.aggr, str) and conv.aggr in _REDUCTIONS and not conv.project
    if not is_known or not _is_linear(conv.lin_l, True) or (adds_own and not _is_linear(conv.lin_r, False)):
        return None

    def finish(rows: Tensor) -> Tensor:
        return F.normalize(rows, p=2.0, dim=-1) if conv.normalize else rows

    def add_bias(sums: Tensor) -> Tensor:
        return sums if conv.lin_l.bias is None else sums + conv.lin_l.bias

    def add_own(rows: Tensor, own: Tensor) -> Tensor:
        return torch.addmm(rows, own, conv.lin_r.weight.t())

    def combine(sums: Tensor, own: Tensor) -> Tensor:
        out = conv.lin_l(sums)
        return finish(add_own(out, own) if adds_own else out)

    narrow_first = NarrowFirst(
        transform=Dense(lambda rows: F.linear(rows, conv.lin_l.weight), lambda: [conv.lin_l.weight]),
        combine=Dense(add_bias, lambda: [conv.lin_l.bias]),
        add_own=Dense(add_own, lambda: [conv.lin_r.weight]) if adds_own else None,
        finish=Dense(finish) if conv.normalize else None,
    )
    return Halves(
        reduce=_REDUCTIONS[conv.aggr],
        combine=combine,
        takes_own=adds_own,
        narrow_first=narrow_first if _narrows(conv.lin_l) else None,
    )


def _gin(conv: Any) -> Halves | None:
    if not isinstance(conv.aggr, str) or conv.aggr not in _REDUCTIONS:
        return None
    return Halves(
        reduce=_REDUCTIONS[conv.aggr],
        combine=lambda sums, own: conv.nn(sums + (1 + conv.eps) * own),
        takes_own=True,
    )


_HALVES: Mapping[str, Callable[[Any], Halves | None]] = {"GCNConv": _gcn, "SAGEConv": _sage, "GINConv": _gin}
