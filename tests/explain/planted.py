"""A planted graph in parts and a model that was trained on it, for tests: what masks should find is known."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gnnsys.explain import Masks, explain_part, pool_part
from gnnsys.explain.explanation_graph import ExplanationGraph
from gnnsys.graph import Graph, planted_noise
from gnnsys.nn import GraphSAGE
from gnnsys.partition import Parts, open_parts, partition_graph

NUM_PARTS = 4


@dataclass
class Planted:
    graph: Graph
    parts: Parts
    model: nn.Module
    x: Tensor  # by global id
    is_noise: Tensor  # by global id
    is_signal: Tensor  # by column

    def explanation(self, part: int, num_pools: int) -> ExplanationGraph:
        pooled = pool_part(self.parts.part(part), num_pools)
        rows = self.parts.part(part).node_data["node"]["x"]
        return explain_part(pooled, self.model, rows, self.x[pooled.ids])

    def auc(self, masks: Masks) -> tuple[float, float]:
        """How well masks tell nodes with signal from noise, and columns."""
        return area(masks.sn, ~self.is_noise[masks.ids]), area(masks.sf, self.is_signal)


def plant(
    folder: Path,
    *,
    method: str = "random",
    seed: int = 0,
    num_nodes: int = 8000,
    train: float = 0.5,
    separation: float = 5.0,
) -> Planted:
    graph = planted_graph(num_nodes, train, separation, seed)
    partition_graph(graph, NUM_PARTS, folder / "parts", method=method)
    parts = open_parts(folder / "parts")
    x = graph.node_data["node"]["x"]
    is_signal = torch.ones(x.shape[1], dtype=torch.bool)
    is_signal[torch.tensor(graph.info["noise_columns"])] = False
    rows = [parts.part(part).node_data["node"] for part in range(NUM_PARTS)]
    by_id = {name: torch.cat([each[name] for each in rows]) for name in ("x", "is_noise")}
    return Planted(graph, parts, trained(num_nodes, train, separation, seed), by_id["x"], by_id["is_noise"], is_signal)


@functools.cache
def planted_graph(num_nodes: int, train: float, separation: float, seed: int) -> Graph:
    return planted_noise(num_nodes, num_classes=8, separation=separation, train=train, seed=seed)


@functools.cache
def trained(num_nodes: int, train: float, separation: float, seed: int) -> nn.Module:
    """On the whole graph, so the same for all parts of it."""
    graph = planted_graph(num_nodes, train, separation, seed)
    x, y, mask = (graph.node_data["node"][name] for name in ("x", "y", "train_mask"))
    edge_index = graph.edge_index().long()
    torch.manual_seed(seed)
    model = GraphSAGE(x.shape[1], 16, 2, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(model(x, edge_index)[mask], y[mask]).backward()
        optimizer.step()
    return model


def area(scores: Tensor, is_positive: Tensor) -> float:
    """Area under the ROC curve; ties count one half."""
    _, place, counts = torch.unique(scores.double(), return_inverse=True, return_counts=True)
    rank = (counts.cumsum(0).double() - (counts.double() - 1) / 2)[place]
    positive = int(is_positive.sum())
    above = rank[is_positive].sum() - positive * (positive + 1) / 2
    return float(above / (positive * (scores.numel() - positive)))
