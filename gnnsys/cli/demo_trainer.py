"""One trainer of `gnnsys demo`: `torchrun -m gnnsys.cli.demo_trainer PARTS RESULT EPOCHS BATCH_SIZE SEED`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import gnnsys
from gnnsys.cli.progress import Progress
from gnnsys.nn import GraphSAGE

FANOUT = [15, 10]


def main(parts: str, result: Path, epochs: int, batch_size: int, seed: int) -> None:
    with gnnsys.init() as session:
        torch.manual_seed(seed)
        graph = gnnsys.open(parts)
        width = graph.node_data["node"]["x"].shape[1]
        model = GraphSAGE(width, 64, len(FANOUT), graph.info["num_classes"], dropout=0.3)
        seconds, num_seeds = train(session, graph, model, epochs, batch_size, seed)
        accuracy = evaluate(graph, model, batch_size)
        if session.rank == 0:
            rate = session.world_size * num_seeds / seconds
            result.write_text(json.dumps({"accuracy": accuracy, "seeds_per_second": rate}))


def train(
    session: gnnsys.Session, graph: gnnsys.DistGraph, model: GraphSAGE, epochs: int, batch_size: int, seed: int
) -> tuple[float, int]:
    """Seconds it took, and the seeds that this trainer went through."""
    each = max(1, batch_size // session.world_size)
    loader = gnnsys.NeighborLoader(
        graph, FANOUT, input_nodes=gnnsys.split(graph, "train"), batch_size=each, shuffle=True, seed=seed
    )
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-4)
    start, num_seeds = time.perf_counter(), 0
    for epoch in range(1, epochs + 1):
        with Progress(len(loader), f"epoch {epoch}/{epochs}", patience=0.0 if session.rank == 0 else 1e9) as bar:
            for batch in loader:
                out = parallel(batch.x, batch.edge_index, num_sampled_nodes=batch.num_sampled_nodes)
                loss = F.cross_entropy(out, batch.y[: batch.batch_size])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                num_seeds += batch.batch_size
                bar.advance(note=f"loss {loss.item():.3f}")
    loader.close()
    return time.perf_counter() - start, num_seeds


@torch.no_grad()
def evaluate(graph: gnnsys.DistGraph, model: GraphSAGE, batch_size: int) -> float:
    """Accuracy on the test nodes, with all neighbours of every node; each trainer takes its share."""
    model.eval()
    test = gnnsys.split(graph, "test")
    right = torch.zeros(2)
    for batch in gnnsys.NeighborLoader(graph, [-1] * len(FANOUT), input_nodes=test, batch_size=batch_size):
        out = model(batch.x, batch.edge_index, num_sampled_nodes=batch.num_sampled_nodes)
        right += torch.tensor([float((out.argmax(1) == batch.y[: batch.batch_size]).sum()), float(batch.batch_size)])
    dist.all_reduce(right)
    return float(right[0] / right[1])


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:6]))
