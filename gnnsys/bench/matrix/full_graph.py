"""Training on the whole graph: one step an epoch, by G3's hybrid parallelism, or with what ranks need replicated."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import gnnsys
from gnnsys.bench.await_file import WAIT_SECONDS
from gnnsys.bench.matrix.cell import FULL_SCHEDULE, Cell, CellOptions
from gnnsys.bench.matrix.mini_batch import validate_sampled
from gnnsys.bench.matrix.rank_trainer import RankTrainer, RepeatFigures, StageCounts
from gnnsys.fullgraph import BinSchedule, HybridParallel, Packing, share_of

# The variants of G3, 4.6.7: inter-layer alone packs nodes by their ids, intra-layer alone waits for a layer's inputs.
_SCHEDULES: dict[str, dict[str, Any]] = {
    "sequential": {"intra_layer": False, "inter_layer": False},
    "inter-layer": {"intra_layer": False, "order": "ids"},
    "intra-layer": {"inter_layer": False},
    FULL_SCHEDULE: {},
}


def make_schedule(options: CellOptions) -> BinSchedule:
    packing = Packing() if options.bins == 1 else Packing(num_bins=options.bins or 1)
    return BinSchedule(**_SCHEDULES[options.schedule], packing=None if options.bins is None else packing)


class FullGraphTrainer(RankTrainer):
    """`HybridParallel`: every rank computes its nodes, layer by layer, and sends the rows that others need."""

    def __init__(self, session: gnnsys.Session, graph: gnnsys.DistGraph, cell: Cell) -> None:
        super().__init__(session, graph, cell)
        self.share = share_of(graph, session.rank, session.world_size)
        self.x, self.y = (self.share.rows(name).to(self.device) for name in ("x", "y"))
        self.train, self.val = (self.share.rows(f"{name}_mask").to(self.device) for name in ("train", "val"))
        (self.count,) = self.sum_over_ranks(int(self.train.sum()))
        self.exchange = {"compute": 0.0, "wait": 0.0, "send": 0.0, "bytes_remote": 0.0}

    def begin(self, seed: int) -> None:
        self.model = HybridParallel(
            self.make_model(seed), self.share, schedule=make_schedule(self.options), timeout=WAIT_SECONDS
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=self.options.learning_rate)

    def run_epoch(self, figures: RepeatFigures) -> None:
        out = self.model(self.x)
        loss = F.cross_entropy(out[self.train], self.y[self.train], reduction="sum") / self.count
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        times = self.model.times
        for name, value in zip(self.exchange, (times.compute, times.wait, times.send, times.num_bytes), strict=True):
            self.exchange[name] += value
        figures.computed, figures.waited = times.compute, times.wait
        figures.steps, figures.seeds = 1, int(self.train.sum())
        (figures.loss,) = self.sum_over_ranks(float(loss.detach()))

    @torch.no_grad()
    def validate(self) -> float:
        self.model.eval()
        is_right = self.model(self.x).argmax(1)[self.val] == self.y[self.val]
        self.model.train()
        right, count = self.sum_over_ranks(int(is_right.sum()), is_right.numel())
        return right / count

    def counts(self) -> StageCounts:
        return {"exchange": dict(self.exchange)}


class ReplicatedTrainer(RankTrainer):
    """Every rank has all that its training nodes depend on, fetched once, and computes it; only gradients travel.

    The losses are those of `FullGraphTrainer` where layers do not look at the degrees of their sources, as GCN's do.
    """

    def __init__(self, session: gnnsys.Session, graph: gnnsys.DistGraph, cell: Cell) -> None:
        super().__init__(session, graph, cell)
        share = gnnsys.split(graph, "train")
        loader = gnnsys.NeighborLoader(
            graph, [-1] * len(cell.fanouts), input_nodes=share, batch_size=max(1, len(share)), fetch=["x", "y"],
            device=self.device,
        )  # fmt: skip
        (self.batch,) = loader
        loader.close()
        (self.count,) = self.sum_over_ranks(self.batch.batch_size)

    def begin(self, seed: int) -> None:
        self.model = self.make_model(seed)
        self.parallel = DistributedDataParallel(self.model) if self.session.world_size > 1 else self.model
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=self.options.learning_rate)

    def run_epoch(self, figures: RepeatFigures) -> None:
        batch, began = self.batch, time.perf_counter()
        out, labels = self.run_on(self.parallel, batch), batch.y[: batch.batch_size]
        loss = F.cross_entropy(out, labels, reduction="sum") / self.count
        self.optimizer.zero_grad()
        (loss * self.session.world_size).backward()  # DDP takes the mean over ranks
        self.optimizer.step()
        figures.computed = time.perf_counter() - began
        figures.steps, figures.seeds = 1, batch.batch_size
        (figures.loss,) = self.sum_over_ranks(float(loss.detach()))

    @torch.no_grad()
    def validate(self) -> float:
        return validate_sampled(self, self.model, [-1] * len(self.cell.fanouts))

    def counts(self) -> StageCounts:
        return {}
