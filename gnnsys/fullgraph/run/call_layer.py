"""A graph layer, ours, PyG's or a user's own, called on a bin, whose nodes are the first of its sources.

What would be wrong on a piece if it were called as it is (degrees of PyG's GCNConv, random numbers of our GATConv) is
done here in parts, but only where a call of the layer is what its class says and nothing else.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gnnsys.fullgraph.keyed_dropout import Turn, turn_now
from gnnsys.fullgraph.plan.module_layout import is_bare, is_pyg, runs_pyg
from gnnsys.nn import GATConv, resolve, whole_scales
from gnnsys.ops import CSC, STRUCTURES, dropout_rows, edge_softmax, spmm, stream_key

_MAX_PLACES = 1 << 24  # of a node's in-edges: further ones have the masks of another node's


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
        now = turn_now()
        is_gat = isinstance(conv, GATConv) and is_bare(conv, GATConv)
        if now is not None and is_gat and conv.training and float(conv.dropout) > 0:  # type: ignore[arg-type]
            assert isinstance(conv, GATConv)
            return _keyed_attention(conv, rows, csc, now, **told)
        return conv(rows, csc, **told)
    edge_index = STRUCTURES.get(lambda: torch.stack([csc.indices.long(), csc.dst()]), csc, key="edge_index")
    if csc.whole is None and csc.num_src == csc.num_dst:  # no piece
        return conv(rows, edge_index, **told)
    if runs_pyg(conv, "GCNConv") and csc.whole is not None:
        return _pyg_gcn(conv, rows, csc, edge_index, **told)
    if not _takes_pair(conv):  # a square graph, in which the other sources have no in-edges
        out = conv(rows, edge_index, **told)
        return out[: csc.num_dst] if isinstance(out, Tensor) else out
    size = {"size": (csc.num_src, csc.num_dst)} if "size" in arguments(conv) else {}
    return conv((rows, rows[: csc.num_dst]), edge_index, **told, **size)


def _keyed_attention(conv: GATConv, rows: Tensor, csc: CSC, now: Turn, edge_attr: Tensor | None = None) -> Tensor:
    """Our GATConv with a dropout of attention whose mask depends on seed, step, layer, node, in-edge and head alone.

    An in-edge goes by its place among the node's, which keep their order on any number of ranks; the self loop is the
    last.
    """
    now.num_drops += 1
    node = conv.transform(rows, rows[: csc.num_dst], csc.num_dst, dst_is_first=True)
    edges, edge_score = conv.scored_edges(resolve(rows, csc), edge_attr)
    dst = edges.dst()
    score = node.score_src.index_select(0, edges.indices) + node.score_dst.index_select(0, dst)
    score = score if edge_score is None else score + edge_score.to(score.dtype)
    alpha = edge_softmax(edges, nn.functional.leaky_relu(score, conv.negative_slope))
    place = torch.arange(edges.num_edges, device=dst.device) - edges.indptr.index_select(0, dst)
    ids = now.rows.ids.index_select(0, dst).long() * _MAX_PLACES + place
    alpha = dropout_rows(alpha, ids, conv.dropout, stream_key(now.rows.key, now.num_drops))
    out = spmm(edges, node.rows, weight=alpha)
    out = out.flatten(1) if conv.concat else out.mean(1)
    out = out if conv.res is None else out + conv.res(rows[: csc.num_dst])
    return out if conv.bias is None else out + conv.bias


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
