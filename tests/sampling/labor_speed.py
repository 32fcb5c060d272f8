"""Samplers beside DGL's, in CPU seconds of one thread: `python -m tests.sampling.labor_speed`.

Three hops of 15, 10 and 5 around 1024 seeds of an R-MAT graph with 200,000 nodes and 4 million edges; the best of two
rounds of 5 batches each. CPU time: other processes on the machine do not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import dgl
import torch
from torch import Tensor

from gnnsys.graph import NODE, rmat
from gnnsys.sampling import FastGCNSampler, LaborSampler, LadiesSampler, NeighborSampler, SampleKey, Sampler

NUM_NODES, NUM_EDGES, BATCHES, FANOUTS = 200_000, 4_000_000, 5, [15, 10, 5]
Counts = tuple[int, int]  # edges, nodes


def ours(sampler: Sampler, ids: list[Tensor]) -> Callable[[int], Counts]:
    def run(batch: int) -> Counts:
        sample = sampler.sample({NODE: ids[batch]}, key=SampleKey(0, 0, batch))
        return sum(map(sum, sample.num_sampled_edges.values())), sample.node[NODE].numel()

    return run


def theirs(sampler: dgl.dataloading.BlockSampler, graph: dgl.DGLGraph, ids: list[Tensor]) -> Callable[[int], Counts]:
    def run(batch: int) -> Counts:
        nodes, _, blocks = sampler.sample_blocks(graph, ids[batch])
        return sum(block.num_edges() for block in blocks), nodes.numel()

    return run


def main() -> None:
    torch.set_num_threads(1)
    graph = rmat(NUM_NODES, NUM_EDGES, seed=1)
    other = dgl.graph(tuple(graph.edge_index()), num_nodes=NUM_NODES).formats("csc")
    ids = [torch.randperm(NUM_NODES, generator=torch.Generator().manual_seed(b))[:1024] for b in range(BATCHES)]
    blocks = {"expand": "frontier"}
    cases = {
        "gnnsys LABOR-0": ours(LaborSampler(graph, FANOUTS, **blocks), ids),
        "DGL LABOR-0": theirs(dgl.dataloading.LaborSampler(FANOUTS[::-1]), other, ids),
        "gnnsys LABOR-1": ours(LaborSampler(graph, FANOUTS, importance_sampling=1, **blocks), ids),
        "DGL LABOR-1": theirs(dgl.dataloading.LaborSampler(FANOUTS[::-1], importance_sampling=1), other, ids),
        "gnnsys uniform": ours(NeighborSampler(graph, FANOUTS, **blocks), ids),
        "DGL uniform": theirs(dgl.dataloading.NeighborSampler(FANOUTS[::-1]), other, ids),
        "gnnsys LADIES": ours(LadiesSampler(graph, [2048] * 3), ids),
        "gnnsys FastGCN": ours(FastGCNSampler(graph, [2048] * 3), ids),
    }
    best: dict[str, tuple[float, int, int]] = {}
    for _ in range(2):
        for name, run in cases.items():
            begin = time.process_time()
            counts = [run(batch) for batch in range(BATCHES)]
            seconds = time.process_time() - begin
            edges, nodes = (sum(c[i] for c in counts) for i in range(2))
            best[name] = min(best.get(name, (seconds, edges, nodes)), (seconds, edges, nodes))
    print("| sampler | ms per batch | million edges/s | edges | nodes |\n|---|---|---|---|---|")
    for name, (seconds, edges, nodes) in best.items():
        rate = edges / seconds / 1e6
        print(f"| {name} | {seconds / BATCHES * 1e3:.1f} | {rate:.2f} | {edges // BATCHES} | {nodes // BATCHES} |")


if __name__ == "__main__":
    main()
