"""Inputs of the GPU's benchmarks: two power-law graphs, made on the host, and what of them goes to the device.

`device` is a setting so that every case can also be run, without meaning, where there is no GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnsys.bench.workload import SEED, Workload
from gnnsys.graph import EDGE, NODE, Graph, sbm
from gnnsys.ops import CSC

NUM_CLASSES, NUM_FEATURES = 47, 100
FANOUTS = [15, 10, 5]
_TIMES_NODES, _TIMES_EDGES = 2.45, 6.185  # the large graph to the small one
_COPIED_BYTES = 1 << 30  # of a buffer that is copied to measure the device's bandwidth, at most


@dataclass(frozen=True)
class GraphSize:
    """A graph by its size, known before it is made."""

    num_nodes: int
    num_edges: int
    is_large: bool

    @property
    def name(self) -> str:
        return f"{self.num_nodes / 1e6:g}M"


def graph_sizes(work: Workload) -> tuple[GraphSize, GraphSize]:
    """RMAT with 1M nodes and 20M edges, as on the CPU; and a block model with 2.45M and 123.7M, both directions of
    every edge, as large as ogbn-products and like it without nodes that have no edge."""
    small = GraphSize(work.sizes.num_nodes, work.sizes.num_edges, False)
    half = round(work.sizes.num_edges * _TIMES_EDGES / 2)
    return small, GraphSize(round(work.sizes.num_nodes * _TIMES_NODES), 2 * half, True)


def large_graph(work: Workload) -> Graph:
    """On the host, with `x` of 100 features and `y` of 47 classes."""
    _, size = graph_sizes(work)

    def make() -> Graph:
        made = sbm(
            size.num_nodes,
            num_classes=NUM_CLASSES,
            avg_degree=size.num_edges / size.num_nodes,
            num_features=NUM_FEATURES,
            seed=SEED,
        )
        rows = {name: made.node_data[NODE][name] for name in ("x", "y")}
        csc = made.csc()  # without its edge ids, which nobody asks for: 0.5 GB
        return Graph({NODE: size.num_nodes}, {EDGE: CSC(csc.indptr, csc.indices, csc.num_src)}, {NODE: rows})

    return work.once("gpu/large graph", make)


def structure_of(work: Workload, size: GraphSize) -> CSC:
    """On the host."""
    return large_graph(work).csc() if size.is_large else work.csc


def structure_on(work: Workload, size: GraphSize) -> CSC:
    """On the device."""
    csc, target = structure_of(work, size), device(work)
    return CSC(csc.indptr.to(target), csc.indices.to(target), csc.num_src)


def device_graph(work: Workload) -> Graph:
    return large_graph(work).to(device(work)) if is_gpu(work) else large_graph(work)


def pinned_graph(work: Workload) -> Graph:
    return work.once("gpu/pinned graph", lambda: large_graph(work).pin_memory() if is_gpu(work) else large_graph(work))


def batches_of_seeds(work: Workload, count: int) -> list[Tensor]:
    """int64 ids on the host, `count` times as many as a batch has, all different where the graph has that many."""
    num_nodes = large_graph(work).num_nodes()
    ids = work.ids(num_nodes, num_nodes)
    needed = count * work.sizes.num_seeds
    return list(ids.repeat(-(-needed // num_nodes))[:needed].split(work.sizes.num_seeds))


def random_rows(work: Workload, num_rows: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal rows on the device."""
    target = device(work)
    generator = torch.Generator(target).manual_seed(SEED)
    return torch.randn(num_rows, width, generator=generator, device=target, dtype=dtype)


def copies(work: Workload, num_bytes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs (from, to) on the device which, copied, read and write `num_bytes` in all."""
    count = -(-num_bytes // (2 * _COPIED_BYTES))
    source = torch.ones(num_bytes // (2 * count), dtype=torch.uint8, device=device(work))
    target = torch.ones_like(source)
    return iter([(source, target)] * count)


def device(work: Workload) -> torch.device:
    return torch.device(work.settings.get("device", "cuda:0"))


def is_gpu(work: Workload) -> bool:
    return device(work).type == "cuda"


def synchronize() -> None:
    """Waits for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
