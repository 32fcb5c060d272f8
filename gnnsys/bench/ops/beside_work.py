"""Native work on all cores, one of which another process keeps busy, beside the same work on one thread.

A thread whose core is taken must not hold up the others: such machines are slower, but never much slower than one
thread alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from gnnsys import ops
from gnnsys.bench.busy_core import BusyCore
from gnnsys.bench.case import Case, NotHere, Side, Versus, value
from gnnsys.bench.peers import set_threads
from gnnsys.bench.workload import FULL, SEED, Workload
from gnnsys.graph import NODE, rmat
from gnnsys.ops import CSC
from gnnsys.partition import assign_parts
from gnnsys.sampling import NeighborSampler, SampleKey

FANOUT, PARTS = 10, 8
AT_LEAST = 0.8  # of the speed of one thread
_SECONDS = 0.3  # of each measurement: many of the turns that the scheduler gives
ALL_CORES, ONE_THREAD = "all cores", "one thread"
Call = Callable[[], Any]


def beside_work(work: Workload) -> Iterator[Case]:
    for name, make in _WORKS.items():
        versus = (Versus((ONE_THREAD,), AT_LEAST),)
        yield Case(f"busy core/{name}", value("ms"), partial(_sides, work, make), versus, ours=ALL_CORES, repeats=5)


BENCHMARKS = [beside_work]


def _sides(work: Workload, make: Callable[[Workload], Call]) -> dict[str, Side]:
    if not hasattr(os, "sched_getaffinity"):
        raise NotHere("a process can be kept on one core on Linux only")
    busy, call = work.once("busy core", lambda: work.enter(BusyCore())), make(work)
    count = _count(call) if work.sizes == FULL else 1
    threads = max(2, len(os.sched_getaffinity(0)))
    each = partial(_milliseconds, busy, call, count)
    return {ALL_CORES: Side(each, threads), ONE_THREAD: Side(each, 1)}


def _milliseconds(busy: BusyCore, call: Call, count: int) -> float:
    """Milliseconds of one call while the core is busy."""
    with busy.beside():
        began = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - began) / count * 1e3


def _count(call: Call) -> int:
    """How many calls fill a measurement."""
    before = torch.get_num_threads()
    set_threads(1)
    call()
    began = time.perf_counter()
    call()
    seconds = time.perf_counter() - began
    set_threads(before)
    return max(1, round(_SECONDS / seconds))


def _one_hop(work: Workload) -> Call:
    csc, seeds = work.csc, work.seeds(8 * work.sizes.num_seeds).to(work.csc.indices.dtype)
    return lambda: ops.sample_neighbors(csc, seeds, FANOUT, key=1)


def _batch(work: Workload) -> Call:
    sampler = NeighborSampler(work.graph, list(work.sizes.fanout), expand="frontier")
    seeds = work.seeds(work.sizes.num_seeds)
    return lambda: sampler.sample({NODE: seeds}, key=SampleKey(0, 0, 0))


def _to_block(work: Workload) -> Call:
    csc, seeds = work.csc, work.seeds(8 * work.sizes.num_seeds).to(work.csc.indices.dtype)
    ids = ops.sample_neighbors(csc, seeds, FANOUT, key=1).ids
    scratch = ops.compact_scratch(seeds.numel() + ids.numel())
    return lambda: ops.compact([seeds], [ids], [0], scratch)


def _spmm(work: Workload) -> Call:
    csc = work.small_graph.csc()
    x = work.rows(csc.num_src, work.sizes.dim)
    return lambda: ops.spmm(csc, x)


def _gather(work: Workload) -> Call:
    table = work.rows(work.sizes.num_nodes, work.sizes.dim)
    index = work.ids(min(81_000, work.sizes.num_nodes // 2), work.sizes.num_nodes)
    out = torch.empty(index.numel(), work.sizes.dim)
    return lambda: ops.gather_rows(table, index, out=out)


def _coo_to_csc(work: Workload) -> Call:
    csc = work.small_graph.csc()
    edges = torch.stack([csc.indices, csc.dst().to(csc.indices.dtype)])
    return lambda: CSC.from_edge_index(edges, csc.num_dst)


def _partition(work: Workload) -> Call:
    graph = rmat(work.sizes.num_nodes // 50, work.sizes.num_edges // 50, seed=SEED)
    return lambda: assign_parts(graph, PARTS)


_WORKS: dict[str, Callable[[Workload], Call]] = {
    "sample_neighbors": _one_hop,
    "one batch": _batch,
    "to_block": _to_block,
    "spmm": _spmm,
    "gather_rows": _gather,
    "coo_to_csc": _coo_to_csc,
    "partition": _partition,
}
