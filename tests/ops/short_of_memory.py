"""Calls of the native core in a process that may not have more memory than it has; run as a program by test_memory.py.

The limit is on the process's address space, so that a failed allocation touches nothing. Large blocks come straight
from the kernel and go straight back, so that none is left over from before.
"""

from __future__ import annotations

import contextlib
import json
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gnnsys.graph import Graph
from gnnsys.loader import NeighborLoader
from gnnsys.nn import GATConv, SAGEConv
from gnnsys.ops import (
    CSC,
    bucket_ids,
    compact,
    compact_scratch,
    degrees,
    dropout_rows,
    edge_softmax,
    gat_aggregate,
    gather_rows,
    in_subgraph,
    parse_table,
    sample_neighbors,
    sddmm,
    spmm,
)
from gnnsys.ops._library import native

ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
    "MALLOC_ARENA_MAX": "1",
    "MIMALLOC_ARENA_RESERVE": "0",  # some builds of torch have this allocator
    "MIMALLOC_PURGE_DELAY": "0",
    "OMP_NUM_THREADS": "2",
}
MIB = 1 << 20
SPARE = 16 * MIB  # what a call may still have
LARGE = 1 << 18  # rows of 64 floats that take 64 MiB
Call = Callable[[], object]


@contextlib.contextmanager
def no_more_memory(spare: int) -> Iterator[None]:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + spare, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def fan_out(num_dst: int) -> CSC:
    """An edge from node 0 to every destination."""
    return CSC(torch.arange(num_dst + 1), torch.zeros(num_dst, dtype=torch.int32), 1)


def fan_in(num_edges: int) -> CSC:
    """All edges lead to one node, all of them from node 0; a row that nobody shares with another thread."""
    return CSC(torch.tensor([0, num_edges]), torch.zeros(num_edges, dtype=torch.int32), 1)


def rows_of(size: int) -> Tensor:
    return torch.ones(size, 64)


def gradient(num_src: int) -> Call:
    x = rows_of(num_src).requires_grad_()
    csc = CSC(torch.tensor([0, num_src]), torch.arange(num_src, dtype=torch.int32), num_src)
    out = spmm(csc, x)
    return lambda: torch.autograd.grad(out, x, torch.ones_like(out), retain_graph=True)


def attention(num_edges: int) -> Call:
    csc, one = fan_in(num_edges), torch.ones(1, 1)
    return lambda: gat_aggregate(csc, torch.ones(1, 1, 1), one, one)


def softmax(num_edges: int) -> Call:
    csc, scores = fan_in(num_edges), torch.ones(num_edges)
    return lambda: edge_softmax(csc, scores)


def dots(num_edges: int) -> Call:
    csc = fan_in(num_edges)
    return lambda: sddmm(csc, torch.ones(1, 1), torch.ones(1, 1))


