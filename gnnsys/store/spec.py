"""What a table is: its name, its rows' shape and dtype, and which rows each part has.

Tables of nodes and edges are named "node/TYPE/NAME" and "edge/SRC|REL|DST/NAME" and cut where the parts are; any other
name is a free-standing table. On the wire a table is known by a number made of its name and of the generation that it
was given when it was created: who has looked at it before it was dropped and made anew does not reach the new one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gnnsys.comm import DTYPES
from gnnsys.graph import EdgeType, NodeType, dtype_name, dtype_named

_MAX_NAME = 512


@dataclass(frozen=True)
class TableSpec:
    """Part p has the rows [bounds[p], bounds[p + 1]). A `mutable` table is trained or written while it is read: its
    rows are pulled when they are needed, never ahead. `generation` tells apart tables that had one name in turn."""

    name: str
    row_shape: tuple[int, ...]
    dtype: torch.dtype
    bounds: tuple[int, ...]
    mutable: bool = False
    generation: int = field(default=0, compare=False)  # 0: of the graph's files

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not 0 < len(self.name) <= _MAX_NAME:
            raise ValueError(f"a table's name must be text of 1 to {_MAX_NAME} characters, got {self.name!r}")
        if not isinstance(self.dtype, torch.dtype):
            raise ValueError(f"dtype of table {self.name!r} must be a torch.dtype, got {self.dtype!r}")
        if any(not isinstance(size, int) or size < 0 for size in self.row_shape) or len(self.row_shape) > 7:
            raise ValueError(f"row_shape of table {self.name!r} must be at most 7 sizes >= 0, got {self.row_shape}")
        bounds = self.bounds
        if len(bounds) < 2 or bounds[0] != 0 or any(a > b for a, b in pairwise(bounds)):
            raise ValueError(f"bounds of table {self.name!r} must start at 0 and never decrease, got {bounds}")

    @property
    def num_rows(self) -> int:
        return self.bounds[-1]

    @property
    def num_parts(self) -> int:
        return len(self.bounds) - 1

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.num_rows, *self.row_shape)

    @property
    def row_size(self) -> int:
        """Values in a row."""
        return math.prod(self.row_shape)

    def part_shape(self, part: int) -> tuple[int, ...]:
        """The shape of a part's rows."""
        return (self.bounds[part + 1] - self.bounds[part], *self.row_shape)

    @cached_property
    def number(self) -> int:
        """What stands for the table on the wire: 63 bits of a hash of its name and generation."""
        text = f"{self.name}\0{self.generation}" if self.generation else self.name
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1

    @cached_property
    def bounds_tensor(self) -> Tensor:
        return torch.tensor(self.bounds, dtype=torch.int64, device="cpu")

    @cached_property
    def narrow(self) -> bool:
        """Row numbers inside a part fit in 32 bits."""
        return max(b - a for a, b in pairwise(self.bounds)) < 1 << 31

    def like(self, name: str, dtype: torch.dtype, row_shape: Sequence[int] | None = None) -> TableSpec:
        """A table beside this one: other values for the same rows, of another shape where one is given."""
        shape = self.row_shape if row_shape is None else tuple(row_shape)
        return TableSpec(name, shape, dtype, self.bounds, self.mutable, self.generation)

    def to_json(self) -> dict[str, Any]:
        """Plain values that `from_json` takes."""
        return {
            "name": self.name,
            "row_shape": list(self.row_shape),
            "dtype": dtype_name(self.dtype),
            "bounds": list(self.bounds),
            "mutable": self.mutable,
        }

    @classmethod
    def from_json(
        cls, values: Mapping[str, Any], bounds: Sequence[int] | None = None, generation: int = 0
    ) -> TableSpec:
        """The spec that `to_json` described; ValueError where it did not describe one."""
        try:
            dtype = dtype_named(values["dtype"])
            if dtype is None:
                raise ValueError(f"unknown dtype {values['dtype']!r}")
            found = values["bounds"] if bounds is None else bounds
            mutable = bool(values["mutable"])
            return cls(values["name"], tuple(values["row_shape"]), dtype, tuple(found), mutable, int(generation))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a table: {error!r}") from error


def check_new(spec: TableSpec) -> None:
    """ValueError unless such a table may be created: its rows can travel, its name leaves the graph's tables alone."""
    if spec.dtype not in DTYPES:
        names = ", ".join(str(dtype)[6:] for dtype in DTYPES)
        raise ValueError(f"table {spec.name!r} cannot be {spec.dtype}: rows travel as {names}")
    first, *others = spec.name.split("/")
    if first in ("global", "original") or (first in ("node", "edge") and len(others) < 2):
        raise ValueError(
            f"a table cannot be named {spec.name!r}: tables of the graph begin like this; data of nodes is "
            "node/TYPE/NAME, data of edges edge/SRC|REL|DST/NAME"
        )


def even_bounds(num_rows: int, num_parts: int) -> tuple[int, ...]:
    """Where a free-standing table is cut: parts differ by at most one row."""
    if num_rows < 0:
        raise ValueError(f"num_rows must be >= 0, got {num_rows}")
    return tuple(num_rows * part // num_parts for part in range(num_parts + 1))


def node_table(node_type: NodeType, name: str) -> str:
    """The name of the table that holds data of nodes."""
    return f"node/{node_type}/{name}"


def edge_table(edge_type: EdgeType, name: str) -> str:
    """The name of the table that holds data of edges."""
    return f"edge/{'|'.join(edge_type)}/{name}"
