"""Graphs that are the same to the last bit on every machine: made of integers, without logarithms or sines."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, Graph
from gnnsys.partition import Assignment, write_parts

WRITES: EdgeType = ("author", "writes", "paper")
CITES: EdgeType = ("paper", "cites", "paper")
REV_WRITES: EdgeType = ("paper", "rev_writes", "author")

NUM_NODES, NUM_PAPERS, NUM_AUTHORS = 200, 120, 60
SEEDS = torch.randperm(NUM_NODES, generator=torch.Generator().manual_seed(5))[:50]
PAPERS = torch.randperm(NUM_PAPERS, generator=torch.Generator().manual_seed(6))[:40]


class _Draw:
    """Random arrays without arithmetic on floats but divisions by powers of two."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def ints(self, bound: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(0, bound, shape, generator=self._generator).to(dtype)

    def rows(self, *shape: int) -> Tensor:
        return (self.ints(512, *shape) - 256).float() / 128

    def weights(self, count: int) -> Tensor:
        """Some are zero."""
        return (self.ints(20, count) - 4).clamp(min=0).float() / 16

    def edges(self, num_src: int, num_dst: int, count: int) -> Tensor:
        return torch.stack([self.ints(num_src, count), self.ints(num_dst, count)])


@cache
def plain() -> Graph:
    """One type; self loops and parallel edges are likely, and the last nodes have no edges."""
    draw = _Draw(0)
    num_edges = 1600
    node_data = {
        "x": draw.rows(NUM_NODES, 4),
        "y": draw.ints(5, NUM_NODES),
        "time": draw.ints(30, NUM_NODES),
        "popularity": draw.weights(NUM_NODES),
        "train_mask": torch.arange(NUM_NODES) % 3 == 0,
    }
    edge_data = {
        "w": draw.weights(num_edges),
        "edge_time": draw.ints(30, num_edges, dtype=torch.int32),
        "number": torch.arange(num_edges),
    }
    return Graph.from_edge_index(draw.edges(NUM_NODES - 5, NUM_NODES - 5, num_edges), NUM_NODES, node_data, edge_data)


@cache
def typed() -> Graph:
    """Papers and authors; the papers' citations have weights."""
    draw = _Draw(1)
    writes = draw.edges(NUM_AUTHORS, NUM_PAPERS, 400)
    index = {
        WRITES: writes,
        CITES: draw.edges(NUM_PAPERS, NUM_PAPERS, 700),
        REV_WRITES: writes.flip(0),
    }
    node_data = {
        "paper": {
            "x": draw.rows(NUM_PAPERS, 3),
            "time": draw.ints(20, NUM_PAPERS),
            "train_mask": torch.arange(NUM_PAPERS) % 3 == 0,
        },
        "author": {"x": draw.rows(NUM_AUTHORS, 2), "time": draw.ints(20, NUM_AUTHORS)},
    }
    edge_data = {CITES: {"w": draw.weights(700)}, WRITES: {"role": draw.ints(4, 400)}}
    return Graph.from_edge_indices(index, {"paper": NUM_PAPERS, "author": NUM_AUTHORS}, node_data, edge_data)


GRAPHS: dict[str, Any] = {"plain": plain, "typed": typed}


def parts_of(name: str, folder: Path, num_parts: int = 3) -> Path:
    """The graph of that name in parts, nodes dealt at random; written once per folder."""
    path = folder / f"{name}-{num_parts}"
    if not path.exists():
        graph, draw = GRAPHS[name](), _Draw(2)
        subpart = {t: draw.ints(num_parts, graph.num_nodes(t), dtype=torch.int32) for t in graph.node_types}
        write_parts(graph, Assignment(num_parts, 1, subpart), path)
    return path
