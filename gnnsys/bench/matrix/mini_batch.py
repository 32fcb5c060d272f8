"""Training by mini-batches on plain DDP, with any sampler of a cell."""

from __future__ import annotations

import time
from collections.abc import Generator
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import gnnsys
from gnnsys.bench.await_file import WAIT_SECONDS
from gnnsys.bench.dist.phase import MODES
from gnnsys.bench.matrix.cell import GUIDED, Cell
from gnnsys.bench.matrix.rank_trainer import NODE, RankTrainer, RepeatFigures, StageCounts
from gnnsys.explain import Guide
from gnnsys.sampling import FastGCNSampler, LaborSampler, LadiesSampler

TIMED = ("batches", "busy", "starved", "blocked")  # of a stage since the pipeline was started
SAMPLERS = {"labor": LaborSampler, "ladies": LadiesSampler, "fastgcn": FastGCNSampler}


class MiniBatchTrainer(RankTrainer):
    """The model, its optimizer and its loader."""

    def __init__(self, session: gnnsys.Session, graph: gnnsys.DistGraph, cell: Cell) -> None:
        super().__init__(session, graph, cell)
        options = cell.options
        self.guide: Guide | None = None
        draws: dict[str, Any] = {"num_neighbors": list(cell.fanouts)}
        if cell.sampler in GUIDED:
            self.guide = Guide(
                model=f"gnnsys.nn:{cell.model}", arguments=self.arguments, **{**options.guide, **GUIDED[cell.sampler]}
            )
            draws["guide"] = self.guide
            self.ends.callback(self.guide.close)
        elif cell.sampler in SAMPLERS:
            draws = {"sampler": SAMPLERS[cell.sampler](graph, list(cell.fanouts))}
        self.loader = gnnsys.NeighborLoader(
            graph,
            input_nodes=choose_seeds(gnnsys.split(graph, "train"), cell, session.world_size),
            batch_size=options.batch_size,
            shuffle=True,
            fetch=["x", "y"],
            seed=options.seed,
            device=self.device,
            **draws,
            **MODES[options.loading],
        )
        self.ends.callback(self.loader.close)
        self.restarts = not MODES[options.loading]["across_epochs"]
        self.batches = self._endless()
        self.ends.callback(self.batches.close)

    def begin(self, seed: int) -> None:
        self.model = self.make_model(seed)
        self.parallel = DistributedDataParallel(self.model) if self.session.world_size > 1 else self.model
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=self.options.learning_rate)

    def run_epoch(self, figures: RepeatFigures) -> None:
        began = time.perf_counter()
        for batch in islice(self.batches, len(self.loader)):
            got = time.perf_counter()
            figures.waited += got - began
            self._step(batch, figures)
            began = time.perf_counter()
            figures.computed += began - got

    @torch.no_grad()
    def validate(self) -> float:
        """With neighbours drawn at random, by the same fanouts; of a layer-wise sampler with all of them."""
        fanouts = [-1] * len(self.cell.fanouts) if self.cell.sampler in ("ladies", "fastgcn") else self.cell.fanouts
        return validate_sampled(self, self.model, list(fanouts))

    def settle(self) -> None:
        """Until batches that nobody has begun are guided, and then an epoch for those that were begun before."""
        deadline = time.monotonic() + WAIT_SECONDS
        while self.guide is not None and self.guide.status()["begins_at"] < 0:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no masks within {WAIT_SECONDS:g} s")
            time.sleep(0.05)
            self.guide.update(self.model)
        super().settle()
        if self.guide is not None:
            self.train_epoch()

    def counts(self) -> StageCounts:
        """A guide's bytes are rows to explain with that came from other machines, and scores that were sent there."""
        found: StageCounts = {
            stage: {name: getattr(of, name) for name in TIMED} | of.counts
            for stage, of in self.loader.counters().items()
        }
        if self.guide is not None:
            status = self.guide.status()
            found["guide"] = {"bytes_remote": status.get("wire_row_bytes", 0) + status.get("score_bytes", 0)}
        return found

    def counted_since(self, before: StageCounts) -> StageCounts:
        """A pipeline that was started anew has counted from 0, all but its own counts."""
        kept = {
            stage: {name: 0.0 if self.restarts and name in TIMED else count for name, count in counts.items()}
            for stage, counts in before.items()
        }
        return super().counted_since(kept)

    def _endless(self) -> Generator[Any, None, None]:
        while True:
            yield from self.loader

    def _step(self, batch: Any, figures: RepeatFigures) -> None:
        out = self.run_on(self.parallel, batch)
        loss = F.cross_entropy(out, batch.y[: batch.batch_size])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if self.guide is not None:
            self.guide.update(self.model)
        figures.steps += 1
        figures.seeds += batch.batch_size
        figures.loss = float(loss.detach())


def validate_sampled(trainer: RankTrainer, model: torch.nn.Module, fanouts: list[int]) -> float:
    """Accuracy on the validation nodes of all ranks; call it without gradients."""
    model.eval()
    loader = gnnsys.NeighborLoader(
        trainer.graph, fanouts, input_nodes=gnnsys.split(trainer.graph, "val"), fetch=["x", "y"],
        batch_size=trainer.options.batch_size, device=trainer.device,
    )  # fmt: skip
    right = count = 0
    for batch in loader:
        right += int((trainer.run_on(model, batch).argmax(1) == batch.y[: batch.batch_size]).sum())
        count += batch.batch_size
    loader.close()
    model.train()
    all_right, all_nodes = trainer.sum_over_ranks(right, count)
    return all_right / all_nodes


def choose_seeds(share: gnnsys.Seeds, cell: Cell, world_size: int) -> gnnsys.Seeds:
    """A rank's share, cut to `steps` batches by taking evenly spaced ids: what is near stays near."""
    if cell.options.steps is None:
        return share
    count = cell.options.steps * cell.options.batch_size
    if share.largest - 1 < count:  # the smallest share of any rank has one less
        return share
    ids = share.ids[torch.arange(len(share))]
    chosen = ids[torch.arange(count) * len(ids) // count]
    return gnnsys.Seeds(chosen, NODE, count, count * world_size, numbering=share.numbering)
