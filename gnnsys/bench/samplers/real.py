"""Samplers on a real graph in four parts: bytes of remote rows and accuracy, several seeds of weights and draws.

Splits of the files have 20 nodes per class to train, which leaves no batches to speak of: half of all nodes are trained
on and a quarter is tested on, drawn by the seed. With two epochs and the
dropout of planted graphs models learned nothing on amazon_computers: five epochs, and none of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial

import torch

from gnnsys.bench.case import Case
from gnnsys.bench.samplers.outcome import Outcome, RunFigures, table_cases
from gnnsys.bench.samplers.trial import Task, Trial, cut, train
from gnnsys.bench.samplers.wide import UNIFORM, VARIANTS, kept_run, share_cases
from gnnsys.bench.workload import FULL, Workload
from gnnsys.graph import NODE, available_datasets, dataset

GRAPHS = ("amazon_computers", "pubmed")
TASK = Task(num_epochs=5, num_seeds=2)
NAMES = (
    UNIFORM,
    "columns",
    "random columns",
    "both",
    "local first, random columns",
    "uniform, 5/8 of the fanout",
    "columns, half",
    "random columns, half",
    "nodes",
    "labor",
)


def real(work: Workload) -> Iterator[Case]:
    """Each beside uniform draws; graphs that are not there ($GNNSYS_DATA) have no rows, nor has a quick run."""
    if work.sizes != FULL:
        return
    for name in GRAPHS:
        if name in available_datasets():
            yield from share_cases(f"real {name}", name, partial(_trial, work, name, 0))
            yield from table_cases(f"real {name}", partial(_found, work, name), NAMES, UNIFORM, TASK.num_epochs)


def _found(work: Workload, graph: str, name: str) -> Outcome:
    def run(seed: int) -> RunFigures:
        which = f"{graph}/{name}/{seed}"
        return kept_run(work, which, asdict(TASK), lambda: train(_trial(work, graph, seed), VARIANTS[name], TASK, seed))

    return Outcome(tuple(run(seed) for seed in range(TASK.num_seeds)))


def _trial(work: Workload, graph: str, seed: int) -> Trial:
    return work.once(f"samplers/{graph}/{seed}", lambda: split(work, graph, seed))


def split(work: Workload, name: str, seed: int) -> Trial:
    """The graph with its nodes dealt to train and test by the seed, in parts."""
    graph = dataset(name)  # words as they are: rows that add up to one need many more steps
    count = graph.num_nodes()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed), device="cpu")
    for which, (first, end) in {"train_mask": (0.0, 0.5), "val_mask": (0.5, 0.75), "test_mask": (0.75, 1.0)}.items():
        mask = torch.zeros(count, dtype=torch.bool, device="cpu")
        mask[order[round(first * count) : round(end * count)]] = True
        graph.set_node_data(which, mask, NODE)
    return cut(graph, work.folder / f"{name}-raw-{seed}")
