"""Distributed graph neural network training in plain PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gnnsys.graph import Graph
from gnnsys.graph import Graph as Graph
from gnnsys.loader import Batch, LinkNeighborLoader, NegativeSampling, NeighborLoader
from gnnsys.loader import Batch as Batch
from gnnsys.loader import LinkNeighborLoader as LinkNeighborLoader
from gnnsys.loader import NegativeSampling as NegativeSampling
from gnnsys.loader import NeighborLoader as NeighborLoader

__all__ = [
    "TYPE_CHECKING",
    "Any",
    "Batch",
    "Batch as Batch",
    "Graph",
    "Graph as Graph",
    "LinkNeighborLoader",
    "LinkNeighborLoader as LinkNeighborLoader",
    "NegativeSampling",
    "NegativeSampling as NegativeSampling",
    "NeighborLoader",
    "NeighborLoader as NeighborLoader",
    "annotations",
]
