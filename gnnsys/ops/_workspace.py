"""What a native op takes beside its outputs, told from shapes and dtypes: who plans memory asks here before a call.

Each op has one statement per device type, registered beside its fake kernel. Its workspace is the largest number of
bytes that it holds at any time, less the bytes of its outputs:

    peak of a call <= bytes of its outputs + workspace_bytes(op, ...)

Fixed small things (a tensor's own record, an op's argument lists) are left out: `SMALL_BYTES` covers them. On CUDA
devices the bytes are those asked of torch's allocator, which rounds them up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

SMALL_BYTES = 1 << 16  # of a call, for what statements leave out
_ROW_WORK = 1 << 14  # rows and edges that a thread takes at a time: csrc/cpu/row_work.h
_SHARES_PER_THREAD = 4  # csrc/common/parallel.h
_SCAN_TILE = 1 << 10  # entries per word of a scan on a device, at least


class Expected(NamedTuple):
    """What shapes do not tell. None: the op's statement takes the most that its arguments allow."""

    num_threads: int
    num_found: int | None
    most_degree: int | None

    def threads(self, size: int, grain: int) -> int:
        """As `num_threads_for` in csrc/common/parallel.h."""
        return min(max(size // max(grain, 1), 1), self.num_threads)

    def shares(self, size: int, grain: int) -> int:
        """As `num_shares_for` in csrc/common/parallel.h."""
        threads = self.threads(size, grain)
        return 1 if threads == 1 else min(size // max(grain, 1), threads * _SHARES_PER_THREAD)

    def row_threads(self, num_rows: int, num_edges: int) -> int:
        """Threads of a loop over the rows of a CSC."""
        return self.threads(-(-(num_rows + num_edges) // _ROW_WORK), 1)

    def degree(self, num_edges: int) -> int:
        return num_edges if self.most_degree is None else min(self.most_degree, num_edges)

    def edges_of(self, num_seeds: int, num_edges: int) -> int:
        """The in-edges of different seeds together."""
        return num_edges if self.most_degree is None else min(num_seeds * self.most_degree, num_edges)

    def taken(self, num_seeds: int, fanout: int, num_edges: int) -> int:
        """Edges that a draw of `fanout` takes of all seeds; of all edges (-1) those of different seeds."""
        if self.num_found is not None:
            return self.num_found
        return num_seeds * fanout if fanout >= 0 else self.edges_of(num_seeds, num_edges)


Statement = Callable[..., int]
_STATEMENTS: dict[tuple[str, str], Statement] = {}


def tells_workspace(op: str, device_type: str) -> Callable[[Statement], Statement]:
    """Registers a statement. It is given an `Expected`, then the op's arguments, of which tensors may be fake."""

    def register(statement: Statement) -> Statement:
        assert (op, device_type) not in _STATEMENTS, f"{op} has two statements for {device_type}"
        _STATEMENTS[op, device_type] = statement
        return statement

    return register


def takes_outputs_only(*ops: str, device_types: Iterable[str] = ("cpu", "cuda")) -> None:
    """Registers ops that take nothing beside their outputs."""
    for op in ops:
        for device_type in device_types:
            tells_workspace(op, device_type)(lambda expected, *arguments, **named: 0)


def workspace_bytes(
    op: str,
    *arguments: Any,
    device: torch.device | str | None = None,
    num_found: int | None = None,
    most_degree: int | None = None,
    num_threads: int | None = None,
) -> int:
    """The bytes that `torch.ops.gnnsys.<op>(*arguments)` takes at most beside its outputs.

    Tensors may be on the meta device. `device` is where the op would run; None: where its tensors are. The size of some
    outputs follows from values (edges that are sampled): `num_found` says it where it is known, `most_degree` the
    largest in-degree. Else the most that shapes allow is assumed, with different seeds where all their edges are
    taken. `num_threads` is torch's number of threads, as it is now by default.

    >>> ids = torch.empty(1_000_000, dtype=torch.int32, device="meta")
    >>> workspace_bytes("degrees", ids, 100_000, device="cpu", num_threads=4)
    2400000
    """
    kind = _device_type(arguments) if device is None else torch.device(device).type
    statement = _STATEMENTS.get((op, kind))
    if statement is None:
        known = sorted({name for name, on in _STATEMENTS if on == kind})
        raise ValueError(f"op {op!r} tells no workspace for {kind!r} devices; these do: {', '.join(known) or 'none'}")
    threads = torch.get_num_threads() if num_threads is None else num_threads
    return statement(Expected(threads, num_found, most_degree), *arguments)


def told_workspaces() -> set[tuple[str, str]]:
    """(op, device type) of every statement there is."""
    return set(_STATEMENTS)


def power_above(size: int, least: int = 1) -> int:
    """The smallest power of two that is at least `size` and `least`."""
    return 1 << max(size - 1, least - 1, 0).bit_length()


def scan_bytes(size: int) -> int:
    """Words of a scan over `size` entries on a device, and what it reports."""
    return 8 * (size // _SCAN_TILE + 2) + 128


def sort_bytes(size: int, key_bytes: int) -> int:
    """What a radix sort of pairs takes on a device beside its inputs and outputs: another copy, and counts."""
    return 2 * size * key_bytes + size // 4 + (1 << 18)


def _device_type(arguments: Iterable[Any]) -> str:
    tensors = [t for a in arguments for t in (a if isinstance(a, list | tuple) else (a,)) if isinstance(t, Tensor)]
    types = {tensor.device.type for tensor in tensors}
    if not types or types == {"meta"}:
        raise ValueError("device must be given where no argument is on one: pass device='cpu' or device='cuda'")
    return "cuda" if "cuda" in types else "cpu"
