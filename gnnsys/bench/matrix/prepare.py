"""`python -m gnnsys.bench.matrix.prepare CELL OUT`: makes the parts of a cell, in a process that has a deadline.

Two processes that make the same ones do so one after the other: the second finds them there.
"""

from __future__ import annotations

import fcntl
import hashlib
import sys
from pathlib import Path
from typing import Any

from gnnsys.bench.matrix.cell import MINI_BATCH, Cell
from gnnsys.graph import MANIFEST, dataset
from gnnsys.partition import partition_graph

_METHODS: dict[str, dict[str, Any]] = {
    "two-level": {"method": "multilevel", "balance": ["train", "edges"]},
    "metis": {"method": "multilevel", "balance": ["train", "edges"]},
    "communication": {"method": "multilevel", "objective": "communication", "balance": ["edges"]},
    "chunk": {"method": "chunk"},
    "random": {"method": "random"},
}


def parts_name(cell: Cell) -> str:
    """Cells with the same one share their parts."""
    kind, subparts = cell.options.partition, num_subparts(cell)
    told = f"{cell.dataset} {kind} {cell.hosts} {subparts} {cell.options.seed}"
    return f"{kind}-{cell.hosts}x{subparts}-{hashlib.sha256(told.encode()).hexdigest()[:12]}"


def num_subparts(cell: Cell) -> int:
    """Of each host's part. On the whole graph every trainer has nodes of its own."""
    is_by_trainer = cell.options.training != MINI_BATCH or cell.options.partition in ("two-level", "communication")
    return cell.trainers if is_by_trainer else 1


def main(cell: Cell, out: Path) -> None:
    with open(f"{out}.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (out / MANIFEST).exists():
            partition_graph(
                dataset(cell.dataset),
                cell.hosts,
                out,
                trainers_per_part=num_subparts(cell),
                edge_ids=False,
                seed=cell.options.seed,
                **_METHODS[cell.options.partition],
            )


if __name__ == "__main__":
    main(Cell.from_text(sys.argv[1]), Path(sys.argv[2]))
