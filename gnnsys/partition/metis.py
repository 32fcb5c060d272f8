"""METIS, through pymetis: partitions the coarsest level of ours, or a whole graph where that is asked for."""

from __future__ import annotations

import numpy as np
import pymetis
import torch
from torch import Tensor

from gnnsys.ops import Level, contract_clusters

_RESOLUTION = 100  # a node of average weight gets this integer
_SEEDS = 1 << 31  # METIS may have been built for 32 bits


def metis(level: Level, num_parts: int, *, recursive: bool, seed: int, imbalance: float = 0.03) -> Tensor:
    """int32 [num_nodes]: METIS's partition by one weight per node, the mean of its shares in all constraints."""
    if num_parts == 1 or level.num_nodes <= num_parts:
        return torch.arange(level.num_nodes, dtype=torch.int32, device="cpu") % num_parts
    if len(level.lists) != 1 or level.lists[0].weight is None:  # several lists, edges listed twice: METIS wants neither
        level = contract_clusters(
            level, torch.arange(level.num_nodes, dtype=torch.int32, device="cpu"), level.num_nodes, heaviest=False
        )
    (neighbors,) = level.lists
    assert neighbors.weight is not None
    if neighbors.indices.numel() == 0:
        return torch.arange(level.num_nodes, dtype=torch.int32, device="cpu") % num_parts
    _, part = pymetis.part_graph(
        num_parts,
        pymetis.CSRAdjacency(_ids(neighbors.indptr), _ids(neighbors.indices)),
        vweights=_ids(node_weight(level)),
        eweights=_ids(neighbors.weight),
        recursive=recursive,
        options=pymetis.Options(seed=seed % _SEEDS, ufactor=max(1, round(imbalance * 1000))),
    )
    return torch.tensor(part, dtype=torch.int32, device="cpu")


def node_weight(level: Level) -> Tensor:
    """One weight per node for all constraints: int64, about `_RESOLUTION` on average, never 0."""
    total = level.node_weights.sum(0).double().clamp_(min=1)
    share = (level.node_weights.double() / total).mean(1)
    return (share * (level.num_nodes * _RESOLUTION)).round_().long().clamp_(min=1)


def _ids(values: Tensor) -> np.ndarray:
    return values.numpy().astype(pymetis.zero_copy_dtype(), copy=False)
