"""Global ids of a user's own ids: read from a table where the parts have one, else searched for in pieces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gnnsys.graph import ORIGINAL, EdgeType, NodeType, check_order

if TYPE_CHECKING:
    from gnnsys.sampling.dist_graph import DistGraph

_PIECE = 1 << 20  # ids that are read together: 8 MB


def global_ids_of(graph: DistGraph, original: Tensor, type: NodeType | EdgeType, piece: int = _PIECE) -> Tensor:
    """Global ids of original ids of nodes or edges, int64, wherever the parts are.

    Parts store a reverse table for nodes only, and older parts store none. Without one, this scans the original ids of
    all nodes or edges once. It reads at most `piece` ids at a time.
    """
    if isinstance(type, str) and graph.parts.has_global_ids:
        return torch.cat([graph.global_ids(ids, type) for ids in original.split(piece)])
    num_ids = graph.num_nodes(type) if isinstance(type, str) else graph.num_edges(type)
    pieces = (torch.arange(first, min(first + piece, num_ids), device="cpu") for first in range(0, num_ids, piece))
    if isinstance(type, str):
        return find_positions(original, (graph.original_ids(ids, type) for ids in pieces))
    return find_positions(original, (graph.original_edge_ids(ids, type) for ids in pieces))


def rows_by_global_id(graph: DistGraph, rows: Any, type: NodeType | EdgeType, order: str | None, where: str) -> Any:
    """All rows of a type as tables have them: a tensor by original ids is copied into the order of global ids.

    ValueError for a tensor without `order`, and for an order of a source, which is always by global id.
    """
    if not isinstance(rows, Tensor):
        if order == ORIGINAL:
            raise ValueError(f"{where}: a source is read by global id: leave order away, or give a tensor")
        return rows
    check_order(graph, order, where)
    if order != ORIGINAL:
        return rows
    ids = torch.arange(rows.shape[0], device="cpu")
    original = graph.original_ids(ids, type) if isinstance(type, str) else graph.original_edge_ids(ids, type)
    return rows[original.to(rows.device)]


def find_positions(wanted: Tensor, pieces: Iterable[Tensor]) -> Tensor:
    """Where each wanted value stands in the pieces, counted through all of them, int64; -1 if nowhere.

    >>> find_positions(torch.tensor([7, 5, 7]), [torch.tensor([5, 6]), torch.tensor([7])])
    tensor([2, 0, 2])
    """
    values, inverse = wanted.unique(return_inverse=True)
    found = torch.full_like(values, -1, dtype=torch.int64)
    first = 0
    for piece in pieces:
        if values.numel():
            at = torch.searchsorted(values, piece).clamp_(max=values.numel() - 1)
            hits = (values[at] == piece).nonzero().view(-1)
            found[at[hits]] = first + hits
        first += piece.numel()
    return found[inverse]
