"""`load`: a graph from a file or directory, by what its name ends in."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from gnnsys.graph.capacity import check_num_nodes
from gnnsys.graph.graph import Graph
from gnnsys.graph.npz import load_npz
from gnnsys.graph.saved_graph import load_saved
from gnnsys.graph.tables import FILE_ENDINGS, NO_EDGES, is_table, table_pieces

PICKLED = (".pt", ".pth", ".bin")  # what torch.save wrote, as a rule


def load(
    path: str | os.PathLike[str],
    *,
    columns: Sequence[str] | None = None,
    num_nodes: int | None = None,
    verify: bool = True,
) -> Graph:
    """Reads a graph.

    - a directory written by `gnnsys.graph.save` (memory-mapped; `verify` compares checksums),
    - `.npz`: `edge_index` and arrays per node or edge (`gnnsys.graph.npz` has the details),
    - `.txt`, `.edges` (separated by blanks), `.csv`, `.tsv`: an edge per line, `#` and `%` start a comment,
    - `.parquet`: an edge per row.

    `columns` names the columns of a table, by default its header or, in a text file without one, `src dst`. Columns
    other than `src` and `dst` become edge data: `("src", "dst", "weight", "time")`. `num_nodes` is needed where the
    last nodes have no edge.

    >>> graph = gnnsys.graph.load("edges.csv", columns=["src", "dst", "weight"])  # doctest: +SKIP
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"path {str(path)!r} does not exist")
    if path.is_dir():
        return load_saved(path, verify=verify)
    if path.suffix == ".npz":
        return load_npz(path)
    if is_table(path):
        return _load_table(path, columns, num_nodes)
    raise unknown_ending(path)


def unknown_ending(path: Path) -> ValueError:
    if path.suffix in PICKLED:
        return ValueError(
            f"path {str(path)!r}: what torch saved may run code, so it is not opened here. If you trust it, load it in "
            f'Python: gnnsys.partition.partition_graph(torch.load("{path}", '
            'weights_only=False), 2, "parts/")'
        )
    known = ", ".join(FILE_ENDINGS)
    return ValueError(f"path {str(path)!r}: its ending says nothing to us, expected a directory or one of {known}")


def _load_table(path: Path, columns: Sequence[str] | None, num_nodes: int | None) -> Graph:
    pieces = list(table_pieces(path, columns))
    table = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
    del pieces
    edge_index = torch.stack([table.pop("src").long(), table.pop("dst").long()])
    try:
        if num_nodes is not None:
            check_num_nodes(num_nodes)
        elif edge_index.numel():
            num_nodes = int(edge_index.max()) + 1
            check_num_nodes(num_nodes, edge=int(edge_index.max(0).values.argmax()))
        else:
            raise ValueError(NO_EDGES)
        return Graph.from_edge_index(edge_index, num_nodes, edge_data=table)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
