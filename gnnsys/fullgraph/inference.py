"""Rows of every node from a trained model, layer by layer over the whole graph: no sampling, no neighbourhood twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gnnsys.fullgraph.parallel import HybridParallel
from gnnsys.graph import ORIGINAL

if TYPE_CHECKING:
    from gnnsys.fullgraph.plan.rank_share import RankShare
    from gnnsys.graph import Graph
    from gnnsys.sampling import DistGraph


def infer(
    layers: Sequence[nn.Module] | nn.Module,
    graph: Graph | DistGraph | RankShare,
    x: Tensor | str = "x",
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Original ids of this rank's nodes, on parts too, and their rows at the end of `layers`. Every rank calls it.

    For models that were trained with mini-batches as well: what `HybridParallel` takes as layers, which also takes
    `options`. `x` is the name of an array of the graph, or rows of this rank's nodes. Parts order nodes by global id:
    there rows go with `share_of(graph, rank, world_size)` in place of the graph. On one rank only two layers' rows are
    in memory at a time. Dropout and batch normalisation do what they do in evaluation.

    >>> nodes, scores = infer(model, graph)
    """
    if not isinstance(x, str) and getattr(graph, "numbering", ORIGINAL) != ORIGINAL:
        raise ValueError(
            "x: rows without a name are ambiguous on parts: write the name of an array of the graph, or give "
            "gnnsys.fullgraph.share_of(graph, rank, world_size) for the graph, and rows in the order of its nodes"
        )
    owner = layers if isinstance(layers, nn.Module) else nn.ModuleList(layers)
    was_training = [(module, module.training) for module in owner.modules()]
    try:
        owner.eval()  # before they are looked at: some fit in evaluation alone
        model = HybridParallel(layers, graph, **options).eval()
        with torch.no_grad():
            rows = model.share.rows(x) if isinstance(x, str) else x
            return model.nodes, model(rows)
    finally:
        for module, training in was_training:
            module.training = training
