"""What callers hand to a store, checked before anything is sent: errors name the table, what came and what fits."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gnnsys.ops import BufferPool
from gnnsys.store.message_plan import WIRE_DTYPES
from gnnsys.store.pull import Pull
from gnnsys.store.spec import TableSpec

_SEEDS = 1 << 63


def check_ids(ids: Tensor, spec: TableSpec) -> None:
    """ValueError unless these can be row numbers."""
    if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"ids of table {spec.name!r} must be int32 or int64 [n], got {ids.dtype} {list(ids.shape)}")


def checked_rows(spec: TableSpec, ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and rows that may be pushed to a table, on the CPU; ValueError where they do not fit it."""
    check_ids(ids, spec)
    if tuple(rows.shape) != (ids.numel(), *spec.row_shape):
        raise ValueError(
            f"rows for table {spec.name!r} must be {[ids.numel(), *spec.row_shape]}, got {list(rows.shape)}"
        )
    if rows.dtype != spec.dtype and not (rows.dtype in WIRE_DTYPES and spec.dtype in WIRE_DTYPES):
        raise ValueError(f"rows for table {spec.name!r} must be {spec.dtype}, got {rows.dtype}")
    return ids.detach().cpu().contiguous(), rows.detach().cpu()


def init_json(init: str | float | tuple[str, float, float, int], spec: TableSpec) -> dict[str, Any]:
    """How a shard is told what first values rows have; ValueError where that is no way."""
    if isinstance(init, str) and init == "zeros":
        return {"kind": "zeros"}
    if isinstance(init, (int, float)) and not isinstance(init, bool):
        return {"kind": "constant", "value": _first_value(init, spec)}
    if isinstance(init, tuple) and len(init) == 4 and init[0] == "uniform":
        if not spec.dtype.is_floating_point:
            raise ValueError(f"uniform values are floating, table {spec.name!r} is {spec.dtype}")
        seed = init[3]
        if not isinstance(seed, int) or not 0 <= seed < _SEEDS:
            raise ValueError(f"the seed of table {spec.name!r} must be a whole number in [0, 2**63), got {seed!r}")
        low, high = _first_value(init[1], spec), _first_value(init[2], spec)
        return {"kind": "uniform", "low": low, "high": high, "seed": seed}
    raise ValueError(f'init must be "zeros", a number or ("uniform", low, high, seed), got {init!r}')


def _first_value(value: float, spec: TableSpec) -> float:
    """The number as the table's dtype has it; whole ones stay whole, whatever their size."""
    problem = ValueError(f"table {spec.name!r} is {spec.dtype}, which has no {value!r} to begin with")
    try:
        if spec.dtype.is_floating_point:
            found = float(value)
            largest = torch.finfo(spec.dtype).max
            fits = math.isinf(found) or abs(found) <= largest  # and not nan, which is never the same again
        else:
            found = int(value)
            limits = (0, 1) if spec.dtype == torch.bool else (torch.iinfo(spec.dtype).min, torch.iinfo(spec.dtype).max)
            fits = found == value and limits[0] <= found <= limits[1]
    except (TypeError, ValueError, OverflowError) as error:
        raise problem from error
    if not fits:
        raise problem
    return found


def out_for(pull: Pull, spec: TableSpec, buffers: BufferPool) -> Tensor:
    """Where the rows of a pull go: the caller's buffer, or one of ours; ValueError where it does not fit."""
    row_shape = spec.row_shape if pull.columns is None else (pull.columns.numel(),)
    if pull.wire_dtype is not None and pull.wire_dtype not in WIRE_DTYPES:
        raise ValueError(f"wire_dtype must be one of {list(WIRE_DTYPES)}, got {pull.wire_dtype}")
    if pull.wire_dtype is not None and spec.dtype not in WIRE_DTYPES:
        raise ValueError(f"table {spec.name!r} is {spec.dtype}: only floating rows travel as {pull.wire_dtype}")
    if pull.at is not None and (pull.out is None or pull.at.shape != pull.ids.shape):
        raise ValueError("at must name one row of out per id")
    if pull.out is None:
        return buffers.empty((pull.ids.numel(), *row_shape), spec.dtype)
    if tuple(pull.out.shape[1:]) != row_shape or (pull.at is None and pull.out.shape[0] != pull.ids.numel()):
        raise ValueError(
            f"out must be {[pull.ids.numel(), *row_shape]} for table {spec.name!r}, got {list(pull.out.shape)}"
        )
    return pull.out
