"""Distributed graph neural network training in plain PyTorch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gnnsys.checkpoint import Saver as Saver
    from gnnsys.checkpoint import resume as resume
    from gnnsys.comm import ShardLost as ShardLost
    from gnnsys.comm import TrainerLost as TrainerLost
    from gnnsys.fullgraph import HybridParallel as HybridParallel
    from gnnsys.graph import Graph as Graph
    from gnnsys.loader import Batch as Batch
    from gnnsys.loader import LinkNeighborLoader as LinkNeighborLoader
    from gnnsys.loader import NegativeSampling as NegativeSampling
    from gnnsys.loader import NeighborLoader as NeighborLoader
    from gnnsys.sampling import DistGraph as DistGraph
    from gnnsys.seeds import Seeds as Seeds
    from gnnsys.seeds import split as split
    from gnnsys.session import Session as Session
    from gnnsys.session import init as init
    from gnnsys.session import open as open
    from gnnsys.store import DistEmbedding as DistEmbedding
    from gnnsys.store import DistTensor as DistTensor
    from gnnsys.store import SparseAdagrad as SparseAdagrad
    from gnnsys.store import SparseAdam as SparseAdam

_ROOM_OF = {
    "Batch": "loader",
    "DistEmbedding": "store",
    "DistGraph": "sampling",
    "DistTensor": "store",
    "Graph": "graph",
    "HybridParallel": "fullgraph",
    "LinkNeighborLoader": "loader",
    "NegativeSampling": "loader",
    "NeighborLoader": "loader",
    "Saver": "checkpoint",
    "Seeds": "seeds",
    "Session": "session",
    "ShardLost": "comm",
    "SparseAdagrad": "store",
    "SparseAdam": "store",
    "TrainerLost": "comm",
    "init": "session",
    "open": "session",
    "resume": "checkpoint",
    "split": "seeds",
}

__all__ = [
    "Batch",
    "DistEmbedding",
    "DistGraph",
    "DistTensor",
    "Graph",
    "HybridParallel",
    "LinkNeighborLoader",
    "NegativeSampling",
    "NeighborLoader",
    "Saver",
    "Seeds",
    "Session",
    "ShardLost",
    "SparseAdagrad",
    "SparseAdam",
    "TrainerLost",
    "init",
    "open",
    "resume",
    "split",
]


def __getattr__(name: str) -> Any:
    """Rooms are loaded when first used, so that `gnnsys --help` does not wait for torch."""
    if name not in _ROOM_OF:
        raise AttributeError(f"module 'gnnsys' has no attribute {name!r}")
    return getattr(importlib.import_module(f"gnnsys.{_ROOM_OF[name]}"), name)
