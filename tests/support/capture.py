"""Models, steps and loaders for the tests of captured steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gnnsys.graph import Graph, sbm
from gnnsys.loader import Batch, NeighborLoader, PadSizes
from gnnsys.nn import GraphSAGE

SIZES = PadSizes(growth=1.03)  # so that there are several
ONE_SIZE = PadSizes(nodes=[256, 1536, 3072], edges=[1536, 6144])  # that every batch of `loader_of` fits


def graph() -> Graph:
    return sbm(3000, num_classes=5, avg_degree=10, num_features=16, seed=1)


def loader_of(made: Graph, **options: Any) -> NeighborLoader:
    return NeighborLoader(made, [6, 4], **{"batch_size": 256, "shuffle": True, "pad": True, **options})


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, trim: bool = True) -> Callable[[Batch], Tensor]:
    def step(batch: Batch) -> Tensor:
        options = {"num_sampled_nodes": batch.num_sampled_nodes} if trim else {}
        out = model(batch.x, batch.edge_index, **options)
        loss = F.cross_entropy(out[: batch.batch_size], batch.y[: batch.batch_size])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def seeded(kind: type = GraphSAGE, **options: Any) -> nn.Module:
    torch.manual_seed(3)
    return kind(16, 32, 2, 5, **options)
