"""One training run on a graph in parts, all of it in this process: what a sampler costs in bytes and in accuracy.

A trainer for each part: trainers take turns, and a step is made with the mean of their gradients, as DDP makes it. A
remote row is a node of a batch that another part owns, counted once per batch: what a store pulls if nothing is kept
between batches, by the columns and in the format that it travels in. Rows fetched to explain (whole, once), scores sent
to owners and lists of columns in requests count as well. Accuracy is on test nodes, with all neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnsys.bench.case import Case, Side, Unit, Versus, score, value
from gnnsys.bench.samplers.draws import NUM_PARTS, open_alone
from gnnsys.explain import Explainer, PooledPart, explain_part, pool_part
from gnnsys.graph import NODE, Graph
from gnnsys.nn import GraphSAGE
from gnnsys.partition import partition_graph
from gnnsys.sampling import DistGraph, GuidedSampler, LaborSampler, NeighborSampler, SampleKey, Sampler
from gnnsys.store import ColumnChoice

COLUMN_GAIN = 0.02  # as `Guide` has it


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


@dataclass(frozen=True)
class Variant:
    """A sampler for the trainer of a part; where it is guided, what makes its masks, and what they decide.

    `share` is N_f, and `fill` what stands in columns that were left out. `wire` is the type in which values travel,
    `every` another T_ex than the task's, `method` how parts are cut.
    """

    make: Callable[[DistGraph, int, Task], Sampler]
    explainer: Explainer | None = None
    nodes: bool = True
    share: float = 1.0
    wire: torch.dtype = torch.float32
    every: int | None = None
    method: str = "multilevel"


def uniform(share: float = 1.0, **options: Any) -> Variant:
    """Uniform draws at a share of the task's fanout."""
    return Variant(
        lambda graph, part, task: NeighborSampler(graph, [max(1, round(task.fanout * share))] * 2), **options
    )


def all_neighbours() -> Variant:
    return Variant(lambda graph, part, task: NeighborSampler(graph, [-1, -1]))


def labor(share: float = 1.0) -> Variant:
    return Variant(
        lambda graph, part, task: LaborSampler(graph, [max(1, round(task.fanout * share))] * 2, normalize=True)
    )


def guided(
    explainer: Explainer,
    *,
    nodes: bool = True,
    share: float = 1.0,
    wire: torch.dtype = torch.float32,
    every: int | None = None,
    method: str = "multilevel",
    **options: Any,
) -> Variant:
    """`options` are those of `GuidedSampler`."""

    def make(graph: DistGraph, part: int, task: Task) -> Sampler:
        return GuidedSampler(graph, [task.fanout] * 2, requester=part, **options)

    return Variant(make, explainer, nodes, share, wire, every, method)


class Trial(NamedTuple):
    """A graph, and the same in parts."""

    graph: Graph
    parts: DistGraph


def cut(graph: Graph, folder: Path, method: str = "multilevel") -> Trial:
    """The graph in parts that lie in `folder`."""
    if not folder.exists():
        partition_graph(graph, NUM_PARTS, folder, method=method)
    return Trial(graph, open_alone(folder))


@dataclass
class Outcome:
    """Figures of one variant by seed: megabytes and accuracy of a run, and those of these bytes that explain.

    `accuracy` is with whole rows, `as_read` with those of other parts by the columns that the last batches read.
    """

    megabytes: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    as_read: list[float] = field(default_factory=list)
    explaining: list[float] = field(default_factory=list)

    @property
    def spread(self) -> float:
        """Standard deviation of the accuracy over seeds."""
        return stdev(self.accuracy) if len(self.accuracy) > 1 else 0.0

    @property
    def error(self) -> float:
        """Standard error of the mean accuracy."""
        return self.spread / math.sqrt(len(self.accuracy))


def accuracy_at(curve: list[Outcome], megabytes: float) -> float:
    """Accuracy of a sampler at so many megabytes, between the settings it was run at; beyond them, that of the last."""
    points = sorted((fmean(found.megabytes), fmean(found.accuracy)) for found in curve)
    for (less, low), (more, high) in pairwise(points):
        if less <= megabytes <= more:
            return low + (high - low) * (megabytes - less) / (more - less)
    return points[0][1] if megabytes < points[0][0] else points[-1][1]


