"""One rank that trains rows on links: `python -m gnnsys.bench.link_rank PART BATCH_SIZE`, in a job's environment.

An epoch of the rank's share of the train links warms up, two more are timed from one moment at which all ranks are
ready to the next. Prints links per second, and how many cores were used meanwhile, as JSON.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist

import gnnsys
from gnnsys.bench.parts_beside_memory import DIM, FANOUTS
from gnnsys.graph import EDGE, NODE
from gnnsys.store import DistEmbedding, SparseAdam

EPOCHS = 2


def main(folder: str, batch_size: int) -> None:
    torch.set_num_threads(1)
    with gnnsys.init():
        graph = gnnsys.open(folder, verify=False)
        links = gnnsys.split(graph, "train", type=EDGE)
        loader = gnnsys.LinkNeighborLoader(
            graph,
            FANOUTS,
            edge_label_index=links,
            neg_sampling=gnnsys.NegativeSampling("binary"),
            batch_size=batch_size,
            shuffle=True,
        )
        table = DistEmbedding(graph, dim=DIM, node_type=NODE)
        optimizer = SparseAdam([table], lr=0.01)

        def epoch() -> None:
            for batch in loader:
                optimizer.zero_grad()
                table(batch.n_id).square().mean().backward()
                optimizer.step()

        epoch()
        dist.barrier()
        began, used = time.perf_counter(), time.process_time()
        for _ in range(EPOCHS):
            epoch()
        dist.barrier()
        seconds, used = time.perf_counter() - began, time.process_time() - used
        print(json.dumps({"links_per_second": EPOCHS * len(links) / seconds, "cores": used / seconds}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
