"""Small graphs in parts on several machines of one process, and the same graphs whole as PyG has them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gnnsys.graph.convert import to_pyg
from gnnsys.sampling import DistGraph
from tests.sampling.machines import homogeneous, machines, typed

SEEDS = torch.randperm(120, generator=torch.Generator().manual_seed(5))[:50]


@contextmanager
def plain_parts(folder: Path) -> Iterator[tuple[Any, list[DistGraph]]]:
    """A graph of one type with every third of 120 nodes in its train mask, in three parts."""
    graph = homogeneous()
    graph.set_node_data("train_mask", torch.arange(120) % 3 == 0)
    with machines(graph, folder, 3) as graphs:
        yield to_pyg(graphs[0].parts.merge()), graphs


@contextmanager
def hetero_parts(folder: Path) -> Iterator[tuple[Any, list[DistGraph]]]:
    """A graph of several types with every third of 90 papers in their train mask, in two parts."""
    graph = typed()
    graph.set_node_data("train_mask", torch.arange(90) % 3 == 0, "paper")
    with machines(graph, folder, 2) as graphs:
        yield to_pyg(graphs[0].parts.merge()), graphs


def messages(graph: DistGraph) -> list[int]:
    """Requests sent to each other machine."""
    assert graph.client is not None
    peers = graph.client.counters()["peers"]
    return [peers[machine]["messages_out"] for machine in sorted(peers) if machine != graph.machine]
