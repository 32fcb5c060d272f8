"""Distributed graph neural network training in plain PyTorch."""

from gnnsys.graph import Graph
from gnnsys.loader import Batch, LinkNeighborLoader, NegativeSampling, NeighborLoader

__all__ = ["Batch", "Graph", "LinkNeighborLoader", "NegativeSampling", "NeighborLoader"]
