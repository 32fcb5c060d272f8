"""Samplers on a real graph in four parts: bytes of remote rows and accuracy, several seeds of weights and draws.

Splits of the files have 20 nodes per class to train, which leaves no batches to speak of: half of all nodes are trained
on and a quarter is tested on, drawn by the seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from gnnsys.bench.case import Case
from gnnsys.bench.samplers.outcome import Outcome, table_cases
from gnnsys.bench.samplers.trial import Task, Trial, cut, train_seeds
from gnnsys.bench.samplers.wide import UNIFORM, VARIANTS
from gnnsys.bench.workload import FULL, Workload
from gnnsys.graph import NODE, available_datasets, dataset

GRAPHS = ("amazon_computers", "pubmed")
TASK = Task(num_epochs=5, num_seeds=3)
NAMES = (
    UNIFORM,
    "all neighbours",
    "nodes",
    "columns",
    "both",
    "random columns",
    "uniform, 5/8 of the fanout",
    "labor",
    "local first, random columns",
)


def real(work: Workload) -> Iterator[Case]:
    """Each beside uniform draws; graphs that are not there ($GNNSYS_DATA) have no rows, nor has a quick run."""
    if work.sizes != FULL:
        return
    for name in GRAPHS:
        if name in available_datasets():
            found = partial(_found, work, name)
            yield from table_cases(f"real {name}", found, NAMES, UNIFORM, TASK.num_epochs)


def _found(work: Workload, graph: str, name: str) -> Outcome:
    def trial_of(seed: int) -> Trial:
        return work.once(f"samplers/{graph}/{seed}", lambda: split(work, graph, seed))

    return work.once(f"samplers/{graph}/{name}", lambda: train_seeds(VARIANTS[name], TASK, trial_of))


def split(work: Workload, name: str, seed: int) -> Trial:
    """The graph with its nodes dealt to train and test by the seed, in parts."""
    graph = dataset(name)  # words as they are: rows that add up to one need many more steps
    count = graph.num_nodes()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed), device="cpu")
    for which, (first, end) in {"train_mask": (0.0, 0.5), "test_mask": (0.75, 1.0)}.items():
        mask = torch.zeros(count, dtype=torch.bool, device="cpu")
        mask[order[round(first * count) : round(end * count)]] = True
        graph.set_node_data(which, mask, NODE)
    return cut(graph, work.folder / f"{name}-raw-{seed}")
