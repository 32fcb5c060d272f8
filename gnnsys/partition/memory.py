"""How much memory partitioning will take, before it starts, stage by stage.

Formulas with named constants: bytes beside what the process holds already. The constants of the streaming path are
measured, and the tests compare them with what processes take.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

from gnnsys.graph import MIN_MEMORY, Graph
from gnnsys.observe import format_size

# The streaming path.
STREAM_SORT_SHARE = 2  # the adjacency is sorted with this fraction of the limit; the rest is the allocator's slack
STREAM_BYTES_PER_NODE = 40  # label, size, counts, orphans; then part and its best; temporaries of numbering
BYTES_PER_CLUSTER = 160  # METIS, and what it is given, per node of the graph between clusters
BYTES_PER_COARSE_PAIR = 220  # the same per pair of clusters, table included
STREAM_FLOOR = 48 << 20  # pieces, runs, the allocator

# The in-memory path, as measured on power-law, web and community graphs (30 to 35 bytes per edge and what nodes take).
MEMORY_BYTES_PER_EDGE = 32.0  # the transpose with its positions, and the first coarse level while it is made
MEMORY_BYTES_PER_NODE = 80.0  # labels, clusters with their weights, members; later ties and heaps
METIS_BYTES_PER_EDGE = 230.0  # both directions with their weights, as METIS wants them, and all levels that it makes
LOAD_BYTES_PER_EDGE = 44.0  # COO int64 (16), CSC (8) and the records of its sort (12 to 24)


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by stage; stages follow one another, so the peak is the largest."""

    stages: dict[str, int]

    @property
    def peak(self) -> int:
        return max(self.stages.values(), default=0)

    def __str__(self) -> str:
        return ", ".join(f"{stage} {format_size(size)}" for stage, size in self.stages.items())


def estimate_in_memory(
    num_nodes: int, num_edges: int, num_constraints: int = 2, *, method: str = "multilevel", loads: bool = True
) -> MemoryEstimate:
    """What loading (unless the graph is mapped) and the partitioner take: the multilevel one, or METIS."""
    weights = 8 * num_constraints * num_nodes
    stages = {"loading": int(num_edges * LOAD_BYTES_PER_EDGE + 8 * num_nodes)} if loads else {}
    held = num_edges * 8 + num_nodes * 8 if loads else 0
    per_edge = METIS_BYTES_PER_EDGE if method == "metis" else MEMORY_BYTES_PER_EDGE
    work = num_edges * per_edge + num_nodes * MEMORY_BYTES_PER_NODE + 2 * weights
    return MemoryEstimate(stages | {"partitioning": int(held + work)})


def estimate_streaming(
    num_nodes: int, num_edges: int, num_parts: int, num_constraints: int = 2, *, memory_limit: int
) -> MemoryEstimate:
    """What `external_graph` and `stream_assignment` take under a limit, which is `least_memory(num_nodes)` at least."""
    nodes = STREAM_BYTES_PER_NODE * num_nodes
    coarse = num_edges * BYTES_PER_COARSE_PAIR + num_nodes * BYTES_PER_CLUSTER
    return MemoryEstimate(
        {
            "sorting": STREAM_FLOOR + min((memory_limit - STREAM_FLOOR) // STREAM_SORT_SHARE, 128 * num_edges),
            "clustering": min(STREAM_FLOOR + nodes + coarse, memory_limit),
            "refining": STREAM_FLOOR + nodes // 2 + 24 * num_constraints * num_parts,
        }
    )


def graph_bytes(graph: Graph) -> int:
    """Bytes of structure and rows in host memory. What is mapped from files does not count."""
    rows = [each for data in (*graph.node_data.values(), *graph.edge_data.values()) for each in data.values()]
    cscs = [graph.csc(edge_type) for edge_type in graph.edge_types]
    tensors = [*rows, *(each for csc in cscs for each in (csc.indptr, csc.indices, csc.edge_ids) if each is not None)]
    maps = _file_maps()
    firsts = [first for first, _ in maps]
    total = 0
    for each in tensors:
        before = bisect_right(firsts, each.data_ptr()) - 1
        is_mapped = before >= 0 and each.data_ptr() < maps[before][1]
        total += each.nbytes if each.is_cpu and not is_mapped else 0
    return total


def _file_maps() -> list[tuple[int, int]]:
    """The addresses of this process that are maps of files, in order; none where the system does not say."""
    try:
        lines = [line.split(None, 5) for line in Path("/proc/self/maps").read_bytes().splitlines()]
    except OSError:
        return []
    of_files = [line[0] for line in lines if len(line) == 6 and line[5].startswith(b"/")]
    return [(int(first, 16), int(end, 16)) for first, end in (addresses.split(b"-") for addresses in of_files)]


def least_memory(num_nodes: int) -> int:
    """The smallest limit under which a graph of so many nodes can be partitioned at all."""
    return max(STREAM_FLOOR + STREAM_BYTES_PER_NODE * num_nodes, MIN_MEMORY)


@dataclass(frozen=True)
class MemoryPlan:
    """Which way a graph will be partitioned, and what either would take; `streaming` is None without a limit.

    `graph`: bytes of the graph itself, where it stays in memory meanwhile.
    """

    is_streaming: bool
    in_memory: MemoryEstimate
    streaming: MemoryEstimate | None
    graph: int = 0

    def __str__(self) -> str:
        chosen = self.streaming if self.is_streaming and self.streaming else self.in_memory
        way = "streaming from files" if self.is_streaming else "in memory"
        graph = f"the graph {format_size(self.graph)}, " if self.graph else ""
        return f"expected peak {format_size(self.graph + chosen.peak)} {way}: {graph}{chosen}"


def plan_memory(
    num_nodes: int,
    num_edges: int,
    num_parts: int,
    num_constraints: int = 2,
    *,
    method: str = "multilevel",
    memory_limit: int | None = None,
    loads: bool = True,
) -> MemoryPlan:
    """In memory where that fits the limit, otherwise streaming; ValueError where not even that fits.

    METIS as the method (`metis`) works in memory or not at all.

    >>> print(plan_memory(10**8, 10**9, 8, memory_limit=16 << 30))
    expected peak 16.0 GiB streaming from files: sorting 8.0 GiB, clustering 16.0 GiB, refining 1.9 GiB
    """
    in_memory = estimate_in_memory(num_nodes, num_edges, num_constraints, method=method, loads=loads)
    if memory_limit is None:
        return MemoryPlan(False, in_memory, None)
    if method == "metis":
        if in_memory.peak > memory_limit:
            raise ValueError(
                f"METIS would take {format_size(in_memory.peak)}, more than the limit of {format_size(memory_limit)}: "
                f"use method multilevel, which takes less and streams where it must, or raise the limit"
            )
        return MemoryPlan(False, in_memory, None)
    if memory_limit < least_memory(num_nodes) and in_memory.peak > memory_limit:
        raise ValueError(
            f"a limit of {format_size(memory_limit)} is too small for {num_nodes:,} nodes: "
            f"give at least {format_size(least_memory(num_nodes))}"
        )
    limit = max(memory_limit, least_memory(num_nodes))
    streaming = estimate_streaming(num_nodes, num_edges, num_parts, num_constraints, memory_limit=limit)
    return MemoryPlan(in_memory.peak > memory_limit, in_memory, streaming)
