"""Random walks along in-edges, with restart, on a graph or on parts: one message per machine and step.

A step from a node is drawn by (key, step, walk, original id), a restart by (key, step, walk): walks are the same on one
graph and on its parts. A walk that reaches a node without in-edges ends there; with restarts it begins again. Where one
CSC has the whole graph, in memory or on a GPU, all steps are one native call; on parts every step is a hop.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, edge_type_key
from gnnsys.ops import COIN_SIDES, CSC, MAX_WALKS, DeviceReads, draw_below, sample_neighbors, stream_key
from gnnsys.ops import random_walks as csc_random_walks
from gnnsys.sampling.device_neighborhoods import DeviceNeighborhoods
from gnnsys.sampling.neighborhoods import (
    AnyGraph,
    GraphNeighborhoods,
    HopRequest,
    Neighborhoods,
    neighborhoods,
    sampling_device,
    to_device,
)

_RESTART = 0x5253  # domain of the coins, apart from that of the steps


def random_walks(
    graph: AnyGraph,
    roots: Tensor,
    length: int,
    *,
    key: int,
    restart_prob: float = 0.0,
    edge_type: EdgeType | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """`length` steps from each root, against the direction of edges: int64 [num_roots, length + 1], -1 behind an end.

    Column 0 are the roots. Walk i is the i-th root's: equal roots have walks of their own. Before each step a walk goes
    back to its root with `restart_prob`, which takes the place of the step. Walks are made on `device`, by default
    where the structure is, and are there.

    >>> random_walks(graph, torch.tensor([7, 7]), 4, key=1).shape  # doctest: +SKIP
    torch.Size([2, 5])
    """
    if edge_type is None:
        if len(graph.edge_types) != 1:
            raise ValueError(f"edge_type must be named, one of {graph.edge_types}")
        (edge_type,) = graph.edge_types
    if edge_type[0] != edge_type[2]:
        raise ValueError(f"walks need an edge type that leads from a node type to itself, got {edge_type!r}")
    check_walks(length, restart_prob)
    num_nodes = graph.num_nodes(edge_type[0])
    if roots.numel() and not 0 <= int(roots.min()) <= int(roots.max()) < num_nodes:
        raise ValueError(f"roots must be in [0, {num_nodes}), got {int(roots.min())} to {int(roots.max())}")
    where = sampling_device(graph, device)
    hoods = neighborhoods(graph, device=where)
    return walk(hoods, edge_type, to_device(roots, where), length, key, restart_prob)


def check_walks(length: int, restart_prob: float) -> None:
    if length < 0 or not 0 <= restart_prob < 1:
        raise ValueError(f"length must be >= 0 and restart_prob in [0, 1), got {length} and {restart_prob}")


def walk(
    hoods: Neighborhoods, edge_type: EdgeType, roots: Tensor, length: int, key: int, restart_prob: float = 0.0
) -> Tensor:
    """`random_walks` on neighbourhoods that are at hand, from roots that exist and are where these draw."""
    if roots.numel() > MAX_WALKS:
        raise ValueError(f"at most {MAX_WALKS} walks at once, got {roots.numel()}: take smaller batches")
    type_key, coin = edge_type_key(edge_type), round(restart_prob * COIN_SIDES)
    step_keys = [stream_key(key, step, type_key) for step in range(length)]
    coin_keys = [stream_key(key, step, _RESTART) for step in range(length)]
    whole = _whole_structure(hoods, edge_type)
    if whole is not None:
        csc, original = whole
        return csc_random_walks(
            csc, roots.long(), step_keys=step_keys, coin_keys=coin_keys, coin=coin, original=original
        )
    return _walk_by_steps(hoods, edge_type, roots, step_keys, coin_keys, coin)


def _whole_structure(hoods: Neighborhoods, edge_type: EdgeType) -> tuple[CSC, Tensor | None] | None:
    """All in-edges as one CSC, and the original ids of its nodes where these are others; None where no one has it."""
    if isinstance(hoods, GraphNeighborhoods):
        hoods.note_read(edge_type)
        return hoods.csc(edge_type), None
    if not isinstance(hoods, DeviceNeighborhoods):
        return None
    csc = hoods.joined(edge_type)
    if not isinstance(csc, CSC):
        return None
    original = hoods.original(edge_type[0])
    if csc.indptr.is_cuda:
        DeviceReads()(csc.indptr.device, csc.indptr, csc.indices, original)
    return csc, original


def _walk_by_steps(
    hoods: Neighborhoods,
    edge_type: EdgeType,
    roots: Tensor,
    step_keys: Sequence[int],
    coin_keys: Sequence[int],
    coin: int,
) -> Tensor:
    """Every step a hop of one neighbour, the tree of a walk its number."""
    dtype = hoods.id_dtypes[edge_type[0]]
    out = roots.new_full((len(step_keys) + 1, roots.numel()), -1, dtype=torch.int64)
    out[0] = roots
    numbers = torch.arange(roots.numel(), device=roots.device)
    walking, at = numbers, roots.to(dtype)  # walks that have not ended, and where they are
    for step, step_key in enumerate(step_keys):
        if not walking.numel():
            break
        stepping = torch.arange(walking.numel(), device=roots.device)
        if coin:
            coins = draw_below(walking, COIN_SIDES, key=coin_keys[step])
            stepping = (coins >= coin).nonzero().view(-1)
        request = HopRequest(edge_type, at[stepping], 1, step_key, tree=walking[stepping].contiguous())
        (found,) = hoods.sample([request], hop=step)
        if not coin and found.ids.numel() == walking.numel():  # the usual case: nobody restarts and nobody ends
            at = found.ids
        else:
            reached = stepping[found.indptr.diff() > 0]
            at = roots[walking].to(dtype) if coin else torch.full_like(at, -1)
            at[reached] = found.ids
            if not coin:
                walking, at = walking[reached], found.ids
        out[step + 1, walking] = at.long()
    return out.T.contiguous()


def metapath_walks(
    steps: Sequence[CSC], roots: Tensor, num_traversals: int, *, key: int, stop_prob: float = 0.0
) -> Tensor:
    """Where walks are after each traversal of `steps`: int64 [num_roots, num_traversals], -1 behind an end.

    A step goes to an entry of the node's column of a CSC, all of which are in memory. The last step leads to nodes of
    the first one's columns. Before each traversal but the first a walk ends with `stop_prob`.
    """
    if roots.numel() > MAX_WALKS:
        raise ValueError(f"at most {MAX_WALKS} walks at once, got {roots.numel()}: take smaller batches")
    out = roots.new_full((num_traversals, roots.numel()), -1, dtype=torch.int64)
    walking, at = torch.arange(roots.numel(), device=roots.device), roots
    for traversal in range(num_traversals):
        if traversal and stop_prob:
            coins = draw_below(walking, COIN_SIDES, key=stream_key(key, traversal, _RESTART))
            stays = (coins >= round(stop_prob * COIN_SIDES)).nonzero().view(-1)
            walking, at = walking[stays], at[stays]
        for number, csc in enumerate(steps):
            drawn = stream_key(key, traversal, number)
            found = sample_neighbors(csc, at.to(csc.indices.dtype), 1, key=drawn, tree=walking)
            if found.ids.numel() < walking.numel():
                walking = walking[found.indptr.diff() > 0]
            at = found.ids
        out[traversal, walking] = at.long()
    return out.T.contiguous()
