"""Assignments that need no optimisation: at random, in chunks of the given order, or from a file."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gnnsys.graph import Graph
from gnnsys.ops import random_permutation, stream_key


def random_assignment(num_nodes: int, num_parts: int, seed: int = 0) -> Tensor:
    """int32: parts of equal size, every assignment equally likely; a pure function of its arguments."""
    return (random_permutation(num_nodes, stream_key(seed, 0)).long() * num_parts // max(num_nodes, 1)).int()


def chunk_assignment(num_nodes: int, num_parts: int) -> Tensor:
    """int32: the first nodes to the first part, and so on, in equal shares."""
    return (torch.arange(num_nodes) * num_parts // max(num_nodes, 1)).int()


def file_assignment(path: str | os.PathLike[str], graph: Graph, num_parts: int) -> Tensor:
    """int32 parts of all nodes, types one after the other: from `.npy`, `.npz` (an array per node type) or text."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"assignment file {str(file)!r} does not exist")
    if file.suffix == ".npz":
        with np.load(file, allow_pickle=False) as arrays:
            missing = [t for t in graph.node_types if t not in arrays]
            if missing:
                raise ValueError(f"{file} has no array for node types {missing}, only {list(arrays)}")
            values = np.concatenate([arrays[t].reshape(-1) for t in graph.node_types])
    elif file.suffix == ".npy":
        values = np.load(file, allow_pickle=False).reshape(-1)
    else:
        try:
            values = np.loadtxt(file, dtype=np.int64, ndmin=1)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
    if values.dtype.kind not in "iu":
        raise ValueError(f"{file} must hold integers, got {values.dtype}")
    num_nodes = sum(map(graph.num_nodes, graph.node_types))
    if values.size != num_nodes:
        raise ValueError(f"{file} assigns {values.size:,} nodes, the graph has {num_nodes:,}")
    if values.size and not 0 <= values.min() <= values.max() < num_parts:
        raise ValueError(f"{file} must hold parts in [0, {num_parts}), got {values.min()} to {values.max()}")
    return torch.from_numpy(values.astype(np.int32))
