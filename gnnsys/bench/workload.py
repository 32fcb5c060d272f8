"""What the benchmarks of one run share: their sizes and the graphs they work on, each generated once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gnnsys.graph import Graph, rmat
from gnnsys.ops import CSC

SEED = 1


@dataclass(frozen=True)
class Sizes:
    """The power-law graph of issue-sized runs, and of quick ones that only show that everything works."""

    num_nodes: int
    num_edges: int
    dim: int = 128
    num_seeds: int = 1024
    fanout: tuple[int, ...] = (15, 10, 5)
    epoch_batches: int = 20


FULL = Sizes(1_000_000, 20_000_000)
QUICK = Sizes(20_000, 400_000, dim=32, num_seeds=256, epoch_batches=4)


class Workload:
    """Graphs and rows, made when first asked for and then kept for the run."""

    def __init__(self, sizes: Sizes = FULL) -> None:
        self.sizes = sizes

    @cached_property
    def graph(self) -> Graph:
        """RMAT at full size: 1M nodes, 20M edges, a power law."""
        return rmat(self.sizes.num_nodes, self.sizes.num_edges, seed=SEED)

    @cached_property
    def small_graph(self) -> Graph:
        """An eighth of it, for peers that make a tensor per edge and feature (10 GB at full size)."""
        return rmat(self.sizes.num_nodes // 8, self.sizes.num_edges // 8, seed=SEED)

    @property
    def csc(self) -> CSC:
        return self.graph.csc()

    def rows(self, num_rows: int, *shape: int) -> Tensor:
        """float32 rows, the same ones for every side."""
        generator = torch.Generator().manual_seed(SEED)
        return torch.randn(num_rows, *shape, generator=generator)

    def seeds(self, count: int) -> Tensor:
        """int64 ids of different nodes that have in-edges (in RMAT almost half have none)."""
        nodes = self.csc.in_degrees().nonzero().view(-1)
        return nodes[self.ids(count, nodes.numel())]

    def ids(self, count: int, below: int) -> Tensor:
        """int64 ids drawn without replacement."""
        generator = torch.Generator().manual_seed(SEED)
        return torch.randperm(below, generator=generator)[:count]
