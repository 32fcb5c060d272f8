"""The jobs that the rows of `gnnsys bench dist` are made of; the row that asks first makes its job run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gnnsys.bench.dist.inputs import METIS, RANDOM, TWO_LEVEL, make_parts
from gnnsys.bench.dist.run_job import PhaseFigures, run_job
from gnnsys.bench.dist.phase import ASYNCHRONOUS, COMPUTE, KEEPING, NON_STOP, SYNCHRONOUS, Phase
from gnnsys.bench.dist.settings import QUICK, DistSettings
from gnnsys.lab import Lab, parse_rate
from gnnsys.bench.lab_jobs import LabJobs, check_lab, say
from gnnsys.bench.workload import Workload

UNLIMITED = "unlimited"
WARM = 4  # steps until the pipeline is as full as it gets


class DistJobs(LabJobs[DistSettings]):
    """Figures by job and phase. Phases of a job go from slow links to fast: none starts with what a fast link left."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload, DistSettings, QUICK)

    def two_level(self, phase: str) -> PhaseFigures:
        """All hosts, METIS over machines and trainers: phases by rate, "unlimited", and by mode."""
        settings = self.settings
        rates = sorted({*settings.rates, settings.rate}, key=parse_rate)
        phases = [
            Phase(name=SYNCHRONOUS, mode=SYNCHRONOUS, rate=settings.rate, warm=0),
            Phase(name=ASYNCHRONOUS, mode=ASYNCHRONOUS, rate=settings.rate, warm=0),
            Phase(name=NON_STOP, mode=NON_STOP, rate=settings.rate, warm=WARM),
            *(Phase(name=rate, rate=rate, warm=WARM) for rate in rates),
            Phase(name=UNLIMITED, warm=WARM),
        ]
        return self._job(TWO_LEVEL, TWO_LEVEL, settings.hosts, phases)[phase]

    def flat(self, kind: str, phase: str) -> PhaseFigures:
        """All hosts, parts at random or by METIS over machines: "synchronous" at the rate, or "unlimited"."""
        phases = [
            Phase(name=SYNCHRONOUS, mode=SYNCHRONOUS, rate=self.settings.rate, warm=0),
            Phase(name=UNLIMITED, mode=SYNCHRONOUS, warm=0),
        ]
        assert kind in (RANDOM, METIS)
        return self._job(kind, kind, self.settings.hosts, phases)[phase]

    def one_host(self) -> PhaseFigures:
        """The first of all hosts alone, with the seeds and the quota that it has among them."""
        phases = [Phase(name=UNLIMITED, warm=WARM)]
        return self._job("one host", TWO_LEVEL, 1, phases, num_seed_parts=1)[UNLIMITED]

    def two_hosts(self, phase: str, *, encrypt: bool = True) -> PhaseFigures:
        """Two hosts, as DistDGL has: "keeping" at the peer's rate, and "compute" without any loading."""
        phases = [
            Phase(name=KEEPING, rate=self.settings.peer_rate, warm=WARM),
            Phase(name=COMPUTE, mode=COMPUTE, warm=1),
        ]
        name = "two hosts" if encrypt else "two hosts in the clear"
        return self._job(name, TWO_LEVEL, 2, phases, encrypt=encrypt)[phase]

    def distdgl(self) -> float:
        """Samples per second of DistDGL on two hosts, the best of its settings."""
        return self._once("distdgl", self._run_distdgl)

    def _job(self, name: str, kind: str, num_hosts: int, phases: list[Phase], **options: Any) -> dict[str, PhaseFigures]:
        return self._once(name, lambda: self._run(name, kind, num_hosts, phases, **options))

    def _run(
        self, name: str, kind: str, num_hosts: int, phases: list[Phase], encrypt: bool = True, **options: Any
    ) -> dict[str, PhaseFigures]:
        check_lab()
        settings, folder = self.settings, self._workload.folder
        # One host alone opens the parts of all: its part is the same one.
        num_parts = settings.hosts if num_hosts == 1 else num_hosts
        parts = self._aloud(f"{kind} in {num_parts} parts", lambda: make_parts(folder, settings, kind, num_parts))
        where = self._folder / f"job-{name.replace(' ', '-')}"
        task = replace(settings.task(num_hosts), encrypt=encrypt)
        found = self._aloud(name, lambda: run_job(where, parts, phases, task, cpu=settings.cpu, **options))
        for figures in found.values():
            say(f"  {name}, {figures.describe()}")
        return found

    def _run_distdgl(self) -> float:
        from gnnsys.bench.dist.distdgl import best_samples_per_s, run_settings

        check_lab()
        settings = self.settings
        folder = self._folder / "distdgl"
        self._aloud("DGL's parts", lambda: _prepare_once(settings, folder))
        with Lab(2, rate=settings.peer_rate, cpu=settings.cpu) as lab:
            runs = self._aloud("DistDGL", lambda: run_settings(lab, folder, settings.samplers))
        for run in runs:
            say(f"  DistDGL, {run['num_samplers']} samplers: {best_samples_per_s(run):.0f} samples/s, {run['epochs'][-1]}")
        return best_samples_per_s(runs[0])

    @staticmethod
    def _aloud(what: str, call: Callable[[], Any]) -> Any:
        say(f"  {what} ...")
        return call()


def _prepare_once(settings: DistSettings, folder: Path) -> None:
    from gnnsys.bench.dist.distdgl import prepare

    task = replace(settings.task(2), num_epochs=2)
    if (folder / "partition.json").exists():
        task.save(folder)
    else:
        prepare(task, folder)
