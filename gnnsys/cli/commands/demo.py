"""Train GraphSAGE on a built-in graph and say what to try next.

The graph is a block model with planted labels, so what a classifier can reach on it is known, not guessed.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from gnnsys.graph import ExpectedAccuracy, Graph


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=int, default=100_000, help="nodes of the graph (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=5, help="passes over the training nodes (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=512, help="seeds per batch (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the graph, the weights and the samples")


def run(args: argparse.Namespace) -> int:
    import torch

    from gnnsys.graph import expected_accuracy, sbm

    for name in ("nodes", "epochs", "batch_size"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    torch.set_num_threads(max(1, torch.get_num_threads() - 1))  # one core loads, the others compute
    start = time.perf_counter()
    graph = sbm(args.nodes, seed=args.seed)
    print(f"graph      {graph.num_nodes():,} nodes, {graph.num_edges():,} edges, {graph.info['num_classes']} classes")
    print(
        f"           made in {time.perf_counter() - start:.1f} s; labels on {_share(graph, 'train_mask')} of the nodes"
    )
    torch.manual_seed(args.seed)
    model, seconds, num_seeds = train(graph, args)
    accuracy = evaluate(model, graph)
    summarise(accuracy, expected_accuracy(graph), num_seeds / seconds, time.perf_counter() - start)
    return 0


def train(graph: Graph, args: argparse.Namespace) -> tuple[torch.nn.Module, float, int]:
    """Two layers, fanout 15 and 10; returns the model, the seconds training took and the seeds it went through."""
    import torch
    import torch.nn.functional as F

    from gnnsys.cli.progress import Progress
    from gnnsys.loader import NeighborLoader
    from gnnsys.nn import GraphSAGE

    rows = graph.node_data["node"]
    model = GraphSAGE(rows["x"].shape[1], 64, num_layers=2, out_channels=graph.info["num_classes"], dropout=0.3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-4)
    loader = NeighborLoader(
        graph,
        [15, 10],
        input_nodes=rows["train_mask"],
        batch_size=args.batch_size,
        shuffle=True,
        seed=args.seed,
    )
    start, num_seeds = time.perf_counter(), 0
    for epoch in range(1, args.epochs + 1):
        with Progress(len(loader), f"epoch {epoch}/{args.epochs}") as bar:
            for batch in loader:
                out = model(batch.x, batch.edge_index, num_sampled_nodes=batch.num_sampled_nodes)
                loss = F.cross_entropy(out, batch.y[: batch.batch_size])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                num_seeds += batch.batch_size
                bar.advance(note=f"loss {loss.item():.3f}")
    return model, time.perf_counter() - start, num_seeds


def evaluate(model: torch.nn.Module, graph: Graph) -> float:
    """Accuracy on the test nodes, with all neighbours of every node."""
    import torch

    rows, mask = graph.node_data["node"], graph.node_data["node"]["test_mask"]
    model.eval()
    with torch.no_grad():
        predicted = model(rows["x"], graph.csc()).argmax(1)
    return float((predicted == rows["y"])[mask].float().mean())


def summarise(accuracy: float, expected: ExpectedAccuracy, seeds_per_second: float, seconds: float) -> None:
    print(f"accuracy   {accuracy:.1%} on the test nodes")
    print("           what the generator's noise allows to a classifier that knows how the graph was made:")
    print(f"           {expected.features:6.1%}  from a node's own features")
    print(f"           {expected.neighbor_features:6.1%}  and those of its neighbours")
    print(f"           {expected.neighbor_labels:6.1%}  and the neighbours' true labels, which no one sees")
    print(f"throughput {seeds_per_second:,.0f} training nodes per second; {seconds:.0f} s in all")
    print("next       python examples/node_classification.py --dataset sbm-20k")
    print("           python examples/pyg_drop_in.py          a PyG script with one import changed")
    print("           gnnsys bench loader --quick             how fast, beside what else is installed")


def _share(graph: Graph, mask: str) -> str:
    return f"{float(graph.node_data['node'][mask].float().mean()):.0%}"
