"""A graph layer, ours, PyG's or a user's own, called on a bin, whose nodes are the first of its sources.

What would be wrong on a piece if it were called as it is, the layer does otherwise, but only where a call of it is what
its class says: ours draw random numbers by key (`GraphLayer.forward_keyed`), of PyG's `pyg_layers.py` has a table.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gnnsys.fullgraph.keyed_dropout import draw_context
from gnnsys.fullgraph.run.pyg_layers import is_pyg, piece_call
from gnnsys.nn import GraphLayer
from gnnsys.ops import CSC, STRUCTURES, stream_key


def arguments(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """What a module's forward takes, by name; of one that passes on whatever it is given, what its class takes."""
    module = getattr(module, "_orig_mod", module)  # also if it is compiled
    own = vars(module).get("forward")
    if own is not None and not _is_open(own, False):
        return inspect.signature(own).parameters
    takes = list(inspect.signature(_forward_of(module.__class__)).parameters.items())  # type: ignore[arg-type]
    return dict(takes[1:])


@functools.lru_cache
def _forward_of(kind: type[nn.Module]) -> Callable[..., Any]:
    """The forward of a class, or of the first of its bases that says what it takes."""
    found = [vars(base)["forward"] for base in kind.__mro__ if "forward" in vars(base)]
    return next((forward for forward in found if not _is_open(forward, True)), found[0])


def _is_open(forward: Callable[..., Any], is_method: bool) -> bool:
    """Whether a function takes anything, `*args`."""
    takes = list(inspect.signature(forward).parameters.values())[is_method:]
    return bool(takes) and all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in takes)


def call(conv: nn.Module, rows: Tensor, csc: CSC) -> Tensor:
    """A graph layer, ours, PyG's or a user's own, on a bin: the nodes' rows are the first of the sources'."""
    told = {}
    if csc.edge_data is not None:
        told = {name: given for name, given in csc.edge_data.rows.items() if name in arguments(conv)}
    if not is_pyg(getattr(conv, "_orig_mod", conv)):
        now = draw_context()
        if now is not None and isinstance(conv, GraphLayer) and conv.draws():
            now.num_drops += 1
            return conv.forward_keyed(rows, csc, now.rows.ids, stream_key(now.rows.key, now.num_drops), **told)
        return conv(rows, csc, **told)
    edge_index = STRUCTURES.get(lambda: torch.stack([csc.indices.long(), csc.dst()]), csc, key="edge_index")
    if csc.whole is None and csc.num_src == csc.num_dst:  # no piece
        return conv(rows, edge_index, **told)
    on_piece = piece_call(conv)
    if on_piece is not None and csc.whole is not None:
        return on_piece(conv, rows, csc, edge_index, **told)
    if not _takes_pair(conv):  # a square graph, in which the other sources have no in-edges
        out = conv(rows, edge_index, **told)
        return out[: csc.num_dst] if isinstance(out, Tensor) else out
    size = {"size": (csc.num_src, csc.num_dst)} if "size" in arguments(conv) else {}
    return conv((rows, rows[: csc.num_dst]), edge_index, **told, **size)


def _takes_pair(conv: nn.Module) -> bool:
    """Whether a PyG layer says that it takes rows of sources and of destinations: a tuple in the type of its rows."""
    conv = getattr(conv, "_orig_mod", conv)
    own = vars(conv).get("forward")
    if own is not None and not _is_open(own, False):
        return False
    return _says_pair(_forward_of(conv.__class__))  # type: ignore[arg-type]


@functools.lru_cache
def _says_pair(forward: Callable[..., Any]) -> bool:
    rows = list(inspect.signature(forward, eval_str=True).parameters.values())[1]
    return any(typing.get_origin(each) is tuple for each in (rows.annotation, *typing.get_args(rows.annotation)))