def train_seeds(variant: Variant, task: Task, trial_of: Callable[[int], Trial]) -> Outcome:
    """One run for each seed."""
    found = Outcome()
    for seed in range(task.num_seeds):
        run = train(trial_of(seed), variant, task, seed)
        found.megabytes.append(run.megabytes)
        found.accuracy.append(run.accuracy)
        found.as_read.append(run.as_read)
        found.explaining.append(run.explaining)
    return found


class RunFigures(NamedTuple):
    """Megabytes in all, those of them that were fetched or sent to explain, and test accuracy, as `Outcome` has it."""

    megabytes: float
    explaining: float
    accuracy: float
    as_read: float


def train(trial: Trial, variant: Variant, task: Task, seed: int) -> RunFigures:
    """A run from the first step to the last."""
    graph, parts = trial
    everything = torch.arange(graph.num_nodes(), device="cpu")
    rows = {name: parts.node_data[NODE][name][everything] for name in ("x", "y")}
    mask = parts.node_data[NODE]["train_mask"][everything].bool()
    torch.manual_seed(seed)
    model = GraphSAGE(rows["x"].shape[1], task.hidden, 2, int(rows["y"].max()) + 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    trainers = [_Trainer(parts, part, variant, task, mask, seed) for part in range(NUM_PARTS)]
    steps = min(trainer.num_batches for trainer in trainers)
    every = variant.every or task.every
    for step in range(task.num_epochs * steps):
        if variant.explainer is not None and step % every == 0 and step:
            for trainer in trainers:
                trainer.explain(model, rows["x"])
        optimizer.zero_grad()
        for trainer in trainers:
            trainer.loss(model, rows, step // steps, step % steps).div(NUM_PARTS).backward()
        optimizer.step()
    explaining = sum(trainer.explain_bytes for trainer in trainers)
    total = explaining + sum(trainer.row_bytes for trainer in trainers)
    narrowed = any(trainer.choice is not None for trainer in trainers)
    accuracy = _accuracy(model, trial)
    as_read = _accuracy(model, trial, trainers) if narrowed else accuracy
    return RunFigures(total / 1e6, explaining / 1e6, accuracy, as_read)


def _accuracy(model: GraphSAGE, trial: Trial, trainers: Sequence[_Trainer] = ()) -> float:
    """On test nodes, with all neighbours. Where trainers are given, each reads rows for the nodes of its part."""
    graph, parts = trial
    data, edges = graph.node_data[NODE], graph.edge_index().long()
    test, ids = data["test_mask"].bool(), parts.global_ids(torch.arange(graph.num_nodes(), device="cpu"), NODE)
    with torch.no_grad():
        model.eval()
        if not trainers:
            is_right = model(data["x"], edges).argmax(1) == data["y"]
        else:
            is_right = torch.zeros_like(test)
            for trainer in trainers:
                found = model(trainer.narrowed(data["x"], ids), edges).argmax(1) == data["y"]
                is_right |= found & trainer.owns(ids)
        model.train()
    return float(is_right[test].float().mean())


class _Trainer:
    """The trainer of one part: its seeds, its sampler, and what it had to fetch."""

    def __init__(self, parts: DistGraph, part: int, variant: Variant, task: Task, mask: Tensor, seed: int) -> None:
        self.parts, self.part, self.variant, self.task, self.seed = parts, part, variant, task, seed
        self.own = parts.book.part_range(part, NODE)
        self.seeds = mask[self.own.start : self.own.stop].nonzero().view(-1) + self.own.start
        self.num_batches = self.seeds.numel() // task.batch_size
        self.sampler = variant.make(parts, part, task)
        self.row_bytes = self.explain_bytes = 0
        self._pooled: PooledPart | None = None

    def loss(self, model: GraphSAGE, rows: dict[str, Tensor], epoch: int, batch: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + epoch)
        order = torch.randperm(self.seeds.numel(), generator=generator, device="cpu")
        seeds = self.seeds[order[batch * self.task.batch_size : (batch + 1) * self.task.batch_size]]
        sample = self.sampler.sample({NODE: seeds}, key=SampleKey(self.seed, epoch, batch))
        x = self._read(rows["x"], sample.node[NODE], (epoch, batch))
        (row,), (col,) = sample.row.values(), sample.col.values()
        return F.cross_entropy(model(x, torch.stack([row, col]))[: seeds.numel()], rows["y"][seeds])

    def _read(self, x: Tensor, nodes: Tensor, position: tuple[int, int]) -> Tensor:
        """Rows as they arrive: those of other parts by the columns of the batch, in the type that they travel in."""
        found, choice, wire = x[nodes], self.sampler.columns_at(position), self.variant.wire
        is_remote = ~self.owns(nodes)
        num_columns, remote = x.shape[1], int(is_remote.sum())
        if wire != x.dtype:
            found[is_remote] = found[is_remote].to(wire).to(x.dtype)
        if choice is not None:
            num_columns = choice.columns.numel()
            found[is_remote.nonzero(), choice.dropped] = choice.values(x.dtype)
            self.row_bytes += (NUM_PARTS - 1) * choice.columns.nbytes  # each request says which
        self.row_bytes += remote * num_columns * wire.itemsize
        return found

    @property
    def choice(self) -> ColumnChoice | None:
        """The columns that rows of other parts are read by now."""
        return self.sampler.newest.columns if isinstance(self.sampler, GuidedSampler) else None

    def owns(self, nodes: Tensor) -> Tensor:
        return (nodes >= self.own.start) & (nodes < self.own.stop)

    def narrowed(self, x: Tensor, ids: Tensor) -> Tensor:
        """A copy of rows, of the nodes with these ids, in which those of other parts have the columns of now."""
        found = x.clone()
        if self.choice is not None:
            found[(~self.owns(ids)).nonzero(), self.choice.dropped] = self.choice.values(x.dtype)
        return found

    def explain(self, model: GraphSAGE, x: Tensor) -> None:
        """New masks, used from the next batch on."""
        variant, sampler = self.variant, self.sampler
        assert variant.explainer is not None and isinstance(sampler, GuidedSampler)
        if self._pooled is None:
            self._pooled = pool_part(self.parts.parts.part(self.part), self.task.pools)
            self.explain_bytes += self._pooled.ids.numel() * x.shape[1] * x.element_size()  # fetched once
        explained = explain_part(self._pooled, model, x[self.own.start : self.own.stop], x[self._pooled.ids])
        masks = variant.explainer.importance(model, explained)
        scores = columns = None
        if variant.nodes:
            scores = masks.node_scores()
            self.explain_bytes += (NUM_PARTS - 1) * sum(array.nbytes for array in scores.to_arrays())
        if variant.share < 1:
            now = sampler.newest.columns
            columns = masks.better_columns(variant.share, None if now is None else now.columns, COLUMN_GAIN)
        sampler.use(scores, columns=columns)


# -- cases -----------------------------------------------------------------------------------------------------------


def figure_case(name: str, unit: Unit, ours: str, sides: Mapping[str, Callable[[], float]], *versus: Versus) -> Case:
    """Figures of runs beside each other; each side is called once."""
    return Case(name, unit, lambda: {side: Side(call) for side, call in sides.items()}, versus, ours=ours, repeats=1)


def table_cases(
    prefix: str, found: Callable[[str], Outcome], names: Iterable[str], beside: str, num_epochs: int = 1
) -> Iterator[Case]:
    """Megabytes (of an epoch, given how many a run has), accuracy and its spread of variants, beside `beside`."""
    figures: dict[str, tuple[Unit, Callable[[str], float]]] = {
        "remote": (value("MB"), lambda variant: fmean(found(variant).megabytes) / num_epochs),
        "accuracy": (score("%"), lambda variant: 100 * fmean(found(variant).accuracy)),
        "spread": (value("points"), lambda variant: 100 * found(variant).spread),
    }
    for name in names:
        if name != beside:
            for figure, (unit, of) in figures.items():
                sides = {side: partial(of, side) for side in (name, beside)}
                yield figure_case(f"{prefix}/{name}/{figure}", unit, name, sides, Versus((beside,)))
