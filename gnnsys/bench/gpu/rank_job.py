"""One rank of `bench gpu`'s job on two parts: `python -m gnnsys.bench.gpu.rank_job PARTS OPTIONS`, prints JSON.

Each rank is a machine of its own, with a server behind the loopback interface; both use the one GPU.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from gnnsys.loader import Batch, NeighborLoader, PipelineOptions
from gnnsys.nn import GraphSAGE
from gnnsys.sampling import DistGraph
from gnnsys.seeds import split
from gnnsys.session import init


def main() -> None:
    parts, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    where = torch.device(options["device"])
    served = {} if "server_threads" not in options else {"server_threads": options["server_threads"]}
    with init(encrypt=options["encrypt"], **served) as session:
        graph = session.open(parts, verify=False, device=where, place="auto", cache=options["cache"])
        shuffled = torch.randperm(graph.num_nodes(), generator=torch.Generator().manual_seed(0))
        seeds = split(graph, graph.from_global(shuffled[: options["num_seeds"]].sort().values))
        loader = NeighborLoader(
            graph,
            options["fanouts"],
            input_nodes=seeds,
            batch_size=options["batch_size"],
            shuffle=True,
            num_threads=options.get("num_threads"),
            pipeline=PipelineOptions(share=options["share"]),
        )
        found = measure(graph, loader, where, options)
        dist.barrier()
        loader.close()
    print(json.dumps(found), flush=True)


def measure(graph: DistGraph, loader: NeighborLoader, where: torch.device, options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    rows = graph.node_data["node"]
    model = GraphSAGE(rows["x"].shape[1], options["hidden"], len(options["fanouts"]), 47).to(where)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(parallel.parameters(), lr=1e-3)

    def step(batch: Batch) -> None:
        out = parallel(batch.x, batch.edge_index, num_sampled_nodes=batch.num_sampled_nodes)
        loss = F.cross_entropy(out[: batch.batch_size], batch.y[: batch.batch_size])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def seconds(batches: Iterator[Batch]) -> float:
        for batch in islice(batches, options["first"]):
            step(batch)
        _wait(where)
        dist.barrier()
        start = time.perf_counter()
        for batch in islice(batches, options["timed"]):
            step(batch)
        _wait(where)
        return (time.perf_counter() - start) / options["timed"]

    def endless() -> Iterator[Batch]:
        while True:
            yield from loader

    with closing(endless()) as batches:  # type: ignore[type-var]
        taken = seconds(batches)
        counts = loader.counters()["fetch"].counts
        fetched = loader.counters()["fetch"].batches
        held = list(islice(batches, options["first"] + options["timed"]))
    where_time_went = {
        name: [round(figure / max(of.batches, 1) * 1e3, 2) for figure in (of.begun, of.busy, of.starved, of.blocked)]
        for name, of in loader.counters().items()
    }
    print(f"{loader}: ms per batch begun, busy, starved, blocked: {where_time_went}", file=sys.stderr)
    alone = seconds(iter(held))  # both ranks at once, on the one GPU
    plan = {} if graph.cache_plan is None else {t: reads._asdict() for t, reads in graph.cache_plan.items()}
    return {
        "seconds": taken,
        "compute_seconds": alone,
        "remote_bytes": counts["bytes_remote"] / max(fetched, 1),
        "expected_remote_bytes": sum(reads["remote_bytes"] for reads in plan.values()),
    }


def _wait(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize(where)


if __name__ == "__main__":
    main()
