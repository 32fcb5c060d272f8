"""Cut a graph into parts on disk, one per machine, balanced in every respect you name.

SOURCE is a dataset's name (cora, rmat-1m, sbm-100k:num_classes=4), a saved graph, or a file of edges.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from gnnsys.cli.early_refusals import check_counts, check_is_free, check_source

if TYPE_CHECKING:
    from gnnsys.graph import Graph
    from gnnsys.partition import MemoryPlan, Partitioned


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="a dataset's name, a saved graph, or a file of edges")
    parser.add_argument("--parts", type=int, required=True, metavar="P", help="parts, one per machine")
    parser.add_argument("--trainers-per-part", type=int, default=1, metavar="T", help="subparts of each part (1)")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="the directory to write, whole or not at all"
    )
    parser.add_argument(
        "--balance",
        metavar="NAMES",
        help="what to even out beside nodes, separated by commas: edges, train, val, test, ntype, etype, "
        "train_edges, val_edges, test_edges, or none (default: edges, train where there is a split, ntype where there "
        "are several)",
    )
    parser.add_argument(
        "--method",
        default="multilevel",
        metavar="NAME",
        help="multilevel (default), metis, random, chunk, assignment=FILE",
    )
    parser.add_argument(
        "--objective",
        default="cut",
        metavar="NAME",
        help="cut (default): few edges between parts; communication: few rows "
        "between parts, and as many for each of them",
    )
    parser.add_argument(
        "--imbalance", type=float, default=0.05, metavar="X", help="how far above the average a subpart may be (0.05)"
    )
    parser.add_argument(
        "--halo-hops", type=int, default=1, metavar="K", help="hops whose in-edges a part can resolve itself (1)"
    )
    parser.add_argument(
        "--clusters", type=int, metavar="N", help="cut the parts into N clusters in all, for Cluster-GCN's batches"
    )
    parser.add_argument("--no-edge-ids", action="store_true", help="do not keep the numbers of the source's edges")
    parser.add_argument(
        "--add-reverse",
        action="store_true",
        help="add edges in the other direction: a reverse of each edge that has none, or a type rev_NAME per edge type",
    )
    parser.add_argument(
        "--columns", metavar="NAMES", help="names of a table's columns, separated by commas: src,dst,weight"
    )
    parser.add_argument("--num-nodes", type=int, metavar="N", help="nodes, where the last ones have no edge")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="another partition of the same quality (0)")
    parser.add_argument(
        "--memory-limit", metavar="SIZE", help="4G, 512M: stream the graph from files where it would take more"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace parts that are there")


def run(args: argparse.Namespace) -> int:
    check_counts(args.parts, args.trainers_per_part, args.halo_hops)
    check_is_free(args.out, overwrite=args.overwrite)
    check_source(args.source)
    from gnnsys.cli.progress import Progress
    from gnnsys.cli.source import opened_source
    from gnnsys.partition import (
        PartitionOptions,
        check_clusters,
        check_halo_hops,
        check_part_counts,
        check_parts_target,
        parse_size,
        partition_graph,
        plan_assignment,
    )

    # Whatever can be refused is refused before a source is read that may take minutes.
    check_part_counts(args.parts, args.trainers_per_part)
    check_halo_hops(args.halo_hops)
    if args.clusters is not None:
        check_clusters(args.clusters, args.parts * args.trainers_per_part)
    options = PartitionOptions(
        method=args.method,
        objective=args.objective,
        balance=balance_names(args.balance),
        imbalance=args.imbalance,
        seed=args.seed,
    )
    limit = None if args.memory_limit is None else parse_size(args.memory_limit)
    check_parts_target(args.out, overwrite=args.overwrite)
    start = time.perf_counter()
    with ExitStack() as stack:
        bar = stack.enter_context(Progress.reported("partition"))
        graph = stack.enter_context(
            opened_source(
                args.source,
                columns=None if args.columns is None else [name.strip() for name in args.columns.split(",")],
                num_nodes=args.num_nodes,
                memory_limit=limit,
                folder=args.out.absolute().parent,
                progress=bar,
            )
        )
        print(f"{graph}, read in {time.perf_counter() - start:.1f} s")
        if args.add_reverse:
            graph = reversed_too(graph, limit)
        plan = plan_assignment(graph, args.parts, args.trainers_per_part, options=options, memory_limit=limit)
        print(expected_memory(plan, options.method), flush=True)
        done = partition_graph(
            graph,
            args.parts,
            args.out,
            trainers_per_part=args.trainers_per_part,
            **vars(options),
            halo_hops=args.halo_hops,
            edge_ids=not args.no_edge_ids,
            clusters=args.clusters,
            memory_limit=limit,
            overwrite=args.overwrite,
            progress=bar,
        )
    print(summary(done, args))
    for line in done.assigned.shortfalls:
        print(f"gnnsys partition: not reached: {line}", file=sys.stderr)
    return 0


def reversed_too(graph: Graph, limit: int | None) -> Graph:
    """The graph with its edges in both directions, made in memory."""
    from gnnsys.partition import LOAD_BYTES_PER_EDGE, format_size

    need = round(2 * sum(map(graph.num_edges, graph.edge_types)) * LOAD_BYTES_PER_EDGE)
    if limit is not None and need > limit:
        raise ValueError(
            f"--add-reverse works in memory, where it may take {format_size(need)}, more than the limit of "
            f"{format_size(limit)}: leave --memory-limit away, or write the reverse edges into the source"
        )
    both = graph.add_reverse()
    print(f"with reverse edges: {both}")
    return both


def expected_memory(plan: MemoryPlan | None, method: str) -> str:
    """What the graph and the partitioner will take."""
    return f"method {method} needs little memory beside the graph" if plan is None else str(plan)


def balance_names(text: str | None) -> list[str] | None:
    if text is None:
        return None
    return [] if text == "none" else [name.strip() for name in text.split(",") if name.strip()]


def summary(done: Partitioned, args: argparse.Namespace) -> str:
    assigned = done.assigned
    share = 100 / max(assigned.num_edges, 1)
    lines = [f"{'edges between parts':<24}{assigned.part_cut:>14,}{assigned.part_cut * share:>9.2f} %"]
    if args.trainers_per_part > 1:
        lines.append(f"{'edges between subparts':<24}{assigned.cut:>14,}{assigned.cut * share:>9.2f} %")
    if args.clusters is not None:
        cut = done.info["clusters"]["cut"]
        lines.append(f"{'edges between clusters':<24}{cut:>14,}{cut * share:>9.2f} %")
    if "rows" in assigned.details:
        rows, busiest = assigned.details["rows"]["in the end"], assigned.details["row_imbalance"]["in the end"]
        lines.append(f"{'rows between subparts':<24}{rows:>14,}{busiest:>9.3f} of the average, at most")
    for balance in assigned.balances:
        mark = "" if balance.met else "  over the limit"
        lines.append(f"{balance.name:<24}{balance.total:>14,}{balance.ratio:>9.3f} of the average, at most{mark}")
    seconds = ", ".join(f"{what} {value:.1f} s" for what, value in done.seconds.items())
    lines += [seconds, f"written to {done.path}; look at it with: gnnsys inspect {done.path}"]
    return "\n".join(lines)
