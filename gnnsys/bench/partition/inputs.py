"""What the partitioners of a contest are given, as files: the graph, and its symmetric form for METIS."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gnnsys.graph import Graph, save
from gnnsys.partition import first_nodes


def write_inputs(folder: Path, graph: Graph, num_parts: int, balance: Sequence[str], *, with_metis: bool) -> None:
    save(graph, folder / "graph")
    (folder / "task.json").write_text(json.dumps({"num_parts": num_parts, "balance": list(balance)}))
    if with_metis:
        src, dst = flat_edges(graph)
        num_nodes = sum(map(graph.num_nodes, graph.node_types))
        xadj, adjncy = metis_arrays(src, dst, num_nodes)
        np.save(folder / "xadj.npy", xadj)
        np.save(folder / "adjncy.npy", adjncy)
        np.save(folder / "weight.npy", (1 + torch.bincount(dst, minlength=num_nodes)).numpy().astype(xadj.dtype))


def flat_edges(graph: Graph) -> tuple[Tensor, Tensor]:
    """Sources and destinations of all edges, int64, nodes of all types in one numbering."""
    first = first_nodes(graph)
    pairs = [(graph.csc(t).indices.long() + first[t[0]], graph.csc(t).dst() + first[t[2]]) for t in graph.edge_types]
    return torch.cat([p[0] for p in pairs]), torch.cat([p[1] for p in pairs])


def metis_arrays(src: Tensor, dst: Tensor, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric, no loops, no repeated edges, in the integers that pymetis does not copy."""
    import pymetis

    other = src != dst
    both = torch.cat([src[other] * num_nodes + dst[other], dst[other] * num_nodes + src[other]]).unique()
    xadj = torch.zeros(num_nodes + 1, dtype=torch.int64)
    xadj[1:] = torch.bincount(both // max(num_nodes, 1), minlength=num_nodes).cumsum(0)
    dtype = pymetis.zero_copy_dtype()
    return xadj.numpy().astype(dtype), (both % max(num_nodes, 1)).numpy().astype(dtype)


def run_metis(
    xadj: np.ndarray,
    adjncy: np.ndarray,
    num_parts: int,
    weight: np.ndarray | None,
    *,
    recursive: bool,
    volume: bool = False,
) -> np.ndarray:
    import pymetis

    options = pymetis.Options(objtype=pymetis.ObjType.VOL) if volume else pymetis.Options()
    adjacency = pymetis.CSRAdjacency(xadj, adjncy)
    return np.asarray(
        pymetis.part_graph(num_parts, adjacency, vweights=weight, recursive=recursive, options=options)[1]
    )
