"""`gnnsys bench jobs`: what is traced and what is measured are the same job."""

import pytest

from gnnsys.bench.jobs.estimates import KINDS, SMALL, estimated_jobs, measured_peaks, traced_peaks
from gnnsys.bench.workload import QUICK, Workload


@pytest.mark.parametrize("kind", KINDS)
def test_on_the_cpu_an_estimate_is_what_a_run_takes(kind):
    arguments = {"library": "gnnsys", "kind": kind, "layers": 3, **SMALL["small"]._asdict()}
    assert traced_peaks(arguments, "cpu") == measured_peaks(arguments, "cpu")


def test_an_estimate_for_a_device_needs_none():
    arguments = {"library": "gnnsys", "kind": "GAT", "layers": 3, **SMALL["small"]._asdict()}
    found = traced_peaks(arguments, "h200")
    assert 32 << 20 < found.allocated < found.reserved


def test_every_job_has_a_row_of_megabytes_and_one_that_is_judged():
    with Workload(QUICK) as work:
        cases = list(estimated_jobs(work))
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    judged = [case for case in cases if case.versus[0].target is not None]
    assert len(judged) == len(cases) // 2 and len(cases) >= 2 * len(KINDS)
