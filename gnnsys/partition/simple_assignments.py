"""Assignments that need no optimisation: at random, in chunks of the given order, or from a file."""

from __future__ import annotations

import os
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gnnsys.graph import Graph, NodeType, load_npy, load_npz_arrays, some
from gnnsys.ops import random_permutation, stream_key


def random_assignment(num_nodes: int, num_parts: int, seed: int = 0) -> Tensor:
    """int32: parts of equal size, every assignment equally likely; a pure function of its arguments."""
    return (random_permutation(num_nodes, stream_key(seed, 0)).long() * num_parts // max(num_nodes, 1)).int()


def chunk_assignment(num_nodes: int, num_parts: int) -> Tensor:
    """int32: the first nodes to the first part, and so on, in equal shares."""
    return (torch.arange(num_nodes, device="cpu") * num_parts // max(num_nodes, 1)).int()


def file_assignment(path: str | os.PathLike[str], graph: Graph, num_parts: int) -> Tensor:
    """int32 parts of all nodes, types one after the other: from `.npy`, `.npz` (an array per node type) or text."""
    file = check_file(path)
    num_nodes = {t: graph.num_nodes(t) for t in graph.node_types}
    if file.suffix == ".npz":
        found = _read_npz(file, graph.node_types)
        values = [_checked(f"{file}, node type {t!r},", found[t], count, num_parts) for t, count in num_nodes.items()]
        return torch.cat(values) if values else torch.empty(0, dtype=torch.int32, device="cpu")
    return _checked(
        str(file), _read_npy(file) if file.suffix == ".npy" else _read_text(file), sum(num_nodes.values()), num_parts
    )


def check_file(path: str | os.PathLike[str]) -> Path:
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"assignment file {str(file)!r} does not exist")
    return file


def _checked(name: str, values: np.ndarray, num_nodes: int, num_parts: int) -> Tensor:
    """int32 [num_nodes]; ValueError unless there is one existing part per node."""
    if values.ndim != 1:
        raise ValueError(f"{name} must hold one part per node, got an array of shape {list(values.shape)}")
    if values.size != num_nodes:
        raise ValueError(f"{name} assigns {values.size:,} nodes, the graph has {num_nodes:,}")
    if values.size == 0:  # of whatever dtype
        return torch.empty(0, dtype=torch.int32, device="cpu")
    if values.dtype.kind not in "iu":
        raise ValueError(f"{name} must hold integers, got {values.dtype}")
    if not 0 <= values.min() <= values.max() < num_parts:
        raise ValueError(f"{name} must hold parts in [0, {num_parts}), got {values.min()} to {values.max()}")
    return torch.from_numpy(values.astype(np.int32))


def _read_npy(file: Path) -> np.ndarray:
    if zipfile.is_zipfile(file):
        raise ValueError(f"{file} holds several arrays: give it the ending .npz")
    return load_npy(file)


def _read_npz(file: Path, node_types: Sequence[NodeType]) -> dict[NodeType, np.ndarray]:
    arrays = load_npz_arrays(file)
    if missing := [t for t in node_types if t not in arrays]:
        raise ValueError(f"{file} has no array for node types {some(missing)}, only {some(arrays)}")
    return {t: arrays[t] for t in node_types}


def _read_text(file: Path) -> np.ndarray:
    """A part per line; `#` starts a comment."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a file without a line, whose length says it
            rows = np.loadtxt(file, dtype=np.int64, ndmin=2)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    if rows.size and rows.shape[1] != 1:
        raise ValueError(f"{file} must hold one part per line, got {rows.shape[1]} columns")
    return rows.reshape(-1)
