"""The graph that a command's SOURCE names: a dataset, a saved graph, or a file of edges, larger than memory or not."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gnnsys.graph import Graph

_TEXT_BYTES_PER_EDGE = 8  # at least: two numbers and what separates them
_PACKED_BYTES_PER_EDGE = 2  # in a compressed file


@contextmanager
def opened_source(
    source: str,
    *,
    columns: Sequence[str] | None = None,
    num_nodes: int | None = None,
    memory_limit: int | None = None,
    folder: Path | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Iterator[Graph]:
    """The graph, for the length of a block.

    `columns` and `num_nodes` say how to read a table of edges, and are refused for anything else. Where a file of edges
    could take more than `memory_limit` to load, sparse features made dense included, it is first turned into a mapped
    graph, in a temporary directory inside `folder`.
    """
    from gnnsys.graph import dataset, external_graph, find_dataset, is_generated, load, sparse_rows_in
    from gnnsys.partition import LOAD_BYTES_PER_EDGE

    path = Path(source)
    is_path = path.exists()
    if not is_path and not is_generated(source):
        path = find_dataset(source)
    if not path.is_file() or path.suffix == ".npz":
        what = "a dataset" if not is_path else "a saved graph" if path.is_dir() else "a .npz file"
        for option, given in (("columns", columns), ("num-nodes", num_nodes)):
            if given is not None:
                raise ValueError(f"--{option} is for tables of edges; {source!r} is {what}, which says that itself")
    if not path.exists():
        yield dataset(source)
        return
    sparse = sparse_rows_in(path) if path.suffix == ".npz" and path.is_file() else []
    for rows in sparse:
        print(rows, flush=True)
    if path.is_file() and memory_limit is not None:
        packed = path.suffix in (".npz", ".parquet")
        num_edges = path.stat().st_size / (_PACKED_BYTES_PER_EDGE if packed else _TEXT_BYTES_PER_EDGE)
        dense = sum(rows.dense_bytes for rows in sparse)
        if num_edges * LOAD_BYTES_PER_EDGE + dense > memory_limit:
            with tempfile.TemporaryDirectory(prefix=".gnnsys-source-", dir=folder) as work:
                mapped = Path(work) / "graph"
                external_graph(
                    path, mapped, memory_limit=memory_limit, columns=columns, num_nodes=num_nodes, progress=progress
                )
                yield load(mapped, verify=False)
            return
    yield load(path, columns=columns, num_nodes=num_nodes)
