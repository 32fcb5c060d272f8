"""Lines of numbers to columns: the typed face of csrc/cpu/parse_table.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnsys.ops._library import native


def parse_table(text: bytes | bytearray, kinds: str, delimiter: str | None = None, first_line: int = 1) -> list[Tensor]:
    """The columns of a table: `kinds` has a letter per field, `i` for int64 and `f` for float32.

    Fields are separated by `delimiter`, or by runs of blanks. Blank lines are skipped, `#` and `%` start a comment.
    What is wrong is a ValueError that names the line, the first one being `first_line`.

    >>> parse_table(b"0 1 # an edge\\n2 3\\n", "ii")
    [tensor([0, 2]), tensor([1, 3])]
    """
    writable = bytearray(text) if isinstance(text, bytes) else text
    none = torch.empty(0, dtype=torch.uint8, device="cpu")
    data = torch.frombuffer(writable, dtype=torch.uint8) if writable else none
    return native.parse_table(data, kinds, ord(delimiter) if delimiter else 0, first_line)
