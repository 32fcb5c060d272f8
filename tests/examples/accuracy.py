"""Trainings on real graphs with known results, each in one thread: they give the same anywhere, and two at a time.

`train_all` runs in a process of its own and prints a line of JSON for every training: its name and its score.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gnnsys import Graph, NeighborLoader
from gnnsys.graph.datasets import dataset
from gnnsys.nn import GCN, GraphSAGE


def train_all(names: Iterable[str]) -> None:
    torch.set_num_threads(1)
    for name in names:
        print(json.dumps({"name": name, "score": TRAININGS[name]()}), flush=True)


def accuracy(model: nn.Module, graph: Graph, mask: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        right = model(graph.node_data["node"]["x"], graph.csc()).argmax(1) == graph.node_data["node"]["y"]
    return float(right[mask].float().mean())


def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train_gcn(name: str, seed: int, epochs: int, input_dropout: float) -> float:
    """Kipf & Welling's protocol: 16 hidden, dropout 0.5, Adam 0.01, weight decay on the first layer; test accuracy."""
    graph = dataset(name, row_normalize=True)
    torch.manual_seed(seed)
    rows = graph.node_data["node"]
    model = GCN(rows["x"].shape[1], 16, 2, int(rows["y"].max()) + 1, dropout=0.5)
    first, last = (list(conv.parameters()) for conv in model.convs)
    optimizer = torch.optim.Adam([{"params": first, "weight_decay": 5e-4}, {"params": last}], lr=0.01)
    x, words = rows["x"].clone(), rows["x"].nonzero(as_tuple=True)
    for _ in range(epochs):
        model.train()
        if input_dropout:  # one value in eighty is not zero: to draw for the others takes most of the time
            x[words] = F.dropout(rows["x"][words], input_dropout)
        out = model(x, graph.csc())[rows["train_mask"]]
        step(optimizer, F.cross_entropy(out, rows["y"][rows["train_mask"]]))
    return accuracy(model, graph, rows["test_mask"])


def train_sampled_sage(name: str, epochs: int, norm: str | None) -> float:
    """Test accuracy of GraphSAGE on sampled neighbours."""
    graph = dataset(name, row_normalize=True)
    rows = graph.node_data["node"]
    torch.manual_seed(0)
    loader = NeighborLoader(graph, [10, 10], input_nodes=rows["train_mask"], batch_size=100, shuffle=True)
    model = GraphSAGE(rows["x"].shape[1], 64, 2, int(rows["y"].max()) + 1, dropout=0.5, norm=norm)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    for _ in range(epochs):
        model.train()
        for batch in loader:
            out = model(batch.x, batch.edge_index, num_sampled_nodes=batch.num_sampled_nodes)
            step(optimizer, F.cross_entropy(out, batch.y[: batch.batch_size]))
    return accuracy(model, graph, rows["test_mask"])


def train_tolokers() -> float:
    """ROC AUC of GraphSAGE on the first split."""
    graph = dataset("tolokers", row_normalize=False)
    rows = graph.node_data["node"]
    train, test = rows["train_mask"][:, 0], rows["test_mask"][:, 0]
    torch.manual_seed(0)
    model = GraphSAGE(rows["x"].shape[1], 64, 3, 2, dropout=0.2, norm="layer")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(160):
        step(optimizer, F.cross_entropy(model(rows["x"], graph.csc())[train], rows["y"][train]))
    model.eval()
    with torch.no_grad():
        out = model(rows["x"], graph.csc())
    return roc_auc((out[:, 1] - out[:, 0])[test], rows["y"][test])


def roc_auc(scores: Tensor, labels: Tensor) -> float:
    """How often a positive scores above a negative, ties counting half."""
    positive, negative = scores[labels == 1], scores[labels == 0].sort().values
    below = torch.searchsorted(negative, positive) + torch.searchsorted(negative, positive, right=True)
    return float(below.double().mean() / (2 * negative.numel()))


TRAININGS: dict[str, Callable[[], float]] = {  # the longest first
    "tolokers": train_tolokers,
    "coauthor_cs": lambda: train_sampled_sage("coauthor_cs", 15, None),
    "pubmed 0": lambda: train_gcn("pubmed", 0, 100, 0.0),  # input dropout makes no difference here, only time
    "pubmed 1": lambda: train_gcn("pubmed", 1, 100, 0.0),
    "cora 0": lambda: train_gcn("cora", 0, 150, 0.5),
    "cora 1": lambda: train_gcn("cora", 1, 150, 0.5),
    "amazon_computers": lambda: train_sampled_sage("amazon_computers", 40, "layer"),
}
