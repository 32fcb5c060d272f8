"""The order in which a native op takes and gives back memory, beside the most that it takes at once.

What torch's allocator of a device reserves depends on this order. It is told for the ops of training on whole graphs;
of others an estimate has their workspace (`_workspace.py`) as one block, taken first and given back last. On the CPU
it is told where an op takes a tensor inside, which torch counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnsys.ops._features import sum_dtype
from gnnsys.ops._spmm_scratch import padded_size, split_bytes

_INT32_MAX = (1 << 31) - 1
_SEGMENT = 1024  # edges of a stretch of a long row: csrc/cuda/segments.cuh
_SORT_TILE_BYTES, _SORT_BYTES = 0.1154, 6100  # of a radix sort beside its copies: per pair, and in all


class AllocationStep(NamedTuple):
    """`takes` so many bytes; or `output` is the number of the result that is made now; or `gives` back what the step of
    that number took."""

    takes: int | None = None
    output: int | None = None
    gives: int | None = None


_Order = Callable[..., list[AllocationStep]]
_ORDERS: dict[tuple[str, str], _Order] = {}


def tells_order(op: str, device_type: str = "cuda") -> Callable[[_Order], _Order]:
    """Registers the order of an op; it is given its arguments, of which tensors may be fake."""

    def register(order: _Order) -> _Order:
        assert (op, device_type) not in _ORDERS, f"{op} has two orders for {device_type}"
        _ORDERS[op, device_type] = order
        return order

    return register


def allocation_order(op: str, arguments: Sequence[Any], device_type: str = "cuda") -> list[AllocationStep] | None:
    """What the op does, step by step; None where it is not told.

    >>> rows, ids = torch.empty(3, 4, device="meta"), torch.empty(5, dtype=torch.int32, device="meta")
    >>> allocation_order("spmm", [torch.empty(4, dtype=torch.int64, device="meta"), ids, None, rows])
    [AllocationStep(takes=None, output=0, gives=None)]
    """
    order = _ORDERS.get((op, device_type))
    return None if order is None else order(*arguments)


def _take(num_bytes: int) -> AllocationStep:
    return AllocationStep(takes=num_bytes)


def _make(output: int) -> AllocationStep:
    return AllocationStep(output=output)


def _give(step: int) -> AllocationStep:
    return AllocationStep(gives=step)


def _sort(num_edges: int, columns_bytes: int, narrow: bool, has_keys: bool) -> list[AllocationStep]:
    """csrc/cuda/structure.cu, `group`: keys, positions, sorted keys, their order (an output where ids are narrow),
    the columns of a transpose, the sort, and the results."""
    key = 4 if num_edges <= _INT32_MAX else 8
    order_is_output = narrow and key == 4
    steps = [_take(num_edges * key)] if has_keys else []
    steps += [_take(num_edges * key), _take(num_edges * key)]
    steps.append(_make(2) if order_is_output else _take(num_edges * key))
    if columns_bytes:
        steps.append(_take(num_edges * columns_bytes))
    taken = [at for at, step in enumerate(steps) if step.takes is not None]
    sort = 2 * key * num_edges + int(_SORT_TILE_BYTES * num_edges) + _SORT_BYTES
    steps += [_take(sort), _give(len(steps)), _make(0), _make(1)]
    if not order_is_output:
        steps.append(_make(2))
    return steps + [_give(at) for at in reversed(taken)]


@tells_order("coo_to_csc")
def _(src: Tensor, dst: Tensor, num_src: int, num_dst: int, narrow: bool = False) -> list[AllocationStep]:
    narrow = src.dtype == torch.int32 or (narrow and max(num_src, src.numel()) <= _INT32_MAX)
    return _sort(src.numel(), 0, narrow, has_keys=src.itemsize != 4)


@tells_order("transpose")
def _(indptr: Tensor, indices: Tensor, num_src: int) -> list[AllocationStep]:
    narrow = indices.dtype == torch.int32 and indptr.numel() - 1 <= _INT32_MAX
    return _sort(indices.numel(), 4 if narrow else 8, narrow, has_keys=indices.itemsize != 4)


@tells_order("spmm")
def _(indptr: Tensor, indices: Tensor, positions: Tensor | None, x: Tensor, *others: Any) -> list[AllocationStep]:
    """Padded rows and sums where they pay, then lists and results of the parts of long rows."""
    size, num_dst, num_edges = x[0].numel() if x.shape[0] else 0, indptr.numel() - 1, indices.numel()
    padded = size if x.dim() == 3 else padded_size(size, x.itemsize, max(x.shape[0], num_dst), num_edges)
    steps = [_make(0)]
    if padded != size:
        steps += [_take(x.shape[0] * padded * x.itemsize), _take(num_dst * padded * x.itemsize)]
    parts = split_bytes(num_edges, padded, sum_dtype(x.dtype).itemsize)
    if parts:
        steps.append(_take(parts))
    taken = [at for at, step in enumerate(steps) if step.takes is not None]
    return steps + [_give(at) for at in reversed(taken)]


def _slots(num_edges: int) -> int:
    return 0 if num_edges <= _SEGMENT else 2 * -(-num_edges // _SEGMENT)


def _for_a_while(steps: list[AllocationStep], *sizes: int) -> None:
    for num_bytes in sizes:
        if num_bytes:
            steps += [_take(num_bytes), _give(len(steps))]


@tells_order("gat_aggregate")
def _(indptr: Tensor, indices: Tensor, x: Tensor, *others: Any) -> list[AllocationStep]:
    """Totals per row and head; and results of long rows' stretches, of totals and then of sums."""
    wide, heads, slots = sum_dtype(x.dtype).itemsize, x.shape[1], _slots(indices.numel())
    steps = [_make(0), _make(1), _take(2 * wide * heads * (indptr.numel() - 1))]
    _for_a_while(steps, 2 * wide * heads * slots, wide * heads * x.shape[2] * slots)
    return [*steps, _give(2)]


@tells_order("gat_aggregate_grad")
def _(
    indptr: Tensor, t_indptr: Tensor, t_indices: Tensor, t_positions: Tensor, x: Tensor, *others: Any
) -> list[AllocationStep]:
    """<grad, out> per row and head; and results of stretches, of rows and then of scores by either end."""
    wide, heads, slots = sum_dtype(x.dtype).itemsize, x.shape[1], _slots(t_indices.numel())
    steps = [*map(_make, range(4)), _take(wide * heads * (indptr.numel() - 1))]
    _for_a_while(steps, wide * heads * x.shape[2] * slots, wide * heads * slots, wide * heads * slots)
    return [*steps, _give(4)]


@tells_order("gat_aggregate_grad", "cpu")
def _(
    indptr: Tensor, t_indptr: Tensor, t_indices: Tensor, t_positions: Tensor, x: Tensor, *others: Any
) -> list[AllocationStep]:
    """<grad, out> per row and head is a tensor; what threads hold beside it is none."""
    inside = sum_dtype(x.dtype).itemsize * x.shape[1] * (indptr.numel() - 1)
    return [*map(_make, range(4)), _take(inside), _give(4)]
