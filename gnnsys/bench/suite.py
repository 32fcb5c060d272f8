"""Running a suite: its benchmarks' cases one after another, each measured, shown and recorded.

A suite is a module of this room with a list `BENCHMARKS`. To add a benchmark, write a function that yields cases and
list it there; to add a suite, write the module and name it here. A suite that not every machine can run has a function
`check_device`, which raises `ValueError` with the reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gnnsys.bench import table
from gnnsys.bench.case import Benchmark, Case, NotHere, Unit
from gnnsys.bench.measure import RoundLimits, measure
from gnnsys.bench.report import Report
from gnnsys.bench.workload import FULL, QUICK, Workload

SUITES = (
    "ops", "loader", "partition", "store", "pipeline", "dist", "fullgraph", "gpu", "samplers", "links", "typed",
    "execution", "plan", "jobs", "flows",
)  # fmt: skip
_MOST_NAMES = 24
LAB = ("lab/", "pacing/")  # what names of cases begin with that run on the lab, in suites where others do not


@dataclass(frozen=True, kw_only=True)
class SuiteOptions:
    """`only` keeps the cases whose name contains it, or one of several with | between them; `lab` those alone that run
    on the cluster in a box. `quick` uses small sizes and judges nothing.

    `cache` is a folder for what is worth keeping between runs; `settings` are the suite's own, by name.
    """

    only: str | None = None
    lab: bool = False
    quick: bool = False
    rounds: RoundLimits = field(default_factory=RoundLimits)
    cache: Path | None = None
    settings: Mapping[str, str] = field(default_factory=dict)

    def selects(self, name: str) -> bool:
        """Whether `only` has a part of this name."""
        return self.only is None or any(part in name for part in self.only.split("|"))


def load_suite(name: str) -> Sequence[Benchmark]:
    if name not in SUITES:
        raise ValueError(f"there is no suite {name!r}; choose one of: {', '.join(SUITES)}")
    return importlib.import_module(f"gnnsys.bench.{name}").BENCHMARKS


def check_machine(name: str) -> None:
    """ValueError where this machine has not what suite `name` measures."""
    check = getattr(importlib.import_module(f"gnnsys.bench.{name}"), "check_device", None)
    if check is not None:
        check()


def run_suite(
    name: str, benchmarks: Sequence[Benchmark], options: SuiteOptions, show: Callable[[str], None] = print,
    keep: Callable[[Report], None] = lambda report: None,
) -> Report:  # fmt: skip
    """Runs every selected case; one that raises is reported and does not stop the others. An interrupt (Ctrl-C) ends
    the run, and its report has the cases before. `keep` is given the report when the last case has ended: what was
    measured is kept, however long processes take to end."""
    rounds = RoundLimits(least=2, most=5, seconds=0.5) if options.quick else options.rounds
    report = Report(name, options.quick)
    sizes = QUICK if options.quick else FULL
    with Workload(sizes, cache=options.cache, settings=options.settings, selects=options.selects) as workload:
        selected = _select(benchmarks, workload, options)
        show(table.header())
        for number, case in enumerate(selected):
            try:
                measured = measure(case, rounds)
            except NotHere as error:
                for row in report.add_missing(case, str(error)):
                    show(table.line(row))
                continue
            except Exception as error:
                report.add_failure(case, f"{type(error).__name__}: {error}")
                show(f"{case.name}: failed, {type(error).__name__}: {error}")
                continue
            except KeyboardInterrupt:
                report.interrupt(selected[number:])
                break
            for row in report.add(case, measured):
                show(table.line(row))
        keep(report)
    show(table.footer(report))
    return report


def units_of(benchmarks: Sequence[Benchmark], options: SuiteOptions) -> dict[str, Unit]:
    """The selected cases by name, with what their figures are; nothing is run."""
    with Workload(QUICK if options.quick else FULL, cache=options.cache, settings=options.settings) as workload:
        return {case.name: case.unit for case in _select(benchmarks, workload, options)}


def _select(benchmarks: Sequence[Benchmark], workload: Workload, options: SuiteOptions) -> list[Case]:
    cases = [case for benchmark in benchmarks for case in benchmark(workload)]
    if options.lab:
        cases = [case for case in cases if case.name.startswith(LAB)]
        if not cases:
            raise ValueError(f"--lab: no case of this suite begins with {LAB[0]}")
    selected = [case for case in cases if options.selects(case.name)]
    if not selected:
        raise ValueError(f"--only {options.only!r} matches none of: {few_names([case.name for case in cases])}")
    return selected


def few_names(names: Sequence[str]) -> str:
    """Names for an error: where there are many, those that tell how the others begin."""
    if len(names) <= _MOST_NAMES:
        return ", ".join(names)
    groups = dict.fromkeys(name.partition(",")[0] for name in names)
    while len(groups) > _MOST_NAMES and any("/" in group for group in groups):
        groups = dict.fromkeys(group.rpartition("/")[0] or group for group in groups)
    listed = list(groups)[:_MOST_NAMES]
    return f"{', '.join(f'{group}...' for group in listed)} ({len(names)} cases in all)"
