"""`gnnsys bench execution --only "table 4"`: DAHA's Table 4 on generated graphs of its sizes, seconds of an epoch.

GraphSAGE with batches of 8,192 seeds. What the paper compares are ways to load, and all of them are ways of ours here:

| row | how batches are made |
|---|---|
| as DGL does it | one thread of the host samples and gathers, between two steps; copies from pageable memory |
| as DGL+ does it | the graph is on the device |
| as SALIENT does it | threads of the host sample and gather ahead; copies from pinned memory |
| intra | the same, and the host makes the first layer's sums of all batches |
| inter | of every second batch |
| H+intra | the device samples in pinned memory, and the host makes the sums of all batches |
| H+inter | the plan that `execution="auto"` chooses where the device has no room for the graph |
| auto | the same where it has |

The paper's last four columns add up stages that were timed apart. Beside the epoch from end to end there is such a sum,
of loading alone and of training alone. The paper does not say how many neighbours it takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from statistics import median
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from gnnsys.bench.case import Benchmark, Case, Side, Versus, value
from gnnsys.bench.execution.workloads import (
    UntrimmedModel,
    check_device,
    hidden_width,
    repeated_ids,
    sized_graph,
    tried,
)
from gnnsys.bench.gpu.epoch import DeviceModel
from gnnsys.bench.gpu.inputs import NUM_CLASSES, device, synchronize
from gnnsys.bench.lab_jobs import say
from gnnsys.bench.peers import set_threads
from gnnsys.bench.workload import FULL, Workload
from gnnsys.graph import NODE, Graph
from gnnsys.loader import Batch, NeighborLoader, SubgraphLoader
from gnnsys.nn import GraphSAGE
from gnnsys.planning import ExecutionPlan, Way
from gnnsys.sampling import SaintNodeSampler
from gnnsys.store import limited

DGL, DGL_PLUS, SALIENT = "as DGL does it", "as DGL+ does it", "as SALIENT does it"
INTRA, INTER, H_INTRA, H_INTER, AUTO = "intra", "inter", "H+intra", "H+inter", "auto"
OURS_OF_TABLE = (INTRA, INTER, H_INTRA, H_INTER, AUTO)
APART = "loading alone + training alone"
AT_LEAST = {DGL: 1 / (1 - 0.75), SALIENT: 1 / (1 - 0.44)}  # of H+inter: the least that the paper has for GraphSAGE
PAPER = {  # seconds of 100 epochs on its machine
    "arxiv": "sample 4.40, intraT 2.63, interT 1.10, DGL 14.26, DGL+ 7.60, ByteGNN 5.43, SALIENT 6.34, intra 7.03, "
    "inter 5.50, H+intra 5.10, H+inter 3.57",
    "products": "sample 10.38, intraT 7.63, interT 3.15, DGL 35.00, DGL+ 20.11, ByteGNN 14.03, SALIENT 14.63, "
    "intra 18.00, inter 13.52, H+intra 11.19, H+inter 6.71",
    "reddit": "sample 8.14, intraT 8.82, interT 5.57, DGL 52.26, DGL+ 34.41, ByteGNN 21.66, SALIENT 36.37, "
    "intra 16.96, inter 13.71, H+intra 16.13, H+inter 12.87",
}
PAPER_SAINT = (
    "sample 10.24, intraT 3.47, interT 1.61, DGL 16.32, DGL+ 7.68, ByteGNN 6.36, SALIENT 10.79, intra 13.71, "
    "inter 11.85, H+intra 7.21, H+inter 5.35"
)
_WIDTHS = {"arxiv": 128, "products": 100, "reddit": 602}
_NUM_TRAIN = {"arxiv": 90_941, "products": 196_615, "reddit": 153_431}  # nodes that are trained on
_BATCH_SIZE, _BUDGET = 8192, 16384  # the latter of nodes of a subgraph, by GraphSAINT
_FANOUTS = [10, 5]
_REPEATS, _EPOCHS = 3, 2
_ENOUGH = 1.0  # seconds that were measured of a row
_WARM = 3
_HELD = 8  # batches that training alone has
_GB = 1 << 30
Step = Callable[[Batch], None]


class BatchLoader(Protocol):
    """What is timed: a loader of any kind."""

    def __iter__(self) -> Iterator[Batch]: ...

    def __len__(self) -> int: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class TimedLoader:
    """`is_ahead`: batches are made while others are trained on. Without, one epoch is as good as several."""

    loader: BatchLoader
    step: Step
    is_ahead: bool = True

    @property
    def num_epochs(self) -> int:
        return _EPOCHS if self.is_ahead else 1

    def warm_up(self) -> None:
        """Some steps, behind which the device's memory has been taken once."""
        go_through(islice(self.loader, _WARM), self.step)
        self.loader.close()

    def epoch_seconds(self) -> float:
        """Of epochs in a row, from the first batch that is asked for to the end of the last step."""

        def train() -> None:
            for _ in range(self.num_epochs):
                go_through(self.loader, self.step)

        return _seconds(train, self.loader) / self.num_epochs

    def loading_seconds(self) -> float:
        """Of an epoch that nobody trains on."""
        return _seconds(partial(go_through, self.loader), self.loader)

    def training_seconds(self) -> float:
        """Of an epoch whose batches are there. Each is seen once, as layers remember what they have seen."""
        held = list(islice(self.loader, _HELD))
        self.loader.close()
        warm, timed = held[: len(held) // 4], held[len(held) // 4 :]
        go_through(warm, self.step)
        return _seconds(partial(go_through, timed, self.step)) / len(timed) * len(self.loader)


def go_through(batches: Iterable[Batch], step: Step | None = None) -> None:
    for batch in batches:
        if step is not None:
            step(batch)


def _seconds(call: Callable[[], object], *loaders: BatchLoader) -> float:
    """Nothing of the loaders is under way before or behind."""
    synchronize()
    began = time.perf_counter()
    call()
    synchronize()
    elapsed = time.perf_counter() - began
    for loader in loaders:
        loader.close()
    return elapsed


class TableRun:
    """GraphSAGE on one graph, loaded in all ways."""

    def __init__(self, work: Workload, name: str) -> None:
        check_device(work)
        self._work, self._name, self._on = work, name, device(work)
        self.model = GraphSAGE(_WIDTHS[name], hidden_width(work), len(_FANOUTS), NUM_CLASSES)
        self.step = DeviceModel(work, self.model).step
        num_nodes = self.graph().num_nodes()
        self._batch_size = _BATCH_SIZE if work.sizes is FULL else min(work.sizes.num_seeds, max(1, num_nodes // 8))
        num_train = _NUM_TRAIN[name] if work.sizes is FULL else 4 * self._batch_size
        self._seeds = repeated_ids(work, num_nodes, num_train)

    def graph(self, *, is_pinned: bool = False) -> Graph:
        return sized_graph(self._work, self._name, _WIDTHS[self._name], is_pinned=is_pinned)

    def loader(self, graph: Graph, **options: Any) -> NeighborLoader:
        return NeighborLoader(
            graph, _FANOUTS, input_nodes=self._seeds, batch_size=self._batch_size, shuffle=True, **options
        )

    def room(self) -> AbstractContextManager[object]:
        """Less than the graph takes."""
        x = self.graph().node_data[NODE]["x"]
        return limited(self._on, min(_GB, x.nbytes))

    def planned(self, room: AbstractContextManager[object]) -> NeighborLoader:
        """Among all ways, within what there is room for."""
        with room:
            loader = self.loader(self.graph(), device=self._on, execution="auto", model=self.model)
            tried(loader, self.step).close()
        assert loader.plan is not None
        say(loader.plan.report())
        return loader

    def with_sums(self, graph: Graph, sums: tuple[bool, ...], made_for: Mapping[str, Any]) -> NeighborLoader:
        plan = ExecutionPlan([Way(sums=sums)], made_for=made_for, chosen=0)
        return self.loader(graph, device=self._on, execution=plan, model=self.model)

    def loaders(self) -> dict[str, TimedLoader]:
        """Of all rows."""
        capped = self.planned(self.room())
        assert capped.plan is not None
        sums = partial(self.with_sums, made_for=capped.plan.made_for)
        made = {
            DGL_PLUS: self.loader(self.graph().to(self._on)),
            SALIENT: self.loader(self.graph(), device=self._on),
            INTRA: sums(self.graph(), (True,)),
            INTER: sums(self.graph(), (False, True)),
            H_INTRA: sums(self.graph(is_pinned=True), (True,)),
            H_INTER: capped,
            AUTO: self.planned(nullcontext()),
        }
        dgl = TimedLoader(self.loader(self.graph(), num_threads=0), self._copied_step, is_ahead=False)
        return {DGL: dgl} | {name: TimedLoader(loader, self.step) for name, loader in made.items()}

    def sampling_seconds(self) -> float:
        """Of the host's threads, alone: structure without rows."""
        loader = self.loader(self.graph(), device=self._on, fetch=[])
        return _seconds(partial(go_through, loader), loader)

    def _copied_step(self, batch: Batch) -> None:
        self.step(batch.to(self._on))


def run_graph(work: Workload, name: str) -> dict[str, float]:
    """Seconds of an epoch by row; those of stages that were timed apart by `apart`."""
    began = time.perf_counter()
    one = TableRun(work, name)
    with all_closed(one.loaders()) as loaders, one_thread():
        found = _in_turns(loaders)
        say(f"table 4, {name}: sampling alone {one.sampling_seconds():.3f} s of an epoch, by the host")
        for row in OURS_OF_TABLE:
            loading, training = loaders[row].loading_seconds(), loaders[row].training_seconds()
            found[apart(row)] = loading + training
            stages = f"loading alone {loading:.3f}, training alone {training:.3f}"
            say(f"table 4, {name}, {row}: {found[row]:.3f} s; {stages}")
    say(f"table 4, {name}: the paper, seconds of 100 epochs: {PAPER[name]}")
    say(f"table 4, {name}: all of it took {time.perf_counter() - began:.1f} s")
    return found


def _in_turns(loaders: Mapping[str, TimedLoader]) -> dict[str, float]:
    """Seconds of an epoch, by name. What takes a second needs no further turn."""
    for timed in loaders.values():
        timed.warm_up()
    samples: dict[str, list[float]] = {name: [] for name in loaders}
    for _ in range(_REPEATS):
        for name, timed in loaders.items():
            if sum(samples[name]) < _ENOUGH / timed.num_epochs:
                samples[name].append(timed.epoch_seconds())
    return {name: median(found) for name, found in samples.items()}


@contextmanager
def one_thread() -> Iterator[None]:
    """Of torch, in this thread: what is sampled and gathered here is the work of one core."""
    before = torch.get_num_threads()
    set_threads(1)
    try:
        yield
    finally:
        set_threads(before)


@contextmanager
def all_closed(loaders: Mapping[str, TimedLoader]) -> Iterator[Mapping[str, TimedLoader]]:
    """Loaders whose threads end with the block."""
    with ExitStack() as stack:
        for timed in loaders.values():
            stack.callback(timed.loader.close)
        yield loaders


def apart(row: str) -> str:
    return f"{row}, stages apart"


# -- GraphSAINT --------------------------------------------------------------------------------------------------------


class SaintRun:
    """GraphSAGE on subgraphs of 16,384 draws of nodes, of the smallest graph, without weights."""

    def __init__(self, work: Workload) -> None:
        check_device(work)
        self._work, self._on = work, device(work)
        model = GraphSAGE(_WIDTHS["arxiv"], hidden_width(work), len(_FANOUTS), NUM_CLASSES)
        self._model = SubgraphModel(work, model)
        self._size = _BUDGET if work.sizes is FULL else 64

    def loader(self, graph: Graph, *, samples_on: torch.device, **options: Any) -> SubgraphLoader:
        sampler = SaintNodeSampler(graph, self._size, coverage=0, device=samples_on)
        return SubgraphLoader(graph, sampler, shuffle=True, **options)

    def loaders(self) -> dict[str, TimedLoader]:
        host, step = torch.device("cpu"), self._model.step
        graph = partial(sized_graph, self._work, "arxiv", _WIDTHS["arxiv"])
        on_host = self.loader(graph(), samples_on=host, num_threads=0)
        pinned = self.loader(graph(is_pinned=True), samples_on=self._on, device=self._on)
        return {
            DGL: TimedLoader(on_host, lambda batch: step(batch.to(self._on)), is_ahead=False),
            DGL_PLUS: TimedLoader(self.loader(graph().to(self._on), samples_on=self._on), step),
            SALIENT: TimedLoader(self.loader(graph(), samples_on=host, device=self._on), step),
            H_INTRA: TimedLoader(pinned, step),
        }


class SubgraphModel(UntrimmedModel):
    """A model that learns from all nodes of a batch."""

    def _finish(self, out: torch.Tensor, batch: Batch) -> None:
        loss = F.cross_entropy(out, batch.y)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()


def run_saint(work: Workload) -> dict[str, float]:
    with all_closed(SaintRun(work).loaders()) as loaders, one_thread():
        found = _in_turns(loaders)
    say(f"table 4, arxiv, GraphSAINT: the paper, seconds of 100 epochs: {PAPER_SAINT}")
    return found


# -- rows --------------------------------------------------------------------------------------------------------------


def table4(work: Workload) -> Iterator[Case]:
    """Each of ours beside the others, and beside the sum of its stages."""
    for name in _WIDTHS:
        found = partial(work.once, f"execution/table 4 {name}", partial(run_graph, work, name))
        for row in OURS_OF_TABLE:

            def sides(found: Callable[[], dict[str, float]] = found, row: str = row) -> dict[str, Side]:
                return _sides(found(), [row, DGL, DGL_PLUS, SALIENT]) | _sides({APART: found()[apart(row)]}, [APART])

            at_least = AT_LEAST if row == H_INTER else {}
            others = tuple(Versus((side,), at_least.get(side)) for side in (DGL, DGL_PLUS, SALIENT, APART))
            yield Case(f"execution/table 4/{name}/{row}", value("s"), sides, others, ours=row, repeats=1)

    def saint_sides() -> dict[str, Side]:
        found = work.once("execution/table 4 GraphSAINT", partial(run_saint, work))
        return _sides(found, found)

    versus = tuple(Versus((side,)) for side in (DGL, DGL_PLUS, SALIENT))
    name = f"execution/table 4/arxiv, GraphSAINT/{H_INTRA}"
    yield Case(name, value("s"), saint_sides, versus, ours=H_INTRA, repeats=1)


def _sides(found: Mapping[str, float], names: Iterable[str]) -> dict[str, Side]:
    return {name: Side(partial(found.__getitem__, name)) for name in names}


BENCHMARKS: list[Benchmark] = [table4]
