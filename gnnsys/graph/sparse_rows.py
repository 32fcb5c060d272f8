"""What features in CSR form cost: they become dense float32 rows, which a batch gathers by position.

A part keeps rows of one width, read at their place without a search; sparse ones would have to be unpacked in every
batch. So they are dense from the start, and whoever has many columns is told what that takes before it is done.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gnnsys.graph.npy import UNREADABLE, check_member, read_values, unreadable

_SHAPE = "_shape.npy"


@dataclass(frozen=True)
class SparseRows:
    """Features of an `.npz` in CSR form: `x_data`, `x_indices`, `x_indptr`, `x_shape`."""

    name: str
    num_rows: int
    num_columns: int
    num_values: int
    stored_bytes: int  # of the four arrays, unpacked

    @property
    def dense_bytes(self) -> int:
        return 4 * self.num_rows * self.num_columns

    def __str__(self) -> str:
        share = 100 * self.num_values / max(self.num_rows * self.num_columns, 1)
        dense, stored = (f"{size / 1e6:,.1f} MB" for size in (self.dense_bytes, self.stored_bytes))
        return (
            f"{self.name} is sparse, {self.num_rows:,} x {self.num_columns:,} with {share:.2g} % of it filled: "
            f"as dense float32 rows it takes {dense} in memory and in the parts, instead of {stored}"
        )


def sparse_rows_in(path: Path) -> list[SparseRows]:
    """The sparse features of an `.npz`, from headers and shapes alone; what is malformed is left to `load`."""
    found = []
    try:
        with zipfile.ZipFile(path) as archive:
            sizes = {member.filename: member for member in archive.infolist()}
            for filename in [name for name in sizes if name.endswith(_SHAPE)]:
                name = filename.removesuffix(_SHAPE)
                parts = [sizes.get(f"{name}_{part}.npy") for part in ("data", "indices", "indptr", "shape")]
                if None in parts:
                    continue
                with archive.open(filename) as stream:
                    header = check_member(sizes[filename], stream)
                    shape = read_values(stream, header).tolist() if header.shape == (2,) else None
                if shape is not None:
                    num_rows, num_columns = shape
                    with archive.open(f"{name}_data.npy") as stream:
                        num_values = int(np.prod(check_member(sizes[f"{name}_data.npy"], stream).shape))
                    stored = sum(part.file_size for part in parts if part is not None)
                    found.append(SparseRows(name, int(num_rows), int(num_columns), num_values, stored))
    except UNREADABLE as error:
        raise unreadable(path, error) from error
    return found
