"""The rank of every node by each partitioner, in the folder of the run: made once, found again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gnnsys.bench.communities import make_graph, task_folder
from gnnsys.bench.fullgraph.settings import FullGraphSettings
from gnnsys.bench.fullgraph.variant import CHUNK, METIS, OURS, RANDOM
from gnnsys.graph import Graph, load
from gnnsys.partition import PartitionOptions, assign_parts

_OPTIONS = {
    OURS: PartitionOptions(objective="communication", balance=["edges"]),
    METIS: PartitionOptions(method="metis", balance=["edges"]),
    CHUNK: PartitionOptions(method="chunk"),
    RANDOM: PartitionOptions(method="random"),
}


def make_parts(folder: Path, settings: FullGraphSettings, partitioner: str, num_parts: int) -> Path:
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
