"""A queue on a GPU: jobs that go wrong beside others whose losses stay those of each alone, and an illegal address."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gnnsys.jobs import JobService, JobState, JobTimes, MpsUnavailable, Queue, run_alone, start_sharing
from tests.cuda.device_jobs import NAME
from tests.jobs.queue_jobs import FOLDER
from tests.jobs.queue_services import DEADLINE, kill, left_in, run_until
from tests.support.processes import alive, await_true

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

STEADY = ({"kind": "loader"}, {"kind": "whole"}, {"kind": "loader", "hidden": 32})
CAPACITY, OWN = "24G", "2G"


@pytest.fixture(params=["slices", "mps"])
def sharing(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "mps":
        try:
            start_sharing(tmp_path, "mps").close()
        except MpsUnavailable as error:
            pytest.skip(str(error))
    return str(request.param)


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    with Queue(tmp_path / "queue") as made:
        yield made


def submit(queue: Queue, function: str, arguments: dict[str, Any], **options: Any) -> int:
    return queue.submit(f"{NAME}:{function}", arguments, folder=FOLDER, **{"memory": OWN, "estimate": False, **options})


def submit_steady(queue: Queue, go: Path) -> list[int]:
    return [
        submit(queue, "steady", {"at": str(go), **arguments}, seed=seed, checkpoint_steps=2)
        for seed, arguments in enumerate(STEADY)
    ]


def check_steady(queue: Queue, numbers: list[int], ended: dict[int, JobTimes], go: Path) -> None:
    """Losses and weights, bit for bit, are those of each job alone in a process without a queue."""
    for seed, (number, arguments) in enumerate(zip(numbers, STEADY, strict=True)):
        assert ended[number].state is JobState.DONE, ended[number].error
        alone = run_alone(f"{NAME}:steady", {"at": str(go), **arguments}, seed=seed, device="cuda:0")
        assert ended[number].result == alone
        losses = json.loads((queue.folder.results(number) / "losses.json").read_text())
        assert len(losses) == 20 and losses[-1] == alone["loss"]


def test_what_goes_wrong_on_a_gpu_changes_no_bit_of_the_jobs_beside_it(queue: Queue, sharing: str, tmp_path: Path):
    go, cancelled_at, killed_at = (tmp_path / name for name in ("go", "cancelled", "killed"))
    steady = submit_steady(queue, go)
    past_cap = submit(queue, "takes", {"num_bytes": 4 << 30})
    failing = submit(queue, "raises", {})
    cancelled = submit(queue, "goes_on", {"at": str(cancelled_at)})
    killed = submit(queue, "goes_on", {"at": str(killed_at)})
    with JobService(
        queue.folder.path, device="cuda", capacity=CAPACITY, workers=7, threads=1, device_sharing=sharing
    ) as service:
        workers = {worker.pid for worker in service.pool.everyone()}
        run_until(service, lambda: cancelled_at.exists() and killed_at.exists())
        run_until(service, lambda: queue.show(failing).state is JobState.FAILED and queue.show(past_cap).is_alone)
        process = queue.show(killed).process
        assert process is not None and [queue.show(number).state for number in steady] == [JobState.RUNNING] * 3
        kill(process.pid)
        queue.cancel([cancelled])
        run_until(service, lambda: all(queue.show(number).state.is_over for number in (cancelled, killed)))
        assert [queue.show(number).attempt for number in steady] == [1] * 3
        go.touch()
        service.run_until_empty(DEADLINE)
        workers |= {worker.pid for worker in service.pool.everyone()}
    ended = {job.number: job.times for job in queue.list()}
    check_steady(queue, steady, ended, go)
    assert [ended[number].attempts for number in steady] == [1] * 3
    assert ended[past_cap].state is JobState.DONE and ended[past_cap].attempts == 2
    assert (ended[past_cap].measured or 0) >= 4 << 30
    assert ended[failing].error == "RuntimeError: as it was asked to"
    assert ended[failing].attempts == 2  # the second one in a fresh process
    assert ended[cancelled].state is JobState.CANCELLED and ended[cancelled].attempts == 1
    assert ended[killed].state is JobState.DONE and ended[killed].attempts == 2
    assert left_in(queue.folder.path) == []
    await_true(lambda: not any(map(alive, workers)), "the end of the workers")


def test_an_illegal_address_fails_the_job_that_did_it_and_the_others_end_with_their_bits(
    queue: Queue, sharing: str, tmp_path: Path
):
    go = tmp_path / "go"
    steady = submit_steady(queue, go)
    running = sorted({f"{go}.{arguments['kind']}" for arguments in STEADY})
    culprit = submit(queue, "reads_freed_memory", {"after": running})
    with JobService(
        queue.folder.path, device="cuda", capacity=CAPACITY, workers=4, threads=1, device_sharing=sharing
    ) as service:
        run_until(service, lambda: queue.show(culprit).state.is_over or queue.show(culprit).is_alone)
        go.touch()
        service.run_until_empty(DEADLINE)
    ended = {job.number: job.times for job in queue.list()}
    assert ended[culprit].state is JobState.FAILED and "CUDA error" in ended[culprit].error
    again = [ended[number].attempts for number in steady]
    assert again == [1, 1, 1] if sharing == "slices" else min(again) >= 2, again
    assert ended[culprit].attempts == (1 if sharing == "slices" else 2)
    check_steady(queue, steady, ended, go)
    assert not [path for path in left_in(queue.folder.path) if not path.endswith(f"checkpoints/{culprit}")]
