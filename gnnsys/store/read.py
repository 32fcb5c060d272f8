"""Rows of several sources at once, here and now: for faces that answer a question instead of loading ahead."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeGuard

import torch
from torch import Tensor

from gnnsys.store.pull import Pull
from gnnsys.store.source import put_rows
from gnnsys.store.tensor import DistTensor


def read_rows(wanted: Iterable[tuple[Any, Tensor]]) -> list[Tensor]:
    """The rows of each (source, ids): one pull for all tables of a store, the other sources meanwhile."""
    tables: dict[int, tuple[Any, list[tuple[int, Pull]]]] = {}
    begun: dict[int, tuple[Any, Tensor]] = {}
    rows: dict[int, Tensor] = {}
    for number, (source, ids) in enumerate(wanted):
        if isinstance(source, Tensor):
            rows[number] = source.index_select(0, ids.to(source.device))
        elif is_table(source):
            tables.setdefault(id(source.store), (source.store, []))[1].append((number, Pull(source.name, ids)))
        else:
            out = torch.empty((ids.numel(), *source.shape[1:]), dtype=source.dtype, device="cpu")
            begun[number] = source.begin_read(ids, out), out
    under_way = [(store.pull([pull for _, pull in some]), some) for store, some in tables.values()]
    for pending, some in under_way:
        rows.update(zip((number for number, _ in some), pending.result(), strict=True))
    for number, (reading, out) in begun.items():
        rows[number] = put_rows(reading.result(), out, "array")
    return [rows[number] for number in range(len(rows))]


def is_table(source: Any) -> TypeGuard[DistTensor]:
    """Whether rows come from a store, that fetches several tables in one round trip."""
    return isinstance(source, DistTensor)
