"""`python -m gnnsys.bench.dist.distdgl_run {partition,serve,train} FOLDER`: DistDGL (dgl 1.1.3), one process of it.

The code is what DGL's own distributed GraphSAGE example does, with the times of its steps taken. Its roles are told by
DGL's environment variables, which `distdgl.py` sets; no ssh is involved.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from gnnsys.bench.dist.task import Task

NAME = "graph"


def partition(folder: Path) -> None:
    """Makes the graph and DGL's parts of it: METIS with train nodes and edges balanced, as DGL's examples do."""
    import dgl

    from gnnsys.bench.partition.run_one import dgl_graph
    from gnnsys.graph import NODE
    from gnnsys.graph import sbm

    task = Task.load(folder)
    graph = sbm(**task.graph)
    theirs = dgl_graph(graph)  # without loops and repeated edges, which DGL's METIS does not stand
    for name in ("x", "y", "train_mask"):
        theirs.ndata[name] = graph.node_data[NODE][name]
    start = time.perf_counter()
    dgl.distributed.partition_graph(
        theirs,
        NAME,
        task.num_hosts,
        str(folder / "parts"),
        balance_ntypes=theirs.ndata["train_mask"],
        balance_edges=True,
    )
    figures = {"partition_seconds": time.perf_counter() - start, "num_edges": theirs.num_edges()}
    (folder / "partition.json").write_text(json.dumps(figures))


def serve(folder: Path) -> None:
    import dgl

    dgl.distributed.initialize(str(folder / "ip_config.txt"))  # never returns


def train(folder: Path) -> None:
    import dgl

    task = Task.load(folder)
    dgl.distributed.initialize(str(folder / "ip_config.txt"))
    dist.init_process_group("gloo")
    graph = dgl.distributed.DistGraph(NAME, part_config=str(folder / "parts" / f"{NAME}.json"))
    book = graph.get_partition_book()
    seeds = dgl.distributed.node_split(graph.ndata["train_mask"], book, force_even=True)
    steps = least_steps(-(-len(seeds) // task.batch_size), task.max_steps)
    seeds = seeds[: steps * task.batch_size]
    sampler = dgl.dataloading.NeighborSampler(list(reversed(task.fanouts)))  # DGL lists the innermost hop last
    loader = dgl.dataloading.DistNodeDataLoader(
        graph, seeds, sampler, batch_size=task.batch_size, shuffle=True, drop_last=False
    )
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(sage(graph, task))
    optimizer = torch.optim.Adam(model.parameters(), lr=task.learning_rate)
    epochs = [run_epoch(graph, loader, model, optimizer) for _ in range(task.num_epochs)]
    if dist.get_rank() == 0:
        (folder / "figures.json").write_text(json.dumps({"steps": steps, "epochs": epochs}))
    dist.barrier()
    dist.destroy_process_group()


def sage(graph: Any, task: Task) -> torch.nn.Module:
    import dgl.nn

    num_classes = task.graph.get("num_classes", 10)
    sizes = [graph.ndata["x"].shape[1], *[task.hidden] * (len(task.fanouts) - 1), num_classes]

    class Sage(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(dgl.nn.SAGEConv(a, b, "mean") for a, b in zip(sizes, sizes[1:]))

        def forward(self, blocks: list[Any], x: torch.Tensor) -> torch.Tensor:
            for index, (layer, block) in enumerate(zip(self.layers, blocks)):
                x = layer(block, x)
                x = F.relu(x) if index < len(self.layers) - 1 else x
            return x

    return Sage()


def least_steps(own: int, limit: int | None) -> int:
    """As many steps on every rank as the one with the fewest has, so that DDP meets in each."""
    count = torch.tensor([own if limit is None else min(own, limit)])
    dist.all_reduce(count, dist.ReduceOp.MIN)
    return int(count)


def run_epoch(graph: Any, loader: Any, model: Any, optimizer: Any) -> dict[str, float]:
    """One epoch, timed from barrier to barrier; the stages' seconds are this rank's."""
    stages = {"sample_seconds": 0.0, "fetch_seconds": 0.0, "compute_seconds": 0.0}
    totals = torch.zeros(3, dtype=torch.float64)  # seeds, input nodes, sum of losses times seeds
    dist.barrier()
    start = begin = time.perf_counter()
    for input_nodes, output_nodes, blocks in loader:
        sampled = time.perf_counter()
        x, y = graph.ndata["x"][input_nodes], graph.ndata["y"][output_nodes].long()
        fetched = time.perf_counter()
        loss = F.cross_entropy(model(blocks, x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        totals += torch.tensor([len(y), len(x), loss.item() * len(y)])
        stages["sample_seconds"] += sampled - begin
        stages["fetch_seconds"] += fetched - sampled
        begin = time.perf_counter()
        stages["compute_seconds"] += begin - fetched
    dist.barrier()
    seconds = time.perf_counter() - start
    dist.all_reduce(totals)
    num_seeds, num_inputs, loss_sum = totals.tolist()
    whole = {"seconds": seconds, "samples": num_seeds, "samples_per_s": num_seeds / seconds}
    return whole | {"input_nodes": num_inputs, "loss": loss_sum / num_seeds} | stages


if __name__ == "__main__":
    os.environ.setdefault("DGLBACKEND", "pytorch")
    {"partition": partition, "serve": serve, "train": train}[sys.argv[1]](Path(sys.argv[2]).resolve())
