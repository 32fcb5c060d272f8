"""Every case of every suite runs, on a tiny graph, and has the sides its rows compare."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import pytest

from gnnsys.bench import SUITES, Case, Report, Workload, child_process, load_suite
from gnnsys.bench.measure import RoundLimits, measure
from gnnsys.bench.workload import Sizes
from gnnsys.session import server_process
from tests.bench.verdicts import judged
from tests.support.forked_popen import forking
from tests.support.processes import module_code, run_code

TINY = Sizes(2_000, 20_000, dim=16, num_seeds=64, epoch_batches=2)
WORKLOAD = Workload(TINY)
IN_LAB = "dist"  # its cases take whole jobs: test_dist.py runs one
WHOLE_GRAPH = "fullgraph"  # likewise: test_fullgraph.py
ON_GPU = "gpu"  # test_gpu.py
PLANNING = "execution"  # likewise, but for what is planned on the host, and for plans alone
WITHOUT_GPU = ("of the host", "batches dealt", "groups of batches", "a mix of rules")
PARTLY_IN_LAB = ("lab/", "embeddings/", "pacing/")  # test_samplers.py, test_links_lab.py, test_embeddings.py
JOBS_ON_GPU = (
    ("jobs/differences/", "jobs/batches/"),
    ("device idle", "memory of the device"),
)  # how they begin, and what they contain
ALIKE = ("rmat-0k", "train communities torn")  # minutes of processes for what others show too
LONG = (  # what others show too: guided as others are, one more size, one more way to count
    "planted/guided at random", "planted/guided by degree", "planted/guided by gradients,", "sweep N_f", "sweep eps",
    "sweep parts/nodes", "sweep parts/columns", "sweep parts/random columns",
    "rmat-2k/time", "checks/1000 rows/all", "rgcn memory", "epoch/sage-64", "spmm/memory/forward",
    "wide bytes/nodes bf16", "wide bytes/columns bf16", "wide accuracy/columns, zero", "wide/columns bf16",
    "wide at equal bytes/both by trained masks", "sweep parts/both, chunk parts", "rich/columns",
    "parts/two ranks",
    "explaining/",  # the lab's job without a lab: test_samplers.py
    "jobs/queues/", "jobs/sweep/",  # services and workers of every side: test_jobs_queues.py
)  # fmt: skip
CASES = [
    pytest.param(case, id=f"{s}/{case.name}", marks=[pytest.mark.long] if case.name.startswith(LONG) else [])
    for s in SUITES
    if s not in (IN_LAB, WHOLE_GRAPH, ON_GPU)
    for b in load_suite(s)
    for case in b(WORKLOAD)
    if not case.name.startswith((*ALIKE, *PARTLY_IN_LAB, *JOBS_ON_GPU[0]))
    if not any(part in case.name for part in JOBS_ON_GPU[1])
    if s != PLANNING or case.name.endswith(WITHOUT_GPU)
]
FIGURES = {  # of what has figures from processes of its own, and a case that does
    "gnnsys.bench.partition.contest": "partition/rmat-2k/memory",
    "gnnsys.bench.store.checks": "store/checks/1000 rows",
}
LAB_CASES = [case for b in load_suite(IN_LAB) for case in b(WORKLOAD)]


@pytest.fixture(scope="module", autouse=True)
def ended():
    """Servers and folders that the cases share end with this module."""
    yield
    WORKLOAD.close()


def run_forked(
    command: Sequence[str], *, timeout: float, env: Mapping[str, str] | None = None, **_: object
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of `python -m MODULE`, in a process that has imported torch already."""
    python, option, module, *arguments = command
    assert (python, option) == (sys.executable, "-m")
    ended = run_code(module_code(module), *arguments, timeout=timeout, environment=env)
    return subprocess.CompletedProcess(command, ended.returncode, ended.stdout, ended.stderr)


@pytest.fixture(scope="module", autouse=True)
def quick_processes():
    """Twenty processes tell a figure each, and need not import torch."""
    forked = SimpleNamespace(run=run_forked, TimeoutExpired=subprocess.TimeoutExpired)
    with pytest.MonkeyPatch.context() as patch:
        for name in FIGURES:
            patch.setattr(sys.modules[name], "subprocess", forked)
        with forking(child_process, server_process):
            yield


OUR_MISTAKES = ("AssertionError", "AttributeError", "ImportError", "KeyError", "NameError", "TypeError")


@pytest.mark.parametrize("case", CASES)
def test_a_case_runs_and_fills_its_rows(case: Case):
    """A peer that is not here or cannot do the work is a row that says so."""
    report = Report("test", quick=True)
    measured = measure(case, RoundLimits(least=1, most=1))
    rows = report.add(case, measured)
    without = {*(case.missing or {}), *measured.refused}
    for row, versus in zip(rows, case.versus, strict=True):
        assert row.ours is not None and row.ours >= 0
        assert (row.ratio is None) == (set(versus.peers) <= without)
        assert (row.reason is None) == without.isdisjoint(versus.peers)
    assert set(report.absent) <= set(case.missing or {})
    assert not [reason for reason in measured.refused.values() if reason.startswith(OUR_MISTAKES)]


@pytest.mark.long  # the same cases have the same processes forked, above
@pytest.mark.parametrize("module", FIGURES)
def test_figures_come_from_fresh_processes_too(module: str, monkeypatch):
    monkeypatch.setattr(sys.modules[module], "subprocess", subprocess)
    (case,) = [case.values[0] for case in CASES if case.id == FIGURES[module]]
    test_a_case_runs_and_fills_its_rows(case)


def test_case_names_are_unique_within_a_suite():
    names = [*(case.id for case in CASES), *(f"{IN_LAB}/{case.name}" for case in LAB_CASES)]
    assert len(set(names)) == len(names)


def test_every_promise_of_the_suites_is_a_target_that_check_judges():
    promised = {
        ("sampling/8 batches/1t", 3.0),
        ("sampling/8 batches/2t", 3.0),
        ("sampling/two threads", 1.6),
        ("spmm/sum/forward/1t", 1.2),
        ("spmm/mean/backward/2t", 3.0),
        ("spmm/scatter/forward/1t", 5.0),
        ("gather_rows/512B/1t", 0.95),
        ("gather_rows/512B/1t", 1.2),
        ("epoch/sage-64", 2.0),
        ("epoch/sage-128", 2.0),
        ("pull/remote/500 rows", 0.6),
        ("pull/remote/500 rows", 3.0),
        ("pull/local/500 rows", 0.9),
        ("memory/one more trainer", 1.0),
        ("checks/1000 rows", 1.0),
        ("rates/100mbit/epoch", 1 / 1.2),
        ("ablation/off the network with random", 1.0),
        ("ablation/5 non-stop/epoch", 3.0),
        ("scaling/2 hosts", 0.8),
        ("two hosts/DistDGL", 1.0),
        ("wide bytes/columns", 1 / 0.9),
        ("wide bytes/both bf16", 1 / 0.76),
        ("wide accuracy/both", 1.0),
        ("wide at equal bytes/both", 1.0),
    }
    cases = [*(case.values[0] for case in CASES), *LAB_CASES]
    assert promised <= judged(cases)


def test_an_unknown_suite_is_refused():
    with pytest.raises(ValueError, match="there is no suite 'tpu'; choose one of: ops, loader"):
        load_suite("tpu")
