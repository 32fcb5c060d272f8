"""Guided trainers of one machine and of several: the first of a machine explains, the others read its masks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

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


def test_exact_runs_repeat_from_any_state_on_any_machines(parts: Path) -> None:
    """Remote rows are more than `row_bytes`: rounds explain slices of them."""

    def run(where: tuple[int, ...], state=None) -> Job:
        with trainers(parts, where) as graphs:
            job = Job(graphs, row_bytes=40 * WIDTH * 4)
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
        job.load_rank(0, job.loaders[0].state_dict())  # explains in another process from here on
        run_until_explained(job, reader._number + 1)
        job.replace(0)
        run_until_explained(job, reader._number + 1)
        job.close()


def test_exact_runs_that_leave_epochs_early_repeat_with_checkpoints_and_without(parts: Path) -> None:
    def run(saves: bool) -> Job:
        with trainers(parts, APART) as graphs:
            job = Job(graphs, num_threads=2, ahead=16)
            for steps in (5, 4, 7, 9):  # masks of batch 3 begin at 22, in an epoch that is left before
                job.run(steps)
                if saves:
                    job.state()
                job.leave_epoch()
            assert all(guide.status()["guided_batches"] > 0 for guide in job.guides)
            job.close()
        return job

    with_states, without = run(saves=True), run(saves=False)
    assert with_states.batches == without.batches and with_states.weights == without.weights


def test_a_state_that_was_altered_or_is_of_another_part_changes_nothing(parts: Path) -> None:
    with trainers(parts, TOGETHER) as graphs:
        job = Job(graphs).run(HALF)
        state = job.state()
        rest = job.run(4).batches[2 * HALF :]
        job.load(state)
        own, other = (each["sampler"] for each in state["loaders"])

        def masks(index: int, value: torch.Tensor) -> dict[str, Any]:
            altered = [*own["explained"]["masks"]]
            altered[index] = value
            return {**own, "explained": {**own["explained"], "masks": altered}}

        for bad in (
            {**own, "explained": {}},
            {**own, "explained": other["explained"]},
            {**own, "explained": {**own["explained"], "given": None}},
            masks(1, own["explained"]["masks"][1] + 1),
            masks(3, own["explained"]["masks"][3] * 3),
            {**own, "versions": [[1, 2], *own["versions"]]},
            {**own, "versions": [["a", 0, 0, 0]]},
            {**own, "versions": own["versions"][::-1]},
            {**own, "scores": own["scores"][1:]},
            {**own, "scores": [[]]},
            {**own, "scores": None},
            {**own, "columns": other["columns"]},
            {**own, "columns": [{**each, "fill": each["fill"][1:]} for each in own["columns"]]},
            {**own, "columns": []},
            {"requester": 0},
        ):
            with pytest.raises(
                ValueError, match=r"altered|another|of part|of other parts|of masks|scores are|has so many"
            ):
                job.loaders[0].load_state_dict({**state["loaders"][0], "sampler": bad})
        job.batches = []
        assert job.run(4).batches == rest
        job.close()


def test_trainers_of_a_machine_have_the_same_guide_or_are_told(parts: Path) -> None:
    with trainers(parts, TOGETHER) as graphs:
        job = Job(graphs, exact=False)
        with pytest.raises(ValueError, match="another guide than this one"):
            job.replace(1, pools=2)
            await_true(lambda: not job.run(1), "the error")
        job.close()


def test_batches_of_an_exact_run_go_on_after_its_guide_was_closed(parts: Path) -> None:
    with trainers(parts, TOGETHER) as graphs:
        job = Job(graphs).run(4)  # masks of batch 3, which nobody has waited for, were to begin at 8
        for guide, batches in zip(job.guides, job.endless, strict=True):
            guide.close()
            assert all(next(batches).num_nodes > 0 for _ in range(8))
        job.close()
