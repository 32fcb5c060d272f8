"""Whether so many nodes can be held at all, asked before anything is allocated.

One id that is a hash or a typing error makes a graph of as many nodes as it says. Structure takes 8 bytes a node (the
CSC's indptr) in memory or, for a graph that is built outside it, twice that on disk: sorted, and then saved.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

_NODE_BYTES = 8
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def check_num_nodes(num_nodes: int, *, edge: int | None = None, folder: Path | None = None) -> None:
    """ValueError unless memory, or the disk that `folder` is on, has room for the structure of `num_nodes` nodes.

    `edge` is the position of the edge that names the last node; None where the user gave the number.
    """
    what = f"num_nodes is {num_nodes}" if edge is None else f"edge {edge} names node {num_nodes - 1}"
    fix = "give the number of nodes there are" if edge is None else "renumber the ids from 0"
    num_bytes = num_nodes * _NODE_BYTES
    _check(num_bytes if folder is None else 2 * num_bytes, f"{what}; so many nodes need", fix, folder)


def check_rows_fit(num_rows: int, num_columns: int, name: str, *, folder: Path | None = None) -> None:
    """ValueError unless there is room for float32 rows of that shape, made of features in CSR form."""
    fix = "keep fewer columns, or the product of x with a matrix of few columns"
    if folder is None:
        fix += ", or give a memory limit (--memory-limit 4G), so that its rows are made on disk"
    _check(4 * num_rows * num_columns, f"{name} [{num_rows}, {num_columns}] becomes dense and needs", fix, folder)


def check_bytes_fit(num_bytes: int, what: str) -> None:
    """ValueError unless memory has room for so many bytes."""
    _check(num_bytes, f"{what} needs", "give a memory limit (--memory-limit 4G), so that it is read from files", None)


def memory_bytes() -> int:
    """What this process could have at most: the machine's memory, or its container's."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(machine, int(_CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # none, or "max"
        return machine


def _check(num_bytes: int, need: str, fix: str, folder: Path | None) -> None:
    room = memory_bytes() if folder is None else shutil.disk_usage(folder).free
    if num_bytes > room:
        where = "of memory" if folder is None else "free on disk"
        raise ValueError(f"{need} {_size(num_bytes)}, and there are {_size(room)} {where}: {fix}")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e12:,.1f} TB" if num_bytes >= 1e12 else f"{num_bytes / 1e9:.1f} GB"
