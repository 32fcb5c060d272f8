"""Guided trainers of one machine and of several: the first of a machine explains, the others read its masks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gnnsys.graph import sbm
from gnnsys.partition import partition_graph
from tests.explain.lockstep import Job, trainers
from tests.explain.models import CLASSES, WIDTH
from tests.support.forked_popen import forking
from tests.support.processes import await_true

STEPS, HALF = 20, 11
TOGETHER, APART = (0, 0), (0, 1)


@pytest.fixture(scope="module", autouse=True)
def forked():
    with forking(sys.modules["gnnsys.explain.explaining"]):
        yield


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("placement") / "parts"
    partition_graph(sbm(400, num_classes=CLASSES, num_features=WIDTH, avg_degree=8), 2, folder)
    return folder


@pytest.mark.parametrize("row_bytes", [40 * WIDTH * 4, 256 << 20], ids=["rows in slices", "all rows"])
def test_exact_runs_repeat_from_any_state_on_any_machines(parts: Path, row_bytes: int) -> None:
    def run(where: tuple[int, ...], state=None) -> Job:
        with trainers(parts, where) as graphs:
            job = Job(graphs, row_bytes=row_bytes)
            if state is None:
                job.run(HALF)
                states.append(job.state())
            else:
                job.load(state)
            job.run(STEPS - HALF).close()
        return job

    states: list = []
    whole, apart = run(TOGETHER), run(APART)
    assert apart.batches == whole.batches and apart.weights == whole.weights
    rest = whole.batches[-2 * (STEPS - HALF) :]
    for where, state in ((TOGETHER, states[0]), (APART, states[0]), (TOGETHER, states[1])):
        resumed = run(where, state)
        assert resumed.batches == rest and resumed.weights == whole.weights


def test_a_reader_finds_the_masks_of_who_takes_the_place_of_the_first_trainer(parts: Path) -> None:
    def run_until_explained(job: Job, position: int) -> None:
        def has_come() -> bool:
            job.run(1)
            return reader._newest is not None and reader._newest.position >= position

        await_true(has_come, "masks for the second trainer")

    with trainers(parts, TOGETHER) as graphs:
        job = Job(graphs, exact=False, every=1)
        reader = job.guides[1]._sampler()
        run_until_explained(job, 0)
        job.loaders[0].load_state_dict(job.loaders[0].state_dict())  # explains in another process from here on
        run_until_explained(job, reader._number + 1)
        job.replace(0)
        run_until_explained(job, reader._number + 1)
        job.close()
