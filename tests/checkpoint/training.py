"""A small training that uses everything a checkpoint holds; alone, or as one rank of a job. Also a program for ranks.

It draws from every generator, so that one which is not restored shows in the weights.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import gnnsys
from gnnsys.partition import write_parts
from tests.partition.part_graphs import homogeneous, random_assignment

NUM_NODES, DIM, BATCH = 60, 8, 4


def make_parts(path, num_parts=2, seed=1):
    """Parts of one graph; another `seed` cuts it otherwise."""
    graph = homogeneous(NUM_NODES, 240)
    write_parts(graph, random_assignment(graph, num_parts, 1, seed=seed), path)
    return path


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.last = nn.BatchNorm1d(DIM), nn.Linear(DIM + 3, 16), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self.last(F.dropout(self.first(torch.cat([x, self.norm(rows)], 1)).relu(), 0.3))


class Job:
    """`states` is what `gnnsys.resume` is given."""

    def __init__(self, graph: Any, *, name: str = "node/node/users", seed: int = 0) -> None:
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        ddp = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
        self.loader = gnnsys.NeighborLoader(
            graph, [3, 2], input_nodes=gnnsys.split(graph, "train"), batch_size=BATCH, shuffle=True, num_threads=1
        )
        self.embedding = gnnsys.DistEmbedding(graph, NUM_NODES, DIM, name)
        self.scores = graph.store.create("scores", 10, (2,))
        self.model: nn.Module = DistributedDataParallel(Model()) if ddp else Model()
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.7)
        self.sparse = gnnsys.SparseAdam([self.embedding], 0.05)
        self.losses: dict[int, float] = {}

    @property
    def states(self) -> dict[str, Any]:
        names = ("loader", "embedding", "scores", "model", "optimizer", "scheduler", "sparse")
        return {name: getattr(self, name) for name in names}

    def run(self, saver: gnnsys.Saver, until: int) -> None:
        """Trains until `until` steps are done, over all lives."""
        while saver.steps < until:
            for batch in self.loader:
                out = self.model(batch.x, self.embedding(batch.n_id))
                noise = random.random() + float(np.random.rand())
                loss = (out.pow(2).mean(1) * (noise + torch.rand(()))).sum()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.scheduler.step()
                self.sparse.step()
                if self.embedding.store.rank == 0:
                    self.scores[torch.tensor([saver.steps % 10])] = torch.full((1, 2), loss.item())
                self.losses[saver.steps] = loss.item()
                saver.step()
                if saver.steps == until:
                    return

    def values(self) -> dict[str, torch.Tensor]:
        """All that was trained."""
        store, name = self.embedding.store, self.embedding.name
        tables = [name, f"{name}/exp_avg", f"{name}/exp_avg_sq", "scores"]
        moments = self.optimizer.state_dict()["state"]
        return {
            **{f"model {key.removeprefix('module.')}": value for key, value in self.model.state_dict().items()},
            **{f"adam {key} {part}": moments[key][part] for key in moments for part in moments[key]},
            **{f"table {table}": store.tensor(table)[:] for table in tables},
        }


def train(
    parts: Any, folder: Any, until: int, *, every: int = 3, prepare: Callable[[gnnsys.Saver], None] | None = None,
    **options: Any,
) -> tuple[dict[str, torch.Tensor], dict[int, float]]:  # fmt: skip
    """A life of the job in this process alone: what was trained, and the loss of each step of this life."""
    with gnnsys.init(process_group=False):
        job = Job(gnnsys.open(parts, verify=False))
        saver = gnnsys.resume(folder, every=every, **options, **job.states)
        if prepare is not None:
            prepare(saver)
        job.run(saver, until)
        values = {name: value.clone() for name, value in job.values().items()}
        saver.close()
        job.loader.close()
        return values, job.losses


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def digest(values: dict[str, torch.Tensor]) -> str:
    text = hashlib.sha256()
    for name, value in sorted(values.items()):
        text.update(name.encode() + value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return text.hexdigest()
