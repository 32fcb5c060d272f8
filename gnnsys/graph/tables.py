"""Tables of edges (text or parquet), read in pieces: an edge per row, columns by name, memory bounded by the piece.

Columns called src, dst and time are integers (int64, never through floating point); any other column of a text file is
float32. A parquet file's columns keep their own types, and a piece of it costs at least one row group.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gnnsys.graph.names_in_errors import some
from gnnsys.ops import parse_table

Columns = Mapping[str, Tensor]

BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # what some programs write before UTF-8
COMMENTS = ("#", "%")
DELIMITERS: dict[str, str | None] = {".csv": ",", ".tsv": "\t", ".txt": None, ".edges": None}
FILE_ENDINGS = (".npz", ".parquet", *DELIMITERS)  # of the files that a graph is read from
NO_EDGES = "there are no edges in it: give a file with an edge per line, or say num_nodes where none is meant"
_NUMBER_THEM = (
    "ids must be 0 to N-1: number names by numpy.unique(names, return_inverse=True), of both columns together if their "
    "nodes are of one type, else of each column alone, for Graph.from_edge_indices"
)
_INTEGERS = ("src", "dst", "time")
_KNOWN = (*_INTEGERS, "weight", "edge_weight")  # columns that mean something already: not suggested as an end
_FLOAT32_MAX = torch.finfo(torch.float32).max
_PIECE_BYTES = 1 << 23
_BYTES_PER_ROW = 16  # of a typical edge in text: pieces of text and of parquet hold about as many rows


def is_table(path: Path) -> bool:
    return path.suffix == ".parquet" or path.suffix in DELIMITERS


def table_pieces(
    path: Path,
    columns: Sequence[str] | None = None,
    *,
    piece_bytes: int = _PIECE_BYTES,
    progress: Callable[[float], None] | None = None,
) -> Iterator[Columns]:
    """The table's rows in order, some at a time, as columns by name; at least one piece, empty where there is no row.

    `columns` names them, by default the header does, or `src dst` where there is none. `piece_bytes` of text are
    parsed at once; `progress` is told the share of the table that was read. ValueError names the file, and the line
    in a text file.
    """
    read = _parquet_pieces if path.suffix == ".parquet" else _text_pieces
    num_rows = 0
    for share, piece in read(path, columns, piece_bytes):
        yield _check_columns(piece, path, num_rows, columns)
        num_rows += piece["src"].numel()
        if progress is not None:
            progress(share)


def _check_columns(piece: Columns, path: Path, before: int, columns: Sequence[str] | None) -> Columns:
    for name in ("src", "dst"):
        if name not in piece:
            raise _no_column(path, name, piece, columns)
        if piece[name].dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{path}: column {name!r} must hold integers, got {piece[name].dtype}")
        if piece[name].numel() and (lowest := int(piece[name].min())) < 0:
            position = before + int(piece[name].argmin())
            raise ValueError(
                f"{path}: {name} must be 0 or more, ids count from 0, got {lowest} at position {position}: leave such "
                "edges out, or number the nodes anew"
            )
    return piece


def _no_column(path: Path, name: str, names: Iterable[str], columns: Sequence[str] | None) -> ValueError:
    """`columns` are the names that the user gave, `names` those that count."""
    listed = list(names)
    said = f"{path}: no column is called {name!r}, there are {some(listed)}"
    if columns is None:
        return ValueError(
            f"{said}; name them in their order, the two ends of an edge src and dst: columns=['src', 'dst', ...] "
            "(--columns src,dst,...)"
        )
    said += "; columns= calls the two ends of an edge src and dst"
    missing = [each for each in ("src", "dst") if each not in listed]
    unknown = [each for each in listed if each not in _KNOWN]
    if len(unknown) < len(missing):
        return ValueError(said)
    renamed = dict(zip(unknown, missing, strict=False))
    return ValueError(f"{said}, such as --columns {','.join(renamed.get(each, each) for each in listed)}")


@dataclass(frozen=True)
class _TextLayout:
    """Where the edges of a text file begin, the names in its header, and how many fields a line has (0: no edges)."""

    offset: int
    line: int
    header: list[str] | None
    num_fields: int


def _text_pieces(path: Path, columns: Sequence[str] | None, piece_bytes: int) -> Iterator[tuple[float, Columns]]:
    delimiter = DELIMITERS[path.suffix]
    layout = _inspect(path, delimiter, columns)
    names = list(columns or layout.header or ("src", "dst"))
    if layout.num_fields == 0:
        yield (
            1.0,
            {
                name: torch.empty(0, dtype=torch.int64 if name in _INTEGERS else torch.float32, device="cpu")
                for name in names
            },
        )
        return
    if len(names) != layout.num_fields:
        raise ValueError(f"{path}: its lines have {layout.num_fields} fields, but columns names {len(names)}: {names}")
    if len(set(names)) != len(names):
        raise ValueError(f"{path}: every column needs a name of its own, got {names}")
    for name in ("src", "dst"):
        if name not in names:
            error = _no_column(path, name, names, columns)
            raise error if columns is not None else ValueError(f"{error}. If this is an edge, {_NUMBER_THEM}")
    kinds = "".join("i" if name in _INTEGERS else "f" for name in names)
    size, done = path.stat().st_size, layout.offset
    for line, text in _whole_lines(path, layout, piece_bytes):
        try:
            parsed = parse_table(text, kinds, delimiter, line)
            _check_range(text, parsed, delimiter, line)
        except ValueError as error:
            raise ValueError(f"{path}: {error}{_remedy(str(error), names)}") from error
        done += len(text)
        yield done / size, dict(zip(names, parsed, strict=True))


def _remedy(error: str, names: Sequence[str]) -> str:
    """What to do where an id is a name."""
    found = re.search(r"field (\d+) must be an integer, got '(.*)", error)
    if found is None or names[int(found[1]) - 1] not in ("src", "dst") or _is_number(found[2].strip("'")):
        return ""
    return f": {_NUMBER_THEM}"


def _check_range(text: bytearray, parsed: Sequence[Tensor], delimiter: str | None, first_line: int) -> None:
    """ValueError for a number that only became infinite, because float32 has none as large."""
    infinite = [i for i, column in enumerate(parsed) if column.is_floating_point() and bool(column.isinf().any())]
    if not infinite:
        return
    for number, raw in enumerate(text.split(b"\n"), start=first_line):
        content = _without_comment(raw)
        fields = [field.strip() for field in content.split(delimiter)] if content else []
        for i in infinite if fields else []:
            value = float(fields[i])
            if math.isfinite(value) and abs(value) > _FLOAT32_MAX:
                raise ValueError(f"line {number}: field {i + 1} must fit in float32, got {fields[i]!r}")


def _whole_lines(path: Path, layout: _TextLayout, piece_bytes: int) -> Iterator[tuple[int, bytearray]]:
    """About `piece_bytes` at a time, cut at line ends, with the number of the first line (from 1)."""
    line = layout.line
    rest = bytearray()
    with open(path, "rb") as file:
        file.seek(layout.offset)
        while data := file.read(piece_bytes):
            cut = data.rfind(b"\n") + 1
            if cut == 0:
                rest += data
                continue
            rest += memoryview(data)[:cut]
            yield line, rest
            line += rest.count(b"\n")
            rest = bytearray(memoryview(data)[cut:])
    if rest:
        yield line, rest


def _inspect(path: Path, delimiter: str | None, columns: Sequence[str] | None) -> _TextLayout:
    header: list[str] | None = None
    with open(path, "rb") as file:
        offset = len(BYTE_ORDER_MARK) if file.read(len(BYTE_ORDER_MARK)) == BYTE_ORDER_MARK else 0
        file.seek(offset)
        for number, raw in enumerate(file, start=1):
            content = _without_comment(raw)
            if content:
                fields = [field.strip() for field in content.split(delimiter)]
                if header is not None or _is_number(fields[0]):
                    return _TextLayout(offset, number, header, len(fields))
                header = _check_header(fields, columns, f"{path}: line {number}")
            offset += len(raw)
    return _TextLayout(offset, 0, header, 0)


def _without_comment(raw: bytes | bytearray) -> str:
    content = raw.decode("utf-8", errors="replace")
    for mark in COMMENTS:
        content = content.partition(mark)[0]
    return content.strip()


def _check_header(fields: list[str], columns: Sequence[str] | None, where: str) -> list[str]:
    """A header is names only, as many as there are columns: anything else is an edge with a slip in it."""
    if any(map(_is_number, fields)):
        raise ValueError(f"{where}: {fields[0]!r} is not a number, and a header has no numbers, got {fields}")
    if columns is not None and len(fields) != len(columns):
        raise ValueError(f"{where}: {fields} is neither an edge nor a header of the columns {list(columns)}")
    return fields


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _parquet_pieces(path: Path, columns: Sequence[str] | None, piece_bytes: int) -> Iterator[tuple[float, Columns]]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("parquet files are read by pyarrow: pip install pyarrow") from error
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} cannot be read as parquet: {error}") from error
    with file:
        stored = file.schema_arrow.names
        names = list(columns or stored)
        if len(names) != len(stored):
            raise ValueError(f"{path}: it has columns {stored}, but columns names {len(names)}: {names}")
        rows = max(piece_bytes // _BYTES_PER_ROW, 1)
        empty = file.schema_arrow.empty_table().to_batches() or [pyarrow.RecordBatch.from_pylist([], file.schema_arrow)]
        done, num_rows = 0, file.metadata.num_rows
        for batch in file.iter_batches(batch_size=rows) if num_rows else empty:
            done += batch.num_rows
            piece = {name: _parquet_column(column, name, path) for name, column in zip(names, batch, strict=True)}
            yield done / max(num_rows, 1), piece


def _parquet_column(column, name: str, path: Path) -> Tensor:  # type: ignore[no-untyped-def]
    where = f"{path}: column {name!r}"
    if column.null_count:
        raise ValueError(f"{where} has {column.null_count} missing values")
    array = column.to_numpy(zero_copy_only=False)
    if array.dtype.kind not in "iufb":
        raise ValueError(f"{where} must hold numbers, got {column.type}")
    if name in ("src", "dst") and array.dtype.kind in "iu":  # ids may be stored in any integers
        if array.size and int(array.max()) >= 2**63:
            raise ValueError(f"{where} must fit in int64, got {array.max()}")
        array = array.astype(np.int64)
    return torch.from_numpy(np.array(array))
