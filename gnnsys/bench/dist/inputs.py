"""The graph of the task and its parts, in the folder of the run: made once, found again where a cache was given."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from gnnsys.bench.dist.settings import Settings
from gnnsys.graph import Graph, load, save
from gnnsys.graph.generate import sbm
from gnnsys.graph.manifest import MANIFEST
from gnnsys.partition import partition_graph

RANDOM, METIS, TWO_LEVEL = "random", "metis", "two-level"


def task_folder(folder: Path, settings: Settings) -> Path:
    """Named after the graph, so that another graph never meets these parts."""
    digest = hashlib.sha256(json.dumps(settings.graph, sort_keys=True).encode()).hexdigest()[:12]
    made = folder / f"dist-{settings.num_nodes}-{digest}"
    made.mkdir(parents=True, exist_ok=True)
    return made


def make_graph(folder: Path, settings: Settings) -> Graph:
    path = task_folder(folder, settings) / "graph"
    if not (path / MANIFEST).exists():
        save(sbm(**settings.graph), path)
    return load(path)


def make_parts(folder: Path, settings: Settings, kind: str, num_parts: int) -> Path:
    """`kind`: nodes at random, METIS over the machines, or METIS over the machines and the trainers of each."""
    out = task_folder(folder, settings) / f"{kind}-{num_parts}"
    if not (out / MANIFEST).exists():
        partition_graph(
            make_graph(folder, settings),
            num_parts,
            out,
            trainers_per_part=settings.trainers if kind == TWO_LEVEL else 1,
            method="random" if kind == RANDOM else "multilevel",
            balance=None if kind == RANDOM else ["train", "edges"],
            edge_ids=False,
        )
    return out
