"""What both sides of `embeddings/...` do: the rows, the batches of ids, and the steps that are timed.

A step looks up the rows of a batch's ids, takes the gradient of a simple loss, and has SparseAdam update the rows. A
side says how; the loop around it is the same for both.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from gnnsys.bench.await_file import await_file
from gnnsys.bench.dist.phase import BEGIN, END, FIGURES, READY, Phase, go_file, load

UNIFORM, SKEWED = "uniform", "skewed"
GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, are far apart
LEARNING_RATE = 0.01
ROWS_AT_ONCE = 50_000


@dataclass(frozen=True, kw_only=True)
class EmbeddingTask:
    """A table of `num_rows` x `dim`, cut evenly over the hosts. A batch is `batch_size` draws, each id kept once."""

    num_rows: int
    dim: int
    trainers_per_host: int
    batch_size: int
    steps: int
    num_hosts: int = 2
    encrypt: bool = True

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "task.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> EmbeddingTask:
        return cls(**json.loads((folder / "task.json").read_text()))


def draw(task: EmbeddingTask, kind: str, rank: int, count: int) -> list[Tensor]:
    """`count` batches of one rank. Uniform: every row alike. Skewed: the share p of all rows that is most popular has
    the cube root of p of all draws, so that one row in a thousand has a tenth of them."""
    generator = torch.Generator().manual_seed(1000 * (kind == SKEWED) + rank)
    stride = int(GOLDEN * task.num_rows)  # from a row to the next in popularity: every host has popular ones
    while math.gcd(stride, task.num_rows) > 1:
        stride += 1
    found = []
    for _ in range(count):
        share = torch.rand(task.batch_size, generator=generator, dtype=torch.float64)
        ids = ((share if kind == UNIFORM else share**3) * task.num_rows).long()
        ids = (ids * stride % task.num_rows).unique()
        found.append(ids[torch.randperm(ids.numel(), generator=generator)])  # as a sampler's: in no order
    return found


def loss_of(rows: Tensor) -> Tensor:
    """Of a model that is a sum of a row's values, which should be 1: one product, so that rows are what takes time."""
    return (rows @ torch.full((rows.shape[1],), rows.shape[1] ** -0.5) - 1).square().mean()


class UpdateSide(Protocol):
    """One trainer of either library."""

    rank: int

    def barrier(self) -> None: ...

    def gather(self, name: str, figures: dict[str, Any]) -> list[dict[str, Any]]: ...

    def update(self, ids: Tensor) -> float:
        """One step on the rows of `ids`; the loss before it."""


def touch_all(side: UpdateSide, task: EmbeddingTask) -> None:
    """Updates every row once. Until then, the memory of rows and states may be but promised by the kernel."""
    num_trainers = task.num_hosts * task.trainers_per_host
    num_steps = -(-task.num_rows // (num_trainers * ROWS_AT_ONCE))
    for ids in torch.arange(task.num_rows).tensor_split(num_trainers)[side.rank].tensor_split(num_steps):
        side.update(ids)


def run_phases(side: UpdateSide, task: EmbeddingTask, folder: Path) -> None:
    """A phase's name is the kind of its ids. Rank 0 tells what `Conductor` hears."""
    say: Callable[[str], None] = (lambda line: print(line, flush=True)) if side.rank == 0 else (lambda line: None)
    touch_all(side, task)
    for phase in load(folder):
        batches = draw(task, phase.name, side.rank, phase.warm + task.steps)
        meet(side, say, READY, phase, folder)
        losses = [side.update(ids) for ids in batches[: phase.warm]]
        meet(side, say, BEGIN, phase, folder)
        start = time.perf_counter()
        losses += [side.update(ids) for ids in batches[phase.warm :]]
        side.barrier()
        seconds = time.perf_counter() - start
        say(f"{END} {phase.name}")
        num_updated = sum(ids.numel() for ids in batches[phase.warm :])
        figures = {"seconds": seconds, "steps": task.steps, "seeds": num_updated, "losses": losses}
        everyone = side.gather(f"figures-{phase.name}", figures)
        say(f"{FIGURES} {phase.name} {json.dumps(everyone)}")


def meet(side: UpdateSide, say: Callable[[str], None], word: str, phase: Phase, folder: Path) -> None:
    """All ranks and the harness, who does what the word asks for before anyone goes on."""
    side.barrier()
    say(f"{word} {phase.name}")
    if side.rank == 0:
        await_file(go_file(folder, word, phase.name))
    side.barrier()
