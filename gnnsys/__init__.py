"""Distributed graph neural network training in plain PyTorch.

What most scripts need is here by name: `gnnsys.NeighborLoader`, `gnnsys.init`, `gnnsys.open`, `gnnsys.split`. The rest
is in rooms, each an attribute that is loaded when first used: `gnnsys.graph` (graphs and where they come from),
`gnnsys.partition`, `gnnsys.loader`, `gnnsys.nn`, `gnnsys.metrics`, `gnnsys.fullgraph`, `gnnsys.store`,
`gnnsys.checkpoint`, and the faces `gnnsys.pyg` and `gnnsys.dgl`.

>>> graph = gnnsys.graph.dataset("sbm-20k")  # doctest: +SKIP
>>> loader = gnnsys.NeighborLoader(graph, [15, 10], input_nodes="train", batch_size=512)  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gnnsys import bench as bench
    from gnnsys import checkpoint as checkpoint
    from gnnsys import comm as comm
    from gnnsys import cuda as cuda
    from gnnsys import dgl as dgl
    from gnnsys import doctor as doctor
    from gnnsys import explain as explain
    from gnnsys import fullgraph as fullgraph
    from gnnsys import graph as graph
    from gnnsys import jobs as jobs
    from gnnsys import launch as launch
    from gnnsys import loader as loader
    from gnnsys import metrics as metrics
    from gnnsys import nn as nn
    from gnnsys import observe as observe
    from gnnsys import ops as ops
    from gnnsys import partition as partition
    from gnnsys import pipeline as pipeline
    from gnnsys import planning as planning
    from gnnsys import pyg as pyg
    from gnnsys import sampling as sampling
    from gnnsys import seeds as seeds
    from gnnsys import session as session
    from gnnsys import store as store
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
    from gnnsys.loader import SubgraphLoader as SubgraphLoader
    from gnnsys.sampling import DistGraph as DistGraph
    from gnnsys.seeds import Seeds as Seeds
    from gnnsys.seeds import split as split
    from gnnsys.seeds import split_links as split_links
    from gnnsys.session import Session as Session
    from gnnsys.session import init as init
    from gnnsys.session import open as open
    from gnnsys.store import DistEmbedding as DistEmbedding
    from gnnsys.store import DistTensor as DistTensor
    from gnnsys.store import RowWiseAdagrad as RowWiseAdagrad
    from gnnsys.store import SparseAdagrad as SparseAdagrad
    from gnnsys.store import SparseAdam as SparseAdam
    from gnnsys.store import SparseSGD as SparseSGD

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
    "RowWiseAdagrad": "store",
    "Saver": "checkpoint",
    "Seeds": "seeds",
    "Session": "session",
    "ShardLost": "comm",
    "SparseAdagrad": "store",
    "SparseAdam": "store",
    "SparseSGD": "store",
    "SubgraphLoader": "loader",
    "TrainerLost": "comm",
    "init": "session",
    "open": "session",
    "resume": "checkpoint",
    "split": "seeds",
    "split_links": "seeds",
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
    "RowWiseAdagrad",
    "Saver",
    "Seeds",
    "Session",
    "ShardLost",
    "SparseAdagrad",
    "SparseAdam",
    "SparseSGD",
    "SubgraphLoader",
    "TrainerLost",
    "init",
    "open",
    "resume",
    "split",
    "split_links",
]


_ROOMS = (
    "bench",
    "checkpoint",
    "comm",
    "cuda",
    "doctor",
    "explain",
    "fullgraph",
    "graph",
    "jobs",
    "lab",
    "launch",
    "loader",
    "metrics",
    "nn",
    "observe",
    "ops",
    "partition",
    "pipeline",
    "planning",
    "profiling",
    "sampling",
    "seeds",
    "session",
    "store",
)
_FACES = ("dgl", "pyg")  # need the library whose face they are

__version__: str


def __getattr__(name: str) -> Any:
    """Rooms are loaded when first used, so that `gnnsys --help` does not wait for torch."""
    if name in _ROOM_OF:
        return getattr(importlib.import_module(f"gnnsys.{_ROOM_OF[name]}"), name)
    if name in _ROOMS:
        return importlib.import_module(f"gnnsys.{name}")
    if name in _FACES:
        try:
            return importlib.import_module(f"gnnsys.{name}")
        except ImportError as error:  # `hasattr` and `help` ask as well
            raise AttributeError(str(error)) from error
    if name == "__version__":
        return _version()
    raise AttributeError(f"module 'gnnsys' has no attribute {name!r}")


def __dir__() -> list[str]:
    dunders = {name for name in globals() if name.startswith("__")}
    return sorted({*dunders, *__all__, *_ROOMS, *_FACES, "__version__"})


def _version() -> str:
    """As installed; a checkout that was never installed has no version of its own."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("gnnsys")
    except PackageNotFoundError:
        return "0+checkout"