def compaction(size: int) -> Call:
    ids = torch.arange(8).repeat(size // 8)
    scratch = compact_scratch(size)
    return lambda: compact([ids[:3]], [ids], [0], scratch)


def dropout(size: int) -> Call:
    x, ids = rows_of(size), torch.arange(size)
    return lambda: dropout_rows(x, ids, 0.5, key=1)


def parsing(size: int) -> Call:
    text = bytearray(b"1\n" * size)
    return lambda: parse_table(text, "i")


def sampling(size: int) -> Call:
    csc, seeds = fan_in(100), torch.zeros(size, dtype=torch.int32)
    return lambda: sample_neighbors(csc, seeds, 1, key=3)


def structure(size: int) -> Call:
    edges = torch.zeros(2, size, dtype=torch.int32)
    return lambda: CSC.from_edge_index(edges, 1)


def volume(num_parts: int) -> Call:
    csc = fan_in(3)
    return lambda: native.communication_volume(csc.indptr, csc.indices, torch.zeros(1, dtype=torch.int32), num_parts)


def layer(size: int) -> Call:
    conv, csc, x = SAGEConv(64, 128), fan_out(size), rows_of(1)
    return lambda: conv((x, torch.ones(1, 64).expand(size, 64)), csc)


def attention_layer(size: int) -> Call:
    conv, csc = GATConv((64, 64), 64, heads=1, add_self_loops=False), fan_out(size)
    return lambda: conv((rows_of(1), None), csc)


class Loading:
    """The seeds of a batch, and the 16 in-edges of each, are sampled by a thread of the pipeline."""

    def __init__(self, size: int) -> None:
        edges = torch.stack([torch.arange(48) % 3, torch.arange(48) // 16])
        graph = Graph.from_edge_index(edges, 3, {"x": torch.ones(3, 1)})
        seeds = torch.arange(3).repeat(size // 3)
        self.size = seeds.numel()
        self.loader = NeighborLoader(graph, [-1], input_nodes=seeds, batch_size=self.size)

    def __call__(self) -> object:
        return next(iter(self.loader))

    def works(self) -> bool:
        """The very loader that failed."""
        (batch,) = self.loader
        self.loader.close()
        return batch.batch_size == self.size


def summing(reduce: str) -> Callable[[int], Call]:
    def make(size: int) -> Call:
        csc, x = fan_out(size), rows_of(1)
        return lambda: spmm(csc, x, reduce=reduce)

    return make


def gathering(size: int) -> Call:
    index, x = torch.zeros(size, dtype=torch.int64), rows_of(1)
    return lambda: gather_rows(x, index)


def bucketing(size: int) -> Call:
    ids, bounds = torch.zeros(size, dtype=torch.int64), torch.tensor([0, 5, 10])
    return lambda: bucket_ids(ids, bounds)


def counting(num_nodes: int) -> Call:
    return lambda: degrees(torch.zeros(3, dtype=torch.int64), num_nodes)


def cutting_out(size: int) -> Call:
    csc, nodes = fan_in(100), torch.zeros(size, dtype=torch.int32)
    return lambda: in_subgraph(csc, nodes)


def transposing(size: int) -> Call:
    csc = fan_in(size)
    return lambda: csc.transpose()


class Case(NamedTuple):
    make: Callable[[int], Call]
    too_large: int
    small: int = 9
    spare: int = SPARE


CASES = {
    "spmm": Case(summing("sum"), LARGE),
    "spmm: mean": Case(summing("mean"), LARGE),
    "spmm: max": Case(summing("max"), LARGE),
    "spmm: backward": Case(gradient, LARGE),
    "gat_aggregate": Case(attention, 1 << 24),  # by a thread among others
    "edge_softmax": Case(softmax, 1 << 24),
    "sddmm": Case(dots, 1 << 24),
    "gather_rows": Case(gathering, LARGE),
    "dropout_rows": Case(dropout, LARGE),
    "compact": Case(compaction, 1 << 23, 16),
    "bucket_ids": Case(bucketing, 1 << 23),
    "degrees": Case(counting, 1 << 24),
    "degrees: 2^46 of them": Case(counting, 1 << 46),
    "degrees: 2^62 of them": Case(counting, 1 << 62),
    "in_subgraph": Case(cutting_out, 1 << 18),
    "transpose": Case(transposing, 1 << 24),
    "coo_to_csc": Case(structure, 1 << 24),
    "sample_neighbors": Case(sampling, 1 << 22),
    "parse_table": Case(parsing, 1 << 24),  # by a thread among others
    "communication_volume": Case(volume, 1 << 12),
    "SAGEConv": Case(layer, LARGE),
    "GATConv": Case(attention_layer, LARGE),
    "NeighborLoader": Case(Loading, 3 << 18, spare=3 * SPARE),
}


def outcome(name: str) -> dict[str, str]:
    make, too_large, small, spare = CASES[name]
    call = make(too_large)
    make(small)()
    said = {"error": "none", "message": ""}
    with no_more_memory(spare):
        try:
            call()
        except Exception as error:  # whatever it is, the test looks at it
            said = {"error": type(error).__name__, "message": str(error)}
    make(small)()
    if isinstance(call, Loading):
        assert call.works()
    return said


if __name__ == "__main__":
    torch.set_num_threads(2)
    spmm(fan_out(1 << 16), rows_of(1))  # threads have their stacks before there is a limit
    for case in CASES:
        print(json.dumps({"case": case, **outcome(case)}), flush=True)
