"""What every way to train has in common: warm-up, repeats that are timed between barriers, trainings to an accuracy."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

import gnnsys
from gnnsys import nn
from gnnsys.bench.matrix.cell import REPEAT, Cell

NODE = "node"
StageCounts: TypeAlias = dict[str, dict[str, float]]


@dataclass
class RepeatFigures:
    """What a rank did in a repeat, an epoch or a whole training. Seconds of the wall clock, without validation.

    `curve`: seconds of training and validation accuracy after each epoch.
    """

    seconds: float = 0.0
    epochs: int = 0
    seeds: int = 0
    steps: int = 0
    waited: float = 0.0
    computed: float = 0.0
    cpu_seconds: float = 0.0
    loss: float = 0.0
    stages: StageCounts = field(default_factory=dict)
    curve: list[tuple[float, float]] = field(default_factory=list)

    def add(self, other: RepeatFigures) -> None:
        for name in ("seconds", "epochs", "seeds", "steps", "waited", "computed", "cpu_seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.loss = other.loss
        for stage, counts in other.stages.items():
            own = self.stages.setdefault(stage, {})
            for name, count in counts.items():
                own[name] = own.get(name, 0) + count


class RankTrainer(ABC):
    """A model of the cell, and whatever brings it rows. A subclass says what an epoch is."""

    def __init__(self, session: gnnsys.Session, graph: gnnsys.DistGraph, cell: Cell) -> None:
        self.session, self.graph, self.cell, self.options = session, graph, cell, cell.options
        self.device = session.device
        self.ends = contextlib.ExitStack()  # of what it has started
        self.arguments = {
            "in_channels": graph.node_data[NODE]["x"].shape[1], "hidden_channels": cell.options.hidden,
            "num_layers": len(cell.fanouts), "out_channels": graph.info["num_classes"],
        }  # fmt: skip

    @abstractmethod
    def begin(self, seed: int) -> None:
        """New weights, the same on every rank."""

    @abstractmethod
    def run_epoch(self, figures: RepeatFigures) -> None:
        """Trains one epoch and counts it."""

    @abstractmethod
    def validate(self) -> float:
        """Accuracy on the validation nodes of all ranks."""

    @abstractmethod
    def counts(self) -> StageCounts:
        """By stage, what it has counted."""

    def counted_since(self, before: StageCounts) -> StageCounts:
        return {
            stage: {name: value - before.get(stage, {}).get(name, 0) for name, value in counts.items()}
            for stage, counts in self.counts().items()
        }

    def settle(self) -> None:
        """After the warm-up: waits for what is to be there before anything is measured."""
        self.session.barrier()

    def close(self) -> None:
        self.ends.close()

    def make_model(self, seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        return getattr(nn, self.cell.model)(**self.arguments).to(self.device)

    def run_on(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Rows of a batch's seeds. Layers compute what later ones need of it, which GCN's cannot: see its `forward`."""
        if batch.blocks:
            return model(batch.x, [next(iter(block.csc.values())) for block in batch.blocks])[: batch.batch_size]
        trim = {} if self.cell.model == "GCN" else {"num_sampled_nodes": batch.num_sampled_nodes}
        return model(batch.x, batch.edge_index, **trim)[: batch.batch_size]

    def measure(self) -> list[RepeatFigures]:
        """All repeats: epochs, or trainings where the cell has an accuracy to reach."""
        self.begin(self.options.seed)
        for _ in range(self.cell.warmup):
            self.train_epoch()
        self.settle()
        measured = []
        for number in range(self.cell.repeats):
            if self.options.accuracy is not None:
                self.begin(self.options.seed + number)
            self.say(f"{REPEAT} {number}")
            measured.append(
                self.train_epoch() if self.options.accuracy is None else self._training(self.options.accuracy)
            )
        self.say(f"{REPEAT} {self.cell.repeats}")
        return measured

    def say(self, line: str) -> None:
        if self.session.rank == 0:
            print(line, flush=True)

    def sum_over_ranks(self, *values: float) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64, device="cpu")
        if self.session.world_size > 1:
            torch.distributed.all_reduce(total)
        return total.tolist()

    def _training(self, accuracy: float) -> RepeatFigures:
        """From new weights until the accuracy is reached."""
        total = RepeatFigures()
        for _ in range(self.options.max_epochs):
            total.add(self.train_epoch())
            total.curve.append((total.seconds, self.validate()))
            if total.curve[-1][1] >= accuracy:
                break
        return total

    def train_epoch(self) -> RepeatFigures:
        """An epoch between two barriers, and what it took."""
        self.session.barrier()
        figures, before, cpu = RepeatFigures(epochs=1), self.counts(), time.process_time()
        start = time.perf_counter()
        self.run_epoch(figures)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.session.barrier()
        figures.seconds = time.perf_counter() - start
        figures.cpu_seconds = time.process_time() - cpu
        figures.stages = self.counted_since(before)
        return figures
