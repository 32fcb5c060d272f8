"""The graph and the rank of every node by each partitioner, in the folder of the run: made once, found again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gnnsys.bench.fullgraph.settings import Settings
from gnnsys.bench.fullgraph.variant import CHUNK, METIS, OURS, RANDOM
from gnnsys.graph import Graph, load, save
from gnnsys.graph.generate import sbm
from gnnsys.graph.manifest import MANIFEST
from gnnsys.partition import Options, assign_parts

_OPTIONS = {
    OURS: Options(objective="communication", balance=["edges"]),
    METIS: Options(method="metis", balance=["edges"]),
    CHUNK: Options(method="chunk"),
    RANDOM: Options(method="random"),
}


def task_folder(folder: Path, settings: Settings) -> Path:
    """Named after the graph, so that another graph never meets these parts."""
    digest = hashlib.sha256(json.dumps(settings.graph, sort_keys=True).encode()).hexdigest()[:12]
    made = folder / f"fullgraph-{settings.num_nodes}-{digest}"
    made.mkdir(parents=True, exist_ok=True)
    return made


def make_graph(folder: Path, settings: Settings) -> Path:
    path = task_folder(folder, settings) / "graph"
    if not (path / MANIFEST).exists():
        save(sbm(**settings.graph), path)
    return path


def make_parts(folder: Path, settings: Settings, partitioner: str, num_parts: int) -> Path:
    """A file of the rank of every node."""
    path = task_folder(folder, settings) / f"{partitioner}-{num_parts}.npy"
    if not path.exists():
        graph = load(make_graph(folder, settings))
        assigned = assign_parts(graph, num_parts, options=_OPTIONS[partitioner])
        np.save(path, assigned.assignment.part(graph.node_types[0]).long().numpy())
    return path


def cut_and_rows(graph: Graph, ranks: Tensor) -> tuple[int, int]:
    """Edges between ranks, and rows that must travel per exchange: pairs of a node and another rank that needs it."""
    csc = graph.csc()
    src, to = csc.indices.long(), ranks[csc.dst().long()]
    away = ranks[src] != to
    pairs = src[away] * (int(ranks.max()) + 1) + to[away]
    return int(away.sum()), int(torch.unique(pairs).numel())
