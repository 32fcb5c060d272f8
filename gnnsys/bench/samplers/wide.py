"""DGS on planted graphs with 512 columns, half of them noise: nodes alone, columns alone and both, and what they beat.

Targets are those of the thesis (Table 3.3) and of issue 18: bytes with all that explaining costs, beside uniform draws
at the same fanout; accuracy beside all neighbours, and at equal bytes beside everything cheaper. What a guide can be
worth depends on what other parts have to say, so there are several graphs, and `graph/...` says what each is like.
Models are regularised alike for all variants, by validation accuracy of uniform draws (`tuning/...`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from hashlib import sha256
from typing import Any

import torch

from gnnsys.bench.case import Case, Versus, score, value
from gnnsys.bench.lab_jobs import NOTHING
from gnnsys.bench.samplers.outcome import (
    Outcome,
    RunFigures,
    differences,
    figure_case,
    found_cases,
    paired_noise,
    table_cases,
)
from gnnsys.bench.samplers.trial import (
    Task,
    Trial,
    Variant,
    all_neighbours,
    cut,
    edge_shares,
    guided,
    labor,
    train,
    uniform,
)
from gnnsys.bench.workload import FULL, Workload
from gnnsys.explain import ColumnNorms, Degrees, GradientInput, RandomMasks, TrainedMasks
from gnnsys.graph import planted_noise

UNIFORM, BOTH, ALL = "uniform", "both", "all neighbours"
TASK = Task(num_nodes=4096, num_epochs=4, batch_size=16, dropout=0.5)
QUICK_TASK = Task(num_nodes=640, num_epochs=1, num_seeds=1, batch_size=16, fanout=3, every=2, pools=4)
SWEEP_SEEDS, RICH_SEEDS = 2, 3
BYTES_EPOCHS = 8  # rows to explain with are fetched once: how much of a run they are depends on its length
KEPT = 0.85  # N_f of the thesis
LEAST = {"nodes": None, "columns": 1 / 0.9, BOTH: 1 / 0.76}  # times fewer bytes than uniform draws take
CURVES = {
    "uniform": ("uniform", "uniform, 3/4 of the fanout", "uniform, 5/8 of the fanout", "uniform, half the fanout"),
    "labor": ("labor", "labor, 3/4 of the fanout"),
}
CHEAPER = ("local first, random columns", "both by norms", "both by degree")
BF16 = torch.bfloat16
VARIANTS: dict[str, Variant] = {
    UNIFORM: uniform(),
    "columns": guided(GradientInput(), nodes=False, share=KEPT),
    "random columns": guided(RandomMasks(), nodes=False, share=KEPT),
    BOTH: guided(GradientInput(), share=KEPT),
    "local first, random columns": guided(RandomMasks(), share=KEPT),
    "nodes": guided(GradientInput()),
    "nodes at random": guided(RandomMasks()),
    "uniform, 3/4 of the fanout": uniform(0.75),
    "uniform, 5/8 of the fanout": uniform(0.625),
    "uniform, half the fanout": uniform(0.5),
    "columns, half": guided(GradientInput(), nodes=False, share=0.5),
    "random columns, half": guided(RandomMasks(), nodes=False, share=0.5),
    "both, half": guided(GradientInput(), share=0.5),
    "local first, random columns, half": guided(RandomMasks(), share=0.5),
    "both by norms": guided(ColumnNorms(), share=KEPT),
    "both by degree": guided(Degrees(), share=KEPT),
    "both by trained masks": guided(TrainedMasks(), share=KEPT),
    "labor": labor(),
    "labor, 3/4 of the fanout": labor(0.75),
    "uniform bf16": uniform(wire=BF16),
    "nodes bf16": guided(GradientInput(), wire=BF16),
    "columns bf16": guided(GradientInput(), nodes=False, share=KEPT, wire=BF16),
    "both bf16": guided(GradientInput(), share=KEPT, wire=BF16),
    "columns, zero": guided(GradientInput(), nodes=False, share=KEPT, fill="zero"),
    "random columns, zero": guided(RandomMasks(), nodes=False, share=KEPT, fill="zero"),
    ALL: all_neighbours(),
}
SWEEPS: dict[str, dict[str, Variant]] = {
    "T_ex": {f"T_ex {n}": guided(GradientInput(), share=KEPT, every=n) for n in (60, 90)},
    "N_f": {f"N_f {share}": guided(GradientInput(), share=share) for share in (1.0, 0.7, 0.5, 0.3)},
    "eps": {f"eps {eps}": guided(GradientInput(), share=KEPT, deviation=eps) for eps in (0.0, 0.05)},
}
METHODS = ("chunk", "random")
ON_PARTS = (UNIFORM, BOTH, "nodes", "columns", "random columns")
TUNING: dict[str, dict[str, Any]] = {f"dropout {rate}": {"dropout": rate} for rate in (0.0, 0.3, 0.5, 0.7)} | {
    "weight decay 0.001": {"dropout": 0.5, "weight_decay": 0.001}
}


@dataclass(frozen=True)
class PlantedSetting:
    """A planted graph and how models are trained on it. `options` are those of `planted_noise`."""

    name: str
    options: Mapping[str, Any]
    task: Task = TASK
    train: float = 0.5
    variants: Mapping[str, Variant] = field(default_factory=lambda: VARIANTS)


COMMUNITIES = {"num_communities": 16, "locality": 0.5}
WIDE = PlantedSetting("wide", {**COMMUNITIES, "homophily": 0.4})
# What other parts have to say: nearly nothing where parts are classes, as much as the own part, or most of it.
CLASSES = PlantedSetting("classes", {"homophily": 0.5}, replace(TASK, num_seeds=SWEEP_SEEDS))
RICH = PlantedSetting(
    "rich", {**COMMUNITIES, "homophily": 0.25, "homophily_between": 0.7}, replace(TASK, num_seeds=RICH_SEEDS)
)
ON_GRAPHS = (
    UNIFORM, "columns", "random columns", BOTH, "local first, random columns", "nodes", "uniform, 5/8 of the fanout",
    "columns, half", "random columns, half",
)  # fmt: skip


class _Runs:
    """The runs on one graph, each when it is first asked for. Those of a benchmark with a cache are kept in it."""

    def __init__(self, work: Workload, setting: PlantedSetting) -> None:
        self._work, self.setting, is_full = work, setting, work.sizes == FULL
        self.task = setting.task if is_full else QUICK_TASK
        self._half = 256 if is_full else 16

    def found(self, name: str) -> Outcome:
        return self.outcome(name, self.setting.variants[name], self.task)

    def swept(self, variants: Mapping[str, Variant], name: str) -> Outcome:
        """The same with fewer seeds."""
        return self.outcome(name, variants[name], replace(self.task, num_seeds=min(SWEEP_SEEDS, self.task.num_seeds)))

    def outcome(self, name: str, variant: Variant, task: Task) -> Outcome:
        return Outcome(tuple(self._run(name, variant, task, seed) for seed in range(task.num_seeds)))

    def _run(self, name: str, variant: Variant, task: Task, seed: int) -> RunFigures:
        settings = asdict(replace(task, num_seeds=1)) | dict(self.setting.options) | {"train": self.setting.train}
        which = f"{self.setting.name}/{name}/{seed}"
        return kept_run(
            self._work, which, settings, lambda: train(self.trial(variant.method, seed), variant, task, seed)
        )

    def trial(self, method: str, seed: int) -> Trial:
        name = f"{self.setting.name}-{self.task.num_nodes}-{method}-{seed}"  # the parts that a cache keeps

        def make() -> Trial:
            options = dict(self.setting.options)
            if "num_communities" in options and self.task is QUICK_TASK:
                options["num_communities"] = 8
            graph = planted_noise(
                self.task.num_nodes, num_classes=8, separation=3.0, train=self.setting.train, num_features=self._half,
                noise_columns=self._half, seed=seed, **options,
            )  # fmt: skip
            return cut(graph, self._work.folder / name, method)

        return self._work.once(f"samplers/graph/{name}", make)

    def accuracy(self, name: str) -> float:
        return 100 * self.found(name).mean("accuracy")

    def as_read(self, name: str) -> float:
        """Accuracy on test nodes with rows of other parts as the last batches read them."""
        return 100 * self.found(name).mean("as_read")

    def less_noise(self, name: str, *others: str, figure: str = "accuracy") -> float:
        """A figure of another variant, or of several at the bytes of `name`, less two standard errors of the difference
        by seed, in points."""
        ahead = differences(self.found(name), [self.found(other) for other in others], figure)
        return 100 * (self.found(name).mean(figure) - sum(ahead) / len(ahead) - paired_noise(ahead))


def kept_run(work: Workload, name: str, settings: Mapping[str, Any], run: Callable[[], RunFigures]) -> RunFigures:
    """The figures of a run, once per process; where the benchmark has a cache, once for as long as that is there."""
    which = f"{name}/{sha256(json.dumps(dict(settings)).encode()).hexdigest()[:12]}"

    def make() -> RunFigures:
        if work.cache is None:
            return run()
        kept = work.folder / "runs" / f"{which.replace('/', '_')}.json"
        if not kept.exists():
            figures = run()
            kept.parent.mkdir(exist_ok=True)
            kept.write_text(json.dumps(figures._asdict()))
        return RunFigures(**json.loads(kept.read_text()))

    return work.once(f"samplers/{which}", make)


def wide(work: Workload) -> Iterator[Case]:
    """Bytes of nodes, columns and both, with and without bfloat16; what columns cost; everything at equal bytes."""
    runs = _runs(work, WIDE)
    yield from _bytes(runs)
    yield from _accuracy(runs)
    yield from table_cases("wide", runs.found, VARIANTS, UNIFORM, runs.task.num_epochs)
    yield from found_cases("wide", runs.found, [name for name, each in VARIANTS.items() if each.explainer is not None])


def _runs(work: Workload, setting: PlantedSetting) -> _Runs:
    return work.once(f"samplers/{setting.name} runs", lambda: _Runs(work, setting))


def _bytes(runs: _Runs) -> Iterator[Case]:
    for wire in ("", " bf16"):
        for name, target in LEAST.items():
            ours, beside = f"{name}{wire}", f"{UNIFORM}{wire}"
            for label, figure in {"": "megabytes", ", the last epoch": "last_epoch"}.items():
                sides = {each: partial(_long_run, runs, each, figure) for each in (ours, beside)}
                versus = Versus((beside,), None if label else target)
                yield figure_case(f"wide bytes/{ours}{label}", value("MB"), ours, sides, versus)
    explaining = {BOTH: partial(_long_run, runs, BOTH, "explaining")}
    yield figure_case("wide bytes/explaining alone", value("MB"), BOTH, explaining, NOTHING)


def _long_run(runs: _Runs, name: str, figure: str) -> float:
    """Megabytes of an epoch, as a mean over a longer run, with one seed: they hardly depend on it."""
    task = replace(runs.task, num_epochs=BYTES_EPOCHS if runs.task is not QUICK_TASK else 2, num_seeds=1)
    found = runs.outcome(f"{name}, {task.num_epochs} epochs", VARIANTS[name], task).mean(figure)
    return found if figure == "last_epoch" else found / task.num_epochs


def _accuracy(runs: _Runs) -> Iterator[Case]:
    sides: dict[str, Callable[[], float]]
    for name in (UNIFORM, "nodes", "columns", BOTH):
        allowed = "all neighbours, less 0.5"
        sides = {name: partial(runs.accuracy, name), allowed: lambda: runs.accuracy(ALL) - 0.5}
        target = None if name == UNIFORM else 1.0
        yield figure_case(f"wide accuracy/{name}", score("%"), name, sides, Versus((allowed,), target))
    yield from _beside_random(runs, ("", ", zero", ", half"))
    for name in (BOTH, "both by trained masks"):
        for label, figure in {"": "accuracy", " as read": "as_read"}.items():
            sides = {name: partial(runs.accuracy if figure == "accuracy" else runs.as_read, name)}
            for curve, points in CURVES.items():
                sides[f"{curve}, less noise"] = partial(runs.less_noise, name, *points, figure=figure)
            for other in CHEAPER:
                sides[f"{other}, less noise"] = partial(runs.less_noise, name, other, figure=figure)
            versus = [Versus((side,), 1.0) for side in sides if side != name]
            yield figure_case(f"wide at equal bytes/{name}{label}", score("%"), name, sides, *versus)


def _beside_random(runs: _Runs, kinds: tuple[str, ...]) -> Iterator[Case]:
    """Explained columns beside random ones and a point, with whole rows and with rows as trainers read them."""
    for kind in kinds:
        name, other = f"columns{kind}", f"random columns{kind}"
        for label, of in {"": runs.accuracy, " as read": runs.as_read}.items():
            beside = f"{other}, and 1"
            sides = {name: partial(of, name), beside: partial(_with_a_point, of, other)}
            target = None if kind == ", half" else 1.0
            case = f"{runs.setting.name} accuracy/{name} beside random ones{label}"
            yield figure_case(case, score("%"), name, sides, Versus((beside,), target))


def _with_a_point(of: Callable[[str], float], name: str) -> float:
    return of(name) + 1


def graphs(work: Workload) -> Iterator[Case]:
    """What each planted graph is like, the same samplers on all of them, and what settings were chosen by."""
    for setting in (CLASSES, WIDE, RICH):
        runs = _runs(work, setting)
        yield from share_cases(f"graph/{setting.name}", setting.name, partial(runs.trial, "multilevel", 0))
    for setting in (CLASSES, RICH):
        runs = _runs(work, setting)
        yield from table_cases(setting.name, runs.found, ON_GRAPHS, UNIFORM, runs.task.num_epochs)
    yield from _beside_random(_runs(work, RICH), ("", ", half"))
    runs = _runs(work, WIDE)
    for name, options in TUNING.items():
        sides = {name: partial(_validation, runs, name, options)}
        yield figure_case(f"tuning/{name}", score("%"), name, sides, NOTHING)


def share_cases(prefix: str, name: str, trial_of: Callable[[], Trial]) -> Iterator[Case]:
    """What other parts of a graph have to say."""
    for label, share in {
        "edges between parts": "between",
        "of one class, inside parts": "same_inside",
        "of one class, between parts": "same_between",
    }.items():
        sides = {name: partial(_share, trial_of, share)}
        yield figure_case(f"{prefix}/{label}", value("%"), name, sides, NOTHING)


def _share(trial_of: Callable[[], Trial], share: str) -> float:
    return 100 * float(getattr(edge_shares(trial_of()), share))


def _validation(runs: _Runs, name: str, options: Mapping[str, Any]) -> float:
    """Accuracy of uniform draws on validation nodes."""
    task = replace(runs.task, num_seeds=min(SWEEP_SEEDS, runs.task.num_seeds), **options)
    return 100 * runs.outcome(f"tuning {name}", VARIANTS[UNIFORM], task).mean("validation")


def sweeps(work: Workload) -> Iterator[Case]:
    """T_ex, N_f and eps as sections 3.4.2 and 3.4.4 have them, and parts cut otherwise as Fig. 3.8 has them."""
    runs = _runs(work, WIDE)
    base = {BOTH: VARIANTS[BOTH]}
    for kind, variants in SWEEPS.items():
        found = partial(runs.swept, base | variants)
        yield from table_cases(f"sweep {kind}", found, variants, BOTH, runs.task.num_epochs)
    for method in ("multilevel", *METHODS):
        pair = {f"{name}, {method} parts": replace(VARIANTS[name], method=method) for name in ON_PARTS}
        yield from table_cases(
            "sweep parts", partial(runs.swept, pair), pair, f"{UNIFORM}, {method} parts", runs.task.num_epochs
        )
