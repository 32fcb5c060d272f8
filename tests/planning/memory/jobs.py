"""Training jobs to estimate: each is made anew by every call, with the same weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gnnsys.nn
from gnnsys.fullgraph import HybridParallel
from gnnsys.planning import TrainingJob

OPTIMIZERS = {
    "sgd": lambda weights: torch.optim.SGD(weights, 0.1),
    "momentum": lambda weights: torch.optim.SGD(weights, 0.1, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "foreach adam": lambda weights: torch.optim.Adam(weights, foreach=True),
    "foreach adamw": lambda weights: torch.optim.AdamW(weights, foreach=True),
}


def graph(num_nodes: int = 300, num_edges: int = 2400) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, edges and labels; some edges are self loops, and some occur twice."""
    drawn = torch.Generator().manual_seed(1)
    rows = torch.randn(num_nodes, 33, generator=drawn)
    return rows, torch.randint(num_nodes, (2, num_edges), generator=drawn), torch.arange(num_nodes) % 7


def gnn(kind: str = "GCN", library: str = "gnnsys", optimizer: str = "adam", layers: int = 3, dropout: float = 0.0,
        hidden: int = 64, num_edges: int = 2400) -> TrainingJob:  # fmt: skip
    torch.manual_seed(0)
    rows, edges, labels = graph(num_edges=num_edges)
    models = gnnsys.nn
    if library == "pyg":
        import torch_geometric.nn as models
    more = {"heads": 8} if kind == "GAT" else {}
    model = getattr(models, kind)(33, hidden, layers, 7, dropout=dropout, **more)
    return TrainingJob(
        model=model,
        optimizer=OPTIMIZERS[optimizer](model.parameters()),
        loss=lambda model, graph: F.cross_entropy(model(graph.x, graph.edge_index), labels),
        rows=rows,
        edge_index=edges,
    )


def mlp(optimizer: str = "adam", autocast: bool = False) -> TrainingJob:
    torch.manual_seed(0)
    rows, _, labels = graph()
    model = nn.Sequential(nn.Linear(33, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 7))

    def loss(model: nn.Module, graph) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(graph.x)
        return F.cross_entropy(out.float(), labels)

    return TrainingJob(model=model, optimizer=OPTIMIZERS[optimizer](model.parameters()), loss=loss, rows=rows)


def transformer(dropout: float = 0.0, recompute: bool = False, optimizer: str = "adamw") -> TrainingJob:
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, dropout, batch_first=True) for _ in range(2))

    def loss(blocks: nn.Module, batch) -> Tensor:
        rows = batch.x
        for block in blocks:
            rows = checkpoint(block, rows, use_reentrant=False, preserve_rng_state=False) if recompute else block(rows)
        return rows.square().mean()

    return TrainingJob(
        model=blocks,
        optimizer=OPTIMIZERS[optimizer](blocks.parameters()),
        loss=loss,
        rows=torch.randn(8, 20, 32, generator=torch.Generator().manual_seed(2)),
    )


def sampled(batch_size: int = 32, optimizer: str = "adam") -> TrainingJob:
    """A loader of ours: its batches differ in size."""
    torch.manual_seed(0)
    rows, edges, labels = graph()
    data = gnnsys.Graph.from_edge_index(edges, num_nodes=rows.shape[0], node_data={"x": rows, "y": labels})
    loader = gnnsys.NeighborLoader(data, [5, 5], input_nodes=torch.arange(200), batch_size=batch_size, seed=3)
    model = gnnsys.nn.GraphSAGE(33, 32, 2, 7)

    def loss(model: nn.Module, batch) -> Tensor:
        out = model(batch.x, batch.edge_index, num_sampled_nodes=batch.num_sampled_nodes)
        return F.cross_entropy(out[: batch.batch_size], batch.y[: batch.batch_size])

    return TrainingJob(model=model, optimizer=OPTIMIZERS[optimizer](model.parameters()), loss=loss, loader=loader)


def full_graph(kind: str = "GCN") -> TrainingJob:
    """A wrapped model, whose layers are tried on a small graph before the first step."""
    torch.manual_seed(0)
    rows, edges, labels = graph()
    data = gnnsys.Graph.from_edge_index(edges, num_nodes=rows.shape[0])
    model = HybridParallel(getattr(gnnsys.nn, kind)(33, 32, 2, 7), data)
    return TrainingJob(
        model=model, optimizer=torch.optim.Adam(model.parameters()), rows=rows,
        loss=lambda model, graph: F.cross_entropy(model(graph.x), labels),
    )  # fmt: skip


def masked() -> TrainingJob:
    """Trains on the rows of a mask, as most scripts on whole graphs do."""
    torch.manual_seed(0)
    rows, _, labels = graph()
    trains, model = torch.arange(300) % 3 == 0, nn.Linear(33, 200)
    return TrainingJob(
        model=model,
        optimizer=torch.optim.Adam(model.parameters()),
        loss=lambda model, graph: F.cross_entropy(model(graph.x)[trains], labels[trains]),
        rows=rows,
    )


def beside(call: Callable[[], object]) -> TrainingJob:
    """A small model that does something large beside its step."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)

    def loss(model: nn.Module, graph) -> Tensor:
        call()
        return model(graph.x).mean()

    return TrainingJob(
        model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), loss=loss, rows=torch.zeros(16, 8)
    )
