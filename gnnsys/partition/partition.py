"""`partition_graph`: the whole way from a graph to a directory of parts."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gnnsys.graph import Graph, as_graph, check_room
from gnnsys.partition.array_pieces import Progress
from gnnsys.partition.assign import Assigned, PartitionOptions, assign_parts, check_part_counts
from gnnsys.partition.clusters import check_clusters, cut_clusters
from gnnsys.partition.constraints import Balance
from gnnsys.partition.layout import WHAT, check_parts_target
from gnnsys.partition.write import write_parts

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Partitioned:
    """What was made: the assignment with its balance and cut, and the seconds that each step took."""

    path: Path
    assigned: Assigned
    seconds: dict[str, float]
    info: dict[str, Any]  # what the manifest says of it


def partition_graph(
    graph: Graph,
    num_parts: int,
    out: str | os.PathLike[str],
    *,
    trainers_per_part: int = 1,
    method: str = "multilevel",
    objective: str = "cut",
    balance: Sequence[str] | None = None,
    imbalance: float = 0.05,
    seed: int = 0,
    halo_hops: int = 1,
    edge_ids: bool = True,
    add_reverse: bool = False,
    clusters: int | None = None,
    memory_limit: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Partitioned:
    """Partitions `graph` into num_parts parts of trainers_per_part subparts each, written to the directory `out`.

    `graph` may be PyG's or DGL's, too. `add_reverse` first adds edges in the other direction (`Graph.add_reverse`).
    `method`, `objective`, `balance`, `imbalance` and `seed` are those of `gnnsys.partition.PartitionOptions`;
    `halo_hops` and `edge_ids` those of `write_parts`. `clusters`: how many clusters all subparts together are cut into,
    for `ClusterSampler`. With a `memory_limit` in bytes that the partitioner would
    exceed, the graph is streamed. The directory is written whole or not at all.

    >>> graph = gnnsys.graph.dataset("sbm-20k")  # doctest: +SKIP
    >>> partition_graph(graph, 4, "parts", balance=["train", "edges"]).assigned.cut  # doctest: +SKIP
    """
    num_parts, trainers_per_part = check_part_counts(num_parts, trainers_per_part)
    check_halo_hops(halo_hops)
    if clusters is not None:
        check_clusters(clusters, num_parts * trainers_per_part)
    graph = as_graph(graph)
    num_nodes = sum(map(graph.num_nodes, graph.node_types))
    if num_parts > max(1, num_nodes):
        raise ValueError(f"num_parts is {num_parts:,}, and the graph has only {num_nodes:,} nodes: use fewer parts")
    graph = graph.add_reverse() if add_reverse else graph
    graph.check_in_memory("partitioning a graph")
    options = PartitionOptions(method=method, objective=objective, balance=balance, imbalance=imbalance, seed=seed)
    target = check_parts_target(out, overwrite=overwrite)
    check_room(least_bytes(graph), f"{WHAT} {str(out)!r}", target.parent)
    assigned = assign_parts(
        graph,
        num_parts,
        trainers_per_part,
        options=options,
        memory_limit=memory_limit,
        folder=target.parent,
        progress=progress,
    )
    if assigned.assignment.num_empty:
        empty, of = assigned.assignment.num_empty, assigned.assignment.num_subparts
        _log.warning("%s of %s subparts have no node: use fewer", f"{empty:,}", f"{of:,}")
    seconds = {"partition": assigned.seconds}
    start = time.perf_counter()
    info, cut = describe(assigned, options), None
    if clusters is not None:
        cut = cut_clusters(graph, assigned.assignment, clusters, seed=seed)
        info["clusters"] = {"number": clusters, "cut": cut.num_cut(graph)}
        seconds["clusters"] = time.perf_counter() - start
        start = time.perf_counter()
    write_parts(
        graph,
        assigned.assignment,
        target,
        halo_hops=halo_hops,
        edge_ids=edge_ids,
        clusters=cut,
        info=info,
        overwrite=overwrite,
        progress=progress,
    )
    return Partitioned(target, assigned, seconds | {"write": time.perf_counter() - start}, info)


def least_bytes(graph: Graph) -> int:
    """What parts take on disk at least: every row once, an int32 per edge, an offset and an original id per node."""
    rows = [array for data in (*graph.node_data.values(), *graph.edge_data.values()) for array in data.values()]
    num_nodes, num_edges = sum(map(graph.num_nodes, graph.node_types)), sum(map(graph.num_edges, graph.edge_types))
    return sum(array.nbytes for array in rows) + 4 * num_edges + 12 * num_nodes


def check_halo_hops(halo_hops: int) -> None:
    if halo_hops < 1:
        raise ValueError(f"halo_hops must be at least 1, got {halo_hops}")


def describe(assigned: Assigned, options: PartitionOptions) -> dict[str, Any]:
    """What the manifest says about how the parts came about; plain JSON values."""
    return {
        "method": options.method,
        "objective": options.objective,
        "seed": options.seed,
        "imbalance": options.imbalance,
        "balance": [_describe_balance(balance) for balance in assigned.balances],
        "cut": assigned.cut,
        "part_cut": assigned.part_cut,
        "num_edges": assigned.num_edges,
        **assigned.details,
    }


def _describe_balance(balance: Balance) -> dict[str, Any]:
    fields = asdict(balance)
    del fields["method"]  # said once for all of them
    return fields | {"ratio": balance.ratio, "reason": balance.reason}
