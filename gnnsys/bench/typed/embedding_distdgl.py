"""`python -m gnnsys.bench.typed.embedding_distdgl {partition,serve,train} FOLDER`: DistDGL (dgl 1.1.3), one process.

DGL cuts an embedding as a graph's nodes are: here of a graph with a node per row and nearly no edges, cut at random.
What becomes of rows is DGL's own: `dgl.distributed.DistEmbedding` and `dgl.distributed.optim.SparseAdam`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gnnsys.bench.typed.embedding_task import LEARNING_RATE, EmbeddingTask, loss_of, run_phases

NAME = "graph"
ROWS_PER_EDGE = 100  # DGL wants edges, and not as many of them as nodes


def partition(folder: Path) -> None:
    import dgl

    task = EmbeddingTask.load(folder)
    num_edges = max(task.num_rows // ROWS_PER_EDGE, 10)
    generator = torch.Generator().manual_seed(0)
    src, dst = torch.randint(task.num_rows, (2, num_edges), generator=generator)
    graph = dgl.graph((src, dst), num_nodes=task.num_rows)
    dgl.distributed.partition_graph(graph, NAME, task.num_hosts, str(folder / "parts"), part_method="random")


def serve(folder: Path) -> None:
    import dgl

    dgl.distributed.initialize(str(folder / "ip_config.txt"))  # never returns


def first_rows(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Drawn as ours are; servers call it."""
    bound = shape[1] ** -0.5
    return torch.empty(shape, dtype=dtype).uniform_(-bound, bound)


class DglTrainer:
    def __init__(self, task: EmbeddingTask) -> None:
        import dgl

        self.rank = dist.get_rank()
        options = {"name": "rows", "init_func": first_rows}
        self.embedding = dgl.distributed.DistEmbedding(task.num_rows, task.dim, **options)
        self.optimizer = dgl.distributed.optim.SparseAdam([self.embedding], lr=LEARNING_RATE)

    def barrier(self) -> None:
        dist.barrier()

    def gather(self, name: str, figures: dict[str, Any]) -> list[dict[str, Any]]:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, figures)
        return found

    def update(self, ids: Tensor) -> float:
        loss = loss_of(self.embedding(ids))
        self.optimizer.zero_grad()  # has the step forget the gradients that it applies
        loss.backward()
        self.optimizer.step()
        return loss.item()


def train(folder: Path) -> None:
    import dgl

    torch.set_num_threads(1)
    task = EmbeddingTask.load(folder)
    dgl.distributed.initialize(str(folder / "ip_config.txt"))
    dist.init_process_group("gloo")
    graph = dgl.distributed.DistGraph(NAME, part_config=str(folder / "parts" / f"{NAME}.json"))  # has the rows' cut
    assert graph.num_nodes() == task.num_rows
    run_phases(DglTrainer(task), task, folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("DGLBACKEND", "pytorch")
    # By its own name: servers unpickle `first_rows`, and they know no `__main__` of a trainer.
    from gnnsys.bench.typed import embedding_distdgl as program

    getattr(program, sys.argv[1])(Path(sys.argv[2]).resolve())
