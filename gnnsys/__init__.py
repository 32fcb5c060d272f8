"""Distributed graph neural network training in plain PyTorch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gnnsys.graph import Graph as Graph
    from gnnsys.loader import Batch as Batch
    from gnnsys.loader import LinkNeighborLoader as LinkNeighborLoader
    from gnnsys.loader import NegativeSampling as NegativeSampling
    from gnnsys.loader import NeighborLoader as NeighborLoader

_ROOM_OF = {
    "Batch": "loader",
    "Graph": "graph",
    "LinkNeighborLoader": "loader",
    "NegativeSampling": "loader",
    "NeighborLoader": "loader",
}

__all__ = ["Batch", "Graph", "LinkNeighborLoader", "NegativeSampling", "NeighborLoader"]


def __getattr__(name: str) -> Any:
    """Rooms are loaded when first used, so that `gnnsys --help` does not wait for torch."""
    if name not in _ROOM_OF:
        raise AttributeError(f"module 'gnnsys' has no attribute {name!r}")
    return getattr(importlib.import_module(f"gnnsys.{_ROOM_OF[name]}"), name)
