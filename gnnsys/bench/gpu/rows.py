"""gather_rows from pinned host memory and through a cache on the device, beside copies of as many bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gnnsys.bench.case import OURS, Case, Side, Versus, of_peer, rate
from gnnsys.bench.gpu.inputs import device, graph_sizes, is_gpu, num_cores, random_rows
from gnnsys.bench.workload import SEED, Workload
from gnnsys.ops import gather_cached, gather_rows

DIM = 128  # 512 bytes a row, as the target says, in quick runs too
NUM_GATHERED = 400_000  # the input nodes of a three-hop batch
HIT_RATE = 0.9
COPY, SELECT, UNCACHED = "copy", "index_select", "uncached"


def gather(work: Workload) -> Iterator[Case]:
    def from_host() -> dict[str, Side]:
        table, index = _pinned_table(work), _index(work)
        out, selected = (torch.empty(index.numel(), DIM, device=device(work)) for _ in range(2))
        on_host, buffer = index.cpu(), _pinned(work, index.numel())

        def select_and_copy() -> Tensor:
            torch.index_select(table, 0, on_host, out=buffer)
            return selected.copy_(buffer, non_blocking=True)

        return {
            OURS: Side(lambda: gather_rows(table, index, out=out), clock="device"),
            SELECT: of_peer(lambda: select_and_copy, num_cores(), clock="synced"),
            COPY: _copy(out, table[: index.numel()]),
        }

    def from_device() -> dict[str, Side]:
        table, index = random_rows(work, _num_rows(work), DIM), _index(work)
        ours, selected, copied = (torch.empty(index.numel(), DIM, device=device(work)) for _ in range(3))
        return {
            OURS: Side(lambda: gather_rows(table, index, out=ours), clock="device"),
            SELECT: of_peer(lambda: lambda: torch.index_select(table, 0, index, out=selected), clock="device"),
            COPY: _copy(copied, table[: index.numel()]),
        }

    unit = rate("GB/s", 1e-9 * _num_gathered(work) * DIM * 4)
    host = (Versus((COPY,), 0.85), Versus((SELECT,)))
    yield Case("gather/512B/pinned host memory", unit, from_host, host, limit=COPY, agree=0.0, repeats=11)
    yield Case("gather/512B/device memory", unit, from_device, (Versus((SELECT,)),), limit=COPY, agree=0.0, repeats=11)


def cached(work: Workload) -> Iterator[Case]:
    """Half of the rows lie on the device, and 90% of those asked for are among them."""

    def sides() -> dict[str, Side]:
        table, target = _pinned_table(work), device(work)
        num_rows, num_gathered = _num_rows(work), _num_gathered(work)
        num_hits = round(HIT_RATE * num_gathered)
        order = work.ids(num_rows, num_rows)
        kept, others = order[: num_rows // 2], order[num_rows // 2 :]
        index = torch.cat([_draw(kept, num_hits), _draw(others, num_gathered - num_hits)])
        index = index[work.ids(num_gathered, num_gathered)].to(target)
        slots = torch.full((num_rows,), -1, dtype=torch.int32)
        slots[kept] = torch.arange(kept.numel(), dtype=torch.int32)
        slots, cache = slots.to(target), table[kept].to(target)
        ours, uncached = (torch.empty(num_gathered, DIM, device=target) for _ in range(2))
        calls: dict[str, Callable[[], Any]] = {
            OURS: lambda: gather_cached(cache, slots, table, index, out=ours),
            UNCACHED: lambda: gather_rows(table, index, out=uncached),
        }
        return {name: Side(call, clock="device") for name, call in calls.items()}

    unit = rate("GB/s", 1e-9 * _num_gathered(work) * DIM * 4)
    versus = (Versus((UNCACHED,), 5.0),)
    yield Case("gather/512B/90% cached", unit, sides, versus, agree=0.0, repeats=11)


def _num_rows(work: Workload) -> int:
    return graph_sizes(work)[1].num_nodes


def _num_gathered(work: Workload) -> int:
    return min(NUM_GATHERED, _num_rows(work) // 4)


def _index(work: Workload) -> Tensor:
    return work.ids(_num_gathered(work), _num_rows(work)).to(device(work))


def _draw(ids: Tensor, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(SEED)
    return ids[torch.randperm(ids.numel(), generator=generator)[:count]]


def _pinned_table(work: Workload) -> Tensor:
    return work.once(
        "gpu/pinned rows", lambda: _pinned(work, _num_rows(work)).copy_(random_rows(work, _num_rows(work), DIM))
    )


def _pinned(work: Workload, num_rows: int) -> Tensor:
    return torch.empty(num_rows, DIM, pin_memory=is_gpu(work))


def _copy(target: Tensor, source: Tensor) -> Side:
    """Not a result to be compared: other rows."""

    def call() -> None:
        target.copy_(source, non_blocking=True)

    return Side(call, clock="device")


BENCHMARKS = [gather, cached]
