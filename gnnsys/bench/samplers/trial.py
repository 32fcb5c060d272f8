"""One training run on a graph in parts, all of it in this process: what a sampler costs in bytes and in accuracy.

A trainer for each part: trainers take turns, and a step is made with the mean of their gradients, as DDP makes it. A
remote row is a node of a batch that another part owns, counted once per batch: what a store pulls if nothing is kept
between batches, by the columns and in the format that it travels in. Rows fetched to explain (whole, once, in
bfloat16), scores sent to owners and lists of columns in requests, a bit for each, count as well. Accuracy is on test
nodes, with all neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnsys.bench.samplers.draws import NUM_PARTS, open_alone
from gnnsys.bench.samplers.outcome import Outcome, RunFigures, roc_area
from gnnsys.explain import Explainer, Masks, PooledPart, explain_part, pool_part
from gnnsys.graph import NODE, Graph
from gnnsys.nn import GraphSAGE
from gnnsys.partition import partition_graph
from gnnsys.sampling import DistGraph, GuidedSampler, LaborSampler, NeighborSampler, SampleKey, Sampler
from gnnsys.store import ColumnChoice

COLUMN_GAIN = 0.02  # as `Guide` has it
EXPLAINED_AS = torch.bfloat16  # rows to explain with, also


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
    learning_rate: float = 0.01
    weight_decay: float = 0.0
    dropout: float = 0.0


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


@dataclass(frozen=True)
class Trial:
    """A graph, and the same in parts."""

    graph: Graph
    parts: DistGraph
    _pooled: dict[tuple[int, int], PooledPart] = field(default_factory=dict)

    def pooled(self, part: int, num_pools: int) -> PooledPart:
        """A part's explanation graph, which all runs share."""
        key = part, num_pools
        if key not in self._pooled:
            self._pooled[key] = pool_part(self.parts.parts.part(part), num_pools)
        return self._pooled[key]


class EdgeShares(NamedTuple):
    """Of all edges those between parts, and how many of those inside parts and between them join nodes of one class."""

    between: float
    same_inside: float
    same_between: float


def edge_shares(trial: Trial) -> EdgeShares:
    """Whether other parts have something to say: where parts are classes, edges between them join different ones."""
    graph, parts = trial.graph, trial.parts
    src, dst = graph.edge_index().long()
    ids = parts.global_ids(torch.arange(graph.num_nodes(), device="cpu"), NODE)
    part = torch.empty_like(ids)
    for index in range(NUM_PARTS):
        own = parts.book.part_range(index, NODE)
        part[(ids >= own.start) & (ids < own.stop)] = index
    is_between, labels = part[src] != part[dst], graph.node_data[NODE]["y"]
    is_same = (labels[src] == labels[dst]).double()
    return EdgeShares(
        float(is_between.double().mean()), float(is_same[~is_between].mean()), float(is_same[is_between].mean())
    )


def cut(graph: Graph, folder: Path, method: str = "multilevel") -> Trial:
    """The graph in parts that lie in `folder`."""
    if not folder.exists():
        partition_graph(graph, NUM_PARTS, folder, method=method)
    return Trial(graph, open_alone(folder))


def train_seeds(variant: Variant, task: Task, trial_of: Callable[[int], Trial]) -> Outcome:
    """One run for each seed."""
    return Outcome(tuple(train(trial_of(seed), variant, task, seed) for seed in range(task.num_seeds)))


