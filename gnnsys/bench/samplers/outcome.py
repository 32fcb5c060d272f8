"""Figures of training runs, and the cases that are made of them.

What was planted is known, so a run also tells whether its last masks found it: the share of signal columns that rows of
other parts are read by, and how well masks tell signal from noise, as the area under the ROC curve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import fmean, stdev
from typing import NamedTuple

import torch
from torch import Tensor

from gnnsys.bench.case import Case, Side, Unit, Versus, score, value
from gnnsys.bench.lab_jobs import NOTHING


class RunFigures(NamedTuple):
    """Figures of one run. Shares and areas are means over parts; NaN where nothing was planted or nothing guides.

    `megabytes` are all of the run, `explaining` those of them that were fetched or sent to explain, `last_epoch` those
    of its last epoch, rows to explain with left out. `accuracy` is on
    test nodes with whole rows, `as_read` with rows of other parts by the columns that the last batches read,
    `validation` is on validation nodes with whole rows: what settings are chosen by.
    """

    megabytes: float
    accuracy: float
    explaining: float = 0.0
    last_epoch: float = math.nan
    as_read: float = math.nan
    validation: float = math.nan
    signal_kept: float = math.nan
    column_auc: float = math.nan
    node_auc: float = math.nan


@dataclass(frozen=True)
class Outcome:
    """The runs of one variant, by seed."""

    runs: tuple[RunFigures, ...]

    def mean(self, figure: str) -> float:
        return fmean(getattr(run, figure) for run in self.runs)

    @property
    def spread(self) -> float:
        """Standard deviation of the accuracy over seeds."""
        return stdev(run.accuracy for run in self.runs) if len(self.runs) > 1 else 0.0


def value_at(points: Iterable[tuple[float, float]], megabytes: float) -> float:
    """What a sampler has at so many megabytes, between the settings it was run at; beyond them, that of the last."""
    ordered = sorted(points)
    for (less, low), (more, high) in pairwise(ordered):
        if less <= megabytes <= more:
            return low + (high - low) * (megabytes - less) / (more - less)
    return ordered[0][1] if megabytes < ordered[0][0] else ordered[-1][1]


def differences(ours: Outcome, theirs: Sequence[Outcome], figure: str = "accuracy") -> list[float]:
    """How far ours is ahead, by seed: runs of a seed share graph, first weights and order of batches.

    `theirs` is another variant, or one sampler at several fanouts, of which it is taken at the bytes of ours.
    """
    found = []
    for number, run in enumerate(ours.runs):
        points = [(each.runs[number].megabytes, getattr(each.runs[number], figure)) for each in theirs]
        beside = points[0][1] if len(points) == 1 else value_at(points, run.megabytes)
        found.append(getattr(run, figure) - beside)
    return found


def paired_noise(found: Sequence[float]) -> float:
    """Two standard errors of the mean of differences."""
    return 2 * stdev(found) / math.sqrt(len(found)) if len(found) > 1 else 0.0


def roc_area(scores: Tensor, is_positive: Tensor) -> float:
    """The chance that a positive has the higher score, ties counting one half: 0.5 says nothing, 1 everything."""
    _, place, counts = torch.unique(scores.double(), return_inverse=True, return_counts=True)
    rank = (counts.cumsum(0).double() - (counts.double() - 1) / 2)[place]
    positive = int(is_positive.sum())
    pairs = positive * (scores.numel() - positive)
    above = rank[is_positive].sum() - positive * (positive + 1) / 2
    return float(above / pairs) if pairs else math.nan


# -- cases -----------------------------------------------------------------------------------------------------------


def figure_case(name: str, unit: Unit, ours: str, sides: Mapping[str, Callable[[], float]], *versus: Versus) -> Case:
    """Figures of runs beside each other; each side is called once."""
    return Case(name, unit, lambda: {side: Side(call) for side, call in sides.items()}, versus, ours=ours, repeats=1)


def table_cases(
    prefix: str, found: Callable[[str], Outcome], names: Iterable[str], beside: str, num_epochs: int = 1
) -> Iterator[Case]:
    """Megabytes (of an epoch, given how many a run has), accuracy with whole rows and with rows as they are read, and
    its spread, of variants beside `beside`."""
    figures: dict[str, tuple[Unit, Callable[[str], float]]] = {
        "remote": (value("MB"), lambda variant: found(variant).mean("megabytes") / num_epochs),
        "accuracy": (score("%"), lambda variant: 100 * found(variant).mean("accuracy")),
        "as read": (score("%"), lambda variant: 100 * found(variant).mean("as_read")),
        "spread": (value("points"), lambda variant: 100 * found(variant).spread),
    }
    for name in names:
        if name != beside:
            for figure, (unit, of) in figures.items():
                sides = {side: partial(of, side) for side in (name, beside)}
                yield figure_case(f"{prefix}/{name}/{figure}", unit, name, sides, Versus((beside,)))


def found_cases(prefix: str, found: Callable[[str], Outcome], names: Iterable[str]) -> Iterator[Case]:
    """Of guided variants: how much of what was planted their last masks found."""
    figures = {"signal columns kept": "signal_kept", "AUC of columns": "column_auc", "AUC of nodes": "node_auc"}
    for name in names:
        for label, figure in figures.items():
            unit = score("%" if figure == "signal_kept" else "AUC")
            sides = {name: partial(_found_figure, found, name, figure)}
            yield figure_case(f"{prefix}/{name}/{label}", unit, name, sides, NOTHING)


def _found_figure(found: Callable[[str], Outcome], name: str, figure: str) -> float:
    return found(name).mean(figure) * (100 if figure == "signal_kept" else 1)
