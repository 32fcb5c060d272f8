"""The jobs that `gnnsys bench jobs` gives to a queue: functions by name, with JSON arguments, as a user's would be."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import gnnsys.nn
from gnnsys.bench.jobs.table_four import HEADS, HIDDEN
from gnnsys.bench.workload import SEED
from gnnsys.graph import EDGE, NODE, Graph
from gnnsys.jobs import shared_graph
from gnnsys.loader import NeighborLoader
from gnnsys.ops import CSC
from gnnsys.planning import TrainingJob

QUEUE_JOB, SWEEP_JOB = f"{__name__}:queue_job", f"{__name__}:sweep_job"
_DRAWN_ROWS = 4096  # rows repeat: to draw gigabytes would take longer than the jobs


def table_graph(nodes: int, edges: int, features: int, classes: int) -> dict[str, Tensor]:
    """A random graph of these sizes, on the host."""
    draw = torch.Generator("cpu").manual_seed(SEED)
    rows = torch.randn(min(nodes, _DRAWN_ROWS), features, generator=draw, device="cpu")
    return {
        "x": rows.repeat(-(-nodes // len(rows)), 1)[:nodes].contiguous(),
        "y": torch.randint(classes, (nodes,), generator=draw, device="cpu"),
        "edge_index": torch.randint(nodes, (2, edges), generator=draw, device="cpu"),
    }


def queue_job(
    library: str,
    kind: str,
    nodes: int,
    edges: int,
    features: int,
    classes: int,
    layers: int,
    epochs: int,
    device: str = "cpu",
) -> TrainingJob:
    """One of CoGNN's jobs (V-A.2): Adam on a whole graph, hidden 64, GAT with 8 heads of 8."""
    sizes = {"nodes": nodes, "edges": edges, "features": features, "classes": classes}
    graph = shared_graph(table_graph, sizes, device=device)
    models: Any = importlib.import_module("torch_geometric.nn") if library == "pyg" else gnnsys.nn
    more = {"heads": HEADS} if kind == "GAT" else {}
    model = getattr(models, kind)(features, HIDDEN, layers, classes, **more).to(device)
    labels = graph["y"]
    return TrainingJob(
        model=model,
        optimizer=torch.optim.Adam(model.parameters()),
        loss=lambda model, graph: F.cross_entropy(model(graph.x, graph.edge_index), labels),
        rows=graph["x"],
        edge_index=graph["edge_index"],
        epochs=epochs,
    )


def sweep_graph(nodes: int, edges: int, features: int, classes: int) -> Graph:
    """A random graph with rows and labels, on the host: in-edges by node, drawn evenly."""
    draw = torch.Generator("cpu").manual_seed(SEED)
    indptr = torch.arange(nodes + 1, device="cpu") * edges // nodes
    indices = torch.randint(nodes, (edges,), generator=draw, dtype=torch.int32, device="cpu")
    rows = torch.randn(nodes, features, generator=draw, device="cpu")
    labels = torch.randint(classes, (nodes,), generator=draw, device="cpu")
    return Graph({NODE: nodes}, {EDGE: CSC(indptr, indices, nodes)}, {NODE: {"x": rows, "y": labels}})


def _batch_loss(model: torch.nn.Module, batch: Any) -> Tensor:
    """Each layer for the nodes that the next one needs."""
    out = model(batch.x, batch.edge_index, num_sampled_nodes=batch.num_sampled_nodes)
    return F.cross_entropy(out[: batch.batch_size], batch.y[: batch.batch_size])


def sweep_job(
    nodes: int,
    edges: int,
    features: int,
    classes: int,
    batch_size: int,
    num_batches: int,
    hidden: int,
    lr: float,
    dropout: float,
    epochs: int,
    seed: int = 0,
    device: str = "cpu",
) -> TrainingJob:
    """GraphSAGE on batches of a graph that lies on the device: what a sweep tries with many settings."""
    sizes = {"nodes": nodes, "edges": edges, "features": features, "classes": classes}
    graph = shared_graph(sweep_graph, sizes, device=device)
    seeds = torch.arange(batch_size * num_batches, device="cpu") % nodes
    loader = NeighborLoader(
        graph, [15, 10, 5], input_nodes=seeds, batch_size=batch_size, shuffle=True, device=device, seed=seed
    )
    model = gnnsys.nn.GraphSAGE(features, hidden, 3, classes, dropout=dropout).to(device)
    return TrainingJob(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=lr),
        loss=_batch_loss,
        loader=loader,
        epochs=epochs,
    )
