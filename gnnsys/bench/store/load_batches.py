"""`python -m gnnsys.bench.store.load_batches [PARTS]`: opens parts and loads batches, then waits to be looked at.

Every process loads the same batches, so that they touch the same pages.
"""

from __future__ import annotations

import sys
from itertools import islice

import torch

import gnnsys
import gnnsys.loader
import gnnsys.session  # what a trainer imports, the process without a graph has imported too
from gnnsys.bench.child_process import answer, wait_for_end

NUM_BATCHES, BATCH_SIZE, FANOUT = 40, 256, (5, 5)


def load(parts: str | None) -> None:
    torch.set_num_threads(1)
    kept = None
    if parts is not None:
        graph = gnnsys.open(parts, verify=False)
        step = max(1, graph.num_nodes() // (NUM_BATCHES * BATCH_SIZE))
        nodes = graph.from_global(range(0, graph.num_nodes(), step))
        loader = gnnsys.NeighborLoader(graph, list(FANOUT), input_nodes=nodes, batch_size=BATCH_SIZE)
        for batch in islice(loader, min(NUM_BATCHES, len(loader)) - 1):
            kept = batch
    answer({"nodes": 0 if kept is None else kept.num_nodes})
    wait_for_end()


if __name__ == "__main__":
    load(sys.argv[1] if len(sys.argv) > 1 else None)
