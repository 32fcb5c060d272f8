"""A short training on parts with a guide, that may be killed and go on: what tests compare runs by."""

from __future__ import annotations

import hashlib
import os
import signal
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gnnsys
from gnnsys.explain import Guide
from gnnsys.sampling import DistGraph
from gnnsys.session import Session
from tests.explain.models import sage

MODEL = "tests.explain.models:sage"
SECONDS = 120.0


@dataclass
class Trained:
    """What a run ended with."""

    weights: str  # a checksum
    batches: list[str] = field(default_factory=list)  # checksums of ids and rows, of every batch that was seen
    versions: list[Any] = field(default_factory=list)
    status: dict[str, float] = field(default_factory=dict)


def checksum(*values: torch.Tensor) -> str:
    told = hashlib.sha256()
    for value in values:
        told.update(value.detach().contiguous().numpy().tobytes())
    return told.hexdigest()


def make_loader(graph: DistGraph, guide: Guide, **options: Any) -> gnnsys.NeighborLoader:
    options = {"input_nodes": gnnsys.split(graph, "train"), "batch_size": 12, "shuffle": True, **options}
    return gnnsys.NeighborLoader(graph, [5, 5], num_threads=2, guide=guide, **options)


def train(
    session: Session,
    graph: DistGraph,
    *,
    steps: int,
    checkpoints: str | None = None,
    kill_at: int = -1,
    kill_explainer_at: int = -1,
    kill_server_at: int = -1,
    **of_guide: Any,
) -> Trained:
    """Exactly guided unless it is said otherwise."""
    torch.manual_seed(0)
    guide = Guide(**{"model": MODEL, "pools": 4, "every": 5, "exact": True, "ahead": 12, "timeout": SECONDS} | of_guide)
    loader = make_loader(graph, guide)
    model: nn.Module = sage()
    if session.world_size > 1:
        model = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    saver = None
    if checkpoints is not None:
        states = {"model": model, "optimizer": optimizer, "loader": loader}
        saver = gnnsys.resume(checkpoints, every=7, asynchronous=False, **states)
    seen, state = [], loader.state_dict()
    number = state["epoch"] * len(loader) + state["batch"]
    for _ in count():
        for batch in loader:
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            loss = F.cross_entropy(out, batch.y[: batch.batch_size], reduction="sum") / max(1, batch.batch_size)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(checksum(graph.original_ids(batch.n_id), batch.x))
            sampler = guide._sampler()
            if number == kill_explainer_at and sampler._explaining is not None:
                os.kill(sampler._explaining.pid, signal.SIGKILL)
            if number == kill_server_at and session.rank == 0:
                for each in session.status():
                    os.kill(each["pid"], signal.SIGKILL)
            guide.update(model)
            if saver is not None:
                saver.step()
            if number == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            number += 1
            if number == steps:
                versions = sampler.state_dict()["versions"]
                status = guide.status()
                guide.close()
                loader.close()
                return Trained(checksum(*model.state_dict().values()), seen, versions, status)
    raise AssertionError
