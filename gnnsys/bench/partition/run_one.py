"""`python -m gnnsys.bench.partition.run_one FOLDER SIDE`: one partitioner, alone in its process, timed and measured.

Reads the input into memory, notes how much that takes, partitions, and writes `part.npy` and `figures.json`.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from gnnsys.bench.measure import peak_extra_bytes
from gnnsys.bench.partition.contest import COMMUNICATION, DGL, RECURSIVE, VOLUME
from gnnsys.bench.partition.inputs import run_metis
from gnnsys.graph import Graph, load
from gnnsys.ops import CSC


def main(folder: Path, side: str) -> None:
    torch.set_num_threads(2)
    partition = prepared(folder, side)
    seconds = 0.0
    part = np.empty(0)

    def run() -> None:
        nonlocal seconds, part
        start = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):  # DGL prints its own times
            part = partition()
        seconds = time.perf_counter() - start

    peak = peak_extra_bytes(run)
    np.save(folder / "part.npy", part.astype(np.int64))
    (folder / "figures.json").write_text(json.dumps({"seconds": seconds, "peak_bytes": peak}))


def prepared(folder: Path, side: str) -> Callable[[], np.ndarray]:
    """The side with its input in memory, ready to run."""
    task = json.loads((folder / "task.json").read_text())
    num_parts, balance = task["num_parts"], task["balance"]
    if side == DGL:
        return dgl_side(load(folder / "graph"), num_parts, "edges" in balance)
    if side.startswith("gnnsys"):
        return our_side(in_memory(load(folder / "graph")), num_parts, balance, side == COMMUNICATION)
    xadj, adjncy = np.load(folder / "xadj.npy"), np.load(folder / "adjncy.npy")
    weight = np.load(folder / "weight.npy") if balance else None
    return lambda: run_metis(xadj, adjncy, num_parts, weight, recursive=side == RECURSIVE, volume=side == VOLUME)


def our_side(graph: Graph, num_parts: int, balance: list[str], communication: bool) -> Callable[[], np.ndarray]:
    from gnnsys.partition import PartitionOptions, assign_parts

    options = PartitionOptions(balance=balance, objective="communication" if communication else "cut")

    def run() -> np.ndarray:
        subpart = assign_parts(graph, num_parts, options=options).assignment.subpart
        return torch.cat([subpart[t] for t in graph.node_types]).numpy()

    return run


def dgl_side(graph: Graph, num_parts: int, balance_edges: bool) -> Callable[[], np.ndarray]:
    import dgl

    theirs = dgl_graph(graph)
    return lambda: dgl.partition.metis_partition_assignment(theirs, num_parts, balance_edges=balance_edges).numpy()


def dgl_graph(graph: Graph):  # type: ignore[no-untyped-def]
    """A homogeneous graph as DGL's METIS stands it: with repeated edges or loops it corrupts the heap (DGL 1.1.3)."""
    import dgl

    csc = graph.csc()
    made = dgl.graph((csc.indices.long(), csc.dst()), num_nodes=csc.num_dst)
    return dgl.to_simple(dgl.remove_self_loop(made))


def in_memory(graph: Graph) -> Graph:
    """A copy whose arrays are not mapped files: the input is there before anything is measured."""
    csc = {t: graph.csc(t) for t in graph.edge_types}
    copies = {t: CSC(c.indptr.clone(), c.indices.clone(), c.num_src) for t, c in csc.items()}
    data = {t: {name: rows.clone() for name, rows in graph.node_data[t].items()} for t in graph.node_types}
    return Graph({t: graph.num_nodes(t) for t in graph.node_types}, copies, data)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
