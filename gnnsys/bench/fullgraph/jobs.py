"""The jobs that the rows of `gnnsys bench fullgraph` are made of; the row that asks first makes its job run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from gnnsys.bench.communities import make_graph
from gnnsys.bench.fullgraph.inputs import cut_and_rows, make_parts
from gnnsys.bench.fullgraph.run_job import VariantFigures, run_job
from gnnsys.bench.fullgraph.settings import QUICK, FullGraphSettings
from gnnsys.bench.fullgraph.variant import (
    CALIBRATED,
    FULL,
    OURS,
    PARTITIONERS,
    REPLICATED,
    UNLIMITED,
    Variant,
    VariantGroup,
    VariantJob,
    ablation,
)
from gnnsys.bench.lab_jobs import LabJobs, check_lab, say
from gnnsys.bench.workload import Workload
from gnnsys.graph import load
from gnnsys.lab import parse_rate

FiguresByVariant = dict[tuple[str, str, str], VariantFigures]
SCHEDULE, SWEEP = "schedule", "bins"


class FullGraphJobs(LabJobs[FullGraphSettings]):
    """Figures by job. All jobs but the first run at the rate that the first found."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload, FullGraphSettings, QUICK)
        s = self.settings
        self.full = Variant(name=FULL, num_layers=s.layers, num_features=s.num_features, num_bins=s.bins)

    @property
    def rate(self) -> str:
        """Of limited links: as set, or as the schedule's job found it."""
        return self.settings.rate or self._limited_rate()

    def _limited_rate(self) -> str:
        rate = self.schedule(FULL, limited=True).rate
        assert rate is not None
        return rate

    def schedule(self, variant: str, *, limited: bool) -> VariantFigures:
        """One of the paper's variants, on unlimited links or on those at which communication is half of it."""
        return self._schedule_job()[SCHEDULE, variant, self._limited if limited else UNLIMITED]

    def bins(self, number: int, *, limited: bool) -> VariantFigures:
        """The full schedule in so many bins, in turns with others."""
        return self._schedule_job()[SWEEP, str(number), self.rate if limited else UNLIMITED]

    def partitioner(self, name: str) -> VariantFigures:
        """The full schedule on parts of another partitioner."""
        return self._once("partitioners", self._run_partitioners)["partitioners", name, self.rate]

    def cut_and_rows(self, partitioner: str) -> tuple[int, int]:
        """Of a partitioner: edges cut, and rows that must travel per exchange."""
        folder, settings = self._workload.folder, self.settings

        def count() -> tuple[int, int]:
            ranks = torch.from_numpy(np.load(make_parts(folder, settings, partitioner, settings.hosts)))
            return cut_and_rows(load(make_graph(folder, settings)), ranks)

        return self._once(f"cut-{partitioner}", count)

    def shape(self, name: str, variant: str, *, limited: bool) -> VariantFigures:
        """A model with so many layers ("3 layers") or features ("width 16"), by the full schedule or replicated."""
        return self._once("replication", self._run_replication)[name, variant, self.rate if limited else UNLIMITED]

    # -- running them --------------------------------------------------------------------------------------------------

    @property
    def _limited(self) -> str:
        return self.settings.rate or CALIBRATED

    def _schedule_job(self) -> FiguresByVariant:
        return self._once("schedule", self._run_schedule)

    def _run_schedule(self) -> FiguresByVariant:
        """Two jobs: the variants, which find the rate, and the numbers of bins at it."""
        s = self.settings
        variants = VariantGroup(
            name=SCHEDULE, variants=tuple(ablation(self.full)), rates=(UNLIMITED, self._limited), epochs=s.epochs
        )
        found = self._run("schedule", [variants], [OURS])
        rate = found[SCHEDULE, FULL, self._limited].rate
        assert rate is not None
        sweep = tuple(replace(self.full, name=str(number), num_bins=number) for number in s.sweep)
        bins = VariantGroup(name=SWEEP, variants=sweep, rates=(UNLIMITED, rate), epochs=s.epochs)
        return found | self._run("bins", [bins], [OURS])

    def _run_partitioners(self) -> FiguresByVariant:
        variants = tuple(replace(self.full, name=name, parts=name) for name in PARTITIONERS)
        group = VariantGroup(name="partitioners", variants=variants, rates=(self.rate,), epochs=self.settings.epochs)
        return self._run("partitioners", [group], PARTITIONERS)

    def _run_replication(self) -> FiguresByVariant:
        full = replace(self.full, num_bins=0)
        shapes = {f"{depth} layers": replace(full, num_layers=depth) for depth in self.settings.depths}
        shapes |= {f"width {width}": replace(full, num_features=width) for width in self.settings.widths}
        groups = [
            VariantGroup(
                name=name,
                variants=(shape, replace(shape, name=REPLICATED, replicate=True)),
                rates=(UNLIMITED, self.rate),
                epochs=self.settings.epochs,
            )
            for name, shape in shapes.items()
        ]
        return self._run("replication", groups, [OURS], self.settings.replication_hosts)

    def _run(
        self, name: str, groups: Sequence[VariantGroup], partitioners: Sequence[str], num_hosts: int | None = None
    ) -> FiguresByVariant:
        """On so many hosts as set, or on others whose quotas add up to the same."""
        check_lab()
        s, folder = self.settings, self._workload.folder
        num_hosts = num_hosts or s.hosts
        cpu = s.cpu * s.hosts / num_hosts
        say(f"  {name}: inputs ...")
        graph = make_graph(folder, s)
        parts = {each: str(make_parts(folder, s, each, num_hosts)) for each in partitioners}
        job = VariantJob(
            graph=str(graph), parts=parts, hidden=s.hidden, num_hosts=num_hosts, cpu=cpu, groups=tuple(groups)
        )  # fmt: skip
        say(f"  {name}: {num_hosts} hosts ...")
        found = run_job(self._folder / f"job-{name}", job)
        for figures in found.values():
            say(f"    {figures.describe()}")
        return found


def megabits(rate: str) -> float:
    return parse_rate(rate) / 1e6
