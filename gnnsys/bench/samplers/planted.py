"""What a model learns from each sampler, and how many bytes of remote rows that takes.

A planted graph (half of the columns and 30% of the rows are noise) in four parts, a trainer for each, all in this
process: trainers take turns, and a step is made with the mean of their gradients, as DDP makes it. A remote row is a
node of a batch that another part owns, counted once per batch: what a store pulls if nothing is kept between batches.
Rows fetched to explain, and masks sent to owners, count as well. Accuracy is on test nodes, with all neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import fmean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnsys.bench.case import Case, Side, Unit, Versus, score, value
from gnnsys.bench.samplers.draws import NUM_PARTS, open_alone
from gnnsys.bench.workload import FULL, Workload
from gnnsys.explain import Degrees, Explainer, GradientInput, RandomMasks, TrainedMasks, explain_part, pool_part
from gnnsys.graph import NODE, Graph, planted_noise
from gnnsys.nn import GraphSAGE
from gnnsys.partition import partition_graph
from gnnsys.sampling import DistGraph, GuidedSampler, LaborSampler, NeighborSampler, SampleKey, Sampler

UNIFORM = "uniform"


@dataclass(frozen=True)
class Task:
    """Sizes of one training run; `every` and `pools` are those of explanations."""

    num_nodes: int = 20_000
    num_epochs: int = 8
    num_seeds: int = 5
    batch_size: int = 64
    fanout: int = 8
    hidden: int = 16
    every: int = 30
    pools: int = 128


QUICK_TASK = Task(num_nodes=1500, num_epochs=1, num_seeds=1, batch_size=32, fanout=4, every=1, pools=8)


@dataclass(frozen=True)
class Variant:
    """A sampler for the trainer of a part, and what makes its masks where it is guided."""

    make: Callable[[DistGraph, int, Task], Sampler]
    explainer: Explainer | None = None


def _uniform(share: float) -> Variant:
    return Variant(lambda graph, part, task: NeighborSampler(graph, [max(1, round(task.fanout * share))] * 2))


def _guided(explainer: Explainer, **options: Any) -> Variant:
    return Variant(
        lambda graph, part, task: GuidedSampler(graph, [task.fanout] * 2, requester=part, **options), explainer
    )


VARIANTS = {
    UNIFORM: _uniform(1.0),
    "all neighbours": Variant(lambda graph, part, task: NeighborSampler(graph, [-1, -1])),
    "uniform, 3/4 of the fanout": _uniform(0.75),
    "uniform, half the fanout": _uniform(0.5),
    "uniform, a quarter of the fanout": _uniform(0.25),
    "labor": Variant(lambda graph, part, task: LaborSampler(graph, [task.fanout] * 2, normalize=True)),
    "guided at random": _guided(RandomMasks()),
    "guided by degree": _guided(Degrees()),
    "guided by gradients": _guided(GradientInput()),
    "guided by trained masks": _guided(TrainedMasks()),
    "guided by gradients, deviation 0.5": _guided(GradientInput(), deviation=0.5),
    "guided by gradients, proportional": _guided(GradientInput(), split="proportional", deviation=0.25),
}


@dataclass
class Trained:
    """Figures of one variant over all seeds."""

    megabytes: list[float]
    accuracy: list[float]


def planted(work: Workload) -> Iterator[Case]:
    """Remote megabytes of a run, accuracy, and how far it spreads over seeds, each beside uniform draws."""
    task = Task() if work.sizes == FULL else QUICK_TASK

    def found(variant: str) -> Trained:
        return work.once(f"samplers/planted/{variant}", lambda: _train_all(work, variant, task))

    figures: dict[str, tuple[Unit, Callable[[str], float]]] = {
        "remote": (value("MB"), lambda variant: fmean(found(variant).megabytes)),
        "accuracy": (score("%"), lambda variant: 100 * fmean(found(variant).accuracy)),
        "spread": (value("points"), lambda variant: 100 * _deviation(found(variant).accuracy)),
    }
    for name in VARIANTS:
        if name != UNIFORM:
            for figure, (unit, of) in figures.items():
                sides = {side: Side(partial(of, side)) for side in (name, UNIFORM)}
                versus = (Versus((UNIFORM,)),)
                yield Case(f"planted/{name}/{figure}", unit, partial(dict, sides), versus, ours=name, repeats=1)


def _deviation(values: list[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def _train_all(work: Workload, variant: str, task: Task) -> Trained:
    found = Trained([], [])
    for seed in range(task.num_seeds):
        graph, parts = work.once(f"samplers/planted graph/{seed}", lambda seed=seed: _plant(work, task, seed))  # type: ignore[misc]
        megabytes, accuracy = train(graph, parts, VARIANTS[variant], task, seed)
        found.megabytes.append(megabytes)
        found.accuracy.append(accuracy)
    return found


def _plant(work: Workload, task: Task, seed: int) -> tuple[Graph, DistGraph]:
    graph = planted_noise(task.num_nodes, num_classes=8, separation=4.0, train=0.3, seed=seed)
    folder = work.folder / f"planted-{task.num_nodes}-{seed}"
    if not folder.exists():
        partition_graph(graph, NUM_PARTS, folder)
    return graph, open_alone(folder)


def train(graph: Graph, parts: DistGraph, variant: Variant, task: Task, seed: int) -> tuple[float, float]:
    """Megabytes of remote rows that a run took, and the test accuracy at its end."""
    rows = {name: parts.node_data[NODE][name][torch.arange(task.num_nodes, device="cpu")] for name in ("x", "y")}
    mask = parts.node_data[NODE]["train_mask"][torch.arange(task.num_nodes, device="cpu")].bool()
    torch.manual_seed(seed)
    model = GraphSAGE(rows["x"].shape[1], task.hidden, 2, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    trainers = [_Trainer(parts, part, variant, task, mask, seed) for part in range(NUM_PARTS)]
    steps = min(trainer.num_batches for trainer in trainers)
    for step in range(task.num_epochs * steps):
        if variant.explainer is not None and step % task.every == 0 and step:
            for trainer in trainers:
                trainer.explain(model, rows["x"])
        optimizer.zero_grad()
        for trainer in trainers:
            trainer.loss(model, rows, step // steps, step % steps).div(NUM_PARTS).backward()
        optimizer.step()
    row_bytes = rows["x"].shape[1] * 4
    total = sum(trainer.remote_rows * row_bytes + trainer.other_bytes for trainer in trainers)
    return total / 1e6, _accuracy(model, graph)


def _accuracy(model: GraphSAGE, graph: Graph) -> float:
    data = graph.node_data[NODE]
    with torch.no_grad():
        model.eval()
        found = model(data["x"], graph.edge_index().long()).argmax(1)
        model.train()
    test = data["test_mask"].bool()
    return float((found == data["y"])[test].float().mean())


class _Trainer:
    """The trainer of one part: its seeds, its sampler, and what it had to fetch."""

    def __init__(self, parts: DistGraph, part: int, variant: Variant, task: Task, mask: Tensor, seed: int) -> None:
        self.parts, self.part, self.variant, self.task, self.seed = parts, part, variant, task, seed
        self.own = parts.book.part_range(part, NODE)
        self.seeds = mask[self.own.start : self.own.stop].nonzero().view(-1) + self.own.start
        self.num_batches = self.seeds.numel() // task.batch_size
        self.sampler = variant.make(parts, part, task)
        self.remote_rows = self.other_bytes = self.version = 0

    def loss(self, model: GraphSAGE, rows: dict[str, Tensor], epoch: int, batch: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + epoch)
        order = torch.randperm(self.seeds.numel(), generator=generator, device="cpu")
        seeds = self.seeds[order[batch * self.task.batch_size : (batch + 1) * self.task.batch_size]]
        sample = self.sampler.sample({NODE: seeds}, key=SampleKey(self.seed, epoch, batch))
        nodes = sample.node[NODE]
        self.remote_rows += int(((nodes < self.own.start) | (nodes >= self.own.stop)).sum())
        (row,), (col,) = sample.row.values(), sample.col.values()
        out = model(rows["x"][nodes], torch.stack([row, col]))[: seeds.numel()]
        return F.cross_entropy(out, rows["y"][seeds])

    def explain(self, model: GraphSAGE, x: Tensor) -> None:
        """New masks, used from the next batch on."""
        assert self.variant.explainer is not None and isinstance(self.sampler, GuidedSampler)
        pooled = pool_part(self.parts.parts.part(self.part), self.task.pools)
        if not self.version:
            self.other_bytes += pooled.ids.numel() * x.shape[1] * x.element_size()  # rows to explain with, fetched once
        explained = explain_part(pooled, model, x[self.own.start : self.own.stop], x[pooled.ids])
        masks = self.variant.explainer.importance(model, explained)
        self.version += 1
        scores = masks.node_scores()
        self.other_bytes += (NUM_PARTS - 1) * sum(array.nbytes for array in scores.to_arrays())
        self.sampler.use(scores)
