"""The job of an embedding beside prefetched features, on two machines that are processes of this host."""

import json

import pytest

from gnnsys.bench import SuiteOptions, run_suite
from gnnsys.bench.dist.phase import BEGIN, READY, go_file
from gnnsys.bench.dist.run_job import prepare_phases
from gnnsys.bench.typed.beside_features import (
    LINK,
    MOST,
    QUICK,
    WAYS,
    BesideFeaturesSettings,
    beside_features,
    make_parts,
    phases,
)
from gnnsys.bench.typed.beside_features_train import LOOK_UPS, STEPS
from gnnsys.bench.workload import Sizes, Workload
from tests.bench.verdicts import judged
from tests.support.processes import module_code, run_ranks


def test_a_step_stands_beside_the_link_with_a_key_and_without_and_a_missing_lab_is_a_reason(monkeypatch):
    with Workload(Sizes(2_000, 20_000)) as work:
        cases = list(beside_features(work))
    of = "lab/embedding beside features at 100mbit"
    assert judged(cases) == {(f"{of}, {way}/step", 1 / MOST) for way in WAYS}
    assert {case.limit for case in cases if case.name.endswith("/step")} == {LINK}
    monkeypatch.setattr("gnnsys.bench.lab_jobs.available", lambda: "the lab needs root")
    report = run_suite("typed", [beside_features], SuiteOptions(quick=True), show=lambda line: None)
    assert {(row.ours, row.reason) for row in report.rows} == {(None, "the lab needs root")}
    assert report.failures() == []


@pytest.mark.long
def test_trainers_say_how_long_look_ups_and_steps_took(tmp_path):
    settings = BesideFeaturesSettings(**QUICK)
    settings.task.save(tmp_path)
    prepare_phases(tmp_path, phases(settings))
    for phase in phases(settings):
        for word in (READY, BEGIN):
            go_file(tmp_path, word, phase.name).touch()
    program = module_code("gnnsys.bench.typed.beside_features_train")
    first, _ = run_ranks(program, [1, 1], tmp_path, make_parts(tmp_path, settings))
    (line,) = [line for line in first.stdout.splitlines() if line.startswith("phase-figures")]
    for rank in json.loads(line.split(maxsplit=2)[2]):
        assert rank["steps"] == settings.steps
        assert 0 < rank["counts"][LOOK_UPS] + rank["counts"][STEPS] < 1e6 * rank["seconds"]


def test_epochs_of_full_size_have_the_seeds_they_need():
    full = BesideFeaturesSettings()
    assert full.steps * full.batch_size * full.hosts <= 0.85 * full.num_nodes
