"""What a model learns from each sampler on a planted graph, and how many bytes of remote rows that takes.

Half of the 128 columns and 30% of the rows are noise. Each run is a `Trial`: four parts, a trainer for each.
"""

from __future__ import annotations

from collections.abc import Iterator

from gnnsys.bench.case import Case
from gnnsys.bench.samplers.outcome import Outcome, table_cases
from gnnsys.bench.samplers.trial import (
    Task,
    Trial,
    all_neighbours,
    cut,
    guided,
    labor,
    train_seeds,
    uniform,
)
from gnnsys.bench.workload import FULL, Workload
from gnnsys.explain import Degrees, GradientInput, RandomMasks, TrainedMasks
from gnnsys.graph import planted_noise

UNIFORM = "uniform"
QUICK_TASK = Task(num_nodes=600, num_epochs=1, num_seeds=1, batch_size=32, fanout=4, every=1, pools=8)
VARIANTS = {
    UNIFORM: uniform(),
    "all neighbours": all_neighbours(),
    "uniform, 3/4 of the fanout": uniform(0.75),
    "uniform, half the fanout": uniform(0.5),
    "uniform, a quarter of the fanout": uniform(0.25),
    "labor": labor(),
    "guided at random": guided(RandomMasks()),
    "guided by degree": guided(Degrees()),
    "guided by gradients": guided(GradientInput()),
    "guided by trained masks": guided(TrainedMasks()),
    "guided by gradients, deviation 0.5": guided(GradientInput(), deviation=0.5),
    "guided by gradients, proportional": guided(GradientInput(), split="proportional", deviation=0.25),
}


def planted(work: Workload) -> Iterator[Case]:
    """Remote megabytes of a run, accuracy, and how far it spreads over seeds, each beside uniform draws."""
    task = Task() if work.sizes == FULL else QUICK_TASK

    def trial_of(seed: int) -> Trial:
        return work.once(f"samplers/planted graph/{seed}", lambda: _plant(work, task, seed))

    def found(name: str) -> Outcome:
        return work.once(f"samplers/planted/{name}", lambda: train_seeds(VARIANTS[name], task, trial_of))

    yield from table_cases("planted", found, VARIANTS, UNIFORM)


def _plant(work: Workload, task: Task, seed: int) -> Trial:
    graph = planted_noise(task.num_nodes, num_classes=8, separation=4.0, train=0.3, seed=seed)
    return cut(graph, work.folder / f"planted-{task.num_nodes}-{seed}")
