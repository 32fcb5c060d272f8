"""A graph with communities, in two parts: most neighbours are in the same part, some are not."""

from __future__ import annotations

from pathlib import Path

import torch

from gnnsys.graph import Graph
from gnnsys.partition import partition_graph


def two_parts(folder: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    num_nodes, num_edges = 3000, 24000
    source = torch.randint(0, num_nodes, (num_edges,), generator=generator)
    near = (source + torch.randint(1, 300, (num_edges,), generator=generator)) % num_nodes
    data = {
        "x": torch.randn(num_nodes, 16, generator=generator),
        "train_mask": torch.rand(num_nodes, generator=generator) < 0.5,
    }
    graph = Graph.from_edge_index(torch.stack([source, near]), num_nodes, data)
    partition_graph(graph, 2, folder)
    return folder
