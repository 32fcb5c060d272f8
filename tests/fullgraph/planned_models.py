"""Models of every kind, and how they are trained: for tests of `execution="auto"` and of plans."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gnnsys.fullgraph import FullGraphWay, HybridParallel
from gnnsys.fullgraph.plan.full_graph_plan import MEASURED, ROUNDS, WARM
from gnnsys.fullgraph.plan.full_graph_way import ANEW, KEPT, NARROW
from gnnsys.nn import GATConv, GCNConv, GINConv, SAGEConv
from tests.fullgraph.dense import random_graph

pyg = pytest.importorskip("torch_geometric.nn")

N, WIDTH, STEPS = 60, 24, 10
GRAPH = random_graph(N, 300, 1)  # with nodes that have no in-edges, self loops and repeated edges
WEIGHT = torch.rand(300, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
PASSES = 2 * ROUNDS * (WARM + MEASURED) + 1  # of a contest, and one until all know of the last
FEW = 2 * (WARM + MEASURED) + 1  # the same of a contest of one round


def gin_of(kind) -> list[nn.Module]:
    return [kind(nn.Sequential(nn.Linear(WIDTH, 6), nn.ReLU(), nn.Linear(6, 7)), train_eps=True), kind(nn.Linear(7, 3))]


MODELS = {
    "gcn": lambda: [GCNConv(WIDTH, 5), nn.ReLU(), nn.Dropout(0.3), GCNConv(5, 3)],
    "sage": lambda: [SAGEConv(WIDTH, 5), nn.ReLU(), SAGEConv(5, 3)],
    "sage that widens": lambda: [SAGEConv(WIDTH, 30, aggr="sum"), nn.ReLU(), SAGEConv(30, 3)],
    "gin": lambda: gin_of(GINConv),
    "gat": lambda: [GATConv(WIDTH, 5), nn.ReLU(), GATConv(5, 3)],
    "PyG's gcn": lambda: [pyg.GCNConv(WIDTH, 5), nn.ReLU(), nn.Dropout(0.3), pyg.GCNConv(5, 3)],
    "PyG's sage": lambda: [pyg.SAGEConv(WIDTH, 5, normalize=True), nn.ReLU(), pyg.SAGEConv(5, 3, aggr="sum")],
    "PyG's gin": lambda: gin_of(pyg.GINConv),
    "PyG's gat": lambda: [pyg.GATConv(WIDTH, 5), nn.ReLU(), pyg.GATConv(5, 3)],
}
IN_FLOAT32 = ("gcn", "sage", "gin", "PyG's gcn", "PyG's sage")
WAYS = {
    "made anew": FullGraphWay(first=ANEW, takes_apart=True),
    "kept": FullGraphWay(first=KEPT, takes_apart=True),
    "narrow": FullGraphWay(first=NARROW, takes_apart=True),
    "bins": FullGraphWay(num_bins=3, takes_apart=True),
}


def layers_of(name: str, dtype: torch.dtype = torch.float64) -> list[nn.Module]:
    torch.manual_seed(0)
    return [layer.to(dtype) for layer in MODELS[name]()]


def rows(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(N, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)


def loss_of(out: Tensor) -> Tensor:
    return out.tanh().square().sum() / N


def train(model: HybridParallel, x: Tensor, steps: int = STEPS) -> list[list[Tensor]]:
    """Losses and all gradients of some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model(x))
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
        optimizer.step()
    return found


def same(found: list[list[Tensor]], want: list[list[Tensor]], tolerance: float) -> None:
    for step, expected in zip(found, want, strict=True):
        for got, value in zip(step, expected, strict=True):
            assert float((got - value).abs().max()) <= tolerance * max(1.0, float(value.abs().max()))