def train(trial: Trial, variant: Variant, task: Task, seed: int) -> RunFigures:
    """A run from the first step to the last."""
    graph, parts = trial.graph, trial.parts
    everything = torch.arange(graph.num_nodes(), device="cpu")
    rows = {name: parts.node_data[NODE][name][everything] for name in ("x", "y")}
    mask = parts.node_data[NODE]["train_mask"][everything].bool()
    torch.manual_seed(seed)
    model = GraphSAGE(rows["x"].shape[1], task.hidden, 2, int(rows["y"].max()) + 1, task.dropout)
    optimizer = torch.optim.Adam(model.parameters(), lr=task.learning_rate, weight_decay=task.weight_decay)
    trainers = [_Trainer(trial, part, variant, task, mask, seed) for part in range(NUM_PARTS)]
    steps = min(trainer.num_batches for trainer in trainers)
    every = variant.every or task.every
    before_last = 0
    for step in range(task.num_epochs * steps):
        if variant.explainer is not None and step % every == 0 and step:
            for trainer in trainers:
                trainer.explain(model, rows["x"])
        if step == (task.num_epochs - 1) * steps:
            before_last = sum(trainer.row_bytes for trainer in trainers)
        optimizer.zero_grad()
        for trainer in trainers:
            trainer.loss(model, rows, step // steps, step % steps).div(NUM_PARTS).backward()
        optimizer.step()
    explaining, rows_read = (sum(getattr(each, name) for each in trainers) for name in ("explain_bytes", "row_bytes"))
    data = graph.node_data[NODE]
    is_right = is_right_as_read = _is_right(model, trial)
    if any(trainer.choice is not None for trainer in trainers):
        is_right_as_read = _is_right(model, trial, trainers)
    test = data["test_mask"].bool()
    return RunFigures(
        (explaining + rows_read) / 1e6,
        float(is_right[test].float().mean()),
        explaining / 1e6,
        (rows_read - before_last) / 1e6,
        float(is_right_as_read[test].float().mean()),
        float(is_right[data["val_mask"].bool()].float().mean()),
        *_found(trial, trainers),
    )


@torch.no_grad()
def _is_right(model: GraphSAGE, trial: Trial, trainers: Sequence[_Trainer] = ()) -> Tensor:
    """Of every node, with all neighbours. Where trainers are given, each reads rows for the nodes of its part."""
    graph, parts = trial.graph, trial.parts
    data, edges = graph.node_data[NODE], graph.edge_index().long()
    ids = parts.global_ids(torch.arange(graph.num_nodes(), device="cpu"), NODE)
    model.eval()
    if not trainers:
        is_right = model(data["x"], edges).argmax(1) == data["y"]
    else:
        is_right = torch.zeros(graph.num_nodes(), dtype=torch.bool, device="cpu")
        for trainer in trainers:
            found = model(trainer.narrowed(data["x"], ids), edges).argmax(1) == data["y"]
            is_right |= found & trainer.owns(ids)
    model.train()
    return is_right


def _found(trial: Trial, trainers: Sequence[_Trainer]) -> tuple[float, float, float]:
    """Share of signal columns that are read, area of columns, area of nodes: of the last masks, means over parts."""
    graph, parts = trial.graph, trial.parts
    if "noise_columns" not in graph.info or any(trainer.masks is None for trainer in trainers):
        return (math.nan,) * 3
    is_noise = parts.node_data[NODE]["is_noise"][torch.arange(graph.num_nodes(), device="cpu")].bool()
    kept, columns, nodes = [], [], []
    for trainer in trainers:
        assert trainer.masks is not None
        is_signal = torch.ones(trainer.masks.sf.numel(), dtype=torch.bool, device="cpu")
        is_signal[torch.tensor(graph.info["noise_columns"], dtype=torch.int64, device="cpu")] = False
        read = is_signal if trainer.choice is None else is_signal[trainer.choice.columns]
        kept.append(float(read.sum() / is_signal.sum()))
        columns.append(roc_area(trainer.masks.sf, is_signal))
        nodes.append(roc_area(trainer.masks.sn, ~is_noise[trainer.masks.ids]))
    return fmean(kept), fmean(columns), fmean(nodes)


class _Trainer:
    """The trainer of one part: its seeds, its sampler, and what it had to fetch."""

    def __init__(self, trial: Trial, part: int, variant: Variant, task: Task, mask: Tensor, seed: int) -> None:
        self.trial, self.part, self.variant, self.task, self.seed = trial, part, variant, task, seed
        self.own = trial.parts.book.part_range(part, NODE)
        self.seeds = mask[self.own.start : self.own.stop].nonzero().view(-1) + self.own.start
        self.num_batches = self.seeds.numel() // task.batch_size
        self.sampler = variant.make(trial.parts, part, task)
        self.row_bytes = self.explain_bytes = 0
        self.masks: Masks | None = None  # the last ones
        self._arriving: Tensor | None = None
        self._arriving_by: ColumnChoice | None = None

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
        choice = self.sampler.columns_at(position)
        if self._arriving is None or choice is not self._arriving_by:
            self._arriving, self._arriving_by = self._as_they_arrive(x, choice), choice
        remote, num_columns = int((~self.owns(nodes)).sum()), x.shape[1]
        if choice is not None:
            num_columns = choice.columns.numel()
            self.row_bytes += (NUM_PARTS - 1) * -(-x.shape[1] // 8)  # each request says which
        self.row_bytes += remote * num_columns * self.variant.wire.itemsize
        return self._arriving[nodes]

    def _as_they_arrive(self, x: Tensor, choice: ColumnChoice | None) -> Tensor:
        """All rows by global id; those of other parts by these columns, in the type that they travel in."""
        wire, others = self.variant.wire, [slice(0, self.own.start), slice(self.own.stop, None)]
        if wire == x.dtype and choice is None:
            return x
        found = x.clone()
        for rows in others:
            found[rows] = found[rows].to(wire).to(x.dtype)
            if choice is not None:
                found[rows, choice.dropped] = choice.values(x.dtype)
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
        pooled = self.trial.pooled(self.part, self.task.pools)
        if self.masks is None:
            self.explain_bytes += pooled.ids.numel() * x.shape[1] * EXPLAINED_AS.itemsize  # fetched once
        explained = explain_part(
            pooled, model, x[self.own.start : self.own.stop], x[pooled.ids].to(EXPLAINED_AS),
            with_target=variant.explainer.needs_target,
        )  # fmt: skip
        self.masks = masks = variant.explainer.importance(model, explained)
        scores = columns = None
        if variant.nodes:
            scores = masks.node_scores()
            self.explain_bytes += (NUM_PARTS - 1) * sum(array.nbytes for array in scores.to_arrays())
        if variant.share < 1:
            now = sampler.newest.columns
            columns = masks.better_columns(variant.share, None if now is None else now.columns, COLUMN_GAIN)
        sampler.use(scores, columns=columns)
