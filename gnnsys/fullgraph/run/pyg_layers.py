"""What is known of PyG's modules, by the names of their classes; PyG itself is not needed for it.

A layer of PyG's that gives other rows on a piece of a graph when it is called gets an entry in `_ON_PIECES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gnnsys.nn import runs_as, whole_scales
from gnnsys.ops import CSC, STRUCTURES


def is_pyg(module: nn.Module) -> bool:
    return any(base.__module__.startswith("torch_geometric.") for base in type(module).__mro__)


def piece_call(conv: nn.Module) -> Callable[..., Tensor] | None:
    """How a layer is computed on a piece that knows the whole graph's degrees: (conv, rows, csc, edge_index, ...).

    None where it is called, as it is where a call of it is not what its class says.
    """
    return next((call for name, call in _ON_PIECES.items() if runs_pyg(conv, name)), None)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module of torch's that is all there is in one of PyG's; the module itself where it is none of those."""
    name = next((inner for name, inner in _WRAPS.items() if runs_pyg(module, name)), None)
    inner = None if name is None else getattr(module, name, None)
    return module if inner is None else inner


def runs_pyg(module: nn.Module, name: str) -> bool:
    """Whether a call of the module is that of PyG's class of this name and nothing else."""
    return any(
        base.__name__ == name and base.__module__.startswith("torch_geometric.") and runs_as(module, base)
        for base in type(module).__mro__
    )


def _pyg_gcn(conv: Any, rows: Tensor, csc: CSC, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
    """PyG's GCNConv takes no pair of rows and counts degrees in what it is given: its halves, with the whole's.

    Without edge weights every loop weighs 1: PyG takes no notice of `improved` then.
    """
    weight = edge_weight
    if conv.normalize:

        def normalised() -> tuple[Tensor, Tensor]:
            is_weighted, has_loops = edge_weight is not None, conv.add_self_loops
            fill = 2.0 if conv.improved and is_weighted else 1.0
            wide = torch.promote_types(rows.dtype, torch.float32)  # half precision cannot count in-edges
            src, dst, loop_weight = whole_scales(csc, has_loops, fill, wide, is_weighted)
            kept = edge_index[0] != edge_index[1] if has_loops else slice(None)
            edges = edge_index[:, kept]
            weight = src.new_ones(edges.shape[1]) if edge_weight is None else edge_weight.to(src.dtype)[kept]
            if has_loops:
                loops = torch.arange(csc.num_dst, device=edges.device)
                edges, weight = torch.cat([edges, loops.expand(2, -1)], dim=1), torch.cat([weight, loop_weight])
            return edges, (src[edges[0]] * weight * dst[edges[1]]).to(rows.dtype)

        key = ("gcn", conv.add_self_loops, conv.improved, rows.dtype)
        edge_index, weight = STRUCTURES.get(normalised, csc, key=key)
    out = conv.propagate(edge_index, x=conv.lin(rows), edge_weight=weight, size=(csc.num_src, csc.num_src))
    out = out[: csc.num_dst]
    return out if conv.bias is None else out + conv.bias


_ON_PIECES: Mapping[str, Callable[..., Tensor]] = {"GCNConv": _pyg_gcn}
_WRAPS: Mapping[str, str] = {"BatchNorm": "module"}  # the attribute that holds torch's module
