"""`gnnsys bench jobs`: what is traced and what is measured are the same job."""

import pytest

from gnnsys.bench.case import NotHere
from gnnsys.bench.jobs import estimates
from gnnsys.bench.jobs.estimates import (
    LIMITS,
    PeaksAhead,
    estimated_jobs,
    explained_jobs,
    measured_peaks,
    traced_peaks,
)
from gnnsys.bench.jobs.fresh_processes import FreshProcesses
from gnnsys.bench.jobs.table_four import GRAPHS, KINDS, LAYERS, SMALL, grid
from gnnsys.bench.workload import QUICK, Workload


@pytest.mark.parametrize("kind", KINDS)
def test_on_the_cpu_an_estimate_is_what_a_run_takes(kind):
    arguments = {"library": "gnnsys", "kind": kind, "layers": 3, **SMALL["small"]._asdict()}
    assert traced_peaks(arguments, "cpu") == measured_peaks(arguments, "cpu")


def test_an_estimate_for_a_device_needs_none():
    arguments = {"library": "gnnsys", "kind": "GAT", "layers": 3, **SMALL["small"]._asdict()}
    found = traced_peaks(arguments, "h200")
    assert 32 << 20 < found.allocated < found.reserved


@pytest.mark.long  # one process makes the same estimates, above
def test_several_processes_estimate_and_measure_the_same_as_one(monkeypatch):
    """Without a GPU the CPU is measured."""
    monkeypatch.setattr(estimates, "num_estimators", lambda num_jobs: 2)
    monkeypatch.setattr(estimates, "free_bytes", lambda: 2 << 30)  # for one at a time
    monkeypatch.setattr(FreshProcesses, "call", measured_on_the_cpu)
    jobs = list(grid(is_full=False, libraries=("gnnsys",)))
    with Workload(QUICK) as work:
        ahead = PeaksAhead(work, jobs, "h200")
        for job in jobs:
            assert ahead.peaks(job) == (traced_peaks(job.arguments, "h200"), measured_peaks(job.arguments, "cpu"))


_call = FreshProcesses.call


def measured_on_the_cpu(processes, function, arguments, device):
    assert (function, device) == (measured_peaks, "h200")
    return _call(processes, function, arguments, "cpu")


def test_the_full_grid_is_every_model_on_every_graph_of_the_paper_in_every_depth():
    jobs = list(grid(is_full=True))
    assert len(jobs) == len({job.name for job in jobs}) == 2 * len(KINDS) * len(GRAPHS) * len(LAYERS) == 352


def test_every_job_has_rows_of_megabytes_and_one_that_is_judged_and_every_model_a_summary():
    with Workload(QUICK) as work:
        cases = [*estimated_jobs(work), *explained_jobs(work)]
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    judged = [case.name for case in cases if case.versus[0].target is not None]
    models = len({name.split(",")[0] for name in names if name.endswith(", allocated")})
    groups = models + models // len(KINDS) + 1  # models, libraries, all
    assert len([name for name in judged if name.endswith("allocated off by")]) == models
    assert len([name for name in judged if "over all" in name]) == groups * len(LIMITS)


def test_a_summary_is_of_the_jobs_that_ran():
    with Workload(QUICK) as work:
        cases = {case.name: case for case in estimated_jobs(work)}
        summary = cases["jobs/estimate/gnnsys/GCN/over all: allocated, worst"]
        with pytest.raises(NotHere, match="none of these jobs ran"):
            summary.sides()["gnnsys"].call()
        cases["jobs/estimate/gnnsys/GCN, small2, allocated"].sides()["gnnsys"].call()
        assert summary.sides()["gnnsys"].call() == 0.01, "exact"
