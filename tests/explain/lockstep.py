"""Trainers of a job in one process, step by step, with one model as DDP would give them: what placements and resumes
are compared by without starting ranks."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import gnnsys
from gnnsys.comm import Client, Kind, Server
from gnnsys.explain import Guide
from gnnsys.loader.loader import Loader
from gnnsys.partition import Placement, open_parts
from gnnsys.sampling import DistGraph, GraphService, PartMasks, graph_tables, part_rows
from gnnsys.store import Shard, Store
from tests.explain.guided_training import MODEL, SECONDS, checksum
from tests.explain.models import sage


@contextmanager
def trainers(folder: Path, machine_of_rank: Sequence[int]) -> Iterator[list[DistGraph]]:
    """The graph as every rank sees it. There are as many parts as ranks, and each is on the machine of its rank."""
    where = list(machine_of_rank)
    with ExitStack() as stack:
        endpoints = {}
        for machine in sorted(set(where)):
            parts, shard = open_parts(folder), Shard(machine)
            own, specs = [part for part, at in enumerate(where) if at == machine], graph_tables(parts)
            for part in own:
                for name, rows in part_rows(parts, part).items():
                    shard.add(specs[name], part, rows)
            handlers = {**GraphService(parts, own).handlers(), **shard.handlers()}
            server = Server(handlers | {Kind.SELECT: PartMasks(parts, own).handle}, name=f"machine {machine}")
            stack.callback(shard.close)
            stack.callback(server.close)
            endpoints[machine] = server.start().endpoints[0]
        graphs = []
        for rank, machine in enumerate(where):
            client = Client(endpoints, sender=rank, incarnation=1)
            stack.callback(client.close)
            store = Store(machine_of_part=where, machine=machine, client=client, rank=rank, world_size=len(where))
            graph = DistGraph(open_parts(folder), store, client, machine, where)
            graph.placement = Placement(rank, tuple(where), tuple(where))
            stack.callback(graph.end_guides)
            graphs.append(graph)
        yield graphs


class Job:
    """A loader and a guide for each graph, and one model. Exact unless it is said otherwise."""

    def __init__(self, graphs: Sequence[DistGraph], num_threads: int = 0, **of_guide: Any) -> None:
        torch.manual_seed(0)
        self.num_threads = num_threads
        options = {"model": MODEL, "pools": 4, "every": 3, "exact": True, "ahead": 2, "timeout": SECONDS} | of_guide
        self.graphs, self.guides = graphs, [Guide(**options) for _ in graphs]
        self.loaders: list[Loader] = [self.make_loader(*each) for each in zip(graphs, self.guides, strict=True)]
        self.model = sage()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.3, momentum=0.9)
        self.batches: list[str] = []
        self.endless = [_endless(loader) for loader in self.loaders]

    def make_loader(self, graph: DistGraph, guide: Guide) -> Loader:
        seeds = gnnsys.split(graph, None)
        return gnnsys.NeighborLoader(
            graph, [4, 4], input_nodes=seeds, batch_size=12, shuffle=True, num_threads=self.num_threads, guide=guide
        )

    def loss(self, batch: Any) -> torch.Tensor:
        out = self.model(batch.x, batch.edge_index)[: batch.batch_size]
        return F.cross_entropy(out, batch.y[: batch.batch_size], reduction="sum")

    def run(self, steps: int) -> Job:
        for _ in range(steps):
            self.optimizer.zero_grad()
            for graph, batches in zip(self.graphs, self.endless, strict=True):
                batch = next(batches)
                self.loss(batch).div(12 * len(self.graphs)).backward()
                self.batches.append(checksum(graph.original_ids(batch.n_id), batch.x))
            self.optimizer.step()
            for guide in self.guides:
                guide.update(self.model)
        return self

    def leave_epoch(self) -> Job:
        """What follows is of the next epoch."""
        self.endless = [_endless(loader) for loader in self.loaders]
        return self

    @property
    def weights(self) -> str:
        return checksum(*self.model.state_dict().values())

    def state(self) -> dict[str, Any]:
        states = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return copy.deepcopy({**states, "loaders": [loader.state_dict() for loader in self.loaders]})

    def load_rank(self, rank: int, state: dict[str, Any]) -> None:
        self.loaders[rank].load_state_dict(state)
        self.endless[rank] = _endless(self.loaders[rank])

    def load(self, state: dict[str, Any]) -> Job:
        state = copy.deepcopy(state)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for rank, of_loader in enumerate(state["loaders"]):
            self.load_rank(rank, of_loader)
        return self

    def replace(self, rank: int, **of_guide: Any) -> None:
        """Another process in the place of one rank, as far as others can tell: it begins with its state of now."""
        state, graph = self.loaders[rank].state_dict(), self.graphs[rank]
        self.guides[rank].close()
        self.loaders[rank].close()
        graph.guide_numbers = itertools.count(1)
        self.guides[rank] = replace(self.guides[rank], **of_guide)
        self.loaders[rank] = self.make_loader(graph, self.guides[rank])
        self.load_rank(rank, state)

    def close(self) -> None:
        for guide, loader in zip(self.guides, self.loaders, strict=True):
            guide.close()
            loader.close()


def _endless(loader: Loader) -> Iterator[Any]:
    while True:
        yield from loader
