"""What suites in the lab share: jobs that the first row to ask makes run, and rows of figures that jobs measured."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Generic, TypeAlias

from gnnsys.bench.case import Case, Side, Unit, Versus
from gnnsys.bench.communities import S, task_folder
from gnnsys.bench.workload import FULL, Workload
from gnnsys.lab import available

SideFigures: TypeAlias = Mapping[str, Callable[[], float]]
NOTHING = Versus((), required=False, label="-")  # for a row that is there to be read


class LabJobs(Generic[S]):
    """The jobs of a run; a suite's own class says which there are. `quick` are the settings of a quick run."""

    def __init__(self, workload: Workload, kind: type[S], quick: Mapping[str, Any]) -> None:
        self._workload = workload
        base: Mapping[str, Any] = {} if workload.sizes.num_nodes >= FULL.num_nodes else quick
        self.settings = kind.from_texts(workload.settings, base)

    @property
    def _folder(self) -> Path:
        return task_folder(self._workload.folder, self.settings)

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        return self._workload.once(f"{self.settings.suite}/{name}", make)


def check_lab() -> None:
    if reason := available():
        raise RuntimeError(reason)


def say(line: str) -> None:
    """For those who watch."""
    print(line, file=sys.stderr, flush=True)


def trainer_environment(**more: str) -> dict[str, str]:
    """Of a job's processes: this gnnsys, with whatever can be imported here, and one thread each."""
    paths = [str(Path(__file__).resolve().parents[2]), *filter(None, sys.path)]
    return {"OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(paths), **more}


def job_case(
    name: str,
    unit: Unit,
    figures: SideFigures,
    *versus: Versus,
    limit: str | None = None,
    missing: Mapping[str, str] | None = None,
    foreign: Collection[str] = (),
) -> Case:
    """Figures that are asked for once: it is the jobs that measure. `foreign` are those of others' jobs."""
    sides = {side: Side(call, foreign=side in foreign) for side, call in figures.items()}
    return Case(name, unit, lambda: sides, versus, limit=limit, repeats=1, missing=missing)
