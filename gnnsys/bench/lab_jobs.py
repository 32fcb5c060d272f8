"""What suites in the lab share: jobs, each run when a row first needs it, and rows of figures that jobs measured."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Generic, TypeAlias

from gnnsys.bench.case import Case, NotHere, Side, Unit, Versus
from gnnsys.bench.communities import S, task_folder
from gnnsys.bench.workload import FULL, Workload
from gnnsys.lab import available

SideFigures: TypeAlias = Mapping[str, Callable[[], float]]
NOTHING = Versus((), required=False, label="-")  # for a row without a comparison


class LabJobs(Generic[S]):
    """Base of a suite's jobs; a subclass has a method per job. `quick`: the settings of a quick run. `texts`: what a
    person wrote, the workload's settings by default."""

    def __init__(
        self, workload: Workload, kind: type[S], quick: Mapping[str, Any], texts: Mapping[str, str] | None = None
    ) -> None:
        self._workload = workload
        base: Mapping[str, Any] = {} if workload.sizes.num_nodes >= FULL.num_nodes else quick
        self.settings = kind.from_texts(workload.settings if texts is None else texts, base)

    @property
    def _folder(self) -> Path:
        return task_folder(self._workload.folder, self.settings)

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        return self._workload.once(f"{self.settings.suite}/{name}", make)


def check_lab() -> None:
    if reason := available():
        raise NotHere(reason)


def say(line: str) -> None:
    """Prints progress to standard error."""
    print(line, file=sys.stderr, flush=True)


def trainer_environment(**more: str) -> dict[str, str]:
    """Environment of a job's processes: this gnnsys, everything that can be imported here, and one thread each."""
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
    """A case whose sides return figures of jobs, so each is called once. `foreign`: sides that run other libraries."""
    sides = {side: Side(call, foreign=side in foreign) for side, call in figures.items()}
    return Case(name, unit, lambda: sides, versus, limit=limit, repeats=1, missing=missing)
