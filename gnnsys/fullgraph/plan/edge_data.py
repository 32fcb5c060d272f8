"""What layers are told of edges besides where they lead: weights, features, types.

A rank has all in-edges of its nodes, so nothing of this travels between ranks, but what a normalisation by weights must
know of the halo: how much the in-edges of those nodes weigh, which is asked of their owners, once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gnnsys.comm import Peers
from gnnsys.fullgraph.plan.graph_types import EDGE_TYPE
from gnnsys.fullgraph.plan.halo import HaloPlan
from gnnsys.fullgraph.plan.rank_share import RankShare
from gnnsys.graph import Graph
from gnnsys.ops import CSC, WEIGHT, EdgeData, WholeWeights, in_subgraph


def edge_data_of(share: RankShare, plan: HaloPlan, wanted: Mapping[str, str | Tensor], peers: Peers) -> EdgeData | None:
    """By argument what layers are given, by position of the plan's structure; None if nothing is wanted.

    `wanted` says what: the name of an array of the graph's edge data, or a tensor in the order of its edges. Every rank
    calls it, and ValueError is raised on all of them where they do not want the same.
    """
    rows: dict[str, Tensor] = {}
    if share.typed is not None:
        if wanted:
            raise ValueError(
                f"edge_data is for graphs of one node type and one edge type, and this one has "
                f"{len(share.typed.types.edge_types)} edge types: leave it away"
            )
        at = in_subgraph(share.csc, plan.order.to(share.csc.indices.dtype)).edge_ids
        assert at is not None
        rows[EDGE_TYPE] = share.typed.edge_type[at.long()]
    elif wanted:
        at = in_subgraph(share.csc, plan.order.to(share.csc.indices.dtype)).edge_ids
        assert at is not None
        ids = share.find_edge_ids()[at.long()]
        for argument, given in wanted.items():
            rows[argument] = torch.as_tensor(_array(share, argument, given)[ids]).cpu()
            if rows[argument].requires_grad:
                raise ValueError(f"edge_data[{argument!r}] needs a gradient, and none goes to rows of edges: detach it")
    _compare(rows, peers)
    if WEIGHT not in rows:
        return EdgeData(rows) if rows else None
    weight = rows[WEIGHT]
    if weight.dim() != 1 or not weight.is_floating_point():
        raise ValueError(
            f"{WEIGHT} must be one floating-point number per edge, got {weight.dtype} {list(weight.shape)}: squeeze or "
            "convert it"
        )
    own = weights_of(plan.csc, weight)
    halo = [torch.cat(peers.swap([each[places] for places in plan.send_places], plan.rows_from())) for each in own]
    return EdgeData(rows, WholeWeights(*(torch.cat(pair) for pair in zip(own, halo, strict=True))))


def _array(share: RankShare, argument: str, given: str | Tensor) -> Any:
    """What is given as an argument, whose rows go by edge ids."""
    if isinstance(given, str):
        return share.edge_array(given)
    if not isinstance(given, Tensor):
        raise ValueError(
            f"edge_data[{argument!r}] must be the name of an array or a tensor, got {type(given).__name__}"
        )
    if not isinstance(share.source, Graph):
        raise ValueError(f"edge_data[{argument!r}]: parts have edge data of their own, give the name of an array")
    if given.dim() == 0 or given.shape[0] != share.source.num_edges():
        raise ValueError(
            f"edge_data[{argument!r}] has shape {list(given.shape)}, expected {share.source.num_edges()} rows, one per "
            "edge"
        )
    return given


def _compare(rows: Mapping[str, Tensor], peers: Peers) -> None:
    """Raises ValueError on every rank where some have other arguments, or rows of another kind."""
    kinds = [(name, str(each.dtype), list(each.shape[1:])) for name, each in sorted(rows.items())]
    digest = int.from_bytes(hashlib.sha256(repr(kinds).encode()).digest()[:7], "little")
    told = peers.swap([torch.tensor([digest], device="cpu")] * peers.world_size, [1] * peers.world_size)
    differ = [rank for rank, each in enumerate(told) if int(each) != digest]
    if differ:
        raise ValueError(
            f"edge_data is not the same on all ranks: here it is {kinds}, on ranks {differ} something else"
        )


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


def alike(data: EdgeData, num_edges: int, num_src: int, device: torch.device) -> EdgeData:
    """Of so many edges and sources what `data` has, all the same."""
    rows = _like(data, lambda shape, _: torch.ones(num_edges, *shape, device=device))
    ones = (torch.ones(num_src, device=device) for _ in WholeWeights._fields)
    out = EdgeData(rows, None if data.whole is None else WholeWeights(*ones))
    return out.with_tensors([each.to(device) for each in out.tensors()])


def drawn(data: EdgeData, csc: CSC, draws: torch.Generator) -> EdgeData:
    """What `data` has, of the edges of another graph: numbers from 0.5 to 1.5, or integers as large as its own."""

    def draw(shape: torch.Size, most: int) -> Tensor:
        numbers = torch.rand(csc.num_edges, *shape, generator=draws, device="cpu")
        return numbers + 0.5 if most < 0 else numbers * (most + 1)

    rows = _like(data, draw)
    return EdgeData(rows, None if data.whole is None else weights_of(csc, rows[WEIGHT]))


def _like(data: EdgeData, make: Callable[[torch.Size, int], Tensor]) -> dict[str, Tensor]:
    """Rows of the same kinds; `make` gets their shape and the largest integer there is, -1 where they are none."""
    found = {}
    for name, rows in data.rows.items():
        is_whole = not rows.is_floating_point()
        most = max(0, int(rows.max())) if is_whole and rows.numel() else 0 if is_whole else -1
        made = make(rows.shape[1:], most)
        found[name] = (made.clamp(max=most) if is_whole else made).to(rows.dtype)
    return found
