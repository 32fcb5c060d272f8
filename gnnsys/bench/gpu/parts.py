"""Training steps on parts that the GPU samples and reads by itself, beside the same graph in memory.

The graph is 1M nodes and 25M edges (both directions of a block model's edges), 100 features; a step is GraphSAGE,
3 layers of 256, fanouts 15/10/5, 1,024 seeds. Parts lie on a disk, mapped. Figures are milliseconds per step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from gnnsys.bench.case import OURS, Case, Side, Versus, value
from gnnsys.bench.gpu.epoch import DeviceModel, Steps, epoch_seconds, first_epoch, steps_of, widths_of
from gnnsys.bench.gpu.inputs import FANOUTS, NUM_CLASSES, NUM_FEATURES, device, is_gpu
from gnnsys.bench.workload import FULL, SEED, Workload
from gnnsys.graph import NODE, Graph, sbm
from gnnsys.loader import NeighborLoader
from gnnsys.nn import GraphSAGE
from gnnsys.partition import Assignment, write_parts
from gnnsys.sampling import DistGraph
from gnnsys.session import init

ON_DEVICE, PINNED = "graph on the device", "graph pinned"
_AVERAGE_DEGREE = 25
_ON_DEVICE_WITHIN, _PINNED_WITHIN = 1.25, 1.15


def one_process(work: Workload) -> Iterator[Case]:
    """All parts in one process, as `gnnsys.open(parts, device="cuda")` places them, and by force elsewhere."""
    for num_parts in (1, 2):
        for place in ("auto", "structure", "registered", "host"):
            yield _case(work, num_parts, place)


def _case(work: Workload, num_parts: int, place: str) -> Case:
    steps = steps_of(work)

    def sides() -> dict[str, Side]:
        model = DeviceModel(work, GraphSAGE(*widths_of(work)))
        whole = medium_graph(work)
        graphs: dict[str, Graph | DistGraph] = {OURS: opened(work, num_parts, place)}
        if is_gpu(work):
            graphs |= {ON_DEVICE: whole.to(device(work)), PINNED: pinned(work)}
        loaders = {name: loader_of(work, graph, steps) for name, graph in graphs.items()}
        return {name: Side(_milliseconds(loader, model, steps)) for name, loader in loaders.items()}

    versus = [Versus((PINNED,), 1 / _PINNED_WITHIN if place != "host" else None)]
    versus.append(Versus((ON_DEVICE,), 1 / _ON_DEVICE_WITHIN if place == "auto" else None))
    parts = "one part" if num_parts == 1 else f"{num_parts} parts in one process"
    return Case(f"parts/{parts}, place={place}", value("ms"), sides, tuple(versus), repeats=3)


def _milliseconds(loader: NeighborLoader, model: DeviceModel, steps: Steps) -> Callable[[], float]:
    return lambda: 1e3 * epoch_seconds(first_epoch(loader), model.step, steps, steps.timed) / steps.all


def loader_of(work: Workload, graph: Graph | DistGraph, steps: Steps, **options: Any) -> NeighborLoader:
    """With the default arguments of a newcomer: seeds, fanouts, a batch size and a device."""
    num_seeds = min(steps.all * work.sizes.num_seeds, graph.num_nodes())
    seeds = torch.randperm(graph.num_nodes(), generator=torch.Generator().manual_seed(SEED))[:num_seeds]
    return NeighborLoader(
        graph,
        FANOUTS,
        input_nodes=seeds,
        batch_size=work.sizes.num_seeds,
        shuffle=True,
        across_epochs=False,
        device=device(work) if is_gpu(work) else None,
        **options,
    )


def medium_graph(work: Workload) -> Graph:
    """On the host, with `x` of 100 features and `y` of 47 classes."""

    def make() -> Graph:
        num_nodes = 1_000_000 if work.sizes is FULL else work.sizes.num_nodes
        made = sbm(num_nodes, num_classes=NUM_CLASSES, avg_degree=_AVERAGE_DEGREE, num_features=NUM_FEATURES, seed=SEED)
        rows = {name: made.node_data[NODE][name] for name in ("x", "y")}
        return Graph({NODE: num_nodes}, {t: made.csc(t) for t in made.edge_types}, {NODE: rows})

    return work.once("gpu/medium graph", make)


def pinned(work: Workload) -> Graph:
    return work.once("gpu/medium graph, pinned", lambda: medium_graph(work).pin_memory())


def opened(work: Workload, num_parts: int, place: str) -> DistGraph:
    """The parts, opened for the device at `place`."""
    session = work.enter(init(process_group=False))  # one each: a session opens a folder once
    return session.open(parts_of(work, num_parts), verify=False, device=device(work), place=place)


def parts_of(work: Workload, num_parts: int) -> Path:
    """A folder of parts, each a range of nodes: what a partitioner would choose does not matter to one process."""

    def make() -> Path:
        graph = medium_graph(work)
        folder = work.folder / f"{num_parts} parts of {graph.num_nodes()}"
        part = torch.arange(graph.num_nodes()) * num_parts // graph.num_nodes()
        write_parts(
            graph, Assignment(num_parts, 1, {NODE: part.to(torch.int32)}), folder, edge_ids=False, overwrite=True
        )
        return folder

    return work.once(f"gpu/{num_parts} parts", make)


BENCHMARKS = [one_process]
