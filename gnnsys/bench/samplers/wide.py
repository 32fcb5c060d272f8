"""DGS on a planted graph with 512 columns, half of them noise: nodes alone, columns alone and both, and what they beat.

Targets are those of the thesis (Table 3.3) and of issue 18: bytes with all that explaining costs, beside uniform draws
at the same fanout; accuracy beside all neighbours, and at equal bytes beside everything cheaper. Sweeps have fewer
seeds. Each run is a `Trial`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from statistics import fmean

import torch

from gnnsys.bench.case import Case, Versus, score, value
from gnnsys.bench.lab_jobs import NOTHING
from gnnsys.bench.samplers.trial import (
    Outcome,
    Task,
    Trial,
    Variant,
    accuracy_at,
    all_neighbours,
    cut,
    figure_case,
    guided,
    labor,
    table_cases,
    train_seeds,
    uniform,
)
from gnnsys.bench.workload import FULL, Workload
from gnnsys.explain import ColumnNorms, Degrees, GradientInput, RandomMasks, TrainedMasks
from gnnsys.graph import planted_noise

UNIFORM, BOTH, ALL = "uniform", "both", "all neighbours"
TASK = Task(num_nodes=10_000, num_epochs=12)
QUICK_TASK = Task(num_nodes=600, num_epochs=1, num_seeds=1, batch_size=16, fanout=3, every=2, pools=4)
SWEEP_SEEDS = 2
KEPT = 0.85  # N_f of the thesis
LEAST = {"nodes": None, "columns": 1 / 0.9, BOTH: 1 / 0.76}  # times fewer bytes than uniform draws take
CURVES = {
    "uniform": ("uniform", "uniform, 3/4 of the fanout", "uniform, 5/8 of the fanout"),
    "labor": ("labor", "labor, 3/4 of the fanout", "labor, 5/8 of the fanout"),
}
CHEAPER = ("local first, random columns", "both by norms", "both by degree")
BF16 = torch.bfloat16
VARIANTS: dict[str, Variant] = {
    UNIFORM: uniform(),
    ALL: all_neighbours(),
    "nodes": guided(GradientInput()),
    "columns": guided(GradientInput(), nodes=False, share=KEPT),
    BOTH: guided(GradientInput(), share=KEPT),
    "uniform bf16": uniform(wire=BF16),
    "nodes bf16": guided(GradientInput(), wire=BF16),
    "columns bf16": guided(GradientInput(), nodes=False, share=KEPT, wire=BF16),
    "both bf16": guided(GradientInput(), share=KEPT, wire=BF16),
    "columns, zero": guided(GradientInput(), nodes=False, share=KEPT, fill="zero"),
    "random columns": guided(RandomMasks(), nodes=False, share=KEPT),
    "random columns, zero": guided(RandomMasks(), nodes=False, share=KEPT, fill="zero"),
    "uniform, 3/4 of the fanout": uniform(0.75),
    "uniform, 5/8 of the fanout": uniform(0.625),
    "labor": labor(),
    "labor, 3/4 of the fanout": labor(0.75),
    "labor, 5/8 of the fanout": labor(0.625),
    "local first, random columns": guided(RandomMasks(), share=KEPT),
    "both by norms": guided(ColumnNorms(), share=KEPT),
    "both by degree": guided(Degrees(), share=KEPT),
    "both by trained masks": guided(TrainedMasks(), share=KEPT),
}
SWEEPS: dict[str, dict[str, Variant]] = {
    "T_ex": {f"T_ex {n}": guided(GradientInput(), share=KEPT, every=n) for n in (60, 90)},
    "N_f": {f"N_f {share}": guided(GradientInput(), share=share) for share in (1.0, 0.7, 0.5, 0.3)},
    "eps": {f"eps {eps}": guided(GradientInput(), share=KEPT, deviation=eps) for eps in (0.0, 0.05)},
}
METHODS = ("chunk", "random")
ON_PARTS = (UNIFORM, BOTH, "nodes", "columns", "random columns")


class _Runs:
    """The runs of this file, each when it is first asked for."""

    def __init__(self, work: Workload) -> None:
        self._work, self.task = work, TASK if work.sizes == FULL else QUICK_TASK

    def found(self, name: str) -> Outcome:
        return self._found(f"wide/{name}", VARIANTS[name], self.task)

    def swept(self, variants: dict[str, Variant], name: str) -> Outcome:
        """The same with fewer seeds."""
        task = replace(self.task, num_seeds=min(SWEEP_SEEDS, self.task.num_seeds))
        return self._found(f"sweep/{name}", variants[name], task)

    def _found(self, name: str, variant: Variant, task: Task) -> Outcome:
        trial_of = partial(self._trial, variant.method)
        return self._work.once(f"samplers/{name}", lambda: train_seeds(variant, task, trial_of))

    def _trial(self, method: str, seed: int) -> Trial:
        size = 256 if self.task is TASK else 16

        def make() -> Trial:
            graph = planted_noise(
                self.task.num_nodes, num_classes=8, separation=4.0, train=0.4, num_features=size, noise_columns=size,
                seed=seed,
            )  # fmt: skip
            return cut(graph, self._work.folder / f"wide-{self.task.num_nodes}-{method}-{seed}", method)

        return self._work.once(f"samplers/wide graph/{method}/{seed}", make)

    def megabytes(self, name: str) -> float:
        """Of an epoch."""
        return fmean(self.found(name).megabytes) / self.task.num_epochs

    def accuracy(self, name: str) -> float:
        return 100 * fmean(self.found(name).accuracy)

    def at_bytes_of(self, name: str, curve: str) -> float:
        """Accuracy of a sampler at the fanout, between those that it was run at, that takes as many bytes as `name`."""
        points = [self.found(other) for other in CURVES[curve]]
        return 100 * accuracy_at(points, fmean(self.found(name).megabytes))

    def noise(self, name: str, *others: str) -> float:
        """Two standard errors of the difference from the least certain of `others`, in points."""
        worst = max(self.found(other).error for other in others)
        return 200 * (self.found(name).error ** 2 + worst**2) ** 0.5


def wide(work: Workload) -> Iterator[Case]:
    """Bytes of nodes, columns and both, with and without bfloat16; what columns cost; everything at equal bytes."""
    runs = work.once("samplers/wide runs", lambda: _Runs(work))
    yield from _bytes(runs)
    yield from _accuracy(runs)
    yield from table_cases("wide", runs.found, VARIANTS, UNIFORM, runs.task.num_epochs)


def _bytes(runs: _Runs) -> Iterator[Case]:
    for wire in ("", " bf16"):
        for name, target in LEAST.items():
            ours, beside = f"{name}{wire}", f"{UNIFORM}{wire}"
            sides = {each: partial(runs.megabytes, each) for each in (ours, beside)}
            yield figure_case(f"wide bytes/{ours}", value("MB"), ours, sides, Versus((beside,), target))
    explaining = {BOTH: lambda: fmean(runs.found(BOTH).explaining) / runs.task.num_epochs}
    yield figure_case("wide bytes/explaining alone", value("MB"), BOTH, explaining, NOTHING)


def _accuracy(runs: _Runs) -> Iterator[Case]:
    sides: dict[str, Callable[[], float]]
    for name in ("nodes", "columns", BOTH):
        allowed = "all neighbours, less 0.5"
        sides = {name: partial(runs.accuracy, name), allowed: lambda: runs.accuracy(ALL) - 0.5}
        yield figure_case(f"wide accuracy/{name}", score("%"), name, sides, Versus((allowed,), 1.0))
    for fill in ("", ", zero"):
        name, beside = f"columns{fill}", f"random columns{fill}, and 1"
        sides = {name: partial(runs.accuracy, name), beside: partial(_with_a_point, runs, f"random columns{fill}")}
        yield figure_case(f"wide accuracy/{name} beside random ones", score("%"), name, sides, Versus((beside,), 1.0))
    for name in ("columns", "random columns", BOTH):
        whole = f"{name}, whole rows"
        as_read = partial(_as_read, runs, name)
        sides = {name: as_read, whole: partial(runs.accuracy, name), UNIFORM: partial(runs.accuracy, UNIFORM)}
        versus = [Versus((whole,)), Versus((UNIFORM,))]
        yield figure_case(f"wide as read/{name}", score("%"), name, sides, *versus)
    for name in (BOTH, "both by trained masks"):
        sides = {name: partial(runs.accuracy, name)}
        for curve, points in CURVES.items():
            sides[f"{curve}, less noise"] = partial(_less_noise_curve, runs, name, curve, points)
        for other in CHEAPER:
            sides[f"{other}, less noise"] = partial(_less_noise, runs, name, other)
        versus = [Versus((side,), 1.0) for side in sides if side != name]
        yield figure_case(f"wide at equal bytes/{name}", score("%"), name, sides, *versus)


def _as_read(runs: _Runs, name: str) -> float:
    """Accuracy on test nodes with rows of other parts as the last batches read them."""
    return 100 * fmean(runs.found(name).as_read)


def _with_a_point(runs: _Runs, name: str) -> float:
    return runs.accuracy(name) + 1


def _less_noise(runs: _Runs, name: str, other: str) -> float:
    return runs.accuracy(other) - runs.noise(name, other)


def _less_noise_curve(runs: _Runs, name: str, curve: str, points: tuple[str, ...]) -> float:
    return runs.at_bytes_of(name, curve) - runs.noise(name, *points)


def sweeps(work: Workload) -> Iterator[Case]:
    """T_ex, N_f and eps as sections 3.4.2 and 3.4.4 have them, and parts cut otherwise as Fig. 3.8 has them."""
    runs = work.once("samplers/wide runs", lambda: _Runs(work))
    base = {BOTH: VARIANTS[BOTH]}
    for kind, variants in SWEEPS.items():
        found = partial(runs.swept, base | variants)
        yield from table_cases(f"sweep {kind}", found, variants, BOTH, runs.task.num_epochs)
    for method in ("multilevel", *METHODS):
        pair = {f"{name}, {method} parts": replace(VARIANTS[name], method=method) for name in ON_PARTS}
        yield from table_cases(
            "sweep parts", partial(runs.swept, pair), pair, f"{UNIFORM}, {method} parts", runs.task.num_epochs
        )
