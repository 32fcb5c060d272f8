"""`gnnsys bench pipeline`: epochs whose rows and neighbours come half from another process, loaded in several ways.

One trainer with one thread for compute; the other machine is a graph server in a process of its own, over loopback. An
epoch stands beside the slower of its halves, loading alone and compute alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from gnnsys.bench.case import OURS, Benchmark, Case, Side, Versus, value
from gnnsys.bench.two_machines import NUM_CLASSES, two_machines
from gnnsys.bench.workload import Workload
from gnnsys.graph import NODE
from gnnsys.loader import NeighborLoader, PipelineOptions
from gnnsys.nn import GraphSAGE

HIDDEN, NUM_LAYERS = 128, 3
NUM_BATCHES, NUM_EPOCHS = 8, 2
LOADING, COMPUTE = "loading alone", "compute alone"
NON_STOP, ASYNCHRONOUS, SYNCHRONOUS = "non-stop", "asynchronous", "synchronous"
ONE_THREAD, SHALLOW, NOT_SHARED = "one sampling thread", "one batch on the network", "rows not shared"
WAYS: dict[str, dict[str, Any]] = {
    NON_STOP: {"across_epochs": True},
    ASYNCHRONOUS: {"across_epochs": False},
    SYNCHRONOUS: {"across_epochs": False, "num_threads": 0},
    ONE_THREAD: {"across_epochs": True, "num_threads": 1},
    SHALLOW: {"across_epochs": True, "num_threads": 1, "pipeline": PipelineOptions(depths={"sample": 1})},
    NOT_SHARED: {"across_epochs": True, "pipeline": PipelineOptions(share=False)},
}


def epoch(work: Workload) -> Iterator[Case]:
    """The non-stop pipeline beside its halves, and beside every other way to load."""
    halves = Versus((LOADING, COMPUTE), pick="worst")
    yield _figure(work, "epoch", "s", lambda found: found.seconds, tuple(w for w in WAYS if w != NON_STOP), halves)


def waiting(work: Workload) -> Iterator[Case]:
    """The part of an epoch in which the trainer has no batch."""
    others = (ASYNCHRONOUS, SYNCHRONOUS)
    yield _figure(work, "waiting", "% of epoch", lambda found: 100 * found.waited / found.seconds, others)


def traffic(work: Workload) -> Iterator[Case]:
    """Rows that came from the other process, and what batches in flight took from each other instead."""
    flows = {"the other process": "bytes_remote", "batches in flight": "bytes_shared", "this process": "bytes_local"}
    for name, counter in flows.items():
        yield _figure(
            work,
            f"rows from {name}",
            "MB",
            lambda found, counter=counter: found.counts[counter] / 1e6,  # type: ignore[misc]
            (NOT_SHARED,) if counter == "bytes_remote" else (),
        )


BENCHMARKS: list[Benchmark] = [epoch, waiting, traffic]


class Model:
    """GraphSAGE with its optimizer: one step per batch."""

    def __init__(self, work: Workload) -> None:
        self._model = GraphSAGE(work.sizes.dim, HIDDEN, NUM_LAYERS, NUM_CLASSES)
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=1e-3)

    def step(self, batch: Any) -> None:
        out = self._model(batch.x, batch.edge_index, num_sampled_nodes=batch.num_sampled_nodes)
        loss = F.cross_entropy(out, batch.y[: batch.batch_size])
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()


@dataclass
class EpochFigures:
    """What an epoch came to."""

    seconds: float = 0.0
    waited: float = 0.0
    counts: dict[str, float] = field(default_factory=dict)


def _figure(
    work: Workload, name: str, unit: str, read: Callable[[EpochFigures], float], others: Sequence[str], *versus: Versus
) -> Case:
    """A row per way in `others`, the non-stop pipeline being ours; each way runs once, for all figures."""
    needed = (NON_STOP, *others, *(peer for v in versus for peer in v.peers))

    def sides() -> dict[str, Side]:
        found = {way: Side(lambda way=way: read(_found(work, way))) for way in needed}  # type: ignore[misc]
        return {OURS: found.pop(NON_STOP), **found}

    rows = (*versus, *(Versus((way,)) for way in others)) or (Versus((), required=False, label="-"),)
    return Case(name, value(unit), sides, rows, repeats=1)


def _found(work: Workload, way: str) -> EpochFigures:
    return work.once(f"pipeline/{way}", lambda: _run(work, way))


def _run(work: Workload, way: str) -> EpochFigures:
    """Epochs behind a first one that is not counted: a pipeline that never stops is then as full as it stays."""
    model = Model(work)
    loader = _loader(work, ASYNCHRONOUS if way == LOADING else SYNCHRONOUS if way == COMPUTE else way)
    if way == COMPUTE:
        held = list(loader)
        return _measure(held, model.step, dict)
    step = (lambda batch: None) if way == LOADING else model.step
    for batch in loader:
        step(batch)
    try:
        return _measure(loader, step, lambda: dict(loader.counters()["fetch"].counts))
    finally:
        loader.close()


def _measure(batches: Iterable[Any], step: Callable[[Any], None], counts: Callable[[], dict[str, int]]) -> EpochFigures:
    found, before = EpochFigures(), counts()
    start = time.perf_counter()
    for _ in range(NUM_EPOCHS):
        began = time.perf_counter()
        for batch in batches:
            found.waited += time.perf_counter() - began
            step(batch)
            began = time.perf_counter()
    found.seconds = (time.perf_counter() - start) / NUM_EPOCHS
    found.waited /= NUM_EPOCHS
    found.counts = {name: (count - before.get(name, 0)) / NUM_EPOCHS for name, count in counts().items()}
    return found


def _loader(work: Workload, way: str) -> NeighborLoader:
    graph = two_machines(work).graph
    options: dict[str, Any] = {"shuffle": True, "fetch": {NODE: ["x", "y"]}, **WAYS[way]}
    ids = graph.from_original(work.seeds(min(NUM_BATCHES, work.sizes.epoch_batches) * work.sizes.num_seeds))
    return NeighborLoader(graph, list(work.sizes.fanout), input_nodes=ids, batch_size=work.sizes.num_seeds, **options)
