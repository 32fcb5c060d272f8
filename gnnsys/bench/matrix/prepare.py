"""`python -m gnnsys.bench.matrix.prepare CELL OUT`: makes the parts of a cell, in a process that has a deadline."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from gnnsys.bench.matrix.cell import Cell
from gnnsys.graph import dataset
from gnnsys.partition import partition_graph


def parts_name(cell: Cell) -> str:
    """Cells with the same one share their parts."""
    subparts = cell.trainers if cell.options.partition == "two-level" else 1
    told = f"{cell.dataset} {cell.options.partition} {cell.hosts} {subparts} {cell.options.seed}"
    return f"{cell.options.partition}-{cell.hosts}x{subparts}-{hashlib.sha256(told.encode()).hexdigest()[:12]}"


def main(cell: Cell, out: Path) -> None:
    kind = cell.options.partition
    partition_graph(
        dataset(cell.dataset),
        cell.hosts,
        out,
        trainers_per_part=cell.trainers if kind == "two-level" else 1,
        method="random" if kind == "random" else "multilevel",
        balance=None if kind == "random" else ["train", "edges"],
        edge_ids=False,
        seed=cell.options.seed,
    )


if __name__ == "__main__":
    main(Cell.load(Path(sys.argv[1])), Path(sys.argv[2]))
