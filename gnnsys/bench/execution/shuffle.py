"""`gnnsys bench execution --only shuffle`: what a model learns with shuffling on, off and adaptive, and what it reads.

Seeds are in the order of parts, so that a batch in order holds neighbours: of four parts, as other suites have them,
and of 32, where a batch is one part, and nearly of one class. Splits of the files have 20 nodes per class to train,
which leaves no batches to speak of: half of all nodes are trained on, a quarter is for validation and a quarter for the
test, drawn by the seed. Word counts are projected to 128 columns, by one random matrix for all runs: coauthor_cs has
6,805. The three modes take turns, epoch by epoch; test accuracy is that of the epoch that was best in validation, with
all neighbours.

Two rows say where adaptive shuffling loses: its accuracy after as many shuffled epochs as always on has had, so with
its epochs in order on top; and how many hidden units are still in use when training ends. Two seeds with centred
columns are beside them: of amazon_computers the mean row is two thirds as long as a row, of the others a quarter.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, median, stdev
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnsys.bench.case import Benchmark, Case, Unit, Versus, score, value
from gnnsys.bench.lab_jobs import NOTHING
from gnnsys.bench.samplers.outcome import figure_case, paired_noise
from gnnsys.bench.workload import FULL, Workload
from gnnsys.graph import NODE, Graph, available_datasets, dataset, sbm
from gnnsys.loader import NeighborLoader
from gnnsys.nn import GraphSAGE
from gnnsys.partition import assign_parts

GRAPHS = ("pubmed", "amazon_computers", "coauthor_cs")
ON, OFF, ADAPTIVE = "always on", "always off", "adaptive"
MODES: Mapping[str, bool | str] = {ON: True, OFF: False, ADAPTIVE: "adaptive"}
ALLOWED = 0.4  # points behind always on
LIVES = 0.005  # of all nodes: a unit that is not 0 at fewer is out of use
NUM_COLUMNS = 128


@dataclass(frozen=True)
class ShuffleTask:
    """Sizes of one run."""

    num_epochs: int = 60
    num_seeds: int = 5
    num_parts: int = 4
    batch_size: int = 256
    fanout: int = 10
    hidden: int = 64
    dropout: float = 0.5
    learning_rate: float = 0.01
    is_centred: bool = False  # columns, so that their means are 0


FINE_TASK = ShuffleTask(num_parts=32, num_seeds=2)
CENTRED_TASK = ShuffleTask(is_centred=True, num_seeds=2)
QUICK_TASK = ShuffleTask(num_epochs=8, num_seeds=2, num_parts=4, batch_size=64, fanout=3, hidden=8)


@dataclass
class ShuffleRun:
    """One mode with one seed. By epoch: accuracies, input rows of a batch, seconds of training."""

    validation: list[float] = field(default_factory=list)
    test: list[float] = field(default_factory=list)
    rows: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    switch: int | None = None
    live_units: int = 0  # hidden ones that are not 0 at one node in 200, or more
    longer: float | None = None  # accuracy after as many shuffled epochs as always on has, where it was shuffled

    @property
    def accuracy(self) -> float:
        """On test nodes, of the epoch that was best in validation, in percent."""
        return 100 * self.test[max(range(len(self.validation)), key=self.validation.__getitem__)]


Runs: TypeAlias = Mapping[str, list[ShuffleRun]]  # by mode, in the order of seeds
Figures: TypeAlias = Mapping[str, Callable[[], float]]


class _Trainer:
    """A model and a loader of one mode."""

    def __init__(self, graph: Graph, ids: Mapping[str, Tensor], mode: str, task: ShuffleTask, seed: int) -> None:
        self.graph, self.ids, self.run = graph, ids, ShuffleRun()
        data = graph.node_data[NODE]
        torch.manual_seed(seed)
        self._model = GraphSAGE(data["x"].shape[1], task.hidden, 2, int(data["y"].max()) + 1, task.dropout)
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=task.learning_rate)
        self._random = torch.get_rng_state()  # of dropout: modes take turns, and each has its own
        self._loader = NeighborLoader(
            graph,
            [task.fanout] * 2,
            input_nodes=ids["train"],
            batch_size=task.batch_size,
            shuffle=MODES[mode],
            seed=seed,
            across_epochs=False,  # nothing is loaded while others train
            num_threads=1,
        )

    def train_epoch(self) -> None:
        torch.set_rng_state(self._random)
        rows, began = [], time.perf_counter()
        for batch in self._loader:
            self._optimizer.zero_grad()
            out = self._model(batch.x, batch.edge_index, num_sampled_nodes=batch.num_sampled_nodes)
            F.cross_entropy(out, batch.y[: batch.batch_size]).backward()
            self._optimizer.step()
            rows.append(batch.n_id.numel())
        self.run.seconds.append(time.perf_counter() - began)
        self.run.rows.append(fmean(rows))
        self._random = torch.get_rng_state()
        is_right = self._is_right()
        self.run.validation.append(float(is_right[self.ids["val"]].float().mean()))
        self.run.test.append(float(is_right[self.ids["test"]].float().mean()))
        if MODES[ADAPTIVE] == self._loader.state_dict()["shuffle"]:
            self._loader.observe(self.run.validation[-1])
        self.run.switch = self._loader.shuffled_from

    @torch.no_grad()
    def num_live_units(self) -> int:
        """Of the first layer."""
        hidden = self._model.convs[0](self.graph.node_data[NODE]["x"], self.graph.csc())
        return int(((hidden > 0).float().mean(0) >= LIVES).sum())

    @torch.no_grad()
    def _is_right(self) -> Tensor:
        data = self.graph.node_data[NODE]
        self._model.eval()
        is_right = self._model(data["x"], self.graph.csc()).argmax(1) == data["y"]
        self._model.train()
        return is_right


def run_modes(graph: Graph, order: Tensor, task: ShuffleTask, seed: int) -> dict[str, ShuffleRun]:
    """All modes with one seed, in turns; `order` are all nodes in the order of their parts."""
    ids = _split(graph.num_nodes(), seed)
    is_train = torch.zeros(graph.num_nodes(), dtype=torch.bool, device="cpu")
    is_train[ids["train"]] = True
    ids["train"] = order[is_train[order]]
    trainers = {mode: _Trainer(graph, ids, mode, task, seed) for mode in MODES}
    for _ in range(task.num_epochs):
        for trainer in trainers.values():
            trainer.train_epoch()
    runs = {mode: copy.deepcopy(trainer.run) for mode, trainer in trainers.items()}
    for mode, trainer in trainers.items():
        runs[mode].live_units = trainer.num_live_units()
    adaptive = trainers[ADAPTIVE]
    if adaptive.run.switch is not None:
        for _ in range(adaptive.run.switch):
            adaptive.train_epoch()
        runs[ADAPTIVE].longer = adaptive.run.accuracy
    return runs


def part_order(graph: Graph, num_parts: int) -> Tensor:
    """All nodes, part after part."""
    return assign_parts(graph, num_parts).assignment.part(NODE).argsort(stable=True)


def project(graph: Graph, num_columns: int) -> None:
    """Gives the graph fewer columns, by a random matrix that keeps distances nearly as they are."""
    x = graph.node_data[NODE]["x"].float()
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(x.shape[1], num_columns, generator=generator, device="cpu") / num_columns**0.5
    graph.set_node_data("x", x @ matrix, NODE)


def centre(graph: Graph) -> None:
    """Gives the graph columns whose means are 0."""
    x = graph.node_data[NODE]["x"]
    graph.set_node_data("x", x - x.mean(0), NODE)


def _split(count: int, seed: int) -> dict[str, Tensor]:
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed), device="cpu")
    half, quarters = count // 2, 3 * count // 4
    return {"train": order[:half], "val": order[half:quarters], "test": order[quarters:]}


# -- figures -----------------------------------------------------------------------------------------------------------


def shuffle(work: Workload) -> Iterator[Case]:
    """Real graphs that are there ($GNNSYS_DATA), five seeds; a quick run has one that is made up."""
    if work.sizes != FULL:
        yield from shuffle_cases("made up", partial(_runs, work, "made up", QUICK_TASK))
        return
    for name in GRAPHS:
        if name in available_datasets():
            yield from shuffle_cases(name, partial(_runs, work, name, ShuffleTask()))
            in_fine_parts = partial(_runs, work, name, FINE_TASK)
            yield from shuffle_cases(f"{name}, {FINE_TASK.num_parts} parts", in_fine_parts, is_judged=False)
            centred = partial(_runs, work, name, CENTRED_TASK)
            yield from shuffle_cases(f"{name}, columns centred", centred, is_judged=False)


def _runs(work: Workload, name: str, task: ShuffleTask) -> Runs:
    def train() -> Runs:
        graph = sbm(1000, num_features=16) if name == "made up" else dataset(name)
        if name != "made up":
            project(graph, NUM_COLUMNS)
        if task.is_centred:
            centre(graph)
        order = part_order(graph, task.num_parts)
        found = [run_modes(graph, order, task, seed) for seed in range(task.num_seeds)]
        return {mode: [runs[mode] for runs in found] for mode in MODES}

    return work.once(f"shuffle/{name}/{task}", train)


def shuffle_cases(name: str, runs: Callable[[], Runs], *, is_judged: bool = True) -> Iterator[Case]:
    """Accuracy of adaptive shuffling beside always on and always off, and what batches cost in both orders."""

    def by_mode(of: Callable[[list[ShuffleRun]], float], modes: Iterable[str] = MODES) -> Figures:
        return {mode: partial(lambda mode: of(runs()[mode]), mode) for mode in modes}

    def noise(other: str) -> float:
        """Of the difference between adaptive and another mode: runs of a seed share split and first weights."""
        found = runs()
        pairs = zip(found[ADAPTIVE], found[other], strict=True)
        return paired_noise([ours.accuracy - theirs.accuracy for ours, theirs in pairs])

    def case(what: str, unit: Unit, ours: str, sides: Figures, *versus: Versus) -> Case:
        return figure_case(f"shuffle/{name}/{what}", unit, ours, sides, *versus)

    both, target = (Versus((ON,)), Versus((OFF,))), 1.0 if is_judged else None
    accuracy = by_mode(lambda found: fmean(run.accuracy for run in found))
    yield case("accuracy", score("%"), ADAPTIVE, accuracy, *both)
    behind, noisy = f"{ON}, less {ALLOWED}", f"{OFF}, less noise"
    allowed: Figures = {
        ADAPTIVE: accuracy[ADAPTIVE],
        behind: lambda: accuracy[ON]() - ALLOWED,
        noisy: lambda: accuracy[OFF]() - noise(OFF),
    }
    yield case("accuracy, allowed", score("%"), ADAPTIVE, allowed, Versus((behind,), target), Versus((noisy,), target))
    spread = by_mode(lambda found: stdev(run.accuracy for run in found))
    yield case("spread", value("points"), ADAPTIVE, spread, *both)
    yield case(f"noise beside {ON}", value("points"), ADAPTIVE, {ADAPTIVE: partial(noise, ON)}, NOTHING)
    rows = by_mode(lambda found: fmean(each for run in found for each in run.rows), (OFF, ON))
    yield case("rows of a batch in order", value("rows"), OFF, rows, Versus((ON,)))
    epoch = by_mode(lambda found: median(each for run in found for each in run.seconds), (OFF, ON))
    yield case("an epoch in order", value("s"), OFF, epoch, Versus((ON,)))
    yield case("a run", value("s"), ADAPTIVE, by_mode(lambda found: fmean(sum(run.seconds) for run in found)), *both)
    longer: Figures = {
        ADAPTIVE: lambda: fmean(run.accuracy if run.longer is None else run.longer for run in runs()[ADAPTIVE]),
        ON: accuracy[ON],
    }
    yield case("accuracy, as many shuffled epochs", score("%"), ADAPTIVE, longer, Versus((ON,)))
    live = by_mode(lambda found: fmean(run.live_units for run in found))
    yield case("hidden units in use", score("units"), ADAPTIVE, live, *both)
    yield case("epochs in order", value("epochs"), ADAPTIVE, by_mode(_in_order, (ADAPTIVE,)), NOTHING)


def _in_order(found: list[ShuffleRun]) -> float:
    """All epochs, where the curve did not bend."""
    return fmean(len(run.test) if run.switch is None else run.switch for run in found)


BENCHMARKS: list[Benchmark] = [shuffle]
