"""Cut a built-in graph into two parts, train GraphSAGE on it with two trainers under torchrun, say what to try next.

The graph is a block model with planted labels, so what a classifier can reach on it is known, not guessed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gnnsys.graph import ExpectedAccuracy, Graph

TRAINERS = 2
RESULT = "result.json"
DEADLINE = 900  # seconds for the trainers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=int, default=100_000, help="nodes of the graph (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=5, help="passes over the training nodes (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=512, help="seeds per step of both trainers together")
    parser.add_argument("--seed", type=int, default=0, help="of the graph, the weights and the samples")


def run(args: argparse.Namespace) -> int:
    from gnnsys.graph import expected_accuracy, sbm

    for name in ("nodes", "epochs", "batch_size"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    start = time.perf_counter()
    graph = sbm(args.nodes, seed=args.seed)
    print(f"graph      {graph.num_nodes():,} nodes, {graph.num_edges():,} edges, {graph.info['num_classes']} classes")
    print(f"           labels on {float(graph.node_data['node']['train_mask'].float().mean()):.0%} of the nodes")
    with tempfile.TemporaryDirectory(prefix="gnnsys-demo-") as folder:
        cut(graph, Path(folder) / "parts", args.seed)
        result = train(Path(folder), args)
    summarise(result, expected_accuracy(graph), time.perf_counter() - start)
    return 0


def cut(graph: Graph, parts: Path, seed: int) -> None:
    from gnnsys.cli.progress import Progress
    from gnnsys.partition import partition_graph

    with Progress.reported("partition") as bar:
        made = partition_graph(graph, TRAINERS, parts, balance=["train", "edges"], seed=seed, progress=bar)
    assigned = made.assigned
    print(
        f"parts      {TRAINERS}, {assigned.cut / max(1, assigned.num_edges):.0%} of the edges between them; "
        f"{sum(made.seconds.values()):.1f} s"
    )


def train(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Two trainers on this machine; what they print goes where ours goes."""
    trainer = [
        "-m", "gnnsys.cli.demo_trainer", str(folder / "parts"), str(folder / RESULT),
        str(args.epochs), str(args.batch_size), str(args.seed),
    ]  # fmt: skip
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(TRAINERS)]
    threads = max(1, (os.cpu_count() or 1) // TRAINERS)
    environment = {"OMP_NUM_THREADS": str(threads)} | dict(os.environ)
    print(f"trainers   torchrun --standalone --nproc-per-node {TRAINERS}", flush=True)
    done = subprocess.run([*launch, *trainer], env=environment, timeout=DEADLINE)
    if done.returncode != 0:
        raise RuntimeError(f"the trainers ended with exit code {done.returncode}; their own message is above")
    return json.loads((folder / RESULT).read_text())


def summarise(result: dict[str, Any], expected: ExpectedAccuracy, seconds: float) -> None:
    print(f"accuracy   {result['accuracy']:.1%} on the test nodes")
    print("           what the generator's noise allows to a classifier that knows how the graph was made:")
    print(f"           {expected.features:6.1%}  from a node's own features")
    print(f"           {expected.neighbor_features:6.1%}  and those of its neighbours")
    print(f"           {expected.neighbor_labels:6.1%}  and the neighbours' true labels, which no one sees")
    print(f"throughput {result['seeds_per_second']:,.0f} training nodes per second; {seconds:.0f} s in all")
    print("next       gnnsys partition sbm-20k --parts 2 --out parts/")
    print("           torchrun --nproc-per-node 2 examples/node_classification.py parts/")
    print("           python examples/pyg_drop_in.py          a PyG script with one import changed")
    print("           gnnsys bench loader --quick             how fast, beside what else is installed")
