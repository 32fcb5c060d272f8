"""What layers are told of edges besides where they lead: weights, features, types.

A rank has all in-edges of its nodes, so nothing of this travels between ranks, but what a normalisation by weights must
know of the halo: how much the in-edges of those nodes weigh, which is asked of their owners, once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gnnsys.comm.peers import Peers
from gnnsys.fullgraph.halo import HaloPlan
from gnnsys.fullgraph.share import Share
from gnnsys.graph import Graph
from gnnsys.ops import CSC, EdgeData, WholeWeights, in_subgraph

WEIGHT = "edge_weight"  # the argument by which layers normalise


def edge_data_of(share: Share, plan: HaloPlan, edges: Mapping[str, str | Tensor], peers: Peers) -> EdgeData:
    """By argument what layers are given, by position of the plan's structure. Every rank calls it.

    `edges` says which: the name of an array of the graph's edge data, or a tensor in the order of its edges.
    """
    at = in_subgraph(share.csc, plan.order.to(share.csc.indices.dtype)).edge_ids
    assert at is not None
    rows = {argument: _rows(share, argument, given)[at.long()] for argument, given in edges.items()}
    if WEIGHT not in rows:
        return EdgeData(rows)
    weight = rows[WEIGHT]
    if weight.dim() != 1 or not weight.is_floating_point():
        raise ValueError(f"{WEIGHT} must be one floating-point number per edge, got {weight.dtype} {[*weight.shape]}")
    own = weights_of(plan.csc, weight)
    halo = [torch.cat(peers.swap([each[places] for places in plan.send_places])) for each in own]
    return EdgeData(rows, WholeWeights(*(torch.cat(pair) for pair in zip(own, halo))))


def weights_of(csc: CSC, weight: Tensor) -> WholeWeights:
    """What the in-edges of each destination weigh, in float64."""
    dst, weight = csc.dst(), weight.double()
    loops = (csc.indices == dst).nonzero().view(-1)
    zeros = weight.new_zeros(csc.num_dst)
    at = dst[loops]
    last = torch.searchsorted(at, at, right=True) - 1  # of a node's several: all write what the last one does
    return WholeWeights(
        zeros.index_add(0, dst, weight),
        zeros.index_add(0, dst, weight.index_fill(0, loops, 0.0)),
        zeros.index_put((at,), weight[loops[last]]),
    )


def ones(data: EdgeData, num_edges: int, num_src: int, device: torch.device) -> EdgeData:
    """Of so many edges and sources what `data` has, all alike."""
    rows = _like(data, lambda shape: torch.ones(num_edges, *shape))
    whole = None if data.whole is None else WholeWeights(*(torch.ones(num_src) for _ in WholeWeights._fields))
    out = EdgeData(rows, whole)
    return out.with_tensors([each.to(device) for each in out.tensors()])


def drawn(data: EdgeData, csc: CSC, draws: torch.Generator) -> EdgeData:
    """What `data` has, of the edges of another graph."""
    rows = _like(data, lambda shape: torch.rand(csc.num_edges, *shape, generator=draws) + 0.5)
    return EdgeData(rows, None if data.whole is None else weights_of(csc, rows[WEIGHT]))


def _like(data: EdgeData, make: Callable[[torch.Size], Tensor]) -> dict[str, Tensor]:
    """Rows of the same kinds. Numbers of types begin at 0, and nothing says how many there are."""
    found = {}
    for name, rows in data.rows.items():
        made = make(rows.shape[1:])
        found[name] = (made if rows.is_floating_point() else torch.zeros_like(made)).to(rows.dtype)
    return found


def _rows(share: Share, argument: str, given: str | Tensor) -> Tensor:
    """What is given as an argument, by position of the share's structure, on the host."""
    if isinstance(given, str):
        return share.edge_rows(given).cpu()
    if not isinstance(given, Tensor):
        raise ValueError(f"edges[{argument!r}] must be the name of an array or a tensor, got {type(given).__name__}")
    if not isinstance(share.source, Graph):
        raise ValueError(f"edges[{argument!r}]: parts have edge data of their own, give the name of an array of theirs")
    if given.dim() == 0 or given.shape[0] != share.source.num_edges():
        raise ValueError(
            f"edges[{argument!r}] has shape {list(given.shape)}, expected {share.source.num_edges()} rows, one per edge"
        )
    if given.requires_grad:
        raise ValueError(f"edges[{argument!r}] needs a gradient, and none goes to rows of edges: detach it")
    return given.cpu()[share.edge_ids()]
