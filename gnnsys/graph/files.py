"""`load`: a graph from a file or directory, by what its name ends in. Tables of edges are read here.

Edges in a table (text or parquet) are rows; two columns are the source and the destination, the others are edge data
under their column's name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gnnsys.graph.graph import Graph
from gnnsys.graph.npz import load_npz
from gnnsys.graph.saved import load_saved

_COMMENTS = ("#", "%")
_DELIMITERS: dict[str, str | None] = {".csv": ",", ".tsv": "\t", ".txt": None, ".edges": None}
_INTEGERS = ("src", "dst", "time")  # columns that must not pass through floating point


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
    if path.suffix == ".parquet":
        return _from_columns(_read_parquet(path, columns), num_nodes, path)
    if path.suffix in _DELIMITERS:
        return _from_columns(_read_text(path, columns), num_nodes, path)
    known = ", ".join([".npz", ".parquet", *_DELIMITERS])
    raise ValueError(f"path {str(path)!r}: its ending says nothing to us, expected a directory or one of {known}")


def _from_columns(table: Mapping[str, Tensor], num_nodes: int | None, path: Path) -> Graph:
    for name in ("src", "dst"):
        if name not in table:
            raise ValueError(f"{path}: no column is called {name!r}, there are {list(table)}; name them with columns=")
        if table[name].dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{path}: column {name!r} must hold integers, got {table[name].dtype}")
    edge_index = torch.stack([table["src"].long(), table["dst"].long()])
    if num_nodes is None:
        num_nodes = int(edge_index.max()) + 1 if edge_index.numel() else 0
    edge_data = {name: rows for name, rows in table.items() if name not in ("src", "dst")}
    try:
        return Graph.from_edge_index(edge_index, num_nodes, edge_data=edge_data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _read_text(path: Path, columns: Sequence[str] | None) -> dict[str, Tensor]:
    delimiter = _DELIMITERS[path.suffix]
    skip, header, width = _inspect(path, delimiter)
    names = list(columns or header or ("src", "dst"))
    if width == 0:
        return {name: torch.empty(0, dtype=_column_type(name)) for name in names}
    if len(names) != width:
        raise ValueError(f"{path}: its lines have {width} fields, but columns names {len(names)}: {names}")
    dtype = np.dtype([(name, "i8" if name in _INTEGERS else "f8") for name in names])
    try:
        table = np.loadtxt(
            path, dtype=dtype, delimiter=delimiter, comments=list(_COMMENTS), skiprows=skip, ndmin=1, encoding="utf-8"
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return {name: torch.from_numpy(table[name].copy()).to(_column_type(name)) for name in names}


def _column_type(name: str) -> torch.dtype:
    return torch.int64 if name in _INTEGERS else torch.float32


def _inspect(path: Path, delimiter: str | None) -> tuple[int, list[str] | None, int]:
    """Lines to skip before the first edge, the header's names if there is one, and the fields of a line (0: none)."""
    header: list[str] | None = None
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file):
            content = line.strip()
            if not content or content.startswith(_COMMENTS):
                continue
            fields = [field.strip() for field in content.split(delimiter)]
            if header is None and not _is_number(fields[0]):
                header = fields
                continue
            return number, header, len(fields)
    return 0, header, 0


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _read_parquet(path: Path, columns: Sequence[str] | None) -> dict[str, Tensor]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("parquet files are read by pyarrow: pip install pyarrow") from error
    table = pyarrow.parquet.read_table(path)
    names = list(columns or table.column_names)
    if len(names) != table.num_columns:
        raise ValueError(f"{path}: it has columns {table.column_names}, but columns names {len(names)}: {names}")
    result = {}
    for name, column in zip(names, table.columns):
        if column.null_count:
            raise ValueError(f"{path}: column {name!r} has {column.null_count} missing values")
        array = column.to_numpy()
        if array.dtype.kind not in "iufb":
            raise ValueError(f"{path}: column {name!r} must hold numbers, got {column.type}")
        result[name] = torch.from_numpy(np.array(array))
    return result
