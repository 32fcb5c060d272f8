"""Parts of the graph, in the folder of the run: made once, found again where a cache was given."""

from __future__ import annotations

from pathlib import Path

from gnnsys.bench.communities import make_graph, task_folder
from gnnsys.bench.dist.settings import DistSettings
from gnnsys.graph import load
from gnnsys.graph import MANIFEST
from gnnsys.partition import partition_graph

RANDOM, METIS, TWO_LEVEL = "random", "metis", "two-level"


def make_parts(folder: Path, settings: DistSettings, kind: str, num_parts: int) -> Path:
    """`kind`: nodes at random, METIS over the machines, or METIS over the machines and the trainers of each."""
    out = task_folder(folder, settings) / f"{kind}-{num_parts}"
    if not (out / MANIFEST).exists():
        partition_graph(
            load(make_graph(folder, settings)),
            num_parts,
            out,
            trainers_per_part=settings.trainers if kind == TWO_LEVEL else 1,
            method="random" if kind == RANDOM else "multilevel",
            balance=None if kind == RANDOM else ["train", "edges"],
            edge_ids=False,
        )
    return out
